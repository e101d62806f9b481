"""Is DSI worth it here, and with which lookahead? Pure arithmetic on measured latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specexec_cli.dsi.closed_forms import dsi_s, servers_needed, speculative_s

MAX_LOOKAHEAD = 32
LONG_PASS_ROWS = 4096
TYPICAL_ACCEPTANCE = 0.8  # mean of DSI's table 1; nothing is known before the first text
_WORTHWHILE = 1.05  # below it, scheduling and messages eat the gain


def pass_seconds(measured: Mapping[int, float], rows: int) -> float:
    """Seconds of a pass of `rows`, interpolated between measured ones, and extended beyond.

    Args:
        measured: rows -> seconds, at least one; more rows are never taken to be faster.
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
    """What DSI would do on `servers` target servers, beside plain speculation and neither."""

    lookahead: int
    servers: int  # that the lookahead needs; at most those at hand
    dsi_token_s: float
    speculative_token_s: float
    plain_token_s: float
    long_pass_s: float  # of a pass with LONG_PASS_ROWS rows, such as a long prompt's

    @property
    def gain(self) -> float:
        """Speedup over the better of plain speculation and no speculation."""
        return min(self.speculative_token_s, self.plain_token_s) / self.dsi_token_s

    @property
    def worthwhile(self) -> bool:
        """Whether the gain is more than the overhead it takes."""
        return self.gain >= _WORTHWHILE

    def describe(self) -> str:
        """One line for a person."""
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
    """The best lookahead for the servers at hand.

    A block's pass carries the rows of the blocks that other servers took meanwhile, too: each
    server's cache has to catch up with them.

    Args:
        target_s: rows of a pass -> seconds.
        draft_s: seconds per draft token.
        lookahead: fixed, or None to choose it.
    """
    plain_s = pass_seconds(target_s, 1)
    speculative = min(
        speculative_s(pass_seconds(target_s, k + 1), draft_s, acceptance, k)
        for k in range(1, MAX_LOOKAHEAD + 1)
    )

    def cost(k: int) -> float:
        block_s = pass_seconds(target_s, k * servers + 1)
        if servers_needed(block_s, draft_s, k) > servers or k * draft_s > block_s:
            return plain_s  # an unsuitable lookahead is never slower than no speculation
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
    """One line for `plan` and `doctor`: would DSI pay on these devices for this pair?

    A decoding pass over resident weights takes as long as reading them from device memory.

    Args:
        device_bytes: memory of each device; one also holds the draft model.
        memory_bytes_per_s: of one device.
    """
    if len(device_bytes) < 2:
        return "DSI needs at least two devices for target servers; this machine has " + (
            "one" if device_bytes else "none"
        )
    # the drafter goes where it leaves most room
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
