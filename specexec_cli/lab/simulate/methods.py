"""Runs a fake pair without speculation, with plain speculation (SI) and with DSI.

All three have the same acceptances, position by position, so that only the method differs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.errors import ConfigError
from specexec_cli.lab.simulate.clock import Latencies, VirtualWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class FakePair:
    """A pair's latencies, and the probability that a draft token is the target's.

    The probability is the same at every position, and positions are independent.
    """

    latencies: Latencies
    acceptance: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance <= 1.0:
            raise ConfigError(f"`acceptance` must be between 0 and 1, not {self.acceptance}")
        if not self.latencies.target_s > 0 or not self.latencies.draft_s > 0:
            raise ConfigError("`target_ms` and `draft_ms` must be above 0")

    def sample(self, tokens: int, seed: int) -> tuple[bool, ...]:
        """For each position, whether the drafter would propose the target's token there."""
        numbers = random.Random(seed)
        return tuple(numbers.random() < self.acceptance for _ in range(tokens))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The time and work of one method for one text."""

    seconds: float
    forwards: int  # passes of the target, stale ones included
    servers: int  # target servers that ran at least one pass
    gpu_s: float  # seconds of work on all devices, the drafter's included


def run_autoregressive(latencies: Latencies, tokens: int) -> Outcome:
    """Decodes with one pass per token on one device."""
    seconds = tokens * latencies.target_s
    return Outcome(seconds, tokens, 1, seconds)


def run_speculative(latencies: Latencies, accepted: Sequence[bool], lookahead: int) -> Outcome:
    """Drafts `lookahead` tokens (at most the tokens left), verifies them, and repeats."""
    done, tokens, forwards, seconds = 0, len(accepted), 0, 0.0
    while done < tokens:
        drafts = min(lookahead, tokens - done - 1)
        rows = drafts * latencies.target_row_s
        seconds += drafts * latencies.draft_s + latencies.target_s + rows
        forwards += 1
        done += next((i for i in range(drafts) if not accepted[done + i]), drafts) + 1
    return Outcome(seconds, forwards, 1, seconds)


def run_dsi(
    latencies: Latencies, accepted: Sequence[bool], lookahead: int, servers: int
) -> Outcome:
    """Runs the real orchestrator under the virtual clock."""

    def target(sequence: Sequence[int], position: int) -> int:
        return position

    def drafter(sequence: Sequence[int], position: int) -> int:
        return position if accepted[position - 1] else -1

    workers = VirtualWorkers(latencies, target, drafter, servers)
    config = DsiConfig(lookahead=lookahead, max_rows=max(64, lookahead), timeout_s=math.inf)
    text: list[int] = []
    for commit in Orchestrator(workers, config).generate([0], len(accepted)):
        text.extend(commit.tokens)
    assert text == list(range(1, len(accepted) + 1)), "DSI must commit the target's tokens"
    used = [seconds for seconds in workers.busy_s.values() if seconds > 0]
    gpu_s = sum(used) + workers.drafter_busy_s
    return Outcome(workers.now(), workers.forwards, len(used), gpu_s)


def mean(outcomes: Sequence[Outcome]) -> Outcome:
    """Averages over repeats; `servers` is the greatest of all repeats, `forwards` is rounded."""
    count = len(outcomes)
    return Outcome(
        sum(o.seconds for o in outcomes) / count,
        round(sum(o.forwards for o in outcomes) / count),
        max(o.servers for o in outcomes),
        sum(o.gpu_s for o in outcomes) / count,
    )


def dsi_bound_s(target_s: float, draft_s: float, acceptance: float, tokens: int) -> float:
    """An upper bound of a text's expected seconds, N tokens: arXiv:2405.14105, Proposition 1.

    t1 p (N - 1) + t2 ((1 - p)(N - 1) + 1), where t1 is draft_s, t2 is target_s and p is acceptance.
    It assumes lookahead 1 and as many servers as are needed.
    """
    before_last = tokens - 1
    accepted = acceptance * before_last
    return draft_s * accepted + target_s * (before_last - accepted + 1)
