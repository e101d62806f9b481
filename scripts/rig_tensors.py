"""The tensors of a speed rig: a small Llama's weights inside those of a large shape.

The source's d residual dimensions are the first d of the shape's D; the others stay zero. All
other weights are random, so a disk cannot compress them and no arithmetic is saved:
- what enters a layer is zero beyond d, so weights read only by those dimensions may be anything;
- query dimensions without a counterpart are zero for live input, so their keys may be anything;
- values and `up` units without a counterpart are zero for live input, so the columns of o_proj and
  down_proj behind them may be anything, and an extra layer adds exactly zero to the residual;
- live columns of o_proj and down_proj are zero beyond d, and those of query heads without a
  counterpart that share a live KV head are zero altogether.
RMSNorm averages over D instead of d: its weight is scaled by sqrt(d / D) and its epsilon by d / D.
Attention divides by sqrt(head_dim): q_proj is scaled by sqrt(HD / hd). Rotary pair (i, i + hd/2)
goes to (i * HD/hd, i * HD/hd + HD/2), which turns at the same frequency. Norm weights are float32
where sqrt(d / D) is not a power of two (D = 5120 or 8192 over d = 256), bfloat16 elsewhere. What
remains of a difference is then float32 rounding: in the norms' scale and in the order of sums.
Every expert of a mixture holds the source's MLP among random weights of its own, and the weights of
a row's experts sum to one: whatever the routing, the sum over them is that MLP.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rig_routing import Routers
from rig_shapes import Shape, place_dims, place_heads

from specexec_cli.errors import CheckpointError, ConfigError
from specexec_cli.offload.resident import read_tensors
from specexec_cli.offload.store import read_checkpoint

Words = NDArray[np.uint16]  # bfloat16 as its bits
Array = NDArray[Any]

# a Mixtral expert's linears, by the source's
EXPERT_LINEARS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_EXPERT = re.compile(r"block_sparse_moe\.experts\.\d+\.(w\d)\.")

POOL_WORDS = 16_000_057  # random weights are cut from a pool, at offsets no block size divides


def source_name(name: str) -> str:
    """What the source calls the tensor that a rig's tensor holds."""
    linears = {leaf: linear for linear, leaf in EXPERT_LINEARS.items()}
    return _EXPERT.sub(lambda found: f"mlp.{linears[found[1]]}.", name)


def shape_of(config: dict[str, Any]) -> Shape:
    """The sizes in a Llama's config.json."""
    heads = int(config["num_attention_heads"])
    return Shape(
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate=int(config["intermediate_size"]),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json.

    Raises:
        CheckpointError: there is none.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json cannot be read: {error}") from None
    return config


class Source:
    """The small model a rig computes: a Llama checkpoint, whose weights are rounded to bfloat16."""

    def __init__(self, folder: Path) -> None:
        """Read all of it.

        Raises:
            CheckpointError: not a checkpoint, or one whose function cannot be kept exactly.
        """
        self.folder, self.config = folder, read_config(folder)
        self._refuse_unusual()
        stored = read_tensors(list(read_checkpoint(folder).tensors.values()))
        for name, tensor in stored.items():
            if tensor.dtype not in (torch.bfloat16, torch.float32):
                raise CheckpointError(
                    f"{folder}: '{name}' is {tensor.dtype}, a rig needs bfloat16 or float32"
                )
        self._tensors = {name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}
        self.shape = shape_of(self.config)

    def _refuse_unusual(self) -> None:
        config = self.config
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        unusual = [
            config.get("model_type") != "llama" and f"model_type {config.get('model_type')}",
            rope.get("rope_type", "default") != "default" and "scaled rotary positions",
            (config.get("attention_bias") or config.get("mlp_bias")) and "biases",
            config.get("quantization_config") and "quantized weights",
        ]
        if any(unusual):
            raise CheckpointError(
                f"{self.folder} has {', '.join(u for u in unusual if u)}: "
                "a rig is made from a plain Llama checkpoint"
            )

    def __getitem__(self, name: str) -> Words:
        """A weight's bits."""
        if name == "lm_head.weight" and name not in self._tensors:  # tied
            name = "model.embed_tokens.weight"
        return self._tensors[name].view(torch.uint16).numpy()

    def names(self) -> list[str]:
        """Every tensor of the checkpoint."""
        return list(self._tensors)

    def scaled(self, name: str, factor: float) -> NDArray[np.float32]:
        """A weight times a factor, rounded once to float32."""
        return (self._tensors[name].double() * factor).float().numpy()

    def scaled_words(self, name: str, factor: float) -> Words:
        """A weight's bits times a factor that is a power of two."""
        return (self.scaled(name, factor).view(np.uint32) >> 16).astype(np.uint16)


class RandomPool:
    """Random bfloat16 weights, normal with a deviation of 0.02, as fast as memory copies them."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    @cached_property
    def _words(self) -> Words:
        normal = self._random.standard_normal(POOL_WORDS, dtype=np.float32) * np.float32(0.02)
        return (normal.view(np.uint32) >> 16).astype(np.uint16)

    def take(self, shape: tuple[int, ...]) -> Words:
        """An array of its own."""
        flat = np.empty(math.prod(shape), dtype=np.uint16)
        done = 0
        while done < len(flat):
            words = self._words
            start = int(self._random.integers(len(words)))
            part = words[start : start + len(flat) - done]
            flat[done : done + len(part)] = part
            done += len(part)
        return flat.reshape(shape)


class Rig:
    """What every tensor of the rig holds."""

    def __init__(
        self, source: Source, shape: Shape, pool: RandomPool, routers: Routers | None = None
    ) -> None:
        """Check that the source fits into the shape.

        Args:
            routers: of a mixture; random ones unless given.
        Raises:
            ConfigError: it does not.
        """
        self.source, self.shape, self._pool, self._routers = source, shape, pool, routers
        small = source.shape
        for name in ("hidden", "layers", "intermediate"):
            if getattr(shape, name) < getattr(small, name):
                raise ConfigError(
                    f"the source has {name} {getattr(small, name)}, "
                    f"which does not fit into the shape's {getattr(shape, name)}"
                )
        stretch = shape.head_dim / small.head_dim
        if not _is_power_of_4(stretch):
            raise ConfigError(f"head_dim {shape.head_dim} is not 1, 4, 16, ... times the source's "
                              f"{small.head_dim}: q_proj could not be scaled exactly")  # fmt: skip
        self._query_scale = math.sqrt(stretch)
        self._norm_scale = math.sqrt(small.hidden / shape.hidden)
        self.norms_in_float32 = not _is_power_of_4(shape.hidden / small.hidden)
        self._heads, self._kv_heads, self._kv_sources = place_heads(small, shape)
        self._dims = place_dims(small.head_dim, shape.head_dim)

    def config(self, shape_name: str) -> dict[str, Any]:
        """The rig's config.json."""
        shape, small = self.shape, self.source.shape
        config = {
            **self.source.config,
            "model_type": shape.model_type,
            "architectures": [f"{shape.model_type.capitalize()}ForCausalLM"],
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": self.source.config["rms_norm_eps"] * small.hidden / shape.hidden,
            "tie_word_embeddings": False,
            # for benchmarks, which say so when they run on a rig
            "speed_rig": {"shape": shape_name, "source_hidden_size": small.hidden,
                          "source_layers": small.layers},
        }  # fmt: skip
        if shape.model_type in ("mistral", "mixtral"):
            config["sliding_window"] = None  # the source attends to everything
        if shape.experts > 1:
            config |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.chosen}
        return config

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Names, shapes and safetensors dtypes in the order of transformers' state dict."""
        for name, size in self._sizes():
            norm = name.endswith("norm.weight")
            yield name, size, "F32" if norm and self.norms_in_float32 else "BF16"

    def _sizes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        shape, vocab = self.shape, int(self.source.config["vocab_size"])
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        wide = shape.hidden
        yield "model.embed_tokens.weight", (vocab, wide)
        for index in range(shape.layers):
            for leaf, size in (
                ("self_attn.q_proj", (query, wide)), ("self_attn.k_proj", (key, wide)),
                ("self_attn.v_proj", (key, wide)), ("self_attn.o_proj", (wide, query)),
                *self._mlp_sizes(), ("input_layernorm", (wide,)),
                ("post_attention_layernorm", (wide,)),
            ):  # fmt: skip
                yield f"model.layers.{index}.{leaf}.weight", size
        yield "model.norm.weight", (wide,)
        yield "lm_head.weight", (vocab, wide)

    def _mlp_sizes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        wide, inner = self.shape.hidden, self.shape.intermediate
        sizes = {"gate_proj": (inner, wide), "up_proj": (inner, wide), "down_proj": (wide, inner)}
        if self.shape.experts == 1:
            yield from ((f"mlp.{leaf}", size) for leaf, size in sizes.items())
            return
        yield "block_sparse_moe.gate", (self.shape.experts, wide)
        for expert in range(self.shape.experts):
            for leaf, size in sizes.items():
                yield f"block_sparse_moe.experts.{expert}.{EXPERT_LINEARS[leaf]}", size

    def array(self, name: str, size: tuple[int, ...]) -> Array:
        """The tensor, as bits of bfloat16, or as float32 for norms that need it."""
        name = source_name(name)
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        layer = name.split(".")[2] if name.startswith("model.layers.") else "0"
        live = int(layer) < self.source.shape.layers
        if leaf.endswith("norm"):
            return self._norm(name, size, live)
        array = self._pool.take(size)
        # an extra layer must add zero: its values and up units are, for live input
        if leaf in ("v_proj", "up_proj"):
            array[:, : self.source.shape.hidden] = 0
        if leaf == "gate":  # a router may be anything
            if self._routers is not None:
                weights = self._routers.weights(int(layer)).astype(np.float32)
                array[:, : self.source.shape.hidden] = weights.view(np.uint32) >> 16
        elif live:
            fill: Callable[[Words, str], None] = getattr(self, f"_fill_{leaf}")
            fill(array, name)
        return array

    def _norm(self, name: str, size: tuple[int, ...], live: bool) -> Array:
        array = self._pool.take(size)
        weight = (array.astype(np.uint32) << 16).view(np.float32)
        if live:
            weight[: self.source.shape.hidden] = self.source.scaled(name, self._norm_scale)
        elif self._routers is not None:  # which were made for what all dimensions weigh alike in
            weight[: self.source.shape.hidden] = self._norm_scale
        if self.norms_in_float32:
            return weight
        return (weight.view(np.uint32) >> 16).astype(np.uint16)  # exact: a power of two

    def _rows(self, heads: list[int]) -> NDArray[np.int64]:
        """Rows (of q, k, v) or columns (of o_proj) where these heads' dimensions went."""
        return (np.array(heads)[:, None] * self.shape.head_dim + self._dims).reshape(-1)

    def _fill_embed_tokens(self, array: Words, name: str) -> None:
        array[:, self.source.shape.hidden :] = 0
        array[:, : self.source.shape.hidden] = self.source[name]

    def _fill_lm_head(self, array: Words, name: str) -> None:
        array[:, : self.source.shape.hidden] = self.source[name]

    def _fill_q_proj(self, array: Words, name: str) -> None:
        width = self.source.shape.hidden
        every_dim = np.array(self._heads)[:, None] * self.shape.head_dim + np.arange(
            self.shape.head_dim
        )
        array[every_dim.reshape(-1), :width] = 0
        scaled = self.source.scaled_words(name, self._query_scale)
        array[self._rows(self._heads), :width] = scaled

    def _fill_k_proj(self, array: Words, name: str) -> None:
        small = self.source.shape
        heads = self.source[name].reshape(small.kv_heads, small.head_dim, small.hidden)
        array[self._rows(self._kv_heads), : small.hidden] = heads[self._kv_sources].reshape(
            -1, small.hidden
        )

    _fill_v_proj = _fill_k_proj

    def _fill_o_proj(self, array: Words, name: str) -> None:
        # an extra query head that shares a live KV head attends to live values
        sharing = [h for h in range(self.shape.heads) if h // self.shape.group in self._kv_heads]
        array[:, self._rows(sharing)] = 0
        array[: self.source.shape.hidden, self._rows(self._heads)] = self.source[name]

    def _fill_gate_proj(self, array: Words, name: str) -> None:
        small = self.source.shape
        array[: small.intermediate, : small.hidden] = self.source[name]

    _fill_up_proj = _fill_gate_proj

    def _fill_down_proj(self, array: Words, name: str) -> None:
        small = self.source.shape
        array[:, : small.intermediate] = 0
        array[: small.hidden, : small.intermediate] = self.source[name]


def _is_power_of_4(ratio: float) -> bool:
    return ratio >= 1 and math.log2(ratio).is_integer() and math.log2(ratio) % 2 == 0
