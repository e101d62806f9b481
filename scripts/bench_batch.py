"""Measure several texts at once against one alone, on a model larger than the memory it may use.

    python scripts/make_rig.py --shape llama2-7b --out /var/tmp/rig-7b
    python scripts/bench_batch.py --rig /var/tmp/rig-7b --cap 4GB --texts 4,16

In turns, within one run: some texts one after another as `generate` writes them, then so many at
once. A ratio is tokens/s of all texts over that of one alone, or of each text over its own speed
alone. Every text must be the one it is alone. A newcomer is asked for while the others are in the
middle of a pass; how many passes end until its first token does is counted, that one included.
Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from memory_cap import KIND_VARIABLE, cgroup_peak_bytes, run_capped
from offload_report import environment
from offload_setup import DEMO, tell
from rich.console import Console
from rich.table import Table

from specexec_cli.cli.machine import parse_bytes
from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.engine.batched import Batched
from specexec_cli.engine.text import Running, TextRequest
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, SpecexecError
from specexec_cli.planning.request import TreeRequest
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is measured."""

    rig: Path
    draft: Path
    cap_bytes: int | None
    texts: tuple[int, ...]
    alone: int  # texts that are measured one after another
    max_tokens: int
    context_tokens: int
    temperature: float
    budget: int | None
    depth: int | None
    batch: int | None
    policy: str | None
    past: bool
    repeats: int
    seed: int


@dataclass(slots=True)
class Alone:
    """A text as `generate` writes it."""

    tokens: list[int]
    seconds: float
    passes: int


def opened(config: Config, slots: int) -> LocalSession:
    session = Session.open(
        target=str(config.rig), draft=str(config.draft), offload="ssd", device="cpu",
        tree=TreeRequest(budget=config.budget, depth=config.depth, batch=config.batch,
                         policy=config.policy, past=config.past),
        context_tokens=config.context_tokens, slots=slots, notice=tell,
    )  # fmt: skip
    assert isinstance(session, LocalSession)
    return session


def requests_of(session: LocalSession, config: Config, count: int) -> list[TextRequest]:
    held_out = json.loads((DEMO / "heldout_prompts.json").read_text())
    return [
        TextRequest(
            prompt=tuple(session.encode(held_out[at % len(held_out)]["prompt"])),
            sampling=SamplingConfig(temperature=config.temperature, seed=config.seed + at),
            generation=GenerationConfig(max_tokens=config.max_tokens),
        )
        for at in range(count)
    ]


def one_after_another(config: Config) -> list[Alone]:
    found = []
    with opened(config, 1) as session:
        requests = requests_of(session, config, config.alone)
        _warm_up(session, requests[0])
        for request in requests:
            session.forget()
            started = time.perf_counter()
            steps = list(
                session.generate(
                    request.prompt, sampling=request.sampling, generation=request.generation
                )
            )
            tokens = [token for step in steps for token in step.tokens]
            found.append(Alone(tokens, time.perf_counter() - started, len(steps)))
    return found


def _warm_up(session: LocalSession, request: TextRequest) -> None:
    """Kernels are compiled, and the cost of passes is known from the first text on."""
    list(session.generate(request.prompt, generation=GenerationConfig(max_tokens=8)))


def at_once(config: Config, count: int, alone: Sequence[Alone]) -> dict[str, Any]:
    """So many texts at once, and one that comes in the middle of a pass."""
    with opened(config, count + 1) as session:
        *requests, late = requests_of(session, config, count + 1)
        _warm_up(session, requests[0])
        engine = Batched(session, slots=count + 1, most_waiting=1)
        try:
            started, before = time.perf_counter(), engine.figures()
            running = [engine.submit(request) for request in requests]
            tokens = [[token for step in each for token in step.tokens] for each in running]
            seconds = time.perf_counter() - started
            after = engine.figures()
            passes = _first_token_passes(engine, requests, late)
        finally:
            engine.close()
    for own, expected in zip(tokens, alone, strict=False):
        if own != expected.tokens:
            raise AssertionError("a text at once is not the one it is alone")
    shares = [
        (len(own) / each.stats.total_s) / (len(expected.tokens) / expected.seconds)
        for own, each, expected in zip(tokens, running, alone, strict=False)
    ]
    return {
        "texts": count,
        "tokens_per_s": sum(map(len, tokens)) / seconds,
        "passes": after.passes - before.passes,
        "seconds": seconds,
        "tokens": sum(map(len, tokens)),
        "passes_of_texts": [each.stats.target_passes for each in running],
        "draft_s": median(each.stats.draft_s / each.stats.target_passes for each in running),
        "pass_s": median(each.stats.verify_s / each.stats.target_passes for each in running),
        "each_over_alone": shares,
        "first_token_passes": passes,
    }


def _first_token_passes(engine: Batched, requests: Sequence[TextRequest], late: TextRequest) -> int:
    """Passes that end until a newcomer's first token, the one it came in included."""
    others = [engine.submit(request) for request in requests]
    while not others[0].take():
        time.sleep(0.005)
    while _layer(others[0]) in (None, 1):  # into the next pass
        time.sleep(0.005)
    before = engine.figures().passes
    newcomer = engine.submit(late)
    first = next(iter(newcomer))
    assert first.tokens
    passes = engine.figures().passes - before
    for each in (*others, newcomer):
        each.cancel()
    for each in (*others, newcomer):
        list(each)
    return passes


def _layer(running: Running) -> int | None:
    return running.progress.layer if running.progress is not None else None


def run(config: Config) -> dict[str, Any]:
    alone: list[list[Alone]] = []
    batches: list[dict[str, Any]] = []
    for number in range(config.repeats):
        tell(f"round {number + 1}/{config.repeats}: one after another")
        alone.append(one_after_another(config))
        for count in config.texts:
            tell(f"round {number + 1}/{config.repeats}: {count} at once")
            found = at_once(config, count, alone[-1])
            rate = sum(len(each.tokens) for each in alone[-1]) / sum(
                each.seconds for each in alone[-1]
            )
            batches.append({**found, "alone_tokens_per_s": rate,
                            "over_alone": found["tokens_per_s"] / rate})  # fmt: skip
    return {
        **environment(config.rig, config.seed),
        "schema": SCHEMA,
        "bench": "batch",
        "config": {**asdict(config), "rig": str(config.rig), "draft": str(config.draft)},
        "alone": [
            {"tokens": sum(len(each.tokens) for each in texts),
             "seconds": sum(each.seconds for each in texts),
             "passes": sum(each.passes for each in texts)}
            for texts in alone
        ],
        "batches": batches,
        "cgroup_peak_bytes": cgroup_peak_bytes() if config.cap_bytes else None,
    }  # fmt: skip


def show(report: dict[str, Any]) -> None:
    table = Table()
    for title in ("texts", "tokens/s", "over one", "each over itself alone", "tokens a pass",
                  "draft s", "pass s", "passes to a first token"):  # fmt: skip
        table.add_column(title, justify="right")
    for texts in report["alone"]:
        rate, a_pass = texts["tokens"] / texts["seconds"], texts["seconds"] / texts["passes"]
        per_pass = f"{texts['tokens'] / texts['passes']:.2f}"
        table.add_row("1", f"{rate:.2f}", "1.00", "1.00", per_pass, "", f"{a_pass:.2f}", "1")
    for each in report["batches"]:
        shares = each["each_over_alone"]
        table.add_row(
            str(each["texts"]), f"{each['tokens_per_s']:.2f}", f"{each['over_alone']:.2f}",
            f"{min(shares):.2f} to {max(shares):.2f}", f"{each['tokens'] / each['passes']:.2f}",
            f"{each['draft_s']:.2f}", f"{each['pass_s']:.2f}", str(each["first_token_passes"]),
        )  # fmt: skip
    Console(stderr=True, width=110).print(table)


def parse(argv: list[str]) -> Config:
    """Options as a Config."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rig", type=Path, required=True, metavar="DIR", help="of make_rig.py")
    parser.add_argument("--draft", type=Path, default=DEMO / "draft", metavar="DIR")
    parser.add_argument("--cap", default="4GB", metavar="SIZE", help="RAM limit, or none")
    parser.add_argument("--texts", default="4,16", metavar="N,...")
    parser.add_argument("--alone", type=int, default=4, help="texts one after another")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=512, help="tokens to plan memory for")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--budget", type=int, help="of a pass; default: as generate and serve")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--policy", help="default: cost")
    parser.add_argument("--no-past", action="store_true")
    parser.add_argument("--batch", type=int, help="nodes of a draft step")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    return Config(
        rig=args.rig, draft=args.draft,
        cap_bytes=None if args.cap == "none" else parse_bytes(args.cap, "--cap"),
        texts=tuple(int(part) for part in args.texts.split(",")), alone=args.alone,
        max_tokens=args.max_tokens, context_tokens=args.context, temperature=args.temperature,
        budget=args.budget, depth=args.depth, batch=args.batch, policy=args.policy,
        past=not args.no_past, repeats=args.repeats, seed=args.seed,
    )  # fmt: skip


def main(argv: list[str]) -> int:
    try:
        config = parse(argv)
        if config.cap_bytes and KIND_VARIABLE not in os.environ:
            return run_capped([sys.executable, __file__, *argv], config.cap_bytes)
        report = run(config)
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    show(report)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
