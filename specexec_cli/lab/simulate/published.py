"""Reproduces the times that the published simulation of DSI counts, under a virtual clock.

Source: dsi/online/simul/{core,simul}.py of keyboardAnt/distributed-speculative-inference, which
waits in real processes and threads. Its counts differ from the algorithms in these points:

- a number of right drafts is drawn for each restart, at most 20, whatever the lookahead is;
- each restart begins with a target pass that verifies nothing, SI waits for it before it drafts;
- the token that corrects a wrong draft is not counted: a restart commits its right drafts alone;
- the text ends, after that first pass, with the restart whose drafts would exceed it;
- each restart starts a process, whose time is counted too.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

MOST_RIGHT = 20  # most right drafts of one restart: `maximum_correct_tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Seconds of each step; first_target_s is for each server's very first pass (TTFT)."""

    target_s: float
    draft_s: float
    first_target_s: float
    si_restart_s: float = 0.0  # start of a process, at each restart
    dsi_restart_s: float = 0.0  # start of a process and its threads, at each restart


def right_drafts(acceptance: float, tokens: int, numbers: random.Random) -> list[int]:
    """Draws the number of right drafts of each restart, until they exceed `tokens` together."""
    drawn: list[int] = []
    if acceptance == 0:
        raise ValueError("a drafter that is never right commits nothing in that simulation")
    while sum(drawn) <= tokens:
        right = 0
        while right < MOST_RIGHT and numbers.random() < acceptance:
            right += 1
        drawn.append(right)
    return drawn


def si_s(costs: Accounting, drawn: Sequence[int], tokens: int, lookahead: int) -> float:
    """Seconds of SI for a text of `tokens`.

    Each restart runs a pass, then drafts a lookahead and verifies it, until a draft is wrong.
    """
    seconds, done = costs.first_target_s - costs.target_s, 0
    for right in drawn:
        seconds += costs.si_restart_s + costs.target_s
        if done + right > tokens:
            break
        iterations = right // lookahead + 1
        seconds += iterations * (lookahead * costs.draft_s + costs.target_s)
        done += right
    return seconds


def dsi_s(
    costs: Accounting, drawn: Sequence[int], tokens: int, lookahead: int, servers: int
) -> float:
    """Seconds of DSI for a text of `tokens`: passes run on a pool that takes the newest first."""
    seconds, done = 0.0, 0
    visited: set[int] = set()
    for right in drawn:
        ends = done + right > tokens  # if so, the pass without drafts is the last one
        needed = 0 if ends else right + 1
        seconds += costs.dsi_restart_s + _restart_s(costs, needed, lookahead, servers, visited)
        if ends:
            break
        done += right
    return seconds


def _restart_s(
    costs: Accounting, needed: int, lookahead: int, servers: int, visited: set[int]
) -> float:
    """Seconds from a restart to the end of the first pass over at least `needed` drafts.

    Args:
        visited: servers that have run a pass before; this function adds to them.
    """
    idle, waiting = list(range(servers)), list[int]()
    running: list[tuple[float, int, int]] = []  # (end, server, drafts) of each running pass

    def begin(server: int, now: float, drafts: int) -> None:
        first = server not in visited
        visited.add(server)
        end = now + (costs.first_target_s if first else costs.target_s)
        heapq.heappush(running, (end, server, drafts))

    drafts = 0
    while True:
        submitted = drafts * costs.draft_s
        while running and running[0][0] <= submitted:
            end, server, verified = heapq.heappop(running)
            if verified >= needed:
                return end
            if waiting:
                begin(server, end, waiting.pop())
            else:
                idle.append(server)
        if idle:
            begin(idle.pop(0), submitted, drafts)
        else:
            waiting.append(drafts)
        drafts += lookahead
