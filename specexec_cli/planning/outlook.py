"""What a mixture's cache of experts is expected to bring, by the rows of a pass and by memory.

How unevenly a model's rows choose is not known before it runs, so every figure is a pair: for
experts that are all chosen equally often, and for the skew that fine-grained mixtures were seen to
have, where 27 % of the experts hold 80 % of the choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specexec_cli.config import ExpertPlace, OffloadMode
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.placement import place
from specexec_cli.planning.sizes import ExpertBytes, ModelBytes
from specexec_cli.planning.tiers import Plan

ROWS = (1, 4, 16)
_MORE = (1.5, 2.0)  # times the memory there is
# the most used share x of the experts holds x ** power of the choices
_EVEN, _SKEWED = 1.0, math.log(0.8) / math.log(0.27)

Range = tuple[float, float]  # with even choices, with skewed ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Passes of so many rows."""

    rows: int
    experts: Range  # asked for, in all layers
    held_share: Range  # of them, in memory
    ssd_bytes: Range  # of experts, to be read
    tokens_per_s: Range  # if every row commits a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Richer:
    """The same with more memory."""

    ram_bytes: int
    cache_share: float  # of the experts' bytes; 1 where whole layers stay
    tokens_per_s: Range  # of passes of one row


def outlook(plan: Plan) -> tuple[Outlook, ...]:
    """By rows, for a plan with a cache of experts."""
    return tuple(_outlook(plan, rows) for rows in ROWS)


def cache_share(experts: ExpertBytes, plan: Plan) -> float:
    """Of the experts' bytes, what the cache holds; all of it where no expert comes from the SSD."""
    held = plan.expert_bytes + plan.device_expert_bytes
    return min(1.0, held / sum(experts.layers)) if held else 1.0


def with_more_ram(
    plan: Plan,
    draft: ModelBytes | None,
    mode: OffloadMode = "auto",
    where: ExpertPlace = "auto",
) -> tuple[Richer, ...]:
    """What more RAM would bring, up to where all experts stay.

    Args:
        mode, where: of the plan that it is more RAM than.
    """
    found = []
    target, machine = plan.target, plan.machine
    for times in _MORE:
        richer = replace(machine, ram_bytes=round(times * machine.ram_bytes))
        more = place(mode, target, draft, plan.work, richer, where)
        assert target.experts is not None, "only mixtures have experts"
        share = cache_share(target.experts, more)
        each = _outlook(more, 1)
        found.append(
            Richer(ram_bytes=richer.ram_bytes, cache_share=share, tokens_per_s=each.tokens_per_s)
        )
        if share == 1.0:
            break
    return tuple(found)


def _outlook(plan: Plan, rows: int) -> Outlook:
    target, experts = plan.target, plan.target.experts
    assert experts is not None, "only mixtures have experts"
    share, layers = cache_share(experts, plan), experts.in_all // experts.count
    # with the experts' part taken out, what is left of the plan's bytes are those of dense parts
    dense = sum(
        size
        for size, tier in zip(target.dense.layers, plan.tiers, strict=True)
        if plan.expert_bytes and tier == "ssd"
    )
    columns = []
    for power in (_EVEN, _SKEWED):
        used = [1.0 - (1.0 - each) ** rows for each in _chances(experts, power)]
        kept = round(share * experts.count)
        asked, missing = layers * sum(used), layers * sum(used[kept:])
        ssd_bytes = missing * sum(experts.layers) / experts.in_all
        seconds = pass_time(plan, rows, round(dense + ssd_bytes)).seconds
        columns.append((asked, 1.0 - missing / asked, ssd_bytes, rows / seconds))
    even, skewed = columns
    ranges = list(zip(even, skewed, strict=True))
    return Outlook(
        rows=rows, experts=ranges[0], held_share=ranges[1], ssd_bytes=ranges[2],
        tokens_per_s=ranges[3],
    )  # fmt: skip


def _chances(experts: ExpertBytes, power: float) -> list[float]:
    """How likely a row is to choose each expert of a layer, the most used first."""
    count, chosen = experts.count, experts.chosen
    shares = [((n + 1) / count) ** power - (n / count) ** power for n in range(count)]
    found, left = [], float(chosen)
    weight = sum(shares)
    for share in shares:  # none is chosen twice by a row: what is cut off goes to the others
        chance = min(1.0, left * share / weight) if weight > 0 else 0.0
        found.append(chance)
        left, weight = left - chance, weight - share
    return found
