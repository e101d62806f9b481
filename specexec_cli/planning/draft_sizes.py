"""How large what drafts for a target is: its low-bit copy, its MTP layer, or a head trained for it.

`draft='self'` drafts with the target's own layers in 4 bits (`self-3` and `self-2` in fewer), as
SubSpec does (arXiv:2509.18344). models/own_copy.py makes the copy; its config and size are known
before it exists. Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from specexec_cli.catalog.architectures import known_config
from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.catalog.own_copies import copies_folder
from specexec_cli.catalog.weight_counts import WeightCounts
from specexec_cli.errors import ConfigError
from specexec_cli.kept import file_name
from specexec_cli.offload.assistant import assistant_head, is_assistant
from specexec_cli.offload.block_heads import block_head, is_block_head
from specexec_cli.offload.checkpoint import Checkpoint, TrainedHead
from specexec_cli.offload.eagle import (
    eagle_config,
    eagle_features,
    head_size,
    is_eagle,
)
from specexec_cli.offload.mtp import apart, has_mtp, mtp_checkpoint, mtp_head, mtp_layers, no_mtp
from specexec_cli.planning.built_sizes import count_weights
from specexec_cli.planning.sizes import ModelBytes, SizedModel, architecture_bytes, checkpoint_bytes

GROUP_SIZE = 64  # inputs that share a scale and a zero point
_FORMAT_VERSION = 3  # of what is kept: another one is never read


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
    config, counts = own_config(target.config, bits), target.counts
    sizes = architecture_bytes(config, counts)
    return SizedModel(entry, config, counts, sizes, f"the target in {bits} bits", None)


def quantization_keys(bits: int, group_size: int) -> dict[str, Any]:
    """What config.json says of weights that are quantized here.

    `gptq_v2` stores zero points as they are; the older format loses those of 0.
    """
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False,
        "sym": False, "lm_head": False, "checkpoint_format": "gptq_v2", "pack_dtype": "int32",
    }  # fmt: skip


def own_config(target: Mapping[str, Any], bits: int) -> dict[str, Any]:
    """The copy's config.json, as far as sizes go.

    Args:
        target: the target's config.json, of weights that are not quantized.
    """
    return {**target, "quantization_config": quantization_keys(bits, GROUP_SIZE)}


def own_folder(target: Checkpoint, bits: int) -> Path:
    """Where the copy of these very files is kept, whether it is there or not.

    Files count as the same while path, size and time do; a file in the hub's cache is a link to one
    that is named by its content. A copy of other weights would cost speed and never change a token.
    """
    told = hashlib.sha256()
    for path in [target.config_path, *target.files]:
        real = path.resolve()
        status = real.stat()
        told.update(f"{path.name} {real} {status.st_size} {status.st_mtime_ns}\n".encode())
    name = file_name(_readable(target), told.hexdigest()[:16], f"{bits}bit-v{_FORMAT_VERSION}")
    return copies_folder() / name


def _readable(target: Checkpoint) -> str:
    """What a person calls it: in the hub's cache the repository, not the snapshot's hash."""
    folder = target.folder
    if folder.parent.name == "snapshots":
        return folder.parents[1].name.removeprefix("models--")
    return folder.name


def mtp_sized(entry: ModelEntry, target: SizedModel) -> SizedModel:
    """The target's layers that predict further tokens: each attends, and has a linear before it.

    Raises:
        ConfigError: the target has none.
    """
    like = next((layer for layer in reversed(target.counts.layers) if layer.kv), None)
    if like is None:
        raise ConfigError(no_mtp(target.config))
    head, counts = mtp_head(target.config), replace(target.counts, layers=(like,))
    if head.features:  # of MiMo-V2 and Step it is unlike the target's last one
        counts = count_weights(known_config(head.config))
    joint = 2 * counts.hidden**2  # weights of the linear
    if target.checkpoint is not None:
        checkpoint = mtp_checkpoint(target.checkpoint)
        assert checkpoint.head is not None, "it is made one"
        head, found = checkpoint.head, []
        for each in (checkpoint, *head.later):
            before, rest = apart(each)
            sizes = checkpoint_bytes(rest, counts)
            found.append(sizes.layers[0] + before.total_bytes)
    elif has_mtp(target.config):
        checkpoint, sizes = None, architecture_bytes(head.config, counts)
        found = [sizes.layers[0] + 2 * joint] * mtp_layers(target.config)
    else:
        raise ConfigError(no_mtp(target.config))
    times = len(found)
    own, experts = sizes.head * times if head.own_head else 0, sizes.experts
    if experts is not None:
        experts = replace(experts, layers=experts.layers * times)
    sizes = replace(
        sizes, layers=tuple(found), layer_params=times * (sizes.layer_params + joint),
        active_params=times * (sizes.active_params + joint),
        kv_elements=times * sizes.kv_elements, layer_kv=times * sizes.layer_kv, experts=experts,
        resident=own, head=own, table=0,  # embeddings, and most heads, are the target's
    )  # fmt: skip
    return SizedModel(entry, head.config, counts, sizes, "the target's files", checkpoint, head)


def head_sized(
    entry: ModelEntry, said: Mapping[str, Any], target: SizedModel, source: str
) -> SizedModel | None:
    """A trained head that is not here; None where the model is none.

    Args:
        said: its config.json.
        source: where that comes from.
    Raises:
        SpecexecError: it is a head of another kind or model, or its config.json makes no sense.
    """
    if is_block_head(said):
        return _block_sized(entry, said, target, source)
    if is_eagle(said):
        return _eagle_sized(entry, said, target, source)
    if is_assistant(said):
        return _assistant_sized(entry, said, target, source)
    return None


def _eagle_sized(
    entry: ModelEntry, said: Mapping[str, Any], target: SizedModel, source: str
) -> SizedModel:
    """An EAGLE-3 head that is not here; it is taken to have embeddings of its own.

    Args:
        said: its config.json.
    Raises:
        SpecexecError: it is a head of another kind or model, or its config.json makes no sense.
    """
    config = eagle_config(said, target.config, entry.name)
    features = eagle_features(said, target.config, entry.name)
    counts = count_weights(known_config(config))
    hidden = counts.hidden
    heads = head_size(config, "num_attention_heads", entry.name, 32)  # as transformers has it
    kv_heads = head_size(config, "num_key_value_heads", entry.name, heads)
    width = (heads + 2 * kv_heads) * head_size(config, "head_dim", entry.name, hidden // heads)
    # attention reads twice the rows of a Llama's, the linear in front of it several, and there is
    # one more norm
    more = hidden * (width + len(features) * target.counts.hidden + 1)
    vocab = head_size(said, "draft_vocab_size", entry.name, counts.vocab)
    head = TrainedHead(config, features)
    return _head_sized(entry, head, counts, source, more=more, own_vocab=vocab, own_table=True)


def _block_sized(
    entry: ModelEntry, said: Mapping[str, Any], target: SizedModel, source: str
) -> SizedModel:
    """A DFlash or JetSpec head that is not here; its tables are taken to be the target's.

    Args:
        said: its config.json.
    Raises:
        SpecexecError: it is a head of another kind or model, or its config.json makes no sense.
    """
    head = block_head(said, target.config, entry.name)
    counts = count_weights(known_config(head.config))
    # the linear in front of the layers, and the norm behind it
    more = counts.hidden * (len(head.features) * target.counts.hidden + 1)
    return _head_sized(entry, head, counts, source, more=more, own_vocab=0)


def _assistant_sized(
    entry: ModelEntry, said: Mapping[str, Any], target: SizedModel, source: str
) -> SizedModel:
    """An assistant that is not here: its layers are counted as a Gemma 4's, so with their keys.

    Args:
        said: its config.json.
    Raises:
        SpecexecError: it is an assistant of another model, or its config.json makes no sense.
    """
    head = assistant_head(said, target.config, entry.name)
    counts = _without_keys(count_weights(known_config(head.config)))
    more = 3 * counts.hidden * target.counts.hidden  # the linears around the layers
    return _head_sized(entry, head, counts, source, more=more, own_vocab=counts.vocab)


def _head_sized(
    entry: ModelEntry,
    head: TrainedHead,
    counts: WeightCounts,
    source: str,
    *,
    more: int,
    own_vocab: int,
    own_table: bool = False,
) -> SizedModel:
    """A trained head that is not here.

    Args:
        counts: of the model of few layers that it is.
        source: where its config.json comes from.
        more: weights in front of these layers and around them, which are counted with the first.
        own_vocab: tokens of its own output head; 0 where it takes the target's.
        own_table: whether it has embeddings of its own.
    """
    sizes = architecture_bytes(head.config, counts)
    item = sizes.layers[0] // counts.layers[0].params
    own = sizes.head // counts.vocab * own_vocab
    table = sizes.table if own_table else 0
    sizes = replace(
        sizes, layers=(sizes.layers[0] + item * more, *sizes.layers[1:]),
        resident=sizes.resident - sizes.head - sizes.table + own + table, head=own, table=table,
        layer_params=sizes.layer_params + more, active_params=sizes.active_params + more,
    )  # fmt: skip
    return SizedModel(entry, head.config, counts, sizes, source, None, head)


def _without_keys(counts: WeightCounts) -> WeightCounts:
    """The counts of a model whose layers keep no keys and values."""
    return replace(counts, layers=tuple(replace(each, kv=0) for each in counts.layers))


def head_of_files(
    entry: ModelEntry, checkpoint: Checkpoint, head: TrainedHead, counts: WeightCounts
) -> SizedModel:
    """A trained head with files of its own, which are here.

    Args:
        counts: of the model of few layers that it is.
    """
    counts = _without_keys(counts) if head.keys else counts
    sizes = _head_bytes(checkpoint, counts)
    return SizedModel(entry, checkpoint.config, counts, sizes, "its files", checkpoint, head)


def _head_bytes(checkpoint: Checkpoint, counts: WeightCounts) -> ModelBytes:
    """Sizes of a trained head with files of its own: its first layer has what lies beside them."""
    before, rest = apart(checkpoint)
    sizes = checkpoint_bytes(rest, counts)
    head, table = (
        sum(tensor.n_bytes for name, tensor in rest.items() if part in name)
        for part in ("lm_head.", "embed_tokens.")
    )
    matrices = [prod(each.shape) for each in checkpoint.values() if len(each.shape) == 2]
    inside = [
        prod(each.shape) for name, each in checkpoint.items()
        if name in before or (".layers." in name and len(each.shape) == 2)
    ]  # fmt: skip
    return replace(
        sizes, layers=(sizes.layers[0] + before.total_bytes, *sizes.layers[1:]),
        head=head, table=table,
        layer_params=sum(inside), active_params=sum(inside), largest_matrix=max(matrices),
    )  # fmt: skip
