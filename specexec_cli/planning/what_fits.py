"""Which pairs fit a machine, and the best of them; what would make a request fit that does not.

Each is planned before it is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specexec_cli.catalog.registry import ModelEntry, PairEntry, load_registry
from specexec_cli.config import SELF
from specexec_cli.errors import SpecexecError
from specexec_cli.planning.chosen_models import ChosenPair, choose_pair, registry_of
from specexec_cli.planning.machine import Site
from specexec_cli.planning.request import DEFAULT_CONTEXT_TOKENS, Request
from specexec_cli.planning.resolve import resolve
from specexec_cli.planning.verdict import (
    PATIENT_TOKENS_PER_S,
    READING_TOKENS_PER_S,
    Verdict,
    to_fetch,
    verdict_of,
)


@dataclass(frozen=True, slots=True)
class Fit:
    """A pair on a machine."""

    pair: PairEntry
    target: ModelEntry
    draft: ModelEntry | None  # None: the text's own past
    verdict: Verdict


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
        request = Request(model=pair.name, models_file=models_file, offline=True)
        try:
            verdict = verdict_of(resolve(request, site), site, models_file)
        except SpecexecError:  # it does not fit, or nothing tells how big it is
            fetch_bytes, gated = to_fetch([target] if draft is None else [target, draft])
            verdict = Verdict("no", None, None, fetch_bytes, gated)
        found.append(Fit(pair, target, draft, verdict))
    return found


def recommended(found: Sequence[Fit], task: str) -> list[Fit]:
    """The best pair for a task and, behind it, a larger and a faster one where there are.

    The best is the one of the highest `rank`; the others are the highest of those that are larger,
    or half as fast again.
    """
    usable = [fit for fit in found if task in fit.pair.tasks and fit.verdict.speed]
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


def rank(fit: Fit) -> tuple[bool, bool, bool, int, bool, float]:
    """How a pair compares with others for the same task; the highest is recommended.

    A pair that does not fit comes behind all others, and one that newer models have replaced behind
    those that are current. A target that writes at least as fast as one reads comes before one that
    is slower. Of the former the largest is the best (a mixture as ModelEntry.dense_params has it),
    and of one size what needs no accepted licence, then the faster; of the latter the fastest.
    """
    fluent = _speed(fit) >= READING_TOKENS_PER_S
    size = _size(fit) if fluent else (0, True, _speed(fit))
    return (fit.verdict.speed is not None, not fit.target.superseded, fluent, *size)


def _speed(fit: Fit) -> float:
    return fit.verdict.speed.typical if fit.verdict.speed is not None else 0.0


def _params(fit: Fit) -> int:
    return fit.target.dense_params


def _size(fit: Fit) -> tuple[int, bool, float]:
    return _params(fit), not fit.verdict.gated, _speed(fit)


_LEAST_BUDGET, _LEAST_CONTEXT = 16, 512


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the request, and what a user sets for it; context None leaves it as it is."""

    request: Request
    settings: tuple[tuple[str, str | int], ...] = ()  # name in a Request or its tree, value
    context_tokens: int | None = None


def changes_that_fit(request: Request, site: Site, context_tokens: int) -> list[Change]:
    """Changes with which the request fits the machine, the nearest to what was asked for first.

    Args:
        request: one that does not fit.
        context_tokens: that it came to; its prompt need not be counted again.
    Returns:
        One change of every kind that helps by itself; where none does, one that takes several.
    """
    site = replace(site, measure=None)  # what a link reaches does not decide what fits
    plain = replace(request, prompt=None, context_tokens=context_tokens)
    kinds = (_stream, _budgets, _drafts, _contexts)
    alone = [found for kind in kinds if (found := _first(kind(plain), site))]
    if not alone:
        together = (
            Change(context.request, (*budget.settings, *draft.settings), context.context_tokens)
            for draft in (Change(plain), *_drafts(plain))
            for budget in _budgets(draft.request)
            for context in (Change(budget.request), *_contexts(budget.request))
        )  # fmt: skip
        found = _first(together, site)
        alone = [found] if found else []
    if plain.method != "autoregressive":
        undrafted = Change(replace(plain, method="autoregressive"), (("method", "autoregressive"),))
        if not alone and _fits(undrafted.request, site):
            alone = [undrafted]
    return alone


def _first(changes: Iterator[Change], site: Site) -> Change | None:
    return next((change for change in changes if _fits(change.request, site)), None)


def _fits(request: Request, site: Site) -> bool:
    try:
        resolve(request, site)
    except SpecexecError:  # it does not fit, or its size cannot be told, which helps nobody
        return False
    return True


def _stream(request: Request) -> Iterator[Change]:
    if request.offload != "auto":
        yield Change(replace(request, offload="auto"), (("offload", "auto"),))


def _budgets(request: Request) -> Iterator[Change]:
    """Half as many nodes, and half of those, and so on."""
    if request.method == "autoregressive":
        return
    pair = _pair(request)
    nodes = request.tree.budget or pair.tree.budget
    while (nodes := nodes // 2) >= _LEAST_BUDGET:
        depth = request.tree.depth and min(request.tree.depth, nodes)
        tree = replace(request.tree, budget=nodes, depth=depth)
        yield Change(replace(request, tree=tree), (("budget", nodes),))


def _contexts(request: Request) -> Iterator[Change]:
    """Powers of two: a context is a round number."""
    tokens = 1 << (request.context_tokens or DEFAULT_CONTEXT_TOKENS).bit_length()
    while (tokens := tokens // 2) >= _LEAST_CONTEXT:
        if tokens == request.context_tokens:
            continue
        yield Change(replace(request, context_tokens=tokens), (), tokens)


def _drafts(request: Request) -> Iterator[Change]:
    """Smaller draft models of the same tokenizer that models.toml knows.

    Those first that are made for chat, or not, as the target is; among them the largest.
    """
    if request.method == "autoregressive":
        return
    registry, pair = registry_of(request), _pair(request)
    if pair.draft is None or pair.mtp:
        return
    if pair.own_bits is not None:
        for bits in range(pair.own_bits - 1, 1, -1):
            name = f"{SELF}-{bits}"
            yield Change(replace(request, draft=name), (("draft", name),))
        return
    drafts = [registry.resolve(name) for name in registry.drafts_for(pair.target.name)]
    drafts.sort(key=lambda one: (one.chat == pair.target.chat, one.params or 0), reverse=True)
    for draft in drafts:
        if (draft.size_bytes or 0) < (pair.draft.size_bytes or 0):
            yield Change(replace(request, draft=draft.name), (("draft", draft.name),))


def _pair(request: Request) -> ChosenPair:
    return choose_pair(registry_of(request), request)
