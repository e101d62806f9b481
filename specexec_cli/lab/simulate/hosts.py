"""What several machines would write together, real ones or such as one only thinks of.

Placement and the time of a pass are the planner's own, so that nothing here can say otherwise than
`specexec plan`. What others publish of such machines stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specexec_cli.planning.expected_speed import tokens_per_pass
from specexec_cli.planning.hosts import TextRows, WaveTimes, in_waves
from specexec_cli.planning.machine import Host, Site
from specexec_cli.planning.memory import DoesNotFitError
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import Decision, resolve
from specexec_cli.planning.speed import Pace, predict
from specexec_cli.planning.tiers import Plan

ALONE = "one machine"


@dataclass(frozen=True, slots=True)
class Published:
    """What another program was reported to reach, one token a pass."""

    program: str
    model: str
    machines: str
    tokens_per_s: float
    source: str


PUBLISHED = (
    Published(
        "prima.cpp", "Llama 3 70B in 4 bits",
        "a Mac M1, two PCs with GPUs of 8 and 11 GB, and a phone on Wi-Fi", 1 / 0.674,
        "arXiv:2504.08791, 674 ms a token",
    ),
    Published(
        "llama.cpp RPC", "Qwen3-VL 235B-A22B in 4 bits", "two DGX Sparks at 200 Gb/s", 12.98,
        "ggml-org/llama.cpp#15405",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A model over some machines, with trees of one size."""

    machines: str  # their layers, as in "here 20, attic 30"
    gbit_s: float | None  # of the slowest link in use; None: no rows travel
    nodes: int  # of each tree; 0 without a draft model
    pass_s: float
    away_s: float  # of it, in which rows are on their way
    ssd_bytes: int  # that a pass reads, on all machines
    draft_s: float
    tokens_per_pass: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyRows:
    """A pass of many rows, as of a prompt or of several texts with their trees: it goes in waves,
    so that all machines compute at once."""

    machines: str  # as a Way's
    gbit_s: float | None  # likewise
    texts: int
    rows: int  # of all texts
    waves: int
    pass_s: float
    one_wave_s: float  # what it would take in one wave


def compare(
    request: Request,
    site: Site,
    hosts: Sequence[Host],
    budgets: Sequence[int],
    links: Sequence[float],
    models_file: Path | None = None,
) -> list[Way]:
    """Each way to run a model: on one machine, where it fits one, then over all where that pays.

    A machine whose arithmetic is not known is taken as a usual one, also where it is alone.

    Args:
        request: the model and its draft.
        site: the first machine.
        hosts: the others.
        budgets: nodes of the trees to try, besides none.
        links: Gb/s that all links are to have, one after another; empty: those of `hosts`.
    Raises:
        DoesNotFitError: it does not fit all machines together.
        SpecexecError: as `resolve`.
    """
    ways, site = list[Way](), site.with_products()
    for each in [(), *_by_links(hosts, links)]:
        try:
            found = _ways(request, replace(site, hosts=each), budgets, models_file)
            # given no layers, the others leave the ways of one machine, which are there already
            ways += [way for way in found if not each or way.machines != ALONE]
        except DoesNotFitError:
            if each:  # that one machine has no room is why somebody asks for several
                raise
    return ways


def _by_links(hosts: Sequence[Host], links: Sequence[float]) -> list[tuple[Host, ...]]:
    """The machines with all links at each rate in Gb/s, or as they are where none is given."""
    if not links:
        return [tuple(hosts)]
    rates = [gbit_s * 1e9 / 8 for gbit_s in links]
    return [tuple(replace(host, link_bytes_per_s=rate) for host in hosts) for rate in rates]


def many_rows(
    request: Request, site: Site, hosts: Sequence[Host], passes: Sequence[Sequence[TextRows]],
    links: Sequence[float],
) -> list[ManyRows]:  # fmt: skip
    """Passes of many rows on one machine, where it fits one, and over all, with layers where plain
    decoding has them.

    Args:
        request, site, hosts, links: as for `compare`.
        passes: of each, the rows of its texts.
    Raises:
        DoesNotFitError: it does not fit all machines together.
        SpecexecError: as `resolve`.
    """
    found, site = list[ManyRows](), site.with_products()
    plain = replace(request, hosts=None, tree=replace(request.tree, budget=1))
    for each in [(), *_by_links(hosts, links)]:
        try:
            plan = resolve(plain, replace(site, hosts=each)).plan
        except DoesNotFitError:
            if each:
                raise
            continue
        if each and not plan.others:
            continue
        times = WaveTimes(plan)
        for texts in passes:
            waves, rows = times.fastest(texts), sum(each for each, _ in texts)
            found.append(ManyRows(
                machines=_machines(plan), gbit_s=_slowest_gbit_s(plan), texts=len(texts),
                rows=rows, waves=len(waves), pass_s=times.seconds(waves),
                one_wave_s=times.seconds(in_waves(texts, rows)),
            ))  # fmt: skip
    return found


def _machines(plan: Plan) -> str:
    """The layers of each, as in "here 20, attic 30"."""
    if not plan.others:
        return ALONE
    layers = [f"here {len(plan.tiers)}", *(f"{o.host.name} {len(o.layers)}" for o in plan.others)]
    return ", ".join(layers)


def _slowest_gbit_s(plan: Plan) -> float | None:
    """Of the slowest link in use; None: no rows travel."""
    rates = [each.host.link_bytes_per_s for each in plan.others]
    return 8 * min(rates) / 1e9 if rates else None


def _ways(
    request: Request, site: Site, budgets: Sequence[int], models_file: Path | None
) -> list[Way]:
    """Without a draft model, and with trees of each size, for which layers are placed anew."""

    def decided(budget: int | None) -> Decision:
        tree = replace(request.tree, budget=budget)
        return resolve(replace(request, hosts=None, tree=tree), site)

    plain = decided(1)
    found = [_way(plain, 0, predict(plain.plan, None, plain.recommended, None).alone)]
    if plain.draft is None:
        return found
    usual = decided(None)
    rate = tokens_per_pass(usual, models_file)
    assert rate is not None, "there is a draft model"
    for budget in sorted(budgets):
        decision = decided(budget)
        of_budget = rate.of_nodes(budget, usual.recommended.budget)
        speed = predict(decision.plan, plain.draft.sizes, decision.recommended, of_budget)
        if speed.nodes > found[-1].nodes:  # of a mixture fewer may be fastest
            found.append(_way(decision, speed.nodes, speed.usual))
    return found


def _way(decision: Decision, nodes: int, pace: Pace) -> Way:
    plan = decision.plan
    passes = [pass_time(each, nodes + 1) for each in (plan, *(o.plan for o in plan.others))]
    return Way(
        machines=_machines(plan),
        gbit_s=_slowest_gbit_s(plan),
        nodes=nodes,
        pass_s=pace.pass_s,
        away_s=sum(each.hop_s(nodes + 1) for each in plan.others),
        ssd_bytes=sum(each.ssd_bytes for each in passes),
        draft_s=pace.draft_s,
        tokens_per_pass=pace.tokens_per_pass,
        tokens_per_s=pace.tokens_per_s,
    )


def verdict(ways: Sequence[Way]) -> str:
    """A sentence that names the fastest way, and its gain over the fastest of one machine."""
    best = max(ways, key=lambda way: way.tokens_per_s)
    alone = [way.tokens_per_s for way in ways if way.machines == ALONE]
    how = f"trees of {best.nodes}" if best.nodes else "no draft model"
    told = f"fastest: {best.machines}, {how}, {best.tokens_per_s:.2f} tokens/s"
    if not alone:
        return f"{told}; it does not fit one machine"
    if len(alone) == len(ways):
        return f"{told}; the other machines do not pay: a pass takes least without them"
    return f"{told}, {best.tokens_per_s / max(alone):.1f} times one machine's best"
