"""DFlash and JetSpec heads as their makers publish them, as models that draft a block in one pass.

Such a head is a Qwen3 of a few layers, without tables of its own. It reads the target's rows behind
several layers; a linear, `fc`, and a norm make them one row for each committed token. Each of its
layers attends to these rows as they are, and to a block: the last committed token and mask tokens
behind it. A mask's row predicts the token at its place. A row of a DFlash head's block sees the
whole block, one of a JetSpec head's sees those before it.

Layouts that are read: that of both authors (`dflash_config`), and that of speculators.
Source: DFlash, arXiv:2602.06036, https://github.com/z-lab/dflash; JetSpec, arXiv:2606.18394,
`jetspec/models/draft_head.py` of https://github.com/hao-ai-lab/JetSpec
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specexec_cli.catalog.architectures import text_config
from specexec_cli.errors import CheckpointError
from specexec_cli.offload.checkpoint import INPUT, Block, Checkpoint, TrainedHead
from specexec_cli.offload.eagle import check_widths, head_size, vocabulary_map

_NAMES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashSpeculator")
_MAPS = ("d2t", "t2d")
_MOST_ROWS = 256  # of a block; published ones have 7 to 16
_MOST_FEATURES = 64  # rows of the target that are joined; published heads join 5


def is_block_head(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a head that drafts a block in one pass."""
    names = config.get("architectures")
    named = isinstance(names, list) and any("dflash" in str(name).lower() for name in names)
    return named or "dflash_config" in config or config.get("speculators_model_type") == "dflash"


def block_head(said: Mapping[str, Any], target: Mapping[str, Any], place: str) -> TrainedHead:
    """What makes a model of few layers such a head, from its config.json.

    Args:
        said, target: their config.json.
        place: of the head's, for messages.
    Raises:
        CheckpointError: it is a head of another kind, or of another target.
    """
    own, text = said.get("transformer_layer_config", said), text_config(target)
    if reason := _not_read(said, own):
        raise CheckpointError(f"{place}: {reason}, which is not read")
    if own.get("hidden_size") != text.get("hidden_size"):
        raise CheckpointError(
            f"{place}: a DFlash head has rows as wide as its target, whose rows are of "
            f"{text.get('hidden_size')} numbers, not {own.get('hidden_size')!r:.60}. Is it of "
            "another model?"
        )
    both = own.get("max_position_embeddings"), text.get("max_position_embeddings")
    whole = [each for each in both if type(each) is int]
    packing = {key: said[key] for key in ("quantization_config",) if key in said}
    # it drafts as far as its target reads, and its tokens are the target's
    reach = {"max_position_embeddings": max(whole)} if whole else {}
    alone = {"tie_word_embeddings": False, "vocab_size": text.get("vocab_size")}
    config = {**own, **packing, **reach, **alone}
    features = _features(said, own, text, place)
    return TrainedHead(config, features, block=_block(said, text, place))


def _not_read(said: Mapping[str, Any], own: Any) -> str:
    """What a head is that is not read, from its config.json; empty if it is read."""
    names = said.get("architectures")
    if isinstance(names, list) and names and not any(name in _NAMES for name in names):
        return f"a head of type {names[0]!r:.60}"
    kind = own.get("model_type") if isinstance(own, Mapping) else None
    if kind != "qwen3":
        return f"a DFlash head with layers of type {kind!r:.60}, not 'qwen3'"
    if said.get("sample_from_anchor"):
        return "a DFlash head that predicts from its block's first row"
    window = own.get("use_sliding_window") and own.get("sliding_window")
    if window and "speculators_model_type" in said and not said.get("sliding_window_non_causal"):
        return "a DFlash head whose block is causal in layers with a sliding window alone"
    return ""


def _features(
    said: Mapping[str, Any], own: Mapping[str, Any], text: Mapping[str, Any], place: str
) -> tuple[int, ...]:
    """The target's layers in front of which a head reads rows, counted from 0.

    `target_layer_ids` are numbers of layers behind which rows lie; what speculators writes is the
    number of the layer in front of which one lies. Without either they are spread evenly, from 1 to
    N - 3, one for each layer of the head, as both authors' `build_target_layer_ids` does.

    Args:
        said, own: config.json of the head, and the part of it with its layers' sizes.
        text: the target's, of the part that reads text.
        place: of the head's, for messages.
    Raises:
        CheckpointError: the head names other layers than the target has.
    """
    layers, behind = int(text.get("num_hidden_layers", 0)), 1
    if text.get("altup_num_inputs"):
        raise CheckpointError(f"{place}: a DFlash head, and the target has several rows a token")
    asked = _dflash(said).get("target_layer_ids")
    if asked is None and "aux_hidden_state_layer_ids" in said:
        asked, behind = said["aux_hidden_state_layer_ids"], 0
    if asked is None:
        count = head_size(own, "num_hidden_layers", place)
        steps = [each / max(count - 1, 1) for each in range(min(count, _MOST_FEATURES))]
        asked = [round(1 + step * (layers - 4)) for step in steps] if count > 1 else [layers // 2]
    right = isinstance(asked, list) and 0 < len(asked) <= _MOST_FEATURES
    # rows behind the last layer are published behind the last norm, which is not what is kept here
    if not right or not all(type(each) is int and 1 <= each + behind < layers for each in asked):
        raise CheckpointError(
            f"{place}: a DFlash head that reads rows {'behind' if behind else 'in front of'} the "
            f"target's layers {asked!r:.60}, and the target has {layers}. Is it a head of "
            "another model?"
        )
    return tuple(each + behind for each in asked)


def _block(said: Mapping[str, Any], text: Mapping[str, Any], place: str) -> Block:
    """The block that a head drafts.

    Raises:
        CheckpointError: the config says no size, or no mask token that the target has.
    """
    inside = _dflash(said)
    rows = head_size({**inside, **said} if said.get("block_size") else inside, "block_size", place)
    mask, tokens = inside.get("mask_token_id", said.get("mask_token_id")), text.get("vocab_size")
    if not 2 <= rows <= _MOST_ROWS:
        raise CheckpointError(
            f"{place}: a DFlash head says {rows} as 'block_size', and blocks have 2 to "
            f"{_MOST_ROWS} rows: download it again"
        )
    if type(mask) is not int or type(tokens) is not int or not 0 <= mask < tokens:
        raise CheckpointError(
            f"{place}: a DFlash head says {mask!r:.60} as 'mask_token_id', and the target has "
            f"{tokens} tokens. Is it a head of another model?"
        )
    # JetSpec's own files say `causal_head`, those that vLLM reads `causal`
    causal = bool(inside.get("causal_head", inside.get("causal", False)))
    return Block(rows, mask, causal)


def _dflash(said: Mapping[str, Any]) -> Mapping[str, Any]:
    found = said.get("dflash_config")
    return found if isinstance(found, Mapping) else {}


def block_checkpoint(head: Checkpoint, target: Mapping[str, Any]) -> Checkpoint:
    """A published head as a checkpoint of a few layers.

    Args:
        target: config.json of the model that it drafts for.
    Raises:
        CheckpointError: tensors that its config promises are absent, or it is of another target.
    """
    place = str(head.config_path)
    found = block_head(head.config, target, place)
    for name in ("fc.weight", "hidden_norm.weight", "norm.weight"):
        if name not in head:
            raise CheckpointError(
                f"{place} is that of a DFlash head, but its files hold no tensor '{name}': "
                "download them again"
            )
    names = {name: _renamed(name) for name in head if name not in _MAPS}
    tensors = {new: head[name] for name, new in names.items()}
    check_widths(found.config, target, tensors, len(found.features), place)
    made = replace(found, offsets=vocabulary_map(head, found.config, place))
    return head.as_head(made, names)


def _renamed(name: str) -> str:
    """A tensor's name in a Qwen3 with a part in front of it."""
    if name.startswith(("fc.", "hidden_norm.")):
        return f"model.{INPUT}.{name}"
    return name if name.startswith("lm_head.") else f"model.{name}"
