"""Every pair on one machine: where it would run, how fast, what is to be fetched; the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specexec_cli.catalog.downloads import missing
from specexec_cli.catalog.registry import ModelEntry, PairEntry, load_registry
from specexec_cli.errors import SpecexecError
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import resolve
from specexec_cli.planning.site import Site
from specexec_cli.planning.speed import Speed
from specexec_cli.planning.tiers import Plan
from specexec_cli.planning.tokens import predicted

# Where a pair's target would be computed from; no: it does not fit.
Place = Literal["VRAM", "RAM", "SSD", "no"]
READING_TOKENS_PER_S = 4.0  # about as fast as text is read
PATIENT_TOKENS_PER_S = 0.3  # a paragraph in five minutes; nobody waits longer


@dataclass(frozen=True, slots=True)
class Fit:
    """A pair on a machine."""

    pair: PairEntry
    target: ModelEntry
    draft: ModelEntry | None  # None: the text's own past
    place: Place
    speed: Speed | None  # None where it does not fit
    fetch_bytes: int | None  # of both models, as far as they are not here; None is not known
    gated: bool  # of what is to be fetched, something wants an accepted licence


def fits(site: Site, models_file: Path | None) -> list[Fit]:
    """Every pair that is known, in models.toml's order; nothing is downloaded.

    Raises:
        ConfigError: a models file cannot be used.
    """
    registry = load_registry(models_file)
    found = []
    for pair in registry.pairs.values():
        try:
            target, draft = registry.resolve(pair.target), registry.draft_of(pair)
        except SpecexecError:  # a folder of the user's own that has gone
            continue
        request = Request(pair=pair.name, models_file=models_file, offline=True)
        place: Place = "no"
        speed = None
        try:
            decision = resolve(request, site)
        except SpecexecError:  # it does not fit, or nothing tells how big it is
            pass
        else:
            place, speed = place_of(decision.plan, site), predicted(decision, models_file)
        absent = missing([target] if draft is None else [target, draft])
        sizes = [entry.size_bytes for entry in absent]
        known = [size for size in sizes if size is not None]
        fetch_bytes = sum(known) if len(known) == len(sizes) else None
        gated = any(entry.gated for entry in absent)
        found.append(Fit(pair, target, draft, place, speed, fetch_bytes, gated))
    return found


def place_of(plan: Plan, site: Site) -> Place:
    """The slowest place that weights of the target come from."""
    if plan.ssd_bytes:
        return "SSD"
    on_gpu = site.settings["vram"].value > 0
    in_vram = on_gpu and set(plan.tiers) == {"resident"} and not plan.expert_bytes
    return "VRAM" if in_vram else "RAM"


def recommended(found: Sequence[Fit], task: str) -> list[Fit]:
    """The best pair for a task and, behind it, a larger and a faster one where there are.

    The best is the one of the highest `rank`; the others are the highest of those that are larger,
    or half as fast again.
    """
    usable = [fit for fit in found if task in fit.pair.tasks and fit.speed is not None]
    if not usable:
        return []
    best = max(usable, key=rank)
    current = [fit for fit in usable if fit.target.superseded <= best.target.superseded]
    larger = [
        fit
        for fit in current
        if _params(fit) > _params(best) and _speed(fit) >= PATIENT_TOKENS_PER_S
    ]
    faster = [fit for fit in current if _speed(fit) > 1.5 * _speed(best)]
    return [best, *(max(others, key=_size) for others in (larger, faster) if others)]


def rank(fit: Fit) -> tuple[bool, bool, int, bool, float]:
    """How a pair that fits compares with others for the same task; the highest is recommended.

    A model that newer ones have replaced comes behind all others. A target that writes at least as
    fast as one reads comes before one that is slower. Of the former the largest is the best, and of
    one size what needs no accepted licence, then the faster; of the latter the fastest.
    """
    fluent = _speed(fit) >= READING_TOKENS_PER_S
    size = _size(fit) if fluent else (0, True, _speed(fit))
    return (not fit.target.superseded, fluent, *size)


def _speed(fit: Fit) -> float:
    assert fit.speed is not None
    return fit.speed.typical


def _params(fit: Fit) -> int:
    return fit.target.params or 0


def _size(fit: Fit) -> tuple[int, bool, float]:
    return _params(fit), not fit.gated, _speed(fit)
