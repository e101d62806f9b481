"""The decoder architectures that specexec runs: one table for sizes, for loading and for the docs.

transformers has the modelling code of each. What stands here is what that code does not tell
without building the model: which parameters a layer has, and what a checkpoint calls them where
its names differ from the module's. Torch-free, because `plan` reads it before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

# (pattern over a parameter's name inside a layer, what the checkpoint's layer calls it)
Rename = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One `model_type` of config.json, as far as it differs from Llama."""

    model_type: str
    title: str  # for people, as README lists it
    mlp: Literal["gated", "plain", "experts"] = "gated"
    norms: int = 2  # vectors of hidden size in a layer's norms, biases not counted
    query_key_norms: bool = False  # a norm of one head's size for queries and one for keys
    # which linears have a bias: those of queries, keys and values ("qkv"); all of attention and
    # MLP, with those of the LayerNorms ("all"); or attention's where config.json asks for them
    biases: Literal["qkv", "all", "as configured"] = "as configured"
    tied_by_default: bool = False  # the head is the embedding table unless config.json says no
    default_head_dim: int | None = None  # hidden size / heads unless given
    default_kv_heads: int | None = None  # as many as query heads unless given
    shared_expert: bool = False  # an expert that every row goes through, with a gate of its own
    renames: tuple[Rename, ...] = ()


_table: dict[str, Architecture] = {}
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(_table)


def register(architecture: Architecture) -> None:
    """Adds an architecture; tests/e2e/test_architectures.py then asks for its test checkpoint."""
    if architecture.model_type in _table:
        raise ValueError(f"architecture '{architecture.model_type}' is registered twice")
    _table[architecture.model_type] = architecture


register(Architecture(model_type="llama", title="Llama"))
register(Architecture(model_type="mistral", title="Mistral"))
register(
    Architecture(
        model_type="mixtral", title="Mixtral", mlp="experts", default_kv_heads=8,
        renames=(
            (r"^mlp\.experts\.experts\.(\d+)\.gate\.", r"block_sparse_moe.experts.\1.w1."),
            (r"^mlp\.experts\.experts\.(\d+)\.up\.", r"block_sparse_moe.experts.\1.w3."),
            (r"^mlp\.experts\.experts\.(\d+)\.down\.", r"block_sparse_moe.experts.\1.w2."),
            (r"^mlp\.gate\.", "block_sparse_moe.gate."),
        ),
    )
)  # fmt: skip
register(Architecture(model_type="qwen2", title="Qwen2", biases="qkv"))
register(
    Architecture(
        model_type="qwen2_moe", title="Qwen2-MoE", mlp="experts", biases="qkv", shared_expert=True,
        renames=(
            (r"^mlp\.experts\.experts\.(\d+)\.(gate|up|down)\.", r"mlp.experts.\1.\2_proj."),
        ),
    )
)  # fmt: skip
register(Architecture(model_type="qwen3", title="Qwen3", query_key_norms=True))
register(
    Architecture(
        model_type="qwen3_moe", title="Qwen3-MoE", mlp="experts", query_key_norms=True,
        renames=(
            (r"^mlp\.experts\.experts\.(\d+)\.(gate|up|down)\.", r"mlp.experts.\1.\2_proj."),
        ),
    )
)  # fmt: skip
register(Architecture(model_type="phi3", title="Phi-3"))
register(
    Architecture(
        model_type="starcoder2", title="StarCoder2", mlp="plain", biases="all",
        tied_by_default=True, default_kv_heads=2,
    )
)  # fmt: skip
register(
    Architecture(
        model_type="gpt_bigcode", title="GPTBigCode (StarCoder)", mlp="plain", biases="all",
        tied_by_default=True,
    )
)  # fmt: skip
register(
    Architecture(
        model_type="gemma2", title="Gemma-2", norms=4, tied_by_default=True, default_head_dim=256
    )
)
register(
    Architecture(
        model_type="gemma3_text", title="Gemma-3 (text)", norms=4, query_key_norms=True,
        tied_by_default=True, default_head_dim=256,
    )
)  # fmt: skip
