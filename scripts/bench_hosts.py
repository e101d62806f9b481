"""Two machines on a cable of 1 Gb/s against one: iterations, processor seconds, bytes on the cable.

    python scripts/make_rig.py --shape llama2-7b --out /var/tmp/rig
    python scripts/bench_hosts.py --rig /var/tmp/rig --budget 16 --cap 4GB

Needs root, for network namespaces. The machines are this one's, with half of the layers each, so
that a pass computes as much as on one machine, and the cable comes on top. The same texts are
written in turn by one machine with all layers in RAM, by two, and once by one that streams from the
SSD under a limit of memory, each in a process of its own. Every text must be the same, in the same
iterations; of several turns each iteration counts at its fastest. The last line is JSON.

    python scripts/bench_hosts.py --rig DIR --waves --prompt 512 --texts 4 --budget 64

With --waves a core each takes the place of machines: a prompt is read and texts are written side by
side over two of them, in the waves that the planner chooses and in one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from memory_cap import run_capped
from network_cable import Cable, cable, carried_bytes

from specexec_cli.cli.machine import parse_bytes
from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.core import StepResult
from specexec_cli.device import format_bytes
from specexec_cli.engine.batched import Batched
from specexec_cli.engine.text import TextRequest
from specexec_cli.planning.hosts import InWaves, TextRows, WaveTimes, in_waves
from specexec_cli.planning.request import TreeRequest
from specexec_cli.session import Session, TextSession

_PROMPTS = ("def read_lines(path):\n", "class Stack:\n    def __init__(self):\n")
_MAIN = "import sys; from specexec_cli.cli.main import main; sys.exit(main())"
_DRAFT = Path(__file__).parents[1] / "specexec_cli" / "demo" / "draft"


def processor_s(pid: int) -> float:
    """Seconds that a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def written(
    session: TextSession, tokens: int, computed: Callable[[], float], carried: Callable[[], int]
) -> dict[str, Any]:
    """The texts, and what their passes took."""
    steps: list[StepResult] = []
    cpu, on_cable, started = computed(), carried(), time.perf_counter()
    for prompt in _PROMPTS:
        steps += session.generate(prompt, generation=GenerationConfig(max_tokens=tokens))
    return {
        "tokens": [token for step in steps for token in step.tokens],
        "passes": len(steps),
        "rows": [step.tree_nodes + step.pending_rows for step in steps],
        "verify_s": [step.verify_s for step in steps],
        "iteration_s": [step.draft_s + step.verify_s for step in steps],
        "seconds": time.perf_counter() - started,
        "processor_s": computed() - cpu,
        "cable_bytes": carried() - on_cable,
        "streamed_bytes": sum(step.bytes_streamed for step in steps),
    }


WAYS: dict[str, dict[str, str]] = {
    "one, RAM": {"offload": "ram"},
    "two, RAM": {"offload": "ram", "hosts": ""},
    "one, SSD": {"offload": "ssd"},
}
WAVES: dict[str, dict[str, str]] = {
    "two, in waves": {"offload": "ram", "hosts": ""},
    "two, in one wave": {"offload": "ram", "hosts": ""},
}


def read_and_written(session: TextSession, args: argparse.Namespace) -> dict[str, Any]:
    """A prompt's one pass, and texts side by side, each behind the end of that prompt."""
    prompt = session.encode("".join(_PROMPTS) * args.prompt)[: args.prompt]
    started = time.perf_counter()
    first = list(session.generate(prompt, generation=GenerationConfig(max_tokens=1)))
    prompt_s, prompt_waves = time.perf_counter() - started, max(1, _most_waves[0])
    _most_waves[0] = 0
    requests = [
        TextRequest(
            prompt=tuple(prompt[at : at + 16]), sampling=SamplingConfig(),
            generation=GenerationConfig(max_tokens=args.tokens),
        )
        for at in range(args.texts)
    ]  # fmt: skip
    started = time.perf_counter()
    with closing(Batched(session, slots=args.texts, most_waiting=0)) as engine:  # type: ignore[arg-type]
        steps = [[*running] for running in [engine.submit(each) for each in requests]]
    texts_s = time.perf_counter() - started
    longest = max(steps, key=len)
    return {
        "tokens": [token for text in [first, *steps] for step in text for token in step.tokens],
        "prompt_s": prompt_s,
        "texts_s": texts_s,
        "waves": [prompt_waves, max(1, _most_waves[0])],
        "passes": len(longest),
        "draft_s": sum(step.draft_s for step in longest),
        "verify_s": sum(step.verify_s for step in longest),
    }


_fastest, _most_waves = WaveTimes.fastest, [0]


def _counted(times: WaveTimes, texts: Sequence[TextRows]) -> InWaves:
    """The waves that the planner chooses, counted."""
    found = _fastest(times, texts)
    _most_waves[0] = max(_most_waves[0], len(found))
    return found


def _in_one(times: WaveTimes, texts: Sequence[TextRows]) -> InWaves:
    return in_waves(texts, sum(rows for rows, _ in texts))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """One turn of a way, at the first end of the cable."""
    tree = TreeRequest(budget=args.budget, depth=min(args.budget, 24), policy="fixed")
    more: dict[str, Any] = dict({**WAYS, **WAVES}[args.way])
    pids = [os.getpid()]
    if "hosts" in more:
        more["hosts"] = args.hosts
        pids.append(args.worker)
    if args.waves:
        more.update(slots=args.texts)
    with ExitStack() as left:
        divide = _in_one if args.way == "two, in one wave" else _counted
        left.enter_context(mock.patch.object(WaveTimes, "fastest", divide))
        session = Session.open(
            model=str(args.rig), draft=str(_DRAFT), tree=tree, cache=False, device="cpu",
            context_tokens=max(512, args.prompt + 128), **more,
        )  # fmt: skip
        left.enter_context(closing(session))
        list(session.generate("x", generation=GenerationConfig(max_tokens=4)))
        if args.waves:
            return read_and_written(session, args)
        return written(session, args.tokens, lambda: sum(map(processor_s, pids)), carried_bytes)


def at_the_first_end(args: argparse.Namespace, ends: Cable) -> dict[str, list[dict[str, Any]]]:
    """Each way's turns, run there with a worker at the other end."""
    with ExitStack() as left:
        folder = Path(left.enter_context(tempfile.TemporaryDirectory()))
        hosts, output = folder / "hosts.toml", folder / "found.json"
        layers = json.loads((args.rig / "config.json").read_text())["num_hidden_layers"] // 2
        hosts.write_text(
            f'listen = "{ends.addresses[0]}"\n[[host]]\nname = "other"\nlayers = {layers}\n'
        )
        os.environ["SPECEXEC_TOKEN"] = os.urandom(16).hex()
        if args.waves:  # whose rates are those of a core, as nothing keeps them
            os.environ["XDG_CACHE_HOME"] = str(folder)
        worker = subprocess.Popen(
            [*ends.inside(1), *_core(args, 1), sys.executable, "-c", _MAIN, "worker", str(args.rig),
             "--device", "cpu", "--join", ends.addresses[0], "--name", "other", "--quiet"]
        )  # fmt: skip
        left.callback(worker.wait)
        left.callback(worker.kill)
        ways = WAVES if args.waves else WAYS
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for turn in range(args.repeats):
            for way in ways:
                streams = ways[way]["offload"] == "ssd"
                if streams and turn:
                    continue  # it takes the most time, and its ratio is far from any noise
                command = [
                    *ends.inside(0), *_core(args, 0), sys.executable, __file__, *sys.argv[1:],
                    "--worker", str(worker.pid), "--hosts", str(hosts), "--output", str(output),
                    "--way", way,
                ]  # fmt: skip
                print(f"turn {turn + 1} of {args.repeats}: {way}", file=sys.stderr)
                failed = run_capped(command, args.cap) if streams else subprocess.call(command)
                if failed:
                    raise SystemExit(f"'{way}' failed")
                found[way].append(json.loads(output.read_text()))
        return found


def _core(args: argparse.Namespace, end: int) -> list[str]:
    """The beginning of a command that has one core, where waves are measured."""
    return ["taskset", "-c", str(end)] if args.waves else []


def fastest_s(turns: list[dict[str, Any]]) -> float:
    """Seconds of all iterations of a text, each at its fastest turn."""
    return sum(map(min, zip(*(turn["iteration_s"] for turn in turns), strict=True)))


def ratios(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Two machines' iterations over one's in RAM, and their tokens/s over one's from its SSD."""
    one, two, ssd = (fastest_s(found[way]) for way in WAYS)
    return {"iterations_over_one_in_ram": two / one, "tokens_per_s_over_one_from_ssd": ssd / two}


def summary(turns: list[dict[str, Any]]) -> dict[str, float]:
    """What a pass took, over all turns of a way."""
    passes = sum(turn["passes"] for turn in turns)
    return {
        "passes": passes,
        "tokens_per_pass": sum(len(turn["tokens"]) for turn in turns) / passes,
        "rows_per_pass": sum(sum(turn["rows"]) for turn in turns) / passes,
        "processor_s_per_pass": sum(turn["processor_s"] for turn in turns) / passes,
        "verify_s_median": median(s for turn in turns for s in turn["verify_s"]),
        "verify_s_least": min(s for turn in turns for s in turn["verify_s"]),
        "cable_bytes_per_pass": sum(turn["cable_bytes"] for turn in turns) / passes,
        "streamed_bytes_per_pass": sum(turn["streamed_bytes"] for turn in turns) / passes,
        "tokens_per_s": sum(len(turn["tokens"]) for turn in turns)
        / sum(turn["seconds"] for turn in turns),
    }


def tell_waves(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Prints what waves spare, each way at its fastest turn; returns the ratios."""
    least = {
        way: {what: min(turn[what] for turn in turns) for what in ("prompt_s", "texts_s")}
        for way, turns in found.items()
    }
    for way, turns in found.items():
        drafts = sum(turn["draft_s"] for turn in turns)
        passes = sum(turn["verify_s"] for turn in turns)
        print(
            f"{way}: the prompt in {least[way]['prompt_s']:.2f} s and {turns[0]['waves'][0]} "
            f"waves, the texts in {least[way]['texts_s']:.2f} s and {turns[0]['passes']} passes of "
            f"up to {turns[0]['waves'][1]} waves, {drafts / (drafts + passes):.1%} of it drafting"
        )
    waves, one = (least[way] for way in WAVES)
    compared = {f"{what}_in_waves_over_one": waves[what] / one[what] for what in waves}
    print(", ".join(f"{name} {ratio:.3f}" for name, ratio in compared.items()))
    return compared


def main() -> None:
    """Measures, and prints a line for each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rig", type=Path, required=True)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--waves", action="store_true", help="waves over two cores against one")
    parser.add_argument("--prompt", type=int, default=256, help="its tokens, with --waves")
    parser.add_argument("--texts", type=int, default=4, help="side by side, with --waves")
    parser.add_argument("--repeats", type=int, default=2, help="turns of both ways in RAM")
    parser.add_argument(
        "--cap", type=lambda text: parse_bytes(text, "--cap"), default=4 * 10**9, metavar="SIZE",
        help="memory of the process that streams from the SSD; default 4GB",
    )  # fmt: skip
    for name, kind in (("--worker", int), ("--hosts", Path), ("--output", Path), ("--way", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.output is not None:
        args.output.write_text(json.dumps(measured(args)))
        return
    with cable() as ends:
        found = at_the_first_end(args, ends)
    texts = {json.dumps(turn["tokens"]) for turns in found.values() for turn in turns}
    if args.waves:
        told_of = {"bench": "waves", "same_text": len(texts) == 1, "ways": found}
        print(json.dumps({"schema": 1, **told_of, **tell_waves(found)}))
        return
    told = {name: summary(turns) for name, turns in found.items()}
    for name, each in told.items():
        print(
            f"{name}: {each['passes']} passes of {each['rows_per_pass']:.0f} rows, "
            f"{each['tokens_per_pass']:.2f} tokens each; processor "
            f"{each['processor_s_per_pass']:.2f} s, verify {each['verify_s_median']:.2f} s "
            f"(least {each['verify_s_least']:.2f}), cable "
            f"{format_bytes(each['cable_bytes_per_pass'])}, "
            f"SSD {format_bytes(each['streamed_bytes_per_pass'])}; "
            f"{each['tokens_per_s']:.2f} tok/s"
        )
    compared = ratios(found)
    print(
        f"an iteration over two machines takes {compared['iterations_over_one_in_ram']:.3f} times "
        f"one's in RAM; two write {compared['tokens_per_s_over_one_from_ssd']:.1f} times as fast "
        "as one from its SSD"
    )
    same = len(texts) == 1
    print(json.dumps({"schema": 2, "bench": "hosts", "same_text": same, "ways": told, **compared}))


if __name__ == "__main__":
    main()
