"""One program of bench_peers.py, run by the Python of its own virtual environment.

    python peer_worker.py TASK.json RESULT.json

Continues each prompt of the task greedily, and writes tokens and times. specexec is imported only
for its own two programs, since the other programs' environments do not have it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Generates tokens from a prompt's; calls back as they come.
Generate = Callable[[Sequence[int], Callable[[int], None]], list[int]]

# How llama.cpp comes by its weights, as its llama_load_mode: read into memory of its own, mapped,
# or read past the page cache.
_LOAD_MODES = {"read": 0, "mmap": 1, "direct": 4}


class _Counter:
    """A transformers streamer that only reports when tokens come."""

    def __init__(self, came: Callable[[int], None]) -> None:
        self._came = came
        self._prompt = True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self._came(value.numel())
        self._prompt = False

    def end(self) -> None:
        pass


def accelerate(task: dict[str, Any]) -> Generate:
    """transformers with every decoder layer offloaded to disk by accelerate."""
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers": "disk",
              "model.norm": "cpu", "lm_head": "cpu"}  # fmt: skip
    return _of_transformers(task, places)


def _of_transformers(task: dict[str, Any], places: dict[str, str] | None) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tempfile.mkdtemp(dir=task["scratch"])
    model = AutoModelForCausalLM.from_pretrained(
        task["rig"], dtype=torch.bfloat16, device_map=places, offload_folder=folder
    )
    draft = None
    if task["draft"] is not None:
        draft = AutoModelForCausalLM.from_pretrained(task["draft"], dtype=torch.bfloat16)

    def generate(prompt: Sequence[int], came: Callable[[int], None]) -> list[int]:
        ids = torch.tensor([list(prompt)])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=task["tokens"],
            min_new_tokens=task["tokens"], do_sample=False, assistant_model=draft,
            streamer=_Counter(came), pad_token_id=0,
        )  # fmt: skip
        return [int(token) for token in output[0, len(prompt) :]]

    return generate


def transformers(task: dict[str, Any]) -> Generate:
    """transformers with the whole model in RAM."""
    return _of_transformers(task, None)


def assisted(task: dict[str, Any]) -> Generate:
    """`accelerate` with transformers' assisted generation by the draft model."""
    return accelerate(task)


def airllm(task: dict[str, Any]) -> Generate:
    """AirLLM, which splits the checkpoint into layer files first."""
    import torch
    from airllm import AutoModel

    model = AutoModel.from_pretrained(
        task["rig"], device="cpu", layer_shards_saving_path=task["scratch"], prefetching=False
    )

    def generate(prompt: Sequence[int], came: Callable[[int], None]) -> list[int]:
        output = model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=task["tokens"],
            min_new_tokens=task["tokens"], do_sample=False, use_cache=True,
            return_dict_in_generate=True, streamer=_Counter(came),
        )  # fmt: skip
        return [int(token) for token in output.sequences[0, len(prompt) :]]

    return generate


def llama_cpp(task: dict[str, Any]) -> Generate:
    """llama.cpp with a GGUF; with a draft model or n-grams, its own speculative decoding.

    By the server of the package xllamacpp, which has llama.cpp compiled in: its native completion
    takes tokens and streams tokens.
    """
    import xllamacpp

    cores = len(os.sched_getaffinity(0))  # its own default is half of them
    params = xllamacpp.CommonParams()
    params.model.path = task["gguf"]
    params.n_ctx, params.n_parallel, params.cache_ram_mib = task["context_tokens"], 1, 0
    params.load_mode = _LOAD_MODES[task["load"]]
    # weights in an order that suits the CPU are copies: with mmap they would be in memory twice
    params.no_extra_bufts = not task["repack"]
    params.warmup, params.verbosity = False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = cores
    kinds = xllamacpp.common_speculative_type
    if task["draft"] is not None:
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        drafts = params.speculative.draft
        drafts.mparams.path, drafts.n_max = task["draft"], task["length"]
        drafts.cpuparams.n_threads = drafts.cpuparams_batch.n_threads = cores
    elif task["length"]:
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(params)

    def generate(prompt: Sequence[int], came: Callable[[int], None]) -> list[int]:
        asked = {"prompt": list(prompt), "n_predict": task["tokens"], "temperature": 0.0,
                 "stream": True, "return_tokens": True, "ignore_eos": True,
                 "cache_prompt": False}  # fmt: skip
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        tokens: list[int] = []
        with urllib.request.urlopen(request) as lines:
            for line in lines:
                if line.startswith(b"data: ") and (new := json.loads(line[6:])["tokens"]):
                    tokens += new
                    came(len(new))
        return tokens

    return generate


def specexec(task: dict[str, Any]) -> Generate:
    """specexec from SSD, with draft trees if the task names a draft model."""
    from specexec_cli.cli.lean_imports import lean_imports
    from specexec_cli.cli.main import wait_briefly
    from specexec_cli.config import GenerationConfig, TreeConfig

    wait_briefly()  # as the program does, before torch is loaded
    with lean_imports():
        from specexec_cli.session import Session

    session = Session.open(
        model=task["rig"], draft=task["draft"], offload=task["offload"], dtype=task["dtype"],
        activations=task["activations"],
        method="specexec" if task["draft"] else "autoregressive",
        context_tokens=task["context_tokens"],
    )  # fmt: skip
    session.eos_ids = frozenset()  # as many tokens as the others write
    tree = TreeConfig(**task["tree"]) if task["tree"] else None

    def generate(prompt: Sequence[int], came: Callable[[int], None]) -> list[int]:
        session.forget()
        settings = GenerationConfig(max_tokens=task["tokens"])
        tokens: list[int] = []
        for step in session.generate(prompt, tree=tree, generation=settings):
            tokens += step.tokens
            came(len(step.tokens))
        return tokens

    return generate


PROGRAMS: dict[str, Callable[[dict[str, Any]], Generate]] = {
    "accelerate": accelerate, "assisted": assisted, "transformers": transformers, "airllm": airllm,
    "llama_cpp": llama_cpp, "specexec": specexec,
}  # fmt: skip


def _read_bytes() -> int:
    """Bytes that storage delivered to this process, page faults and O_DIRECT included."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise RuntimeError("the kernel does not count this process's reads")


def _peak_rss_bytes() -> int:
    """The peak resident memory of this program alone; getrusage's figure includes the parent's
    memory before exec."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def _measured(generate: Generate, prompt: Sequence[int]) -> dict[str, Any]:
    first_s: list[float] = []
    began, read_before = time.perf_counter(), _read_bytes()

    def came(count: int) -> None:
        if not first_s:
            first_s.append(time.perf_counter() - began)

    tokens = generate(prompt, came)
    return {
        "tokens": tokens,
        "prompt": len(prompt),
        "first_s": first_s[0],
        "total_s": time.perf_counter() - began,
        "read_bytes": _read_bytes() - read_before,
    }


def main() -> None:
    """Runs the task; a failure is reported as the last line of its message."""
    task = json.loads(Path(sys.argv[1]).read_text())
    began = time.perf_counter()
    try:
        generate = PROGRAMS[task["program"]](task)
        load_s = time.perf_counter() - began
        runs = [_measured(generate, prompt) for prompt in task["prompts"]]
        result = {"load_s": load_s, "runs": runs, "peak_rss_bytes": _peak_rss_bytes()}
    except Exception as error:  # whatever a peer raises is its result
        result = {"failed": f"{type(error).__name__}: {error}"[:500]}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
