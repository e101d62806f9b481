"""The measurements of bench_batch.py: texts one after another, then several at once.

Each text and each pass is reported on stderr as it ends, so that a run that is cut short has
reported what it measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

from batch_passes import Passes, sums, told
from offload_setup import DEMO, tell

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.engine.batched import Batched
from specexec_cli.engine.text import Running, TextRequest
from specexec_cli.planning.request import TreeRequest
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession

_FEW = GenerationConfig(max_tokens=5)  # of the text that warms up
_LATE = 1  # the pass in which the late text is submitted; the other texts' first pass is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is measured."""

    rig: Path
    draft: Path
    cap_bytes: int | None
    texts: tuple[int, ...]
    alone: int  # number of texts that are measured one after another
    max_tokens: int
    prompt_tokens: int | None  # tokens that each prompt is cut to; None: not cut
    context_tokens: int
    temperature: float
    budget: int | None
    depth: int | None
    batch: int | None
    policy: str | None
    past: bool
    seed: int


def opened(config: Config, slots: int) -> LocalSession:
    """A session on the rig, with memory for `slots` texts at once."""
    session = Session.open(
        model=str(config.rig), draft=str(config.draft), offload="ssd", device="cpu",
        tree=TreeRequest(budget=config.budget, depth=config.depth, batch=config.batch,
                         policy=config.policy, past=config.past),
        context_tokens=config.context_tokens, slots=slots, notice=tell,
    )  # fmt: skip
    assert isinstance(session, LocalSession)
    return session


def requests_of(session: LocalSession, config: Config, count: int) -> list[TextRequest]:
    """The requests of the first `count` texts; all of them differ in prompt or seed."""
    held_out = json.loads((DEMO / "heldout_prompts.json").read_text())
    prompts = [session.encode(one["prompt"])[: config.prompt_tokens] for one in held_out]
    return [
        TextRequest(
            prompt=tuple(prompts[at % len(prompts)]),
            sampling=SamplingConfig(temperature=config.temperature, seed=config.seed + at),
            generation=GenerationConfig(max_tokens=config.max_tokens),
        )
        for at in range(count)
    ]


def _warm_up(session: LocalSession, request: TextRequest) -> None:
    """Generates a short text, so that kernels are compiled and the cost of passes is known."""
    tell("to warm up:")
    list(session.generate(request.prompt, generation=_FEW))


@dataclass(frozen=True, slots=True)
class Alone:
    """A text that was generated alone, and its speed."""

    tokens: list[int]
    seconds: float
    sums: dict[str, float]


def one_after_another(config: Config, passes: Passes) -> list[Alone]:
    """Generates the first texts one after another, as `generate` does."""
    found = []
    with opened(config, 1) as session:
        requests = requests_of(session, config, config.alone)
        _warm_up(session, requests[0])
        for number, request in enumerate(requests, 1):
            session.forget()
            first, started = passes.begin(), time.perf_counter()
            steps = list(
                session.generate(
                    request.prompt, sampling=request.sampling, generation=request.generation
                )
            )
            tokens = [token for step in steps for token in step.tokens]
            text = Alone(tokens, time.perf_counter() - started, sums(passes.done[first:]))
            tell(
                f"text {number}/{config.alone} alone, behind {len(request.prompt)} tokens: "
                f"{len(tokens)} tokens in {text.seconds:.1f} s; {told(text.sums)}"
            )
            found.append(text)
    return found


@dataclass(slots=True)
class Arrivals:
    """Collects the steps of one text as they come, in the engine's thread."""

    passes: Passes
    running: Running
    steps: list[tuple[int, list[int]]] = field(default_factory=list)  # number of its pass, tokens
    ended: Event = field(default_factory=Event)

    def come(self) -> None:
        """Takes the steps that have come."""
        ended = self.running.done
        for step in self.running.take():
            self.steps.append((len(self.passes.done) - 1, list(step.tokens)))
        if ended:
            self.ended.set()

    def wait(self) -> None:
        """Waits until the text has ended.

        Raises:
            Exception: the error of a text that failed.
        """
        self.ended.wait()
        if self.running.error is not None:
            raise self.running.error

    @property
    def tokens(self) -> list[int]:
        """All tokens that have come."""
        return [token for _, tokens in self.steps for token in tokens]

    @property
    def last(self) -> int:
        """The number of the pass that brought the last token."""
        return self.steps[-1][0]

    def until(self, number: int) -> int:
        """How many tokens came up to the end of a pass."""
        return sum(len(tokens) for at, tokens in self.steps if at <= number)


def _asked(engine: Batched, passes: Passes, request: TextRequest) -> Arrivals:
    arrivals = Arrivals(passes, engine.submit(request))
    arrivals.running.listen(arrivals.come)
    return arrivals


def at_once(config: Config, count: int, alone: Sequence[Alone], passes: Passes) -> dict[str, Any]:
    """Generates `count` texts at once, and one that is submitted in the middle of a pass.

    Raises:
        AssertionError: a text is not the one that it is alone.
    """
    with opened(config, count + 1) as session:
        *requests, late = requests_of(session, config, count + 1)
        engine = Batched(session, slots=count + 1, most_waiting=1)
        try:
            tell("to warm up:")  # by the engine: a text that `generate` writes takes every node
            other = tuple(reversed(requests[0].prompt))  # no text is to find its prompt there
            _asked(engine, passes, replace(requests[0], prompt=other, generation=_FEW)).wait()
            first, started = passes.begin(), time.perf_counter()
            texts = [_asked(engine, passes, request) for request in requests]
            for text in texts:
                text.wait()
            own = passes.done[first:]
            found = _rates(texts, alone, [one.ended_s - started for one in own], first)
            found |= {"texts": count, **sums(own), "each_pass": [asdict(one) for one in own]}
            tell(
                f"{count} texts at once: {found['tokens']} tokens in {found['seconds']:.1f} s, "
                f"{found['tokens_while_all']} of them in the {found['seconds_while_all']:.1f} s "
                f"until the first text ended; {told(sums(own))}"
            )
            found["first_token_passes"] = _first_token_passes(engine, passes, requests, late)
        finally:
            engine.close()
    return found


def _rates(
    texts: Sequence[Arrivals], alone: Sequence[Alone], ends_s: Sequence[float], first: int
) -> dict[str, Any]:
    """Tokens and seconds of texts at once, and each text's speed over its own alone.

    Args:
        ends_s: when each pass ended, seconds since the texts were submitted.
        first: number of the first of these passes.
    """
    for text, expected in zip(texts, alone, strict=False):
        if text.tokens != expected.tokens:
            raise AssertionError("a text at once is not the one it is alone")
    until = min(text.last for text in texts)
    return {
        "tokens": sum(len(text.tokens) for text in texts),
        "seconds": ends_s[-1],
        "passes_of_texts": [text.last - first + 1 for text in texts],
        "tokens_while_all": sum(text.until(until) for text in texts),
        "passes_while_all": until - first + 1,
        "seconds_while_all": ends_s[until - first],
        "each_over_alone": [
            len(text.tokens) / ends_s[text.last - first] / (len(own.tokens) / own.seconds)
            for text, own in zip(texts, alone, strict=False)
        ],
    }


def _first_token_passes(
    engine: Batched, passes: Passes, requests: Sequence[TextRequest], late: TextRequest
) -> int:
    """Passes until the late text's first token, the pass in which it was submitted included."""
    newcomers: list[Arrivals] = []
    passes.late_at = passes.begin() + _LATE
    short = replace(late, generation=replace(late.generation, max_tokens=1))
    passes.late = lambda: newcomers.append(_asked(engine, passes, short))
    others = [_asked(engine, passes, request) for request in requests]
    while not newcomers:
        assert not all(each.ended.is_set() for each in others), "they ended before it came"
        time.sleep(0.001)
    newcomers[0].wait()
    passes.late = None
    found = newcomers[0].steps[0][0] - passes.late_at + 1
    for each in others:
        each.running.cancel()
    for each in others:
        each.wait()
    tell(f"a newcomer's first token came with pass {found} since it was asked for")
    return found
