"""Gives the tensors of a GGUF file transformers' names, and says what the converter changed.

The converter (convert_hf_to_gguf.py of ggml-org/llama.cpp) renames tensors, puts all experts of a
layer into one tensor, and for some architectures changes values (families.py). This module turns
names and experts back; a Restoration names the other changes, which are undone where weights are
used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.container import GgufFile, GgufTensor, shown
from specexec_cli.gguf.families import FAMILIES, Family, Made, Making, RowOrder
from specexec_cli.gguf.metadata import Metadata

_LARGEST = 3.4e38  # of a float32
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.+?)(?:\.(?P<leaf>weight|bias))?")
_OLD_EXPERT = re.compile(r"ffn_(?P<part>gate|up|down)\.(?P<index>\d{1,9})")  # Mixtral files of 2023
_EXPERTS = re.compile(r"ffn_(?P<part>gate|up|down|gate_up)_exps")
# config keys that may have the number of a layer's experts
EXPERT_COUNTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
)  # fmt: skip
# factors of the rotary frequencies, from which rotary.py makes parameters of the config
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# frequencies of a layer, which files of 2023 may have: plain ones, which llama.cpp skips too
_OLD_FREQUENCIES = "attn_rot_embd"

_OUTSIDE = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}


# parts whose tensors have other shapes than transformers' parameters of as many numbers
_CONVOLUTIONS = (
    "ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "shortconv.conv",
)  # fmt: skip
_FLAT = ("ssm_a", "ssm_d", "ssm_norm")


@dataclass(frozen=True, slots=True)
class Rows:
    """The order in which the rows of a linear, or of a recurrent layer's parameter, are stored."""

    order: RowOrder
    heads: int  # of the linear: of queries, of values, or of keys for one that makes keys alone
    groups: int  # heads of keys and values, or key heads that value heads share
    first: int = 0  # rows before the tiles, which lie as in transformers
    turned: int = 0  # numbers of a head that its position turns, of rows in halves


@dataclass(frozen=True, slots=True)
class Restoration:
    """The converter's changes that have to be undone where the weights are used."""

    rows: Mapping[str, Rows]  # name of a weight or parameter -> the order of its rows
    plus_one: frozenset[str]  # names of norm weights that are stored plus one
    decays: frozenset[str]  # names of logarithms that are stored as -exp
    # name of a parameter -> how it is made, and the names of the tensors that it is made of
    made: Mapping[str, tuple[Making, tuple[str, ...]]]
    constants: Mapping[str, float]  # name of a parameter of one number, which metadata say -> it


def translate(
    file: GgufFile, config: Mapping[str, object]
) -> tuple[dict[str, GgufTensor], Restoration]:
    """The tensors under the names of safetensors checkpoints, each expert's by themselves.

    An unknown name stays as it is: the code that looks for the tensor's place then refuses it. A
    tensor that a parameter is made of keeps llama.cpp's name within its layer.

    Args:
        config: what gguf_config() made from the same file.
    Raises:
        CheckpointError: a stack of experts is not as large as the config says, or two tensors
            have one name.
    """
    family = FAMILIES[str(config["model_type"])]
    if "blk.0.attn_norm_2.weight" in file.tensors:
        family = replace(family, inside={**family.inside, **family.two_norms})
    if Metadata(file).value("rope.dimension_sections") is not None:
        family = replace(family, rows={**family.rows, **family.rows_of_axes})
    tensors: dict[str, GgufTensor] = {}
    for tensor in file.tensors.values():
        own = (
            {} if _is_left_out(tensor.name, family, config) else _translated(tensor, family, config)
        )
        if twice := own.keys() & tensors.keys():
            name = min(twice)
            raise CheckpointError(
                f"{tensor.path}: tensors {shown(tensors[name].name)} and {shown(tensor.name)} are "
                f"both {shown(name)}: the file is damaged, download it again"
            )
        tensors |= own
    plus_one = {
        name
        for name, tensor in tensors.items()
        if (ending := family.norms_plus_one)
        and name.endswith(f"{ending}.weight")
        and "ssm_norm" not in tensor.name
    }
    decays = frozenset(name for name in tensors if name.endswith(".A_log"))
    return tensors, Restoration(
        _rows(tensors, family, config), frozenset(plus_one), decays, _made(tensors, family),
        _constants(file, family, config),
    )  # fmt: skip


# tensors of a layer that predicts further tokens: what they are called inside the head's input, or
# in a file of one layer
_JOINT = ("nextn.enorm", "nextn.hnorm", "nextn.eh_proj")
_OF_MTP = {"nextn.shared_head_norm": "output_norm", "layer_output_norm": "output_norm"}
_OWN_HEAD = {"nextn.shared_head_head": "output"}
_TABLES = ("token_embd", "output")


def mtp_file(file: GgufFile, layer: int, model_type: str, own_head: bool) -> GgufFile | None:
    """One of the file's layers behind the others (MTP) as a file of one layer; None without it.

    Args:
        layer: its number in the file.
        model_type: the target's.
        own_head: whether such layers have output heads of their own.
    """
    decoder = FAMILIES[model_type].layers.rpartition(".")[0]
    parts = {each: f"{decoder}.head_input.{each.removeprefix('nextn.')}" for each in _JOINT}
    parts |= _OF_MTP | (_OWN_HEAD if own_head else {})
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        found = _BLOCK.fullmatch(name)
        if found is None:
            if name.rpartition(".")[0] in _TABLES:
                tensors.setdefault(name, tensor)
        elif int(found["layer"]) == layer:
            part = parts.get(found["part"])
            if part is None and found["part"].startswith("nextn."):
                continue  # copies of the target's tables
            leaf = f".{found['leaf']}" if found["leaf"] else ""
            own = f"{part or 'blk.0.' + found['part']}{leaf}"
            tensors[own] = replace(tensor, name=own)
    if f"{decoder}.head_input.eh_proj.weight" not in tensors:
        return None
    if "output_norm.weight" not in tensors and "output_norm.weight" in file.tensors:
        tensors["output_norm.weight"] = file.tensors["output_norm.weight"]
    return replace(file, tensors=tensors)


def _is_left_out(name: str, family: Family, config: Mapping[str, object]) -> bool:
    """Whether a tensor is needed by no pass: what the config says, and layers that draft (MTP)."""
    found = _BLOCK.fullmatch(name)
    if found is None:
        return name in ROPE_FACTORS
    layers, part = int(str(config["num_hidden_layers"])), found["part"]
    if part.startswith(_OLD_FREQUENCIES):
        return True
    return int(found["layer"]) >= layers or part in family.unused


def _rows(
    tensors: Mapping[str, GgufTensor], family: Family, config: Mapping[str, object]
) -> dict[str, Rows]:
    """The linears and parameters whose rows are stored in another order than transformers'."""
    found = {}
    for name, tensor in tensors.items():
        block = _BLOCK.fullmatch(tensor.name)
        if block is not None:
            part = f"{block['part']}.bias" if block["leaf"] == "bias" else block["part"]
            if (order := family.rows.get(part)) is not None:
                found[name] = _order_of(part, order, config)
    return found


def _order_of(part: str, order: RowOrder, config: Mapping[str, object]) -> Rows:
    if order in ("tiles", "columns"):
        heads, groups, size = (
            int(str(config[f"linear_{name}"]))
            for name in ("num_value_heads", "num_key_heads", "key_head_dim")
        )
        behind_keys = part in ("attn_qkv", "ssm_conv1d")
        return Rows(order, heads, groups, 2 * groups * size if behind_keys else 0)
    heads = int(str(config["num_attention_heads"]))
    groups = int(str(config.get("num_key_value_heads", heads)))
    turned = 0
    if order == "halves":
        rope = config["rope_parameters"]
        assert isinstance(rope, Mapping)
        turned = round(int(str(config["head_dim"])) * float(rope["partial_rotary_factor"]))
    return Rows(order, groups if part == "attn_k" else heads, groups, turned=turned)


def _made(
    tensors: Mapping[str, GgufTensor], family: Family
) -> dict[str, tuple[Making, tuple[str, ...]]]:
    """The parameters that are made of tensors of other shapes, in the layers that have these."""
    found = (_BLOCK.fullmatch(tensor.name) for tensor in tensors.values())
    layers = {each["layer"] for each in found if each} if family.made else set()
    return {
        f"{family.layers}.{layer}.{parameter}":
            (made.how, tuple(f"{family.layers}.{layer}.{part}.weight" for part in made.parts))
        for layer in layers
        for parameter, made in family.made.items()
        if any(f"{family.layers}.{layer}.{part}.weight" in tensors for part in made.parts)
    }  # fmt: skip


def _constants(file: GgufFile, family: Family, config: Mapping[str, object]) -> dict[str, float]:
    """The numbers of layers that the converter puts into the metadata."""
    metadata, layers = Metadata(file), int(str(config["num_hidden_layers"]))
    for key in family.constants:
        if not all(abs(number) < _LARGEST for number in metadata.each_number(key, layers)):
            raise metadata.refusal(f"its metadata have no finite float32 as '{key}'")
    return {
        f"{family.layers}.{layer}.{parameter}": number
        for key, parameter in family.constants.items()
        for layer, number in enumerate(metadata.each_number(key, layers))
    }


def _translated(
    tensor: GgufTensor, family: Family, config: Mapping[str, object]
) -> dict[str, GgufTensor]:
    found = _BLOCK.fullmatch(tensor.name)
    if found is None:
        part, _, leaf = tensor.name.rpartition(".")
        if (stack := family.stacks.get(part)) is not None and len(tensor.shape) == 3:
            return {f"{stack}.{n}.{leaf}": _nth(tensor, n) for n in range(tensor.shape[0])}
        name = family.outside.get(part, _OUTSIDE.get(part))
        return {f"{name}.{leaf}" if name else tensor.name: tensor}
    part, leaf = found["part"], found["leaf"]
    prefix = f"{family.layers}.{found['layer']}."
    if leaf == "weight" and any(_is_piece(tensor, part, made) for made in family.made.values()):
        return {f"{prefix}{part}.{leaf}": tensor}
    tensor = _in_shape(tensor, part, family)
    if experts := _EXPERTS.fullmatch(part):
        count = config.get(next((name for name in EXPERT_COUNTS if name in config), ""))
        if len(tensor.shape) != (2 if leaf == "bias" else 3) or tensor.shape[0] != count:
            raise CheckpointError(
                f"{tensor.path}: tensor '{tensor.name}' has shape {list(tensor.shape)}, the "
                f"metadata says {count} experts: the file is damaged, download it again"
            )
        return {
            f"{prefix}{family.experts}.{index}.{experts['part']}.{leaf}": _nth(tensor, index)
            for index in range(tensor.shape[0])
        }
    if old := _OLD_EXPERT.fullmatch(part):
        return {f"{prefix}{family.experts}.{old['index']}.{old['part']}.{leaf}": tensor}
    if (whole := family.inside.get(f"{part}.{leaf}" if leaf else part)) is not None:
        return {prefix + whole: tensor}
    inside = family.inside.get(part, _INSIDE.get(part))
    return {f"{prefix}{inside}.{leaf}" if inside and leaf else tensor.name: tensor}


def _is_piece(tensor: GgufTensor, part: str, made: Made) -> bool:
    """Whether a parameter is made of a tensor; columns in blocks stay, and inputs are reordered."""
    packed = tensor.type.stored_as is None
    return part in made.parts and not (packed and made.how == "columns")


def _in_shape(tensor: GgufTensor, part: str, family: Family) -> GgufTensor:
    """A recurrent layer's tensor with the dimensions of transformers' parameter."""
    if len(tensor.shape) < 2 or tensor.type.stored_as is None:
        return tensor
    shape, count = tensor.shape, prod(tensor.shape)
    if part in _CONVOLUTIONS:
        shape = (prod(shape[:-1]), 1, shape[-1])
    elif part in family.shapes:
        shape = tuple(count if each < 0 else each for each in family.shapes[part])
    elif part in _FLAT and (part != "ssm_a" or shape[-1] == 1):  # Mamba-1 has one for each number
        shape = (count,)
    return replace(tensor, shape=shape)


def _nth(tensor: GgufTensor, index: int) -> GgufTensor:
    """One matrix or bias of a stack, such as one expert's of all experts'."""
    size = (tensor.stop - tensor.start) // tensor.shape[0]
    start = tensor.start + index * size
    return replace(tensor, shape=tensor.shape[1:], start=start, stop=start + size)
