"""Which models a request means: names, sizes before weights are loaded, and what is to be fetched.

Torch-free: `plan` asks too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specexec_cli.catalog.architectures import known_config
from specexec_cli.catalog.downloads import Download, free_disk_bytes, missing, survey
from specexec_cli.catalog.gguf_choice import of_hub
from specexec_cli.catalog.hub import cached_snapshot, fetch, fetch_config
from specexec_cli.catalog.models_file import ModelEntry, weight_files
from specexec_cli.catalog.registry import PairEntry, Registry, load_registry
from specexec_cli.config import AUTO_DRAFT, MTP, SELF, SELF_DRAFTS, SUFFIX, TreeConfig
from specexec_cli.device import format_bytes
from specexec_cli.errors import CheckpointError, ConfigError, NotFetchedError, UnknownModelError
from specexec_cli.offload.assistant import assistant_checkpoint, is_assistant
from specexec_cli.offload.block_heads import block_checkpoint, is_block_head
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.eagle import (
    eagle_checkpoint,
    is_eagle,
)
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.built_sizes import count_weights
from specexec_cli.planning.draft_sizes import head_of_files, head_sized, mtp_sized, own_sized
from specexec_cli.planning.request import Request
from specexec_cli.planning.sizes import SizedModel, architecture_bytes, checkpoint_bytes

_TIMES_SMALLER = 8  # than its target, a draft model should be
# An MTP layer looks one token ahead: chains of them bring 2.3 to 2.8 tokens a pass. More nodes
# would bring little, and take memory for their rows and scores from the target's layers.
_MTP_TREE = TreeConfig(budget=16, max_depth=8, batch=8)


@dataclass(frozen=True, slots=True)
class ChosenPair:
    """The models that a session runs, and the tree recommended for them."""

    name: str  # the pair's, or the target's reference
    target: ModelEntry
    draft: ModelEntry | None
    tree: TreeConfig  # recommended
    suffix: bool = False  # trees are grown from the text's own past, without a draft model
    own_bits: int | None = None  # bits of the target's copy, where that is the draft model
    mtp: bool = False  # the target's own layer that predicts further tokens drafts
    weighs: bool = False  # the draft is yet to be chosen, see alternatives.py

    @property
    def draft_name(self) -> str | None:
        """What drafts; None where nothing does."""
        return self.draft.name if self.draft is not None else SUFFIX if self.suffix else None

    @property
    def of_target(self) -> bool:
        """Whether the draft model is made of the target's files, or is in them."""
        return self.mtp or self.own_bits is not None


def choose_pair(registry: Registry, request: Request) -> ChosenPair:
    """Resolves a request's words to a target and, where the method needs one, a draft model.

    A word that is a pair's name is that pair. Any other stands for a target, which takes the draft
    model of the first pair for it, unless the target is on this machine and the draft model is not.

    Raises:
        UnknownModelError: a name is not known, or no draft is known for the target.
        ConfigError: contradicting options, or a revision of a folder.
    """
    model, draft = registry.meant(request.model), request.draft
    target_entry = _target(registry, request)
    if request.revision is not None:
        target_entry = target_entry.at(request.revision)
    known = registry.pairs.get(model)
    word = request.model or registry.used
    alias = word if word in registry.names else None  # it stays the name that is shown
    name = alias or model
    if known is None:
        known = registry.pair_for_target(model)
        if known is not None and draft is None and _is_at_hand(registry, known, target_entry):
            name, draft = alias or known.name, known.draft
    elif draft is None:
        draft = known.draft
    tree = known.tree if known is not None else TreeConfig()
    if request.method == "autoregressive":
        return ChosenPair(name, target_entry, None, tree)
    if request.method == "dsi":
        if draft == SUFFIX:
            raise ConfigError(f"`draft='{draft}'` takes no device: use it without `method='dsi'`")
        if draft in (None, AUTO_DRAFT):
            return ChosenPair(name, target_entry, best_draft(registry, model), tree)
    if draft in (None, SUFFIX, AUTO_DRAFT):  # before it was weighed, there is no draft model
        # a repetition may be as long as the tree is large
        tree = replace(tree, max_depth=tree.budget)
        weighs = draft != SUFFIX
        return ChosenPair(name, target_entry, None, tree, suffix=True, weighs=weighs)
    assert draft is not None
    bits = own_bits(draft)
    if request.method == "dsi" and (bits is not None or draft == MTP):
        raise ConfigError(f"`draft='{draft}'` is not for `method='dsi'`: give a draft model")
    if draft == MTP:
        tree = tree if known is not None and known.draft == MTP else _MTP_TREE
        return ChosenPair(name, target_entry, ModelEntry(name=MTP, repo=MTP), tree, mtp=True)
    if bits is not None:
        if target_entry.file is not None:  # known before the file is here
            raise ConfigError(
                f"`draft='{draft}'`: the target is a GGUF file, of which no copy is made. Give "
                "another `draft`, such as `draft='suffix'`"
            )
        # it has no folder before the target's files are here
        own = ModelEntry(name=draft, repo=f"{SELF}-{bits}")
        return ChosenPair(name, target_entry, own, tree, own_bits=bits)
    return ChosenPair(name, target_entry, registry.resolve(draft), tree)


def _target(registry: Registry, request: Request) -> ModelEntry:
    try:
        return registry.resolve(registry.meant(request.model))
    except UnknownModelError as error:
        if request.model is None:
            raise UnknownModelError(
                f"{error}. `specexec use` has set that one: set another, or `specexec use --none`"
            ) from error
        raise


def _is_at_hand(registry: Registry, pair: PairEntry, target: ModelEntry) -> bool:
    """Whether a pair's draft model is as near as the target: here, or to be fetched like it."""
    if missing([target]):
        return True
    try:
        draft = registry.draft_of(pair)
    except UnknownModelError:  # a folder of the user's own that has gone
        return False
    return draft is None or not missing([draft])


def best_draft(registry: Registry, target: str) -> ModelEntry:
    """The draft model that the method dsi takes where none is named.

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
            f"no draft model is known for '{target}', and `method='dsi'` needs one: give `draft`"
        )

    def rank(draft: ModelEntry) -> tuple[bool, bool, bool, int]:
        here = not missing([draft])
        params = draft.params or 0
        small = params * _TIMES_SMALLER <= (entry.params or 0)
        return here, draft.chat == entry.chat, small, params if small else -params

    return max(drafts, key=rank)


def models_of(
    pair: ChosenPair, offline: bool, check: Callable[[Checkpoint], object] | None
) -> tuple[SizedModel, SizedModel | None]:
    """The pair's target and draft model.

    Args:
        check: called with every checkpoint; what is not here is then fetched. None reckons with
            sizes from elsewhere instead.
    Raises:
        SpecexecError: a model is not to be had, or its sizes are not.
    """

    def found(entry: ModelEntry, target: SizedModel | None = None) -> SizedModel:
        if check is None:
            return sized(entry, offline, target)
        checkpoint = _read(entry, fetch(entry, offline=offline), target)
        check(checkpoint)
        return _of_files(entry, checkpoint)

    target = found(pair.target)
    if pair.draft is None:
        return target, None
    if pair.own_bits is not None:
        return target, own_sized(pair.draft, target, pair.own_bits)
    if pair.mtp:
        return target, mtp_sized(pair.draft, target)
    return target, found(pair.draft, target)


def sized(entry: ModelEntry, offline: bool, target: SizedModel | None = None) -> SizedModel:
    """The model's sizes without downloading its weights.

    Args:
        target: of a draft model, which may be a trained head.
    Raises:
        UnknownModelError: they are neither here, nor in models.toml, nor on the hub.
        NotFetchedError: a GGUF file that is not here.
    """
    if not entry.shape and missing([entry]):
        entry = of_hub(entry, offline)
    folder = entry.folder or cached_snapshot(entry)
    if folder is not None and weight_files(folder):
        return _of_files(entry, _read(entry, folder, target))
    if entry.file is not None:
        raise NotFetchedError(
            f"{entry.name} is not on this machine, and only the file itself tells how large its "
            f"layers are: specexec pull {entry.name}"
        )
    if entry.shape:
        config, source = entry.config_json(), "models.toml"
    else:
        config, source = fetch_config(entry, offline=offline), "config.json"
    head = head_sized(entry, config, target, source) if target is not None else None
    if head is not None:
        return head
    own = source == "models.toml"  # whose config need not be compared with itself
    counts = entry.counts(None if own else config) or count_weights(known_config(config))
    return SizedModel(entry, config, counts, architecture_bytes(config, counts), source, None)


def _read(entry: ModelEntry, folder: Path, target: SizedModel | None) -> Checkpoint:
    """The checkpoint of a target or, given that, of what drafts for it.

    Raises:
        CheckpointError: its files cannot be used.
        ConfigError: a trained head in the place of a target.
    """
    checkpoint = read_checkpoint(folder)
    for is_one, name, made in _HEADS:
        if not is_one(checkpoint.config):
            continue
        if target is None:
            raise ConfigError(
                f"{entry.name} is {name}, which drafts for another model: give it as `draft`"
            )
        return made(checkpoint, target.config)
    return checkpoint


# heads with files of their own: by their config.json, what they are, and what reads them
_HEADS: tuple[
    tuple[
        Callable[[Mapping[str, Any]], bool],
        str,
        Callable[[Checkpoint, Mapping[str, Any]], Checkpoint],
    ],
    ...,
] = (
    (is_block_head, "a DFlash or JetSpec head", block_checkpoint),
    (is_eagle, "an EAGLE-3 head", eagle_checkpoint),
    (is_assistant, "an assistant", assistant_checkpoint),
)


def _of_files(entry: ModelEntry, checkpoint: Checkpoint) -> SizedModel:
    config = checkpoint.config
    counts = entry.counts(config)
    try:
        counts = counts or count_weights(known_config(config))
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.folder}: {error}") from error
    if checkpoint.head is not None:
        return head_of_files(entry, checkpoint, checkpoint.head, counts)
    sizes = checkpoint_bytes(checkpoint, counts)
    return SizedModel(entry, config, counts, sizes, "its files", checkpoint)


def registry_of(request: Request) -> Registry:
    """The entries that a request can name.

    Raises:
        ConfigError: a models file cannot be used.
    """
    return load_registry(request.models_file, offline=request.offline)


def entries_of(request: Request) -> list[ModelEntry]:
    """Target and draft models of the request, at the revisions it asks for.

    Raises:
        UnknownModelError, ConfigError: see choose_pair.
    """
    registry = registry_of(request)
    pair = choose_pair(registry, request)
    if pair.draft is None or pair.of_target:
        return [pair.target]
    more = request.dsi.more_drafts if request.method == "dsi" else ()
    return [pair.target, pair.draft, *map(registry.resolve, more)]


def to_fetch(request: Request) -> list[Download]:
    """What is not on this machine; nothing where the request may not use the network.

    Raises:
        UnknownModelError: a name is not known, or the hub has no such model or does not answer.
    """
    from huggingface_hub import constants

    absent = missing(entries_of(request))
    if request.offline or constants.is_offline_mode():
        return []
    return [survey(entry) for entry in absent]


def check_room(downloads: Sequence[Download]) -> int:
    """Makes sure that the disk has room for what is to be fetched.

    Returns:
        Bytes that are free on the cache's disk.
    Raises:
        NotFetchedError: it is too small.
    """
    from huggingface_hub import constants

    needed = sum(download.fetch_bytes for download in downloads)
    free = free_disk_bytes()
    if needed > free:
        raise NotFetchedError(
            f"{format_bytes(needed)} to fetch, but the disk of {constants.HF_HUB_CACHE} has "
            f"{format_bytes(free)} free: `specexec rm NAME` makes room, or set HF_HOME to a folder "
            "on a larger disk"
        )
    return free


def fetch_line(downloads: list[Download]) -> str:
    """How much a download is, in one line, for whoever is not asked."""
    named = ", ".join(f"{item.entry.repo} {format_bytes(item.fetch_bytes)}" for item in downloads)
    return f"fetching {named} into the cache of the hub"


def own_bits(draft: str | None) -> int | None:
    """Bits of the copy that `draft` asks for; None where it is something else.

    Raises:
        ConfigError: bits that there are no copies of.
    """
    if draft is None or not re.fullmatch(rf"{SELF}(-\d+)?", draft):
        return None
    if draft not in SELF_DRAFTS:
        raise ConfigError(
            f"`draft='{draft}'`: the target's own copy has 4, 3 or 2 bits. Try `draft='{SELF}'`, "
            f"`draft='{SELF}-3'` or `draft='{SELF}-2'`"
        )
    return SELF_DRAFTS[draft]
