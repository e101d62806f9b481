"""Compares one streamed target with several: when is one better than replicas?

A pass over a streamed target takes as long as its slowest part, the link or the arithmetic, so a
big draft tree costs no extra time. Replicas that fit their devices are fast and suit DSI's chains.

The drafter's r-th best child of any node is the target's token with probability a (1 - a)^(r-1),
where a is the acceptance rate of the best child. The probability of a node is the product along its
path, and the best tree of K nodes commits one token plus the sum of the K largest products.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from specexec_cli.dsi.closed_forms import servers_needed, speculative_s
from specexec_cli.errors import ConfigError
from specexec_cli.lab.simulate.clock import Latencies
from specexec_cli.lab.simulate.methods import FakePair, mean, run_dsi

DRAFT_BATCH = 16  # nodes one draft step expands


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A target, a drafter and the available devices."""

    target_bytes: float
    link_bytes_per_s: float  # RAM or SSD to one device
    memory_bytes_per_s: float  # the device's own memory
    device_bytes: float  # memory of one device
    devices: int
    draft_s: float  # one step of the drafter
    acceptance: float  # acceptance rate of the drafter's best token
    row_s: float = 0.0  # seconds of arithmetic per row of a pass
    shared_link: bool = False  # all devices stream through one link

    def __post_init__(self) -> None:
        for name in ("target_bytes", "link_bytes_per_s", "memory_bytes_per_s", "device_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name.replace('_', ' ')} must be above 0")
        if not 0.0 < self.acceptance < 1.0:
            raise ConfigError(f"`acceptance` must be between 0 and 1, not {self.acceptance}")
        if self.devices < 1 or not self.draft_s > 0 or self.row_s < 0:
            raise ConfigError("`devices` and `draft_ms` must be above 0, `row_ms` not negative")

    def streamed_pass_s(self, rows: int, streams: int = 1) -> float:
        """Seconds of a pass while `streams` devices stream: the slower of link and arithmetic."""
        share = streams if self.shared_link else 1
        return max(self.target_bytes * share / self.link_bytes_per_s, rows * self.row_s)

    def resident_pass_s(self, rows: int) -> float:
        """Seconds of a pass over weights in device memory."""
        return max(self.target_bytes / self.memory_bytes_per_s, rows * self.row_s)

    @property
    def devices_per_replica(self) -> int:
        """Number of devices that are needed to hold the target."""
        return math.ceil(self.target_bytes / self.device_bytes)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated speed of one way to use the devices."""

    name: str
    devices: int
    pass_s: float
    tokens_per_pass: float
    tokens_per_s: float
    device_s_per_token: float


def best_tree(acceptance: float, budget: int) -> tuple[float, int]:
    """Committed tokens per pass and depth of the best tree of `budget` nodes."""
    heap = [(-acceptance, 1)]
    total, deepest = 1.0, 0
    for _ in range(budget):
        negative, depth = heapq.heappop(heap)
        total -= negative
        deepest = max(deepest, depth)
        heapq.heappush(heap, (negative * acceptance, depth + 1))  # its best child
        heapq.heappush(heap, (negative * (1 - acceptance), depth))  # its next sibling
    return total, deepest


def compare(scenario: Scenario, budgets: tuple[int, ...], tokens: int) -> list[Estimate]:
    """Estimates every way that the devices allow."""
    plain_s = scenario.streamed_pass_s(1)
    estimates = [Estimate("streamed, no speculation", 1, plain_s, 1.0, 1 / plain_s, plain_s)]
    for budget in budgets:
        rate, depth = best_tree(scenario.acceptance, budget)
        steps = max(depth, math.ceil(budget / DRAFT_BATCH))
        pass_s = scenario.streamed_pass_s(budget + 1)
        token_s = (pass_s + steps * scenario.draft_s) / rate
        name = f"streamed, tree of {budget}"
        estimates.append(Estimate(name, 1, pass_s, rate, 1 / token_s, token_s))
    if scenario.devices > 1:
        pass_s = scenario.streamed_pass_s(1, scenario.devices)
        estimates.append(
            _dsi("DSI, streamed replicas", scenario, pass_s, scenario.devices, 1, tokens)
        )
    held = scenario.devices_per_replica
    replicas = scenario.devices // held
    if replicas:
        resident_s = scenario.resident_pass_s(1)
        lookaheads = range(1, 33)
        best_s = min(
            speculative_s(resident_s, scenario.draft_s, scenario.acceptance, k) for k in lookaheads
        )
        rate = resident_s / best_s
        estimates.append(
            Estimate(
                "resident, plain speculation", held, resident_s, rate, 1 / best_s, held * best_s
            )
        )
    if replicas > 1:
        name = f"DSI, {replicas} resident replicas"
        estimates.append(_dsi(name, scenario, scenario.resident_pass_s(1), replicas, held, tokens))
    return estimates


def _dsi(
    name: str, scenario: Scenario, pass_s: float, servers: int, held: int, tokens: int
) -> Estimate:
    """DSI under the virtual clock at the shortest lookahead the servers can follow."""
    lookahead = 1
    while servers_needed(pass_s, scenario.draft_s, lookahead) > servers:
        lookahead += 1
    latencies = Latencies(target_s=pass_s, draft_s=scenario.draft_s)
    pair = FakePair(latencies=latencies, acceptance=scenario.acceptance)
    outcome = mean(
        [run_dsi(latencies, pair.sample(tokens, s), lookahead, servers) for s in range(20)]
    )
    rate = tokens / outcome.seconds
    device_s = outcome.seconds * servers * held / tokens
    return Estimate(name, servers * held, pass_s, pass_s * rate, rate, device_s)


def verdict(estimates: list[Estimate]) -> str:
    """A sentence that names the fastest way and its gain over the best single streamed target."""
    best = max(estimates, key=lambda e: e.tokens_per_s)
    streamed = max(
        (e for e in estimates if e.devices == 1 and e.name.startswith("streamed")),
        key=lambda e: e.tokens_per_s,
    )
    if best is streamed:
        return f"one streamed target wins: {best.name}, {best.tokens_per_s:.2f} tokens/s"
    gain = best.tokens_per_s / streamed.tokens_per_s
    return (
        f"{best.name} wins: {best.tokens_per_s:.2f} tokens/s, {gain:.1f} times "
        f"'{streamed.name}', on {best.devices} devices"
    )
