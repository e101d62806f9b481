"""What would make a request fit that does not: each change is planned before it is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from specexec_cli.catalog.registry import load_registry
from specexec_cli.config import SELF
from specexec_cli.errors import SpecexecError
from specexec_cli.planning.pair import ChosenPair, choose_pair
from specexec_cli.planning.request import DEFAULT_CONTEXT_TOKENS, Request
from specexec_cli.planning.resolve import resolve
from specexec_cli.planning.site import Site

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
    registry, pair = load_registry(request.models_file), _pair(request)
    if pair.draft is None:
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
    return choose_pair(load_registry(request.models_file), request)
