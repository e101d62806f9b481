"""Gives the tensors of a GGUF file transformers' names, and says what the converter changed.

The converter (convert_hf_to_gguf.py of ggml-org/llama.cpp) renames tensors, puts all experts of a
layer into one tensor, and for some architectures changes values: rows of queries and keys of a
Llama are reordered so that both halves of a rotary pair are neighbours, and Gemma's norms are
stored plus one. This module turns names and experts back; a Restoration names the other changes,
which are undone where weights are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.container import GgufFile, GgufTensor, shown

_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.+)\.(?P<leaf>weight|bias)")
_OLD_EXPERT = re.compile(r"ffn_(?P<part>gate|up|down)\.(?P<index>\d{1,9})")  # Mixtral files of 2023
_EXPERTS = re.compile(r"ffn_(?P<part>gate|up|down)_exps")
# factors of the rotary frequencies, from which rotary.py makes parameters of the config
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

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
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


_VECTORS = {"attn_sinks": "self_attn.sinks"}  # tensors that are no module's `weight`


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture's tensors differ from Llama's."""

    inside: Mapping[str, str]  # parts of a layer that have other names
    expert: str = "mlp.experts.{index}.{part}_proj"
    rotary_pairs: bool = False  # rows of queries and keys are reordered
    norms_plus_one: bool = False


_MIXTRAL = {"gate": "w1", "down": "w2", "up": "w3"}  # the parts' names in Mixtral's checkpoints

# by transformers' model_type
FAMILIES: Mapping[str, Family] = {
    "llama": Family({}, rotary_pairs=True),
    "mixtral": Family(
        {"ffn_gate_inp": "block_sparse_moe.gate"},
        expert="block_sparse_moe.experts.{index}.{part}", rotary_pairs=True,
    ),
    "qwen2": Family({}),
    "qwen3": Family({}),
    "qwen3_moe": Family({}),
    "gemma2": Family(_GEMMA, norms_plus_one=True),
    "gemma3_text": Family(_GEMMA, norms_plus_one=True),
    "phi3": Family({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "gpt_oss": Family(
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        expert="mlp.experts.{index}.{part}",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Restoration:
    """The converter's changes that have to be undone where the weights are used."""

    rotary_pairs: Mapping[str, int]  # name of a linear with reordered rows -> its heads
    plus_one: frozenset[str]  # names of norm weights that are stored plus one


def translate(
    file: GgufFile, config: Mapping[str, object]
) -> tuple[dict[str, GgufTensor], Restoration]:
    """The tensors under the names of safetensors checkpoints, each expert's by themselves.

    An unknown name stays as it is: the code that looks for the tensor's place then refuses it.

    Args:
        config: what gguf_config() made from the same file.
    Raises:
        CheckpointError: a stack of experts is not as large as the config says, or two tensors
            have one name.
    """
    family = FAMILIES[str(config["model_type"])]
    tensors: dict[str, GgufTensor] = {}
    for tensor in file.tensors.values():
        if tensor.name in ROPE_FACTORS:
            continue
        own = _translated(tensor, family, config)
        if twice := own.keys() & tensors.keys():
            name = min(twice)
            raise CheckpointError(
                f"{tensor.path}: tensors {shown(tensors[name].name)} and {shown(tensor.name)} are "
                f"both {shown(name)}: the file is damaged, download it again"
            )
        tensors |= own
    heads = {
        "q_proj": int(str(config["num_attention_heads"])),
        "k_proj": int(str(config["num_key_value_heads"])),
    }
    pairs = {
        name.rpartition(".")[0]: heads[name.split(".")[-2]]
        for name in tensors
        if family.rotary_pairs and name.endswith((".q_proj.weight", ".k_proj.weight"))
    }
    plus_one = {name for name in tensors if family.norms_plus_one and name.endswith("norm.weight")}
    return tensors, Restoration(pairs, frozenset(plus_one))


def _translated(
    tensor: GgufTensor, family: Family, config: Mapping[str, object]
) -> dict[str, GgufTensor]:
    found = _BLOCK.fullmatch(tensor.name)
    if found is None:
        part, _, leaf = tensor.name.rpartition(".")
        return {f"{_OUTSIDE[part]}.{leaf}" if part in _OUTSIDE else tensor.name: tensor}
    prefix, leaf = f"model.layers.{found['layer']}.", found["leaf"]
    if experts := _EXPERTS.fullmatch(found["part"]):
        count = config.get("num_experts", config.get("num_local_experts"))
        if len(tensor.shape) != (2 if leaf == "bias" else 3) or tensor.shape[0] != count:
            raise CheckpointError(
                f"{tensor.path}: tensor '{tensor.name}' has shape {list(tensor.shape)}, the "
                f"metadata says {count} experts: the file is damaged, download it again"
            )
        return {
            f"{prefix}{_expert(family, index, experts['part'])}.{leaf}": _nth(tensor, index)
            for index in range(tensor.shape[0])
        }
    if old := _OLD_EXPERT.fullmatch(found["part"]):
        return {f"{prefix}{_expert(family, int(old['index']), old['part'])}.{leaf}": tensor}
    if found["part"] in _VECTORS:
        return {prefix + _VECTORS[found["part"]]: tensor}
    inside = family.inside.get(found["part"], _INSIDE.get(found["part"]))
    return {f"{prefix}{inside}.{leaf}" if inside else tensor.name: tensor}


def _expert(family: Family, index: int, part: str) -> str:
    mixtral = "block_sparse_moe" in family.expert
    return family.expert.format(index=index, part=_MIXTRAL[part] if mixtral else part)


def _nth(tensor: GgufTensor, index: int) -> GgufTensor:
    """One expert's matrix or bias from the stack of all experts'."""
    size = (tensor.stop - tensor.start) // tensor.shape[0]
    start = tensor.start + index * size
    return replace(tensor, shape=tensor.shape[1:], start=start, stop=start + size)
