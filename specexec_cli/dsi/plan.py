"""Predicts from measured latencies whether DSI pays on a machine, and with which lookahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specexec_cli.dsi.closed_forms import dsi_s, servers_needed, speculative_s

MAX_LOOKAHEAD = 32  # the largest lookahead that is considered
LONG_PASS_ROWS = 4096
# The mean acceptance rate of table 1, arXiv:2405.14105; used before anything was measured.
TYPICAL_ACCEPTANCE = 0.8
_WORTHWHILE = 1.05  # a smaller predicted gain is lost to scheduling and messages


def pass_seconds(measured: Mapping[int, float], rows: int) -> float:
    """Seconds of a pass of `rows` rows, interpolated linearly and extrapolated beyond.

    More rows are never taken to be faster.

    Args:
        measured: seconds by rows, at least one entry.
        rows: rows of the pass.
    """
    points = sorted(measured.items())
    if len(points) == 1 or rows <= points[0][0]:
        return points[0][1]
    for (low, low_s), (high, high_s) in pairwise(points):
        if rows <= high or high == points[-1][0]:
            slope = max(0.0, (high_s - low_s) / (high - low))
            return low_s + slope * (rows - low)
    raise AssertionError("the last pair covers every number of rows")


@dataclass(frozen=True, slots=True)
class DsiPlan:
    """Predicted seconds per token of DSI, of plain speculation and of plain decoding."""

    lookahead: int
    servers: int  # target servers that the lookahead needs, at most those at hand
    dsi_token_s: float
    speculative_token_s: float
    plain_token_s: float
    long_pass_s: float  # seconds of a pass of LONG_PASS_ROWS rows, such as a long prompt's

    @property
    def gain(self) -> float:
        """Speedup over the better of plain speculation and no speculation."""
        return min(self.speculative_token_s, self.plain_token_s) / self.dsi_token_s

    @property
    def worthwhile(self) -> bool:
        """Whether the gain is larger than DSI's overhead."""
        return self.gain >= _WORTHWHILE

    def describe(self) -> str:
        """One line for a person about the plan."""
        return (
            f"DSI: lookahead {self.lookahead}, {self.servers} target servers, predicted "
            f"{self.dsi_token_s * 1e3:.1f} ms/token; plain speculation "
            f"{self.speculative_token_s * 1e3:.1f}, none {self.plain_token_s * 1e3:.1f} "
            f"({self.gain:.2f}x the better)"
        )


def make_plan(
    target_s: Mapping[int, float],
    draft_s: float,
    servers: int,
    lookahead: int | None = None,
    acceptance: float = TYPICAL_ACCEPTANCE,
) -> DsiPlan:
    """Predicts DSI with the best lookahead for the servers at hand.

    The pass of a block also carries the blocks that other servers verified meanwhile, since each
    server's cache has to catch up with them.

    Args:
        target_s: seconds of the target's passes by their rows.
        draft_s: seconds per draft token.
        servers: target servers at hand.
        lookahead: a fixed one, or None to choose the best.
        acceptance: expected acceptance rate.
    """
    plain_s = pass_seconds(target_s, 1)
    speculative = min(
        speculative_s(pass_seconds(target_s, k + 1), draft_s, acceptance, k)
        for k in range(1, MAX_LOOKAHEAD + 1)
    )

    def cost(k: int) -> float:
        block_s = pass_seconds(target_s, k * servers + 1)
        if servers_needed(block_s, draft_s, k) > servers or k * draft_s > block_s:
            return plain_s  # DSI with an unsuitable lookahead is as slow as plain decoding
        return min(plain_s, dsi_s(block_s, draft_s, acceptance, k))

    best = lookahead or min(range(1, MAX_LOOKAHEAD + 1), key=cost)
    needed = servers_needed(pass_seconds(target_s, best * servers + 1), draft_s, best)
    long_pass_s = pass_seconds(target_s, LONG_PASS_ROWS)
    return DsiPlan(best, min(needed, servers), cost(best), speculative, plain_s, long_pass_s)


def advise(
    target_bytes: int,
    draft_bytes: int,
    device_bytes: Sequence[int],
    memory_bytes_per_s: float,
    acceptance: float = TYPICAL_ACCEPTANCE,
) -> str:
    """One line for `plan` and `doctor` on whether DSI would pay on these devices for a pair.

    A pass over resident weights is taken to last as long as reading them from device memory.

    Args:
        target_bytes, draft_bytes: bytes of the models' weights.
        device_bytes: memory of each device; one also holds the draft model.
        memory_bytes_per_s: memory bandwidth of one device.
        acceptance: expected acceptance rate.
    """
    if len(device_bytes) < 2:
        return "DSI needs at least two devices for target servers; this machine has " + (
            "one" if device_bytes else "none"
        )
    # the drafter goes to the device with the most memory
    rooms = sorted(device_bytes, reverse=True)
    rooms[0] -= draft_bytes
    servers = sum(room >= target_bytes * 1.1 for room in rooms)
    if servers < 2:
        return (
            f"DSI is not worth it here: {servers} of {len(rooms)} devices can hold the target "
            "whole, and it needs two"
        )
    target_s = target_bytes / memory_bytes_per_s
    plan = make_plan({1: target_s}, draft_bytes / memory_bytes_per_s, servers, None, acceptance)
    word = "is worth it" if plan.worthwhile else "is not worth it"
    return f"DSI {word} at an acceptance rate of {acceptance:g}: {plan.describe()}"
