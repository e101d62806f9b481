"""The decoder architectures that specexec runs: one table for sizes, for loading and for the docs.

transformers has the modelling code of each. What stands here is what that code does not tell
without building the model: which parameters a layer has, and what a checkpoint calls them where
its names differ from the module's. Torch-free, because `plan` reads it before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal

from specexec_cli.catalog.conforming import REFUSED, RUNS


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One `model_type` of config.json, as far as it differs from Llama."""

    model_type: str
    title: str  # for people, as README lists it
    # "built": sizes are not told from these fields, but counted on a model built without weights
    mlp: Literal["built", "gated", "plain", "experts"] = "built"
    norms: int = 2  # vectors of hidden size in a layer's norms, biases not counted
    # a norm for queries and one for keys, each of the size of one head or of all of them;
    # "as configured": of one head where config.json says use_qk_norm
    query_key_norms: Literal["none", "one head", "all heads", "as configured"] = "none"
    # which linears have a bias: those of queries, keys and values ("qkv"); all of attention and
    # MLP, with those of the LayerNorms ("all"); or, where config.json asks for them, attention's
    # or of these the first three; or attention's, the router's and the experts'
    biases: Literal["qkv", "all", "as configured", "qkv as configured", "with experts"] = (
        "as configured"
    )
    sinks: bool = False  # a number for each query head, which attention may give its weight to
    tied_by_default: bool = False  # the head is the embedding table unless config.json says no
    default_head_dim: int | None = None  # hidden size / heads unless given
    default_kv_heads: int | None = None  # as many as query heads unless given
    # an expert that every row goes through; where config.json counts such experts, its count tells
    shared_expert: Literal["as counted", "with a gate", "one"] = "as counted"
    router_bias: bool = False  # a number for each expert that is added where experts are chosen
    latent: bool = False  # keys and values of all heads come from one cached vector (MLA)
    gemma4: bool = False  # layers of two kinds, and what else Gemma 4 alone has in them


# a maker's `model_type` -> transformers' own of the same architecture.
# Source: "Kimi-K2 reuses the DeepSeekV3CausalLM architecture [...] you can still run the model by
# changing model_type to deepseek_v3", MoonshotAI/Kimi-K2/docs/deploy_guidance.md
ALIASES: Mapping[str, str] = MappingProxyType({"kimi_k2": "deepseek_v3"})

_FLOATS = ("Infinity", "-Infinity", "NaN")
_table: dict[str, Architecture] = {}
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(_table)


def known_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json as transformers' config classes take it.

    It has transformers' `model_type` in place of an alias of it, and infinities and NaN in place of
    the objects as which transformers writes them.
    """
    known = ALIASES.get(str(config.get("model_type")))
    found = {name: _with_floats(value) for name, value in config.items()}
    return found if known is None else {**found, "model_type": known}


def _with_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in _FLOATS:
        return float(value["__float__"])
    return {name: _with_floats(each) for name, each in value.items()}


def refusal(model_type: str) -> str:
    """One line about a `model_type` that is not in the table: why, and what comes nearest."""
    reason = REFUSED.get(model_type)
    near = relatives(model_type, ARCHITECTURES)
    return (
        f"architecture '{model_type}' is not supported"
        + (f": {reason}. " if reason else ". ")
        + (f"Nearest of those that run: {', '.join(near)}. " if near else "")
        + "docs/architectures.md lists all"
    )


def relatives(model_type: str, known: Iterable[str]) -> list[str]:
    """At most three of the known types whose names begin as this one's, the nearest first."""
    family = re.split(r"[_.-]", model_type)[0].rstrip("0123456789")
    same = [name for name in known if family and name.startswith(family)]
    return get_close_matches(model_type, same, n=3, cutoff=0.0)


def register(architecture: Architecture) -> None:
    """Adds an architecture; tests/e2e/test_architectures.py then asks for its test checkpoint."""
    if architecture.model_type in _table:
        raise ValueError(f"architecture '{architecture.model_type}' is registered twice")
    _table[architecture.model_type] = architecture


register(Architecture(model_type="llama", title="Llama", mlp="gated"))
register(Architecture(model_type="mistral", title="Mistral", mlp="gated"))
register(Architecture(model_type="mixtral", title="Mixtral", mlp="experts", default_kv_heads=8))
register(Architecture(model_type="qwen2", title="Qwen2", mlp="gated", biases="qkv"))
register(
    Architecture(
        model_type="qwen2_moe", title="Qwen2-MoE", mlp="experts", biases="qkv",
        shared_expert="with a gate",
    )
)  # fmt: skip
register(Architecture(model_type="deepseek_v2", title="DeepseekV2", mlp="experts", latent=True))
register(
    Architecture(
        model_type="deepseek_v3", title="DeepseekV3", mlp="experts", latent=True, router_bias=True,
    )
)  # fmt: skip
register(
    Architecture(
        model_type="glm4_moe_lite", title="Glm4MoeLite", mlp="experts", latent=True,
        router_bias=True,
    )
)  # fmt: skip
register(
    Architecture(
        model_type="minimax_m2", title="MiniMaxM2", mlp="experts", query_key_norms="all heads",
        router_bias=True,
    )
)  # fmt: skip
register(
    Architecture(model_type="llama4_text", title="Llama4Text", mlp="experts", shared_expert="one")
)
register(
    Architecture(
        model_type="glm4_moe", title="Glm4Moe", mlp="experts", biases="qkv as configured",
        query_key_norms="as configured", router_bias=True,
    )
)  # fmt: skip
register(Architecture(model_type="qwen3", title="Qwen3", mlp="gated", query_key_norms="one head"))
register(
    Architecture(
        model_type="qwen3_moe", title="Qwen3-MoE", mlp="experts", query_key_norms="one head",
    )
)  # fmt: skip
register(
    Architecture(
        model_type="gpt_oss", title="GptOss", mlp="experts", biases="with experts", sinks=True,
        default_head_dim=64, default_kv_heads=8,
    )
)  # fmt: skip
register(Architecture(model_type="phi3", title="Phi-3", mlp="gated"))
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
        model_type="gemma2",
        title="Gemma-2",
        mlp="gated",
        norms=4,
        tied_by_default=True,
        default_head_dim=256,
    )
)
register(
    Architecture(
        model_type="gemma3_text", title="Gemma-3 (text)", mlp="gated", norms=4,
        query_key_norms="one head", tied_by_default=True, default_head_dim=256,
    )
)  # fmt: skip
register(
    Architecture(
        model_type="gemma4_text", title="Gemma4Text", mlp="gated", gemma4=True,
        tied_by_default=True, default_head_dim=256,
    )
)  # fmt: skip
register(
    Architecture(model_type="cohere2", title="Cohere2", mlp="gated", norms=1, tied_by_default=True)
)
register(
    Architecture(
        model_type="seed_oss", title="SeedOss", mlp="gated", biases="qkv as configured",
        default_head_dim=128,
    )
)  # fmt: skip
register(Architecture(model_type="ministral3", title="Ministral3", mlp="gated"))
register(Architecture(model_type="granite", title="Granite", mlp="gated"))
register(Architecture(model_type="smollm3", title="SmolLM3", mlp="gated", tied_by_default=True))
register(Architecture(model_type="olmo2", title="Olmo2", mlp="gated", query_key_norms="all heads"))
register(
    Architecture(
        model_type="glm4", title="Glm4", mlp="gated", norms=4, biases="qkv as configured",
    )
)  # fmt: skip
for _model_type, _title in RUNS.items():  # those that nothing has to be said about
    if _model_type not in _table:
        register(Architecture(model_type=_model_type, title=_title))
