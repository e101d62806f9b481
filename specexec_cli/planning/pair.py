"""Which target and draft model a request means. Torch-free: `plan` asks too."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specexec_cli.catalog.hub import cached_snapshot
from specexec_cli.catalog.registry import ModelEntry, PairEntry, Registry
from specexec_cli.config import AUTO_DRAFT, SELF, SUFFIX, TreeConfig
from specexec_cli.errors import ConfigError, UnknownModelError
from specexec_cli.planning.low_bits import own_bits
from specexec_cli.planning.request import Request

_TIMES_SMALLER = 8  # than its target, a draft model should be


@dataclass(frozen=True, slots=True)
class ChosenPair:
    """The models that a session runs, and the tree recommended for them."""

    name: str  # the pair's, or the target's reference
    target: ModelEntry
    draft: ModelEntry | None
    tree: TreeConfig  # recommended
    suffix: bool = False  # trees are grown from the text's own past, without a draft model
    own_bits: int | None = None  # the draft model is the target's copy in so many bits

    @property
    def draft_name(self) -> str | None:
        """What drafts; None where nothing does."""
        return self.draft.name if self.draft is not None else SUFFIX if self.suffix else None


def choose_pair(registry: Registry, request: Request) -> ChosenPair:
    """Resolves a request's names to a target and, where the method needs one, a draft model.

    A target that no pair names takes the best draft model of its tokenizer.

    Raises:
        UnknownModelError: a name is not known, or no draft is known for the target.
        ConfigError: contradicting options, or a revision of a folder.
    """
    pair, target, draft = request.pair, request.target, request.draft
    if pair is not None and target is not None:
        raise ConfigError("`pair` and `target` exclude each other: a pair names its target")
    known: PairEntry | None
    if target is None:
        known = registry.pair(pair or "demo")
        target, name = known.target, known.name
    else:
        known = registry.pair_for_target(target)
        name = known.name if known is not None and draft is None else target
    target_entry = registry.resolve(target)
    if request.revision is not None:
        target_entry = target_entry.at(request.revision)
    tree = known.tree if known is not None else TreeConfig()
    if request.method == "autoregressive":
        return ChosenPair(name, target_entry, None, tree)
    if draft is None and known is not None:
        draft = known.draft
    if draft in (SUFFIX, AUTO_DRAFT):  # before it has been weighed, there is no draft model
        if request.method == "dsi":
            raise ConfigError(f"`draft='{draft}'` takes no device: use it without `method='dsi'`")
        # a repetition may be as long as the tree is large
        return ChosenPair(name, target_entry, None, replace(tree, max_depth=tree.budget), True)
    if draft is None:
        return ChosenPair(name, target_entry, best_draft(registry, target), tree)
    bits = own_bits(draft)
    if bits is not None:
        if request.method == "dsi":
            raise ConfigError(f"`draft='{draft}'` is not for `method='dsi'`: give a draft model")
        if target_entry.file is not None:  # known before the file is here
            raise ConfigError(
                f"`draft='{draft}'`: the target is a GGUF file, of which no copy is made. Give "
                "another `draft`, such as `draft='suffix'`"
            )
        # it has no folder before the target's files are here
        own = ModelEntry(name=draft, repo=f"{SELF}-{bits}")
        return ChosenPair(name, target_entry, own, tree, own_bits=bits)
    return ChosenPair(name, target_entry, registry.resolve(draft), tree)


def best_draft(registry: Registry, target: str) -> ModelEntry:
    """The draft model for a target that no pair names.

    Of those that models.toml knows for its tokenizer, one that is on this machine comes before one
    that is not; then one made for chat, or not, as the target is; then the largest that is small
    beside the target.

    Raises:
        UnknownModelError: none is known.
    """
    entry = registry.resolve(target)
    drafts = [registry.resolve(name) for name in registry.drafts_for(target)]
    if not drafts:
        raise UnknownModelError(
            f"no pair names '{target}' as its target, so the draft model is not known: "
            "give `draft`, draft with the target's own layers in 4 bits, `draft='self'`, from the "
            "text's own past, `draft='suffix'`, or run without: `method='autoregressive'`"
        )

    def rank(draft: ModelEntry) -> tuple[bool, bool, bool, int]:
        here = draft.folder is not None or cached_snapshot(draft) is not None
        params = draft.params or 0
        small = params * _TIMES_SMALLER <= (entry.params or 0)
        return here, draft.chat == entry.chat, small, params if small else -params

    return max(drafts, key=rank)
