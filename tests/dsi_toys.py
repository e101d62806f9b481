"""Toy workers for DSI: pure functions of (seed, position, last tokens) with injected latency."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specexec_cli.config import SamplingConfig
from specexec_cli.dsi.messages import Ready
from specexec_cli.errors import NonFiniteLogitsError, SpecexecError, StreamError


def toy_token(seed: int, sequence: Sequence[int], position: int, vocab: int = 50) -> int:
    """The target's draw: depends on the seed, the position and the three tokens before it."""
    key = (seed, position, *sequence[max(0, position - 3) : position])
    return random.Random(repr(key)).randrange(vocab)


class ToyWorker:
    """What both workers answer alike: they are ready at once, and keep nothing."""

    delay_s: Callable[[], float]
    offset: int

    def ready(self) -> Ready:
        return Ready({1: self.delay_s()}, 1000)

    def close(self) -> None:
        pass

    def configure(
        self, sampling: SamplingConfig, rejection: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        self.offset = sampling.seed

    def end(self, tokens: Sequence[int]) -> None:
        pass


@dataclass
class ToyServer(ToyWorker):
    """A target server that sleeps in place of compute and polls as a real one does."""

    seed: int
    delay_s: Callable[[], float] = lambda: 0.0
    dies_at: int = -1  # the pass that raises
    hangs_at: int = -1  # the pass that does not answer in time
    exits_at: int = -1  # the pass that ends the process, as a segmentation fault would
    # (sequence, position) -> why the position cannot be drawn
    fails: Callable[[Sequence[int], int], SpecexecError | None] = lambda sequence, position: None
    score_s: float = 0.0  # how long logits take
    passes: int = 0
    forgot: int = 0  # how often
    offset: int = 0
    bytes_streamed: int = 0
    rows_run: int = 0
    bonus: NDArray[np.float32] | None = None

    def verify(
        self,
        tokens: Sequence[int],
        first: int,
        stale: Callable[[], bool],
        proposals: Sequence[NDArray[np.float32]] = (),
    ) -> tuple[int, ...] | None:
        self.passes += 1
        if None in tokens:
            raise TypeError("no token at all")
        if self.passes == self.dies_at:
            raise RuntimeError("injected failure")
        if self.passes == self.exits_at:
            os._exit(7)
        if self.passes == self.hangs_at:
            time.sleep(3.0)  # without polling; longer than any timeout of a test
        prefill = first > len(tokens)  # free, as in the simulator by default
        end = time.perf_counter() + (0.0 if prefill else self.delay_s())
        while (left := end - time.perf_counter()) > 0:
            if stale():
                return None
            time.sleep(min(left, 0.002))
        draws: list[int] = []
        for position in range(first, len(tokens) + 1):
            error = self.fails(tokens, position)
            if error is not None and (not draws or not isinstance(error, NonFiniteLogitsError)):
                raise error
            if error is not None:
                break
            draws.append(toy_token(self.seed + self.offset, tokens, position))
        return tuple(draws)

    def score(self, tokens: Sequence[int], first: int) -> NDArray[np.float32]:
        """Of a vocabulary of two: the position, and how often the cache was emptied."""
        time.sleep(self.score_s)
        rows = [(position, self.forgot) for position in range(first, len(tokens))]
        return np.array(rows, dtype=np.float32)

    def forget(self) -> None:
        self.forgot += 1


@dataclass
class ToyDrafter(ToyWorker):
    """Proposes the target's token with the given probability, else another one."""

    seed: int
    acceptance: float
    delay_s: Callable[[], float] = lambda: 0.0
    dies_at: int = -1
    window: int = 10**9  # it says nothing of positions from here on
    sequence: list[int] = field(default_factory=list)
    drafted: int = 0
    offset: int = 0
    proposal: NDArray[np.float32] | None = None

    def start(self, tokens: Sequence[int]) -> None:
        self.sequence = list(tokens)

    def score(self, tokens: Sequence[int], first: int) -> NDArray[np.float32]:
        raise StreamError("the draft model cannot be read")

    def forget(self) -> None:
        pass

    def next_token(self) -> int | None:
        if len(self.sequence) >= self.window:
            return None
        self.drafted += 1
        if self.drafted == self.dies_at:
            raise RuntimeError("injected failure")
        time.sleep(self.delay_s())
        position = len(self.sequence)
        token = toy_token(self.seed + self.offset, self.sequence, position)
        if random.Random(f"{self.seed}/{position}").random() >= self.acceptance:
            token = (token + 1) % 50
        self.sequence.append(token)
        return token


@dataclass
class RandomDelay:
    """Picklable jitter: uniform between two bounds, seeded."""

    low_s: float
    high_s: float
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def __call__(self) -> float:
        return self._random.uniform(self.low_s, self.high_s)


def autoregressive(seed: int, prompt: Sequence[int], tokens: int) -> list[int]:
    """The oracle: one token after another."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(toy_token(seed, text, len(text)))
    return text[len(prompt) :]


def balanced(acceptance: float, runs: int) -> list[bool]:
    """Acceptances whose runs have the lengths of the geometric distribution's quantiles."""
    lengths = [int(math.log((i + 0.5) / runs) / math.log(acceptance)) for i in range(runs)]
    random.Random(0).shuffle(lengths)
    return [accepted for n in lengths for accepted in (*[True] * n, False)]
