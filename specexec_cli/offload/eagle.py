"""EAGLE-3 heads as their makers publish them, as models of one layer that draft for a target.

Such a head reads the target's rows in front of three of its layers, made one row by a linear, `fc`.
Its decoder layer attends over that row beside the embedding of the token behind it, and its own
rows stand in for the target's from there on. Its vocabulary may be a part of the target's: `d2t`
says how far each token of it lies from the target's. Embeddings and head may be the target's.

Layouts that are read: that of EAGLE's authors, SpecForge and AngelSlim, whose layer is called
`midlayer`, and that of speculators, which keeps the layer's config in one of its own.
Source: EAGLE-3, arXiv:2503.01840; https://github.com/SafeAILab/EAGLE
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specexec_cli.catalog.architectures import text_config
from specexec_cli.errors import CheckpointError
from specexec_cli.offload.checkpoint import INPUT, Checkpoint, TensorRange, TrainedHead

# config keys with the rows of a head that has a vocabulary of its own
_OWN_VOCABULARY = ("draft_vocab_size", "truncated_vocab_size")
_FEATURES = 3  # rows of the target that are joined
_LAYERS = ("midlayer.", "layers.0.")
_MAPS = ("d2t", "t2d")
_MOST = 2**31  # of a number in a config; no head has as many of anything


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head."""
    names = config.get("architectures")
    named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    layout = config.get("speculators_model_type") == "eagle3"
    return named or layout or any(key in config for key in _OWN_VOCABULARY)


def eagle_config(head: Mapping[str, Any], target: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The config of a head as a Llama of one layer, from its config.json.

    It drafts as far as its target reads: its own number of positions is that of the texts it was
    trained on, and EAGLE's own code turns further ones alike.

    Args:
        head, target: their config.json.
        place: of the head's, for messages.
    Raises:
        CheckpointError: it is a head of another kind.
    """
    own = head.get("transformer_layer_config", head)
    if not isinstance(own, Mapping) or own.get("model_type") != "llama":
        kind = own.get("model_type") if isinstance(own, Mapping) else None
        raise CheckpointError(
            f"{place}: an EAGLE-3 head with a layer of type {kind!r:.60}, not 'llama'"
        )
    if own.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(f"{place}: an EAGLE-3 head of more than one layer, which is not read")
    kept = {"norm_before_residual": bool(head.get("norm_before_residual", False))}
    packing = {key: head[key] for key in ("quantization_config",) if key in head}
    both = (own, text_config(target))
    known = [each.get("max_position_embeddings") for each in both]
    whole = [each for each in known if type(each) is int]
    reach = {"max_position_embeddings": max(whole)} if whole else {}
    alone = {"num_hidden_layers": 1, "tie_word_embeddings": False}
    return {**own, **packing, **kept, **reach, **alone}


def head_size(config: Mapping[str, Any], key: str, place: str, absent: int | None = None) -> int:
    """A size of a trained head, from its config.json.

    Args:
        place: of the config.json, for messages.
        absent: the size where the file has none, or null.
    Raises:
        CheckpointError: it is no whole number above 0, or there has to be one.
    """
    value = config.get(key)
    if value is None and absent is not None:
        return absent
    if type(value) is not int or not 0 < value < _MOST:
        raise CheckpointError(
            f"{place}: the config of a trained head says {value!r:.60} as '{key}', and not a "
            "whole number above 0: download it again"
        )
    return value


def eagle_features(
    head: Mapping[str, Any], target: Mapping[str, Any], place: str
) -> tuple[int, ...]:
    """The target's layers in front of which a head reads rows, counted from 0.

    Two numberings are published under one name. At the top of config.json, as speculators has it
    and vLLM reads it, a number is that of the layer in front of which the row lies. Inside
    `eagle_config`, as SpecForge and ModelOpt have it, it is that of the layer behind which it lies.

    Args:
        head, target: their config.json.
        place: of the head's, for messages.
    Raises:
        CheckpointError: the head names other layers than the target has.
    Source: SGLang's `set_eagle3_layers_to_capture` adds one to the numbers in `eagle_config`, and
        none to [2, N / 2, N - 3], which it takes without them; SpecForge's
        `set_aux_hidden_states_layers` has these as [1, N / 2 - 1, N - 4], outputs of layers.
    """
    nested = head.get("eagle_config")
    asked, behind = head.get("eagle_aux_hidden_state_layer_ids"), 0
    if asked is None and isinstance(nested, Mapping):
        asked, behind = nested.get("eagle_aux_hidden_state_layer_ids"), 1
    text = text_config(target)
    layers = int(text.get("num_hidden_layers", 0))
    if text.get("altup_num_inputs"):
        raise CheckpointError(f"{place}: an EAGLE-3 head, and the target has several rows a token")
    if asked is None:
        asked, behind = [2, layers // 2, layers - 3], 0
    right = isinstance(asked, list) and len(asked) == _FEATURES
    if not right or not all(type(each) is int and 1 <= each + behind <= layers for each in asked):
        raise CheckpointError(
            f"{place}: an EAGLE-3 head that reads rows {'behind' if behind else 'in front of'} the "
            f"target's layers {asked!r:.60}, and the target has {layers}. Is it a head of "
            "another model?"
        )
    return tuple(each + behind for each in asked)


def eagle_checkpoint(head: Checkpoint, target: Mapping[str, Any]) -> Checkpoint:
    """A published head as a checkpoint of one layer.

    Args:
        target: config.json of the model that it drafts for.
    Raises:
        CheckpointError: tensors that its config promises are absent, or it is of another target.
    """
    place = str(head.config_path)
    config = eagle_config(head.config, target, place)
    features = eagle_features(head.config, target, place)
    names = {name: _renamed(name) for name in head if name not in _MAPS}
    tensors = {new: head[name] for name, new in names.items()}
    lacking = [name for name in ("fc", "norm") if f"{name}.weight" not in head]
    if lacking or not any(name.startswith(_LAYERS) for name in head):
        what = f"'{lacking[0]}.weight'" if lacking else f"'{_LAYERS[0]}*'"
        raise CheckpointError(
            f"{place} is that of an EAGLE-3 head, but its files hold no tensor {what}: download "
            "them again"
        )
    check_widths(config, target, tensors, _FEATURES, place)
    made = TrainedHead(config, features, vocabulary_map(head, config, place))
    return head.as_head(made, names)


def _renamed(name: str) -> str:
    """A tensor's name in a Llama of one layer with a part in front of it."""
    for layer in _LAYERS:
        if name.startswith(layer):
            return f"model.layers.0.{name.removeprefix(layer)}"
    if name.startswith("fc."):
        return f"model.{INPUT}.{name}"
    return name if name.startswith("lm_head.") else f"model.{name}"


def check_widths(
    config: Mapping[str, Any],
    target: Mapping[str, Any],
    tensors: Mapping[str, TensorRange],
    features: int,
    place: str,
) -> None:
    """Refuses a head that reads rows or tables of another width than the target's.

    Args:
        config: of the head, as a model of few layers.
        target: config.json of the model that it drafts for.
        tensors: the head's, by their names in such a model.
        features: rows of the target that the head's linear joins.
        place: of the head's config.json, for messages.
    Raises:
        CheckpointError: it does.
    """
    text = text_config(target)
    hidden = config.get("hidden_size"), text.get("hidden_size")
    absent = [
        name for name in ("model.embed_tokens.weight", "lm_head.weight") if name not in tensors
    ]
    if absent and hidden[0] != hidden[1]:
        raise CheckpointError(
            f"{place}: the head has no '{absent[0].removeprefix('model.')}' and takes the "
            f"target's, whose rows are of {hidden[1]} numbers, not {hidden[0]!r:.60}. Is it of "
            "another model?"
        )
    shape, kept = tensors[f"model.{INPUT}.fc.weight"].shape, features * int(hidden[1] or 0)
    if len(shape) != 2:
        raise CheckpointError(
            f"{place}: the head's 'fc.weight' has {len(shape)} dimensions, not 2: download its "
            "files again"
        )
    reads = shape[1]
    if reads != kept:
        raise CheckpointError(
            f"{place}: the head's 'fc.weight' reads {reads} numbers, and the target keeps {kept} "
            "for it. Is it of another model?"
        )


def vocabulary_map(head: Checkpoint, config: Mapping[str, Any], place: str) -> TensorRange | None:
    """The tensor that maps a head's vocabulary to the target's, if it has one of its own.

    Args:
        head: as it is published.
        config: of the head, as a model of few layers.
        place: of the head's config.json, for messages.
    Raises:
        CheckpointError: it lacks one that it needs, or has one of another size than its head.
    """
    own, offsets = head.get("lm_head.weight"), head.get("d2t")
    vocab = head_size(config, "vocab_size", place, 32_000)  # as transformers has it
    rows = own.shape[0] if own is not None and own.shape else vocab
    if offsets is None and rows != vocab:
        raise CheckpointError(
            f"{place}: the head has {rows} tokens of the target's {vocab}, but its "
            "files hold no tensor 'd2t' that says which: download them again"
        )
    if offsets is not None and (offsets.shape != (rows,) or offsets.dtype not in ("I64", "I32")):
        raise CheckpointError(
            f"{place}: tensor 'd2t' is {offsets.dtype} of shape {list(offsets.shape)}, and the "
            f"head has {rows} tokens. Are its files of two heads?"
        )
    return offsets
