"""Which draft a target gets where `draft='auto'` leaves it to us: the one expected to be fastest.

Weighed are the draft models and trained heads that are on this machine, the target's own copy in
each number of bits and its MTP layer, by the tokens per second that `plan` would predict of them.
None of them is taken where plain decoding is expected to be faster: the text's own past drafts
then, which takes next to no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from specexec_cli.catalog.downloads import missing
from specexec_cli.config import MTP, SELF, SUFFIX
from specexec_cli.errors import ConfigError, SpecexecError
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.mtp import find_mtp
from specexec_cli.planning.chosen_models import choose_pair, registry_of
from specexec_cli.planning.dtype_choice import SMALL_MODEL_BYTES
from specexec_cli.planning.expected_speed import predicted
from specexec_cli.planning.machine import Site
from specexec_cli.planning.request import Request
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
        size = f"{head.params / 1e9:.2g}B weights" if head.params else None
        named.append(", ".join(fact for fact in (head.name, size, head.license) if fact))
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
