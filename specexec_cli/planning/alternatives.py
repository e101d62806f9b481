"""Which draft, which pair or which change of a request would be best on a machine.

Each is planned before it is named. `draft='auto'` takes the draft that is expected to be fastest:
of the draft models and trained heads that are on this machine, the target's own copy in each number
of bits and its MTP layer, by the tokens per second that `plan` would predict of them. None of them
is taken where plain decoding is expected to be faster: the text's own past drafts then, which takes
next to no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from specexec_cli.catalog.downloads import missing
from specexec_cli.catalog.registry import ModelEntry, PairEntry, load_registry
from specexec_cli.config import MTP, SELF, SUFFIX
from specexec_cli.device import looked_at_once
from specexec_cli.errors import ConfigError, SpecexecError
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.mtp import find_mtp
from specexec_cli.planning.chosen_models import ChosenPair, choose_pair, registry_of
from specexec_cli.planning.dtype_choice import SMALL_MODEL_BYTES
from specexec_cli.planning.expected_speed import (
    PATIENT_TOKENS_PER_S,
    READING_TOKENS_PER_S,
    Verdict,
    predicted,
    to_fetch,
    verdict_of,
)
from specexec_cli.planning.machine import Site
from specexec_cli.planning.request import DEFAULT_CONTEXT_TOKENS, Request
from specexec_cli.planning.resolve import Decision, resolve
from specexec_cli.planning.speed import Speed, figure


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft for a target on a machine."""

    draft: str  # as `draft` names it
    speed: Speed | None
    obstacle: str = ""  # why it cannot be used, where there is no speed

    @property
    def pays(self) -> bool:
        """Whether it is expected to be faster than plain decoding."""
        return self.speed is not None and self.speed.drafting_pays

    @property
    def tokens_per_s(self) -> float:
        """As expected; 0 where it cannot be used."""
        return self.speed.typical if self.speed is not None else 0.0


# (target, bits) -> why the target can have no copy of itself in this many bits; empty if it can
CopyObstacle = Callable[[Checkpoint, int], str]


def with_best_draft(
    request: Request,
    site: Site,
    notice: Callable[[str], None] = lambda text: None,
    obstacle: CopyObstacle = lambda target, bits: "",
) -> Request:
    """The request with the draft that is expected to be fastest, where it leaves that to us.

    Args:
        notice: told in one line which it is, and what the others would come to.
        obstacle: asked where the target is on this machine.
    Raises:
        OutOfMemoryError: the target does not fit with any draft, nor without.
    """
    if not choose_pair(registry_of(request), request).weighs:
        return request
    found = weighed(request, site, obstacle)
    paying = [candidate for candidate in found if candidate.pays]
    chosen = paying[0].draft if paying else SUFFIX
    notice(_told(chosen, found))
    if proposal := _heads_to_fetch(request):
        notice(proposal)
    return replace(request, draft=chosen)


def check_own_copy(
    decision: Decision,
    notice: Callable[[str], None] = lambda text: None,
    models_file: Path | None = None,
    obstacle: CopyObstacle = lambda target, bits: "",
) -> None:
    """Says so where the target's own copy was asked for, and cannot be or is not expected to pay.

    Args:
        notice: told where it might pay after all: with the most tokens per pass that copies
            reached, or because the target is small, and what is predicted of it little worth.
        obstacle: asked where the target is on this machine.
    Raises:
        ConfigError: it cannot be made, or cannot pay, so it is not worth making.
    """
    bits, target = decision.pair.own_bits, decision.target.checkpoint
    if bits is None:
        return
    if target is not None and (reason := obstacle(target, bits)):
        raise ConfigError(
            f"the target has no {bits}-bit copy to draft with: {reason}. Give another `draft`"
        )
    speed = predicted(decision, models_file)
    if speed.drafting_pays:
        return
    name, plain = decision.pair.draft_name, figure(speed.plain)
    slower = (
        f"the target's own copy takes {figure(speed.usual.draft_s)} s here to draft for a pass, "
        f"which without drafts takes {figure(1 / speed.plain)} s, so `draft='{name}'` is expected "
        f"to be slower here than no draft model: {figure(speed.typical)} against {plain} tok/s"
    )
    mend = "Give `draft='suffix'`, or `draft='auto'`"
    if decision.target.sizes.total >= SMALL_MODEL_BYTES and speed.high <= speed.plain:
        raise ConfigError(f"{slower}, and {figure(speed.high)} at best. {mend}")
    notice(f"{slower}. {mend}")


def weighed(
    request: Request, site: Site, obstacle: CopyObstacle = lambda target, bits: ""
) -> list[Candidate]:
    """Every draft at hand, the fastest first; `obstacle` as in with_best_draft.

    Raises:
        OutOfMemoryError: the target does not fit even without a draft model.
    """
    request = request.with_estimated_prompt()
    plain = resolve(replace(request, draft=SUFFIX), site)
    target = plain.target.checkpoint
    # what this has measured is not measured again for each of them
    site = replace(site, settings=plain.settings, measure=None)
    found = []
    for name in _at_hand(request, plain):
        try:
            decision = resolve(replace(request, draft=name), site)
            bits = decision.pair.own_bits
            if bits is not None and target is not None and (reason := obstacle(target, bits)):
                raise ConfigError(reason)
            speed = predicted(decision, request.models_file)
        except SpecexecError as error:
            found.append(Candidate(name, None, str(error)))
        else:
            found.append(Candidate(name, speed))
    return sorted(found, key=lambda candidate: -candidate.tokens_per_s)


def _at_hand(request: Request, plain: Decision) -> list[str]:
    """What drafts out of the target's own files, and draft models that are on this machine."""
    # a copy of weights that are quantized already would hardly be smaller
    names = [] if plain.target.sizes.packed else [SELF, f"{SELF}-3", f"{SELF}-2"]
    if plain.target.checkpoint is not None and find_mtp(plain.target.checkpoint) is not None:
        names.append(MTP)
    registry = registry_of(request)
    meant = registry.meant(request.model)
    for name in (*registry.drafts_for(meant), *(one.name for one in registry.heads_for(meant))):
        with suppress(SpecexecError):  # a folder of the user's own that has gone
            if not missing([registry.resolve(name)]):
                names.append(name)
    return names


def _heads_to_fetch(request: Request) -> str:
    """The trained heads that models.toml names for the target, in one line, if none of them is on
    this machine; else empty."""
    registry = registry_of(request)
    heads = registry.heads_for(registry.meant(request.model))
    if request.offline or not heads or any(not missing([head.model]) for head in heads):
        return ""
    named = []
    for head in heads:
        size = f"{head.params / 1e9:.2g}B weights" if head.params else "size not stated"
        named.append(f"{head.name}, {size}, {head.license or 'licence not stated'}")
    return f"trained for this target: {'; '.join(named)}. To weigh one: specexec pull NAME"


def _told(chosen: str, found: Sequence[Candidate]) -> str:
    """What was chosen and why, in one line."""
    plain = next((one.speed.plain for one in found if one.speed is not None), None)
    others = [
        f"{one.draft} {figure(one.tokens_per_s)}" if one.speed else f"{one.draft} cannot be used"
        for one in found
        if one.draft != chosen
    ]
    if plain is not None:
        others.append(f"none {figure(plain)}")
    beside = f" ({', '.join(others)})" if others else ""
    if chosen == SUFFIX:
        return f"no draft model is expected to pay, so the text's own past drafts{beside}"
    speed = next(one.speed for one in found if one.draft == chosen)
    assert speed is not None
    return f"`draft='{chosen}'` is expected to be fastest, {figure(speed.typical)} tok/s{beside}"


@dataclass(frozen=True, slots=True)
class Fit:
    """A pair on a machine."""

    pair: PairEntry
    target: ModelEntry
    draft: ModelEntry | None  # None: the text's own past
    verdict: Verdict


@looked_at_once()
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
        found.append(Fit(pair, target, draft, _verdict(request, [target, draft], site)))
    return found


@looked_at_once()
def unpaired_fits(models: Sequence[ModelEntry], site: Site, models_file: Path | None) -> list[Fit]:
    """Models without a draft model, each with the text's own past as its draft."""
    found = []
    for model in models:
        pair = PairEntry(name=model.name, target=model.name, draft=SUFFIX)
        request = Request(model=model.name, draft=SUFFIX, models_file=models_file, offline=True)
        found.append(Fit(pair, model, None, _verdict(request, [model], site)))
    return found


def _verdict(request: Request, models: Sequence[ModelEntry | None], site: Site) -> Verdict:
    try:
        return verdict_of(resolve(request, site), site, request.models_file)
    except SpecexecError:  # it does not fit, or nothing tells how big it is
        fetch_bytes, gated = to_fetch([model for model in models if model is not None])
        return Verdict("no", None, None, fetch_bytes, gated)


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
