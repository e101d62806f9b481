"""Which target and draft model --pair, --target and --draft mean. Torch-free: `plan` asks too."""

from __future__ import annotations

from dataclasses import dataclass

from specexec_cli.catalog.registry import ModelEntry, PairEntry, Registry
from specexec_cli.config import Method, TreeConfig
from specexec_cli.errors import ConfigError, UnknownModelError


@dataclass(frozen=True, slots=True)
class ChosenPair:
    """The models that a session runs and the tree for them, from --pair, --target and --draft."""

    name: str  # the pair's, or the target's reference
    target: ModelEntry
    draft: ModelEntry | None
    tree: TreeConfig  # recommended


def choose_pair(
    registry: Registry, *, pair: str | None, target: str | None, draft: str | None, method: Method
) -> ChosenPair:
    """Resolves references to a target and, where the method needs one, a draft model.

    Raises:
        UnknownModelError: a name is not known, or no draft is known for the target.
        ConfigError: contradicting options.
    """
    if pair is not None and target is not None:
        raise ConfigError("--pair and --target exclude each other: a pair names its target")
    known: PairEntry | None
    if target is None:
        known = registry.pair(pair or "demo")
        target, name = known.target, known.name
    else:
        known = registry.pair_for_target(target)
        name = known.name if known is not None and draft is None else target
    target_entry = registry.resolve(target)
    tree = known.tree if known is not None else TreeConfig()
    if method == "autoregressive":
        return ChosenPair(name, target_entry, None, tree)
    if draft is None:
        if known is None:
            drafts = registry.drafts_for(target)
            hint = f"--draft {' or '.join(drafts)}" if drafts else "--draft MODEL"
            raise UnknownModelError(
                f"no pair names '{target}' as its target, so the draft model is not known: "
                f"give {hint}, or run without one: --method autoregressive"
            )
        draft = known.draft
    return ChosenPair(name, target_entry, registry.resolve(draft), tree)
