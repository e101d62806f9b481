"""Shapes a speed rig can take, and where a small model's heads go in them. Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexec_cli.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Llama-like model, without its vocabulary.

    A mixture has `experts` MLPs of `intermediate` units in each layer, `chosen` of them for a row.
    With `state_heads`, three of four layers keep a recurrent state in place of keys and values: of
    that many heads, as wide together as a row, each a square matrix.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int = 1
    chosen: int = 1
    state_heads: int = 0
    model_type: str = "llama"

    def __post_init__(self) -> None:
        optional = ("model_type", "state_heads")
        sizes = [getattr(self, f.name) for f in fields(self) if f.name not in optional]
        if min(sizes) < 1:
            raise ConfigError(f"{self}: sizes must be 1 or more")
        if self.heads % self.kv_heads or self.hidden % self.heads or self.head_dim % 2:
            raise ConfigError(
                f"{self}: hidden must be a multiple of heads, heads of kv_heads, head_dim of 2"
            )
        if self.chosen > self.experts or (self.experts > 1) != (self.model_type == "mixtral"):
            raise ConfigError(f"{self}: a mixtral chooses some of several experts, others have one")
        if self.state_heads and (self.hidden % self.state_heads or self.experts > 1):
            raise ConfigError(
                f"{self}: hidden must be a multiple of state_heads, which a mixture has none of"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    def widened(self, times: int) -> str:
        """The shape that is so many times as wide, of as many layers, as parse_shape() takes it."""
        wider = {
            "hidden": self.hidden * times, "layers": self.layers, "heads": self.heads * times,
            "kv_heads": self.kv_heads * times, "head_dim": self.head_dim,
            "intermediate": self.intermediate * times,
        }  # fmt: skip
        return ",".join(f"{name}={size}" for name, size in wider.items())


SHAPES = {
    "llama2-7b": Shape(hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128,
                       intermediate=11008),
    "llama2-13b": Shape(hidden=5120, layers=40, heads=40, kv_heads=40, head_dim=128,
                        intermediate=13824),
    "llama2-70b": Shape(hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128,
                        intermediate=28672),
    "mistral-7b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
                        intermediate=14336, model_type="mistral"),
    # Mixtures are Mixtrals in sizes of these models: the others norm queries and keys, or have
    # attention sinks, which the source does not. An expert holds the whole MLP of the source, so
    # those of qwen3-30b-a3b have the demo target's 896 units instead of 768; gpt-oss-120b's heads
    # of 64 are paired to heads of 128.
    "mixtral-8x7b": Shape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
                          intermediate=14336, experts=8, chosen=2, model_type="mixtral"),
    "qwen3-30b-a3b": Shape(hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128,
                           intermediate=896, experts=128, chosen=8, model_type="mixtral"),
    "qwen3-235b-a22b": Shape(hidden=4096, layers=94, heads=64, kv_heads=4, head_dim=128,
                             intermediate=1536, experts=128, chosen=8, model_type="mixtral"),
    "gpt-oss-120b": Shape(hidden=2880, layers=36, heads=32, kv_heads=4, head_dim=128,
                          intermediate=2880, experts=128, chosen=4, model_type="mixtral"),
    # with --format gpt-oss; without, one of MODELS
    "gpt-oss-20b": Shape(hidden=2880, layers=24, heads=32, kv_heads=4, head_dim=128,
                         intermediate=2880, experts=32, chosen=4, model_type="mixtral"),
    # Qwen3.8-27B's sizes (see MODELS) as nearly as a Bamba can have them: 40 heads of 128 attend in
    # place of 24 of 256, and 40 keep a state of 128 x 128 in place of 48
    "hybrid-27b": Shape(hidden=5120, layers=64, heads=40, kv_heads=8, head_dim=128,
                        intermediate=17408, state_heads=40),
}  # fmt: skip
# Models whose layers cannot hold the source's weights (rig_random.py): what differs from the
# defaults of transformers' config class.
MODELS: dict[str, dict[str, Any]] = {
    # github.com/google/gemma_pytorch, gemma/config.py, get_config_for_27b_v3
    "gemma-3-27b": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62,
        "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    # arXiv:2508.10925, table 1 and section 2; the defaults are those of gpt-oss-120b
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32,
    },
    # Three of four layers keep a recurrent state (Gated DeltaNet). Attention norms queries and keys
    # in each head, which no product in front of it can undo.
    # github.com/THUDM/slime, scripts/models/qwen3.5-27B.sh; the model card of Qwen3.6-27B has the
    # 48 value heads, and Qwen3.8-27B is of the same architecture
    "qwen3.8-27b": {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64,
        "intermediate_size": 17408, "num_attention_heads": 24, "linear_num_value_heads": 48,
    },
    # its model card; all of it is the default of transformers' config class
    "qwen3.6-35b-a3b": {"model_type": "qwen3_5_moe_text"},
}  # fmt: skip


def parse_shape(text: str) -> Shape:
    """A name of SHAPES, or sizes: "hidden=1024,layers=4,heads=8,kv_heads=8,head_dim=128,...".

    Raises:
        ConfigError: it is neither.
    """
    if "=" not in text:
        if text not in SHAPES:
            known = [*dict.fromkeys((*SHAPES, *MODELS))]
            raise ConfigError(f"no shape '{text}'.{nearest(text, known)} "
                              f"Known: {', '.join(known)}, or hidden=...,layers=...")  # fmt: skip
        return SHAPES[text]
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    try:
        sizes = {key.strip(): int(value) for key, value in pairs.items()}
        return Shape(**sizes, model_type="mixtral" if sizes.get("experts", 1) > 1 else "llama")
    except (TypeError, ValueError) as error:
        names = ", ".join(f.name for f in fields(Shape) if f.name != "model_type")
        raise ConfigError(f"--shape {text}: needs whole numbers for {names} ({error})") from None


def place_heads(small: Shape, shape: Shape) -> tuple[list[int], list[int], list[int]]:
    """Where the source's heads go.

    Returns:
        for each source query head, its head in the shape; the shape's KV heads in use; and for
        each of those, the source KV head it holds (one source KV head may be held several times).
    Raises:
        ConfigError: there are too few heads.
    """
    heads, kv_heads, kv_sources = [], [], []
    for source in range(small.kv_heads):
        for query in range(small.group):
            if query % shape.group == 0:
                kv_heads.append(len(kv_heads))
                kv_sources.append(source)
            heads.append(kv_heads[-1] * shape.group + query % shape.group)
    if len(kv_heads) > shape.kv_heads:
        raise ConfigError(
            f"the source's {small.heads} query heads over {small.kv_heads} KV heads need "
            f"{len(kv_heads)} KV heads of the shape, which has {shape.kv_heads}"
        )
    return heads, kv_heads, kv_sources


def place_dims(small: int, large: int) -> NDArray[np.int64]:
    """Where a head's dimensions go: to rotary pairs of the same frequency."""
    first = np.arange(small // 2) * (large // small)
    return np.concatenate([first, first + large // 2])
