"""Compare specexec with other programs on the same checkpoint, prompts and memory cap.

    python scripts/make_rig.py --shape llama2-7b --out /var/tmp/rig-7b
    python scripts/bench_peers.py --rig /var/tmp/rig-7b --cap 4GB

Each peer runs in a virtual environment of its own, which this script makes under --home. Peers take
turns; every run is a new process under the cap, and the rig's files are dropped from the page cache
before it. Programs that draft generate --tokens greedy tokens; the others generate
--baseline-tokens, since each token costs them the same. A peer that fails is a row with its
message. Times include the prompt, but not the opening of the model, which has a column of its own.
Prints a table; the last line is JSON.

What README shows, on two models that people trained and a wide rig with the function of one, in RAM
and under a cap, from ready packages alone (8 GB of disk):

    python scripts/bench_peers.py --real

In RAM, on the same shape and bits, with one row a pass and a long prompt:

    python scripts/gguf_rig.py RIG16 RIG4.gguf 4          (in llama.cpp's environment below --home)
    python scripts/bench_peers.py --rig RIG4 --gguf RIG4.gguf --in-ram --prompt-tokens 256 \
        --peers "llama.cpp read,specexec autoregressive"

Like for like, specexec and llama.cpp on the very same file, in RAM and under half its size:

    python scripts/gguf_rig.py RIG16 RIG.Q4_K_M.gguf Q4_K_M     (there too; gguf_repeat.py makes a
                                                                 long one of it)
    python scripts/bench_peers.py --rig RIG.Q4_K_M.gguf --in-ram \
        --peers "llama.cpp read,specexec autoregressive,specexec"
    python scripts/bench_peers.py --rig RIG.Q4_K_M.gguf --cap HALF \
        --peers "llama.cpp mmap,llama.cpp draft 16,specexec autoregressive,specexec"

A mixture whose experts do not fit, the same weights for both (gguf_gptq.py):

    python scripts/make_rig.py --shape qwen3-30b-a3b --layers 8 --bits 4 --skew 0.27 --out RIG4
    python scripts/bench_peers.py --rig RIG4 --offload auto --expert-share 0.25 \
        --peers "llama.cpp mmap,llama.cpp direct,specexec autoregressive,specexec"

With a GGUF file as rig, programs that draft by a model use the GGUF of the draft model that this
script writes to --home. So both programs read the same tokenizer from it, llama.cpp's rule for
splitting text included; transformers and accelerate read --folder, the same weights unpacked.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_experts import decision_for
from make_rig import write_rig
from memory_cap import run_capped
from real_models import MODELS, default_folder, gguf_path, safetensors_folder
from rig_tensors import read_config, shape_of

from specexec_cli.cli.machine import parse_bytes
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ConfigError, SpecexecError
from specexec_cli.gguf.container import is_gguf
from specexec_cli.lab.bench.adapters import Prompt
from specexec_cli.lab.bench.datasets import load_dataset
from specexec_cli.lab.bench.environment import environment
from specexec_cli.lab.bench.metrics import spread
from specexec_cli.lab.bench.tables import aligned
from specexec_cli.models.tokenizer import load_tokenizer

HERE = Path(__file__).parent
DEMO_DRAFT = HERE.parent / "specexec_cli" / "demo" / "draft"
BASELINE = "accelerate"
# that specexec has taken before it plans, PyTorch's libraries included
_PROGRAM_BYTES = 500_000_000
_SPARE_TOKENS = 64  # of a context, behind the longest text: for drafts
_LLAMA_CPP = ("xllamacpp==2026.10.11549", "gguf==0.19.0")
_TRANSFORMERS = ("torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0")


@dataclass(frozen=True, slots=True)
class Peer:
    """A program and how to run it; with `needs` empty, in this script's environment.

    Attributes:
        program: in peer_worker.PROGRAMS.
        drafts: whether it drafts by the model of --draft.
        draft: what specexec drafts by in its place.
        load: how llama.cpp comes by its weights, see peer_worker.py.
        length: llama.cpp's speculation length; without a draft model it drafts by n-grams.
        activations: of specexec, as its option.
    """

    program: str
    needs: tuple[str, ...] = ()
    drafts: bool = False
    draft: str | None = None
    load: str = "mmap"
    length: int = 0
    activations: str = "full"


_WRITES_GGUF = Peer("llama_cpp", _LLAMA_CPP)  # whose environment has what gguf_rig.py needs
PEERS: Mapping[str, Peer] = {
    BASELINE: Peer("accelerate", _TRANSFORMERS),
    "accelerate assisted": Peer("assisted", _TRANSFORMERS, drafts=True),
    "transformers": Peer("transformers", _TRANSFORMERS),
    "airllm": Peer("airllm", ("torch==2.13.0", "airllm==4.0.0")),
    "llama.cpp mmap": Peer("llama_cpp", _LLAMA_CPP),
    "llama.cpp read": Peer("llama_cpp", _LLAMA_CPP, load="read"),
    "llama.cpp direct": Peer("llama_cpp", _LLAMA_CPP, load="direct"),
    "llama.cpp n-grams": Peer("llama_cpp", _LLAMA_CPP, load="read", length=16),
    "llama.cpp draft 4": Peer("llama_cpp", _LLAMA_CPP, drafts=True, length=4),
    "llama.cpp draft 8": Peer("llama_cpp", _LLAMA_CPP, drafts=True, length=8),
    "llama.cpp draft 16": Peer("llama_cpp", _LLAMA_CPP, drafts=True, length=16),
    "specexec autoregressive": Peer("specexec"),
    "specexec autoregressive 8bit": Peer("specexec", activations="8bit"),
    "specexec": Peer("specexec", drafts=True),
    "specexec 8bit": Peer("specexec", drafts=True, activations="8bit"),
    "specexec auto": Peer("specexec", draft="auto"),
}
# what --real compares; the rig is SmolLM2 four times as wide, with the same function
_REAL_IN_RAM = "llama.cpp read,llama.cpp n-grams,transformers,specexec autoregressive,specexec auto"
_REAL_STREAMED = (
    "accelerate,llama.cpp mmap,llama.cpp draft 8,llama.cpp draft 16,specexec autoregressive,"
    "specexec"
)


def python_of(peer: Peer, home: Path) -> Path:
    """The peer's interpreter; makes its environment if there is none.

    Raises:
        subprocess.CalledProcessError: pip could not install it.
    """
    if not peer.needs:
        return Path(sys.executable)
    folder = home / "-".join(sorted(peer.needs)).replace("==", "_")
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {', '.join(peer.needs)} in {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", *peer.needs],
            check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        (folder / "complete").touch()
    return python


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Drops files from the page cache, so that the next reader reads the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class PeerBench:
    """Runs peers on one rig and keeps their results."""

    def __init__(self, options: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> None:
        self.options = options
        self.prompts = prompts
        self.results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.peers}
        self.failed: dict[str, str] = {}

    def prepare(self) -> None:
        """Makes the environments, and the GGUF if llama.cpp takes part. Failures become results."""
        for name in self.options.peers:
            peer = PEERS[name]
            try:
                python_of(peer, self.options.home)
                if not self._reads_gguf(peer):
                    continue
                python = python_of(_WRITES_GGUF, self.options.home)
                self._convert(python, self.options.rig, self.options.gguf)
                if peer.drafts:
                    self._convert(python, self.options.draft, self._draft_gguf)
            except (OSError, subprocess.CalledProcessError) as error:
                self.failed[name] = f"could not be installed: {error}"

    def _reads_gguf(self, peer: Peer) -> bool:
        """Whether a program reads the rig, and so its draft model too, as a GGUF file."""
        own = peer.program == "specexec" and self.options.rig.is_file()
        return own or peer.program == "llama_cpp"

    @property
    def _draft_gguf(self) -> Path:
        if self.options.draft.is_file():
            return self.options.draft
        folder = self.options.home if self.options.rig.is_file() else self.options.gguf.parent
        return folder / f"{self.options.gguf.stem}.draft.gguf"

    @staticmethod
    def _convert(python: Path, folder: Path, gguf: Path) -> None:
        """Writes the GGUF of a checkpoint, unless it is a GGUF or there is one that is as new."""
        if folder == gguf:
            return
        written = max(path.stat().st_mtime for path in folder.glob("*.safetensors"))
        if gguf.exists() and gguf.stat().st_mtime > written:
            return
        partial = gguf.with_suffix(".partial")
        subprocess.run([python, HERE / "gguf_rig.py", folder, partial], check=True)
        partial.replace(gguf)

    def run(self, name: str) -> None:
        """Runs one process of one peer over all prompts."""
        if name in self.failed:
            return
        peer, options = PEERS[name], self.options
        if not options.in_ram:
            folders = {options.rig, options.folder}
            files = [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]
            drop_from_page_cache([*files, *self._gguf()])
        with tempfile.TemporaryDirectory(dir=options.home) as scratch:
            task, result = Path(scratch, "task.json"), Path(scratch, "result.json")
            task.write_text(json.dumps(self._task(peer, scratch)))
            command = [str(python_of(peer, options.home)), str(HERE / "peer_worker.py"),
                       str(task), str(result)]  # fmt: skip
            status = _limited(command, options.cap)
            if not result.exists():
                self.failed[name] = f"ended with status {status}, killed by the cap perhaps"
                return
            found = json.loads(result.read_text())
        if "failed" in found:
            self.failed[name] = found["failed"]
        else:
            self.results[name].append(found)

    def _gguf(self) -> list[Path]:
        return [self.options.gguf] if self.options.gguf.exists() else []

    def _task(self, peer: Peer, scratch: str) -> dict[str, Any]:
        options = self.options
        depth = min(options.depth, options.budget)
        draft = peer.draft
        if peer.drafts:
            draft = str(self._draft_gguf if self._reads_gguf(peer) else options.draft)
        rig = options.rig if peer.program == "specexec" else options.folder
        tokens = options.tokens if draft or peer.length else options.baseline_tokens
        return {
            "program": peer.program, "rig": str(rig), "gguf": str(options.gguf),
            "draft": draft, "load": peer.load, "activations": peer.activations,
            # llama.cpp's copy of weights in an order that suits the CPU is as large as they are
            "repack": not options.cap,
            "length": peer.length, "prompts": [list(prompt) for prompt in self.prompts],
            "tokens": tokens,
            "context_tokens": max(map(len, self.prompts)) + tokens + _SPARE_TOKENS,
            "scratch": scratch, "offload": options.offload, "dtype": options.dtype,
            "tree": {"budget": options.budget, "max_depth": depth, "batch": options.batch}
                    if peer.drafts else None,
        }  # fmt: skip

    def summary(self) -> list[dict[str, Any]]:
        """One entry for each peer, with its samples."""
        entries = []
        texts = [texts for name in self.options.peers if (texts := self._texts(name))]
        # programs compute in different dtypes, and one may differ at a near-tie; texts are compared
        # with the one that most programs agree on
        reference = max(
            texts, default=[], key=lambda ours: sum(_shared(ours, theirs) for theirs in texts)
        )
        for name in self.options.peers:
            if name in self.failed or not self.results[name]:
                reason = self.failed.get(name, "stopped before its turn")
                entries.append({"peer": name, "failed": reason})
                continue
            runs = [run for result in self.results[name] for run in result["runs"]]
            rates = [len(run["tokens"]) / run["total_s"] for run in runs]
            same = [
                _common(ours, theirs) / min(len(ours), len(theirs))
                for ours, theirs in zip(self._texts(name), reference, strict=False)
            ]
            entries.append({
                "peer": name,
                "tokens_per_s": spread(rates),
                "first_s": spread([run["first_s"] for run in runs]),
                "prompt_tokens_per_s": spread([run["prompt"] / run["first_s"] for run in runs]),
                "next_tokens_per_s": spread([_next_rate(run) for run in runs]),
                "read_bytes_per_s": spread([r["read_bytes"] / r["total_s"] for r in runs]),
                "load_s": spread([result["load_s"] for result in self.results[name]]),
                "peak_rss_bytes": max(r["peak_rss_bytes"] for r in self.results[name]),
                "same_tokens": sum(same) / len(same) if same else None,
                "texts": self._texts(name),
            })  # fmt: skip
        return entries

    def _texts(self, name: str) -> list[list[int]]:
        results = self.results.get(name) or [{"runs": []}]
        return [run["tokens"] for run in results[0]["runs"]]


def _next_rate(run: Mapping[str, Any]) -> float:
    """Tokens/s after the first token; 0 if there are no others."""
    return (len(run["tokens"]) - 1) / max(run["total_s"] - run["first_s"], 1e-9)


def _limited(command: Sequence[str], cap: int) -> int:
    if cap:
        return run_capped(command, cap)
    return subprocess.run(command, check=False).returncode


def _shared(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    """Tokens before the first difference, summed over all texts."""
    return sum(_common(a, b) for a, b in zip(ours, theirs, strict=False))


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = list(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def show(entries: Sequence[Mapping[str, Any]]) -> str:
    """The table. Ratios are median tokens/s over accelerate's, or over the first program's."""
    able = [entry for entry in entries if "failed" not in entry]
    base = next((e for e in able if e["peer"] == BASELINE), able[0] if able else None)
    header = ["program", "tok/s p50", "p20-p80", "ratio", "first token s", "prompt tok/s",
              "then tok/s", "GB/s", "peak RSS GB", "open s", "same tokens"]  # fmt: skip
    rows, failures = [], []
    for entry in entries:
        if "failed" in entry:
            failures.append(f"{entry['peer']} failed: {entry['failed']}")
            continue
        rate = entry["tokens_per_s"]
        ratio = f"{rate['p50'] / base['tokens_per_s']['p50']:.2f}x" if base else "-"
        rows.append([
            entry["peer"], f"{rate['p50']:.3f}", f"{rate['p20']:.3f}-{rate['p80']:.3f}", ratio,
            f"{entry['first_s']['p50']:.2f}", f"{entry['prompt_tokens_per_s']['p50']:.1f}",
            f"{entry['next_tokens_per_s']['p50']:.2f}",
            f"{entry['read_bytes_per_s']['p50'] / 1e9:.2f}",
            f"{entry['peak_rss_bytes'] / 1e9:.2f}", f"{entry['load_s']['p50']:.1f}",
            "-" if entry["same_tokens"] is None else f"{entry['same_tokens']:.0%}",
        ])  # fmt: skip
    return "\n".join([*aligned(header, rows), *failures])


def default_home() -> Path:
    """The folder of the programs' environments, GGUF files and rigs that this script makes."""
    return Path.home() / ".cache" / "specexec-peers"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options, checked.

    Raises:
        ConfigError: an unknown peer, numbers that make no sense, or a share of the experts of
            a rig that has none.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rig", type=Path, required=True)
    parser.add_argument("--draft", type=Path, default=DEMO_DRAFT)
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--cap", default="0", help="memory of each program, e.g. 4GB; 0: no limit")
    memory.add_argument("--expert-share", type=float, metavar="SHARE",
                        help="of a mixture's experts, which specexec has room for under the limit "
                             "of all programs")  # fmt: skip
    by_default = [name for name, peer in PEERS.items()
                  if peer.draft is None and name != "transformers"]  # fmt: skip
    parser.add_argument("--peers", default=",".join(by_default))
    parser.add_argument("--home", type=Path, default=default_home())
    parser.add_argument("--gguf", type=Path, help="default: RIG.gguf beside the rig")
    parser.add_argument("--folder", type=Path,
                        help="a GGUF rig's weights, unpacked for transformers")  # fmt: skip
    parser.add_argument("--dataset", default="demo", help="of prompts, as for `specexec bench`")
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the dataset's file")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--baseline-tokens", type=int, help="without a draft model; as --tokens")
    parser.add_argument("--repeats", type=int, default=2)
    for name, value in (("--budget", 64), ("--depth", 16), ("--batch", 8)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--offload", default="ssd", choices=("ssd", "auto"))
    parser.add_argument("--in-ram", action="store_true",
                        help="files stay in the page cache; specexec loads them")  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int,
                        help="prompts repeated or cut to so many tokens")  # fmt: skip
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    options = parser.parse_args(arguments)
    options.peers = [name.strip() for name in options.peers.split(",")]
    if unknown := [name for name in options.peers if name not in PEERS]:
        raise ConfigError(f"no peer '{unknown[0]}'; there are {', '.join(PEERS)}")
    if options.baseline_tokens is None:
        options.baseline_tokens = options.tokens
    if min(options.prompts, options.tokens, options.baseline_tokens, options.repeats) < 1:
        raise ConfigError("--prompts, --repeats and both numbers of tokens must be 1 or more")
    if not (options.rig / "config.json").is_file() and not is_gguf(options.rig):
        raise ConfigError(f"no rig in {options.rig}: write one with scripts/make_rig.py")
    options.cap = parse_bytes(options.cap, "--cap") if options.cap != "0" else 0
    if options.in_ram:
        options.offload = "auto"
    options.rig, options.draft = options.rig.resolve(), options.draft.resolve()
    if options.expert_share is not None:
        decision = decision_for(options.rig, options.draft, options.expert_share)
        options.cap = int(decision.settings["ram"].value) + _PROGRAM_BYTES
    if options.rig.is_file():
        options.gguf = options.rig
    options.folder = (options.folder or options.rig).resolve()
    options.gguf = options.gguf or options.rig.with_name(options.rig.name + ".gguf")
    options.home.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(options.home).free < 2 << 30:
        raise ConfigError(f"{options.home} has less than 2 GB free: choose another --home")
    return options


def encode(words: Any, prompt: Prompt) -> list[int]:
    """The tokens that every program gets: chat by the target's own template if it has one."""
    if not prompt.chat or words.chat_template is None:
        return list(words.encode(prompt.text))
    messages = [{"role": role, "content": text} for role, text in prompt.messages]
    text = words.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(words.encode(text, add_special_tokens=False))


def real_comparisons(home: Path) -> list[list[str]]:
    """The arguments of each comparison of --real, whose models and rig are brought and made."""
    models = default_folder()
    found = []
    for name in MODELS:
        file, folder = gguf_path(name, models), safetensors_folder(name, models)
        found.append(["--rig", str(file), "--folder", str(folder), "--in-ram", "--peers",
                      _REAL_IN_RAM, "--prompts", "3", "--tokens", "64",
                      "--repeats", "2"])  # fmt: skip
    source, rig = safetensors_folder("smollm2", models), home / "smollm2-4-times"
    if not rig.is_dir():
        partial = home / "smollm2-4-times.partial"
        shutil.rmtree(partial, ignore_errors=True)
        write_rig(source, shape_of(read_config(source)).widened(4), partial, bits=16)
        partial.rename(rig)
    draft = gguf_path("smollm2", models)
    found.append(["--rig", str(rig), "--draft", str(draft), "--cap", "3GB", "--peers",
                  _REAL_STREAMED, "--tokens", "48", "--baseline-tokens", "6",
                  "--repeats", "1"])  # fmt: skip
    return found


def main(arguments: Sequence[str]) -> None:
    """Measures and prints."""
    if arguments[:1] == ["--real"]:
        home = default_home()
        for comparison in real_comparisons(home):
            print(f"bench_peers.py {shlex.join([*comparison, *arguments[1:]])}", file=sys.stderr)
            measure(parse([*comparison, *arguments[1:]]))
    else:
        measure(parse(arguments))


def measure(options: argparse.Namespace) -> None:
    """One comparison: runs all programs in turns, and prints the table and its JSON."""
    words = load_tokenizer(options.rig)
    dataset = load_dataset(options.dataset, data_folder=options.data, count=options.prompts)
    prompts = [encode(words, prompt) for prompt in dataset.prompts]
    if count := options.prompt_tokens:
        prompts = [(prompt * -(-count // len(prompt)))[:count] for prompt in prompts]
    bench = PeerBench(options, prompts)
    bench.prepare()
    began = time.perf_counter()
    for repeat in range(options.repeats):
        for turn in range(len(options.peers)):
            name = options.peers[(repeat + turn) % len(options.peers)]
            print(
                f"{time.perf_counter() - began:6.0f} s  round {repeat + 1}: {name}", file=sys.stderr
            )
            bench.run(name)
    entries = bench.summary()
    config = {name: str(value) if isinstance(value, Path) else value
              for name, value in vars(options).items()}  # fmt: skip
    print(show(entries))
    print(json.dumps({"schema": 1, "config": config, "peers": entries, **environment()}))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
