"""The models of a pair before their weights are loaded: how large they are, and who says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specexec_cli.catalog.hub import cached_snapshot, fetch, fetch_config
from specexec_cli.catalog.models_file import ModelEntry, weight_files
from specexec_cli.errors import ConfigError, NotFetchedError
from specexec_cli.offload.store import Checkpoint, read_checkpoint
from specexec_cli.planning.low_bits import own_config
from specexec_cli.planning.pair import ChosenPair
from specexec_cli.planning.sizes import ModelBytes, architecture_bytes, checkpoint_bytes


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model and what is known of it before its weights are loaded."""

    entry: ModelEntry
    config: Mapping[str, Any]  # config.json's
    sizes: ModelBytes
    source: str  # where the sizes come from: its files, models.toml or config.json
    checkpoint: Checkpoint | None  # headers and folder, where they are here

    @property
    def window_tokens(self) -> int | None:
        """The model's own context window; None where nothing tells."""
        config = {**self.config, **self.config.get("text_config", {})}
        known = config.get("max_position_embeddings") or config.get("n_positions")
        return int(known) if known else None

    @property
    def stored_dtype(self) -> str | None:
        """Of weights that are not quantized, as config.json says."""
        config = {**self.config, **self.config.get("text_config", {})}
        return config.get("dtype") or config.get("torch_dtype")

    @property
    def table_dtype(self) -> str | None:
        """Of embeddings and head, which are the largest tensors: as the files say, if here."""
        if self.checkpoint is None:
            return self.stored_dtype
        largest = max(self.checkpoint.tensors.values(), key=lambda tensor: tensor.n_bytes)
        names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
        return names.get(largest.dtype)


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

    def find(entry: ModelEntry) -> SizedModel:
        if check is None:
            return sized(entry, offline)
        checkpoint = read_checkpoint(fetch(entry, offline=offline))
        check(checkpoint)
        return _of_files(entry, checkpoint)

    target = find(pair.target)
    if pair.draft is None:
        return target, None
    if pair.own_bits is not None:
        return target, own_sized(pair.draft, target, pair.own_bits)
    return target, find(pair.draft)


def sized(entry: ModelEntry, offline: bool) -> SizedModel:
    """The model's sizes without downloading its weights.

    Raises:
        UnknownModelError: they are neither here, nor in models.toml, nor on the hub.
        NotFetchedError: a GGUF file that is not here.
    """
    folder = entry.folder or cached_snapshot(entry)
    if folder is not None and weight_files(folder):
        return _of_files(entry, read_checkpoint(folder))
    if entry.file is not None:
        raise NotFetchedError(
            f"{entry.name} is not on this machine, and only the file itself tells how large its "
            f"layers are: specexec pull {entry.name}"
        )
    if entry.shape:
        config, source = entry.config_json(), "models.toml"
    else:
        config, source = fetch_config(entry, offline=offline), "config.json"
    return SizedModel(entry, config, architecture_bytes(config), source, None)


def own_sized(entry: ModelEntry, target: SizedModel, bits: int) -> SizedModel:
    """The target's low-bit copy, which need not have been made.

    Raises:
        ConfigError: the target's weights are quantized already.
    """
    # a GGUF file's config says nothing of it
    if target.sizes.packed or target.config.get("quantization_config") is not None:
        raise ConfigError(
            f"`draft='{entry.name}'`: the target's weights are quantized already, so a copy in "
            "fewer bits would hardly be smaller and much worse. Give another `draft`, such as "
            "`draft='suffix'`"
        )
    config = own_config(target.config, bits)
    return SizedModel(entry, config, architecture_bytes(config), f"the target in {bits} bits", None)


def _of_files(entry: ModelEntry, checkpoint: Checkpoint) -> SizedModel:
    config = checkpoint.config
    return SizedModel(entry, config, checkpoint_bytes(checkpoint), "its files", checkpoint)
