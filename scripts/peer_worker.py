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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Generates tokens from a prompt's; calls back as they come.
Generate = Callable[[Sequence[int], Callable[[int], None]], list[int]]


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
    import torch
    from transformers import AutoModelForCausalLM

    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers": "disk",
              "model.norm": "cpu", "lm_head": "cpu"}  # fmt: skip
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
    """llama.cpp with a GGUF; with a draft model, its speculative mode."""
    from llama_cpp import Llama

    _set_loading(task)
    cores = len(os.sched_getaffinity(0))  # its own default is half of them
    model = Llama(
        model_path=task["gguf"], n_ctx=task["context_tokens"], n_batch=512,
        use_mmap=task["load"] == "mmap",
        n_threads=cores, n_threads_batch=cores, verbose=False, draft_model=_llama_cpp_draft(task),
    )  # fmt: skip

    def generate(prompt: Sequence[int], came: Callable[[int], None]) -> list[int]:
        model.reset()
        tokens: list[int] = []
        for token in model.generate(list(prompt), temp=0.0, top_k=1, repeat_penalty=1.0):
            tokens.append(int(token))
            came(1)
            if len(tokens) == task["tokens"]:
                break
        return tokens

    return generate


def _set_loading(task: dict[str, Any]) -> None:
    """Sets what llama-cpp-python has no options for: reads with O_DIRECT, and no repacking.

    The load modes are mmap, read (into memory of its own) and direct (the same with O_DIRECT);
    llama-cpp-python has options for the first two. Repacked weights are copies, so with mmap they
    would be in memory twice.
    """
    from llama_cpp import llama_cpp as api

    if task["load"] == "direct":  # what it hands on where mmap is not wanted
        api.LLAMA_LOAD_MODE_NONE = api.LLAMA_LOAD_MODE_DIRECT_IO
    if not task["repack"]:
        defaults = api.llama_model_default_params

        def without_repacking() -> Any:
            params = defaults()
            params.use_extra_bufts = False
            return params

        api.llama_model_default_params = without_repacking


def _llama_cpp_draft(task: dict[str, Any]) -> Any:
    """The draft model for llama-cpp-python's speculative loop; None without one."""
    if task["draft"] is None:
        return None
    import numpy
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Draft(LlamaDraftModel):
        """The small model's greedy continuation; its cache is kept from call to call."""

        def __init__(self) -> None:
            context = task["context_tokens"]
            self.model = Llama(model_path=task["draft"], n_ctx=context, verbose=False)

        def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
            drafted = self.model.generate(input_ids.tolist(), temp=0.0, top_k=1, repeat_penalty=1.0)
            tokens = [token for _, token in zip(range(task["length"]), drafted, strict=False)]
            return numpy.array(tokens, dtype=numpy.intc)

    return Draft()


def specexec(task: dict[str, Any]) -> Generate:
    """specexec from SSD, with draft trees if the task names a draft model."""
    from specexec_cli.cli.main import wait_briefly

    wait_briefly()  # as the program does, before torch is loaded
    from specexec_cli.config import GenerationConfig, TreeConfig
    from specexec_cli.session import Session

    method = "autoregressive" if task["draft"] is None else "specexec"
    session = Session.open(
        model=task["rig"], draft=task["draft"], method=method, offload=task["offload"],
        dtype=task["dtype"], context_tokens=task["context_tokens"],
    )  # fmt: skip
    session.eos_ids = frozenset()  # as many tokens as the others write
    tree = TreeConfig(**task["tree"])

    def generate(prompt: Sequence[int], came: Callable[[int], None]) -> list[int]:
        session.forget()
        settings = GenerationConfig(max_tokens=task["tokens"])
        tokens: list[int] = []
        for step in session.generate(prompt, tree=tree, generation=settings, method=method):
            tokens += step.tokens
            came(len(step.tokens))
        return tokens

    return generate


PROGRAMS: dict[str, Callable[[dict[str, Any]], Generate]] = {
    "accelerate": accelerate, "assisted": assisted, "airllm": airllm, "llama_cpp": llama_cpp,
    "specexec": specexec,
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
