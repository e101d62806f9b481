"""A checkpoint's layers that predict further tokens (MTP), as models of one layer to draft with.

Such a layer is a decoder layer like the others. Its input joins two rows: the embedding of a token,
and the hidden row that the target's head reads behind the token before. Embeddings and head are the
target's. Checkpoints store it in two ways: Qwen3-Next and its successors below `mtp.`, MiMo-V2
below `model.mtp.`; DeepSeek-V3, GLM-4.5 and theirs, and Step, as a layer behind the last.

MiMo-V2 and Step have three such layers, each trained for one more token ahead, and no other type is
published with several. Layer k joins a token to a row of k tokens before. Of MiMo-V2 that is the
target's; of others the layer before made it of the target's and of the tokens between. MiMo-V2 and
Step read rows in front of a norm, not behind it, and Step's layers have output heads of their own.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2, and transformers' `MtpModel`; for MiMo-V2 and
Step SGLang, where Xiaomi and StepFun brought their models first (`hidden_states_before_norm` in
`mimo_v2_flash_nextn.py` and `step3p5_mtp.py`, `chain_mtp_hidden_states` in
`multi_layer_eagle_worker_v2.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from specexec_cli.catalog.architectures import known_config
from specexec_cli.config import MTP
from specexec_cli.errors import ConfigError
from specexec_cli.offload.checkpoint import INPUT, Checkpoint, TensorRange, TrainedHead
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint, gguf_mtp

# config keys that say how many such layers a model was trained with
_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
# the same, of makers that publish no such layers, as MiniMax
_WITHOUT = ("num_mtp_modules", "mtp_num_layers")
# types whose makers' checkpoints have them, where a config does not say so
_TYPES = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "mimo_v2_flash",
)
_LAYERS = re.compile(r"(?P<decoder>(?:.*\.)?)layers\.(?P<number>\d{1,9})\.(?P<inside>.+)")
_OF_MTP = re.compile(r"(?:model\.)?mtp\.(?:layers\.(?P<number>\d+)\.)?(?P<inside>.+)")
_QWEN = {
    "pre_fc_norm_embedding": f"{INPUT}.enorm", "pre_fc_norm_hidden": f"{INPUT}.hnorm",
    "fc": f"{INPUT}.eh_proj", "norm": "norm",
}  # fmt: skip
# parts of a numbered layer
_INSIDE = {
    "enorm": f"{INPUT}.enorm", "hnorm": f"{INPUT}.hnorm", "eh_proj": f"{INPUT}.eh_proj",
    "shared_head.norm": "norm", "transformer.shared_head.norm": "norm", "final_layernorm": "norm",
    "pre_mlp_layernorm": "layers.0.post_attention_layernorm",
}  # fmt: skip
# names of tensors that belong to such layers, in whatever layout
_OF_ANY = re.compile(r"(?:^|\.)mtp[._]|\.eh_proj\.")
_MIMO = "model.mtp.layers.0.final_layernorm.weight"  # LongCat's layers lie below `model.mtp.` too
_MOST = 8  # layers that are read of files, or believed of a config where these are not here
_OWN_HEAD = "transformer.shared_head.output."  # of Step
_SHARED = ("embed_tokens.", "shared_head.head.")  # copies of the target's own tables
# lists with an entry for each layer, of configs of Step that have some for the layers behind too
_BY_LAYER = (
    "layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta",
    "partial_rotary_factors",
)  # fmt: skip


def mtp_checkpoint(target: Checkpoint) -> Checkpoint:
    """The target's first MTP layer as a checkpoint of one layer, with the target's tables.

    Layers behind it are its head's `later`.

    Raises:
        ConfigError: the files hold none.
    """
    if (found := find_mtp(target)) is not None:
        return found
    tensors = target.file.tensors if isinstance(target, GgufCheckpoint) else target
    raise ConfigError(no_mtp(target.config, str(target.config_path), tensors))


def no_mtp(config: Mapping[str, Any], place: str = "", tensors: Collection[str] = ()) -> str:
    """Why no MTP layer can draft, as one line.

    Args:
        config: the target's.
        place: where it comes from, if the target's files were looked at.
        tensors: the names of all that they hold.
    """
    key = _promise(config)
    what = "the target has no layer that predicts further tokens (MTP)"
    if name := next((each for each in tensors if _OF_ANY.search(each)), None):
        what = (
            f"{place}: the target's layers that predict further tokens (MTP) are stored in a way "
            f"that is not read, as '{name:.100}'"
        )
    elif place and key is not None:
        what = (
            f"{place} says {_text(config)[key]} as '{key}', but the files hold no tensors of such "
            "layers: whoever made this copy left them out"
        )
    return f"`draft='{MTP}'`: {what}. Give another `draft`, such as `draft='suffix'`"


def left_out(target: Checkpoint, layer: Checkpoint) -> str | None:
    """That fewer MTP layers draft than the target's config says, as one line; None if as many do.

    Args:
        layer: the first of those that draft.
    """
    assert layer.head is not None, "it is made one"
    text, here = _text(target.config), 1 + len(layer.head.later)
    counts = (text[key] for key in _COUNTS if type(text.get(key)) is int)
    if (said := max(mtp_layers(target.config), *counts, 0)) <= here:
        return None
    why = "no more are read" if here == _MOST else "the files hold no others that are read"
    return (
        f"{target.config_path} says {said} layers that predict further tokens (MTP), "
        f"of which {here} draft{'s' if here == 1 else ''}: {why}"
    )


def has_mtp(config: Mapping[str, Any]) -> bool:
    """Whether a model is made with MTP layers, by its config: its files may lack them.

    A type says it where no number does: Kimi-K2 is of DeepSeek-V3's, and its config says 0.
    """
    text = _text(config)
    said = [text[key] for key in _COUNTS if text.get(key) is not None]
    return any(said) if said else text.get("model_type") in _TYPES


def _promise(config: Mapping[str, Any]) -> str | None:
    """The config's key that speaks of MTP layers; None if there is none."""
    text = _text(config)
    return next((key for key in (*_COUNTS, *_WITHOUT) if text.get(key)), None)


def find_mtp(target: Checkpoint) -> Checkpoint | None:
    """As mtp_checkpoint; None where the files hold no such layer."""
    layers = list(_layers(target))
    if not layers:
        return None
    head = layers[0].head
    assert head is not None, "it is made one"
    return replace(layers[0], head=replace(head, later=tuple(layers[1:])))


def _layers(target: Checkpoint) -> Iterator[Checkpoint]:
    """The target's MTP layers, at most `_MOST`, from the first to the last that is there."""
    if isinstance(target, GgufCheckpoint):
        for number in range(_MOST):
            found = gguf_mtp(target, number, mtp_head(target.config, number))
            if found is None:
                return
            yield found
    else:
        yield from (_layer(target, number) for number in range(_stored(target)))


def _layer(target: Checkpoint, number: int) -> Checkpoint:
    """One of the target's MTP layers, counted from 0."""
    below = _MIMO in target or _below(target)
    tensors = _below_mtp(target, number) if below else _behind_last(target, number)
    renamed = {name: replace(tensor, name=name) for name, tensor in tensors.items()}
    return replace(target, tensors=renamed, head=mtp_head(target.config, number))


def _below(target: Checkpoint) -> bool:
    """Whether the files have an MTP layer as Qwen3-Next's, and its successors'."""
    return any(name.startswith("mtp.fc.") for name in target)


def _stored(target: Checkpoint) -> int:
    """How many MTP layers the files hold that are read, at most `_MOST`."""
    if _below(target):
        return 1
    place, first = "model.mtp.layers.", 0
    if _MIMO not in target:
        count = _text(target.config).get("num_hidden_layers")
        if type(count) is not int:
            return 0  # nobody knows which layers are behind the last
        place, first = f"{_decoder(target)}layers.", count
    found = {
        name.removeprefix(place).partition(".")[0]
        for name in target if name.startswith(place) and ".eh_proj." in name
    }  # fmt: skip
    return next((each for each in range(_MOST) if str(first + each) not in found), _MOST)


def mtp_layers(config: Mapping[str, Any]) -> int:
    """How many MTP layers a model is published with, by its config."""
    text = _text(config)
    if text.get("model_type") == "mimo_v2_flash":
        return 3
    said = text.get("num_nextn_predict_layers")
    return min(said, _MOST) if type(said) is int and said > 0 else 1


def mtp_head(config: Mapping[str, Any], number: int = 0) -> TrainedHead:
    """What makes an MTP layer a head of its target, from the target's config."""
    text, own = _text(config), config.get("model_type") == "step3p7"
    mimo = text.get("model_type") == "mimo_v2_flash"
    features = (_layer_count(text),) if own or mimo else ()
    return TrainedHead(mtp_config(config, number), features, own_head=own, chained=not mimo)


def apart(layer: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """What a trained head has before a decoder layer, and all its other tensors."""
    own = {name: each for name, each in layer.items() if f"{INPUT}." in name}
    others = {name: each for name, each in layer.items() if name not in own}
    return replace(layer, tensors=own), replace(layer, tensors=others)


def mtp_config(config: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """The config of an MTP layer as a model of one layer, from the target's."""
    if config.get("model_type") == "step3p7":
        return {**config, "text_config": _of_step(_text(config), number)}
    if (text := _text(config)) is not config:
        return {**known_config(config), "text_config": mtp_config(text, number)}
    own = {**config, "num_hidden_layers": 1}
    if "layer_types" in config or str(config.get("model_type")).startswith("qwen3_"):
        own["layer_types"] = ["full_attention"]
    # of a mixture, such a layer is one like the others, not one of the dense ones at the beginning
    if "mlp_layer_types" in config or config.get("model_type") == "glm4_moe_lite":
        own["mlp_layer_types"] = ["sparse"]
    own |= {key: value for key, value in _NONE_DENSE.items() if key in config}
    if config.get("model_type") == "mimo_v2_flash":
        own |= {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
    return own


def _of_step(config: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The config of one of a Step's MTP layers, from the part of the target's that reads text."""
    layers = _layer_count(config)
    own = {**config, "num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    for key in _BY_LAYER:
        behind, listed = config.get(f"mtp_{key}"), config.get(key)
        if isinstance(listed, list):
            behind = behind or listed[layers:]
            del own[key]
        if isinstance(behind, list) and behind[number:]:
            own[key] = behind[number : number + 1]
    own.setdefault("mlp_layer_types", ["dense"])
    own.pop("per_layer_config", None)  # it is made of the others
    return own


_NONE_DENSE: dict[str, Any] = {"first_k_dense_replace": 0, "mlp_only_layers": []}


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = known_config(config).get("text_config") or config
    return found


def _layer_count(config: Mapping[str, Any]) -> int:
    """The number of a decoder's layers, behind which its MTP layers are counted.

    Raises:
        ConfigError: the config does not say it.
    """
    count = config.get("num_hidden_layers")
    if type(count) is not int:
        raise ConfigError(
            f"`draft='{MTP}'`: config.json has no whole number as 'num_hidden_layers', behind "
            "which layers that predict further tokens are counted: get another copy of the model"
        )
    return count


def _below_mtp(target: Checkpoint, number: int) -> dict[str, TensorRange]:
    """The tensors of a checkpoint that has them below `mtp.`."""
    decoder, found = _decoder(target), dict[str, TensorRange]()
    for name, tensor in target.items():
        own = _OF_MTP.fullmatch(name)
        if own is None:
            if _LAYERS.fullmatch(name) is None and not name.startswith(f"{decoder}norm."):
                found[name] = tensor
        elif own["number"] is not None:
            if own["number"] == str(number):
                found[decoder + _renamed(own["inside"])] = tensor
        else:
            part, _, leaf = own["inside"].rpartition(".")
            found[f"{decoder}{_QWEN.get(part, f'{INPUT}.{part}')}.{leaf}"] = tensor
    return found


def _behind_last(target: Checkpoint, nth: int) -> dict[str, TensorRange]:
    """The tensors of a checkpoint that has them in a layer behind the last."""
    decoder, number = _decoder(target), str(_text(target.config)["num_hidden_layers"] + nth)
    of_step = target.config.get("model_type") == "step3p7"
    # transformers' names of Step have a level more than those in its files
    place = "model.language_model." if of_step else decoder
    found: dict[str, TensorRange] = {}
    for name, tensor in target.items():
        own = _LAYERS.fullmatch(name)
        if own is None or own["decoder"] != decoder:
            if not name.startswith(f"{decoder}norm.") and not (of_step and "lm_head." in name):
                found[name] = tensor
        elif own["number"] == number and own["inside"].startswith(_OWN_HEAD):
            found[f"lm_head.{own['inside'].removeprefix(_OWN_HEAD)}"] = tensor
        elif own["number"] == number and not own["inside"].startswith(_SHARED):
            found[place + _renamed(own["inside"])] = tensor
    return found


def _renamed(inside: str) -> str:
    """The place of a tensor of a numbered layer in a decoder of one layer."""
    part, _, leaf = inside.rpartition(".")
    return f"{_INSIDE[part]}.{leaf}" if part in _INSIDE else f"layers.0.{inside}"


def behind_last(target: Checkpoint) -> Collection[str]:
    """The names of tensors in layers behind the last, if these predict further tokens."""
    decoder, count = _decoder(target), _text(target.config).get("num_hidden_layers")
    behind = f"{decoder}layers.{count}.eh_proj."
    if type(count) is not int or not any(name.startswith(behind) for name in target):
        return ()
    found = ((name, _LAYERS.fullmatch(name)) for name in target)
    return {
        name
        for name, own in found
        if own is not None and own["decoder"] == decoder and int(own["number"]) >= count
    }


def _decoder(target: Checkpoint) -> str:
    """What the names of the decoder's tensors begin with, as in `model.language_model.`."""
    found = (_LAYERS.fullmatch(name) for name in target if not name.startswith("mtp."))
    names = {each["decoder"] for each in found if each is not None}
    return max(names, key=lambda name: f"{name}norm.weight" in target, default="")
