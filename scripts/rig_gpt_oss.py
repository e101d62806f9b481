"""A speed rig in the form of gpt-oss's own checkpoints: a layer's MXFP4 experts in one tensor.

Parts that a Llama lacks are set so that they have no effect: biases are 0, and the sinks of
attention are so low that they get no weight. gpt-oss's gate computes
gate * sigmoid(alpha * gate) * (up + 1), clamped; here alpha is 1, the clamps are out of reach, and
the biases of `up` are -1. Every expert holds the source's MLP in MXFP4 among random codes, so the
rig computes nearly what its source does, as a RowRig.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from quantize_rows import mxfp4
from rig_routing import Routers
from rig_shapes import Shape
from rig_tensors import Array, RandomPool, Rig, Source, Words

from specexec_cli.errors import ConfigError

FORMAT = "gpt-oss"
_GROUP = 32
_ATTENTION = re.compile(r"\.self_attn\.[qkvo]_proj\.weight$")
_NO_SINK, _MINUS_ONE = 0xC6EA, 0xBF80  # bfloat16: about -30000, and -1
_FAR = 1e4  # a clamp that no value reaches
_SCALE = 119  # E8M0; with codes up to 6, weights are as large as the other random weights
_PATCH = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # codes and scales of some outputs


class GptOssRig:
    """Makes the rig's tensors, with the interface of rig_tensors.Rig."""

    def __init__(
        self, source: Source, shape: Shape, pool: RandomPool, routers: Routers | None = None
    ) -> None:
        """Begins from a plain rig.

        Raises:
            ConfigError: the shape has no experts, or the source does not fit into it.
        """
        if shape.experts == 1:
            raise ConfigError(f"--format {FORMAT} packs experts, and --shape has none")
        small = source.shape
        sizes = small.hidden, small.intermediate, shape.hidden, shape.intermediate
        if any(size % _GROUP for size in sizes):
            raise ConfigError(
                f"--format {FORMAT}: sizes must be multiples of {_GROUP}, not {sizes}"
            )
        self._plain = Rig(source, shape, pool, routers)
        self.source, self._shape, self._pool = source, shape, pool
        self.norms_in_float32 = self._plain.norms_in_float32
        self._made: tuple[str, dict[str, Array]] = ("", {})

    def config(self, shape_name: str) -> dict[str, Any]:
        """The rig's config.json."""
        own = self.source.config
        rope = {"rope_type": "default", "rope_theta": own.get("rope_theta", 10000.0)}
        return {
            **self._plain.config(shape_name),
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "swiglu_alpha": 1.0,
            "swiglu_limit": _FAR,
            "layer_types": ["full_attention"] * self._shape.layers,
            "sliding_window": 128,
            "rope_parameters": own.get("rope_parameters") or rope,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                           "model.embed_tokens", "lm_head"],
            },
        }  # fmt: skip

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """The names, shapes and safetensors dtypes of all tensors."""
        shape = self._shape
        for name, size, dtype in self._plain.tensors():
            layer, _, rest = name.partition(".block_sparse_moe.")
            if rest == "gate.weight":
                yield f"{layer}.mlp.router.weight", size, dtype
                yield f"{layer}.mlp.router.bias", size[:1], dtype
            elif rest == "experts.0.w1.weight":
                for linear, outputs, inputs in (
                    ("gate_up_proj", 2 * shape.intermediate, shape.hidden),
                    ("down_proj", shape.hidden, shape.intermediate),
                ):
                    rows = shape.experts, outputs
                    stem = f"{layer}.mlp.experts.{linear}"
                    yield f"{stem}_blocks", (*rows, inputs // _GROUP, _GROUP // 2), "U8"
                    yield f"{stem}_scales", (*rows, inputs // _GROUP), "U8"
                    yield f"{stem}_bias", rows, dtype
            elif not rest:
                yield name, size, dtype
            if _ATTENTION.search(name):
                yield f"{name.removesuffix('weight')}bias", size[:1], dtype
            if name.endswith("o_proj.weight"):
                yield f"{name.removesuffix('o_proj.weight')}sinks", (shape.heads,), dtype

    def array(self, name: str, size: tuple[int, ...]) -> Array:
        """The tensor's bytes."""
        if name.endswith(("_blocks", "_scales")):
            stem, _, leaf = name.rpartition("_")
            if self._made[0] != stem:
                self._made = stem, self._experts(stem)
            return self._made[1][leaf]
        if name.endswith(("bias", "sinks")):
            constant = np.zeros(size, np.uint16)
            if name.endswith("gate_up_proj_bias"):
                constant[:, 1::2] = _MINUS_ONE
            elif name.endswith("sinks"):
                constant[:] = _NO_SINK
            return constant
        return self._plain.array(name.replace("mlp.router", "block_sparse_moe.gate"), size)

    def _experts(self, stem: str) -> dict[str, Array]:
        """The codes and scales of one linear, for all experts of a layer."""
        shape, small = self._shape, self.source.shape
        down = stem.endswith("down_proj")
        layer = int(stem.split(".")[2])
        inputs, outputs = (
            (shape.intermediate, shape.hidden) if down else (shape.hidden, 2 * shape.intermediate)
        )
        rows = shape.experts, outputs, inputs // _GROUP
        blocks = self._random((*rows, _GROUP // 2))
        scales = _SCALE + (self._random(rows) & 1)
        groups = (small.intermediate if down else small.hidden) // _GROUP
        # what would add something for live input: columns behind extra units, and rows of `up`
        (blocks if down else blocks[:, 1::2])[:, :, :groups] = 0
        if layer < small.layers:
            prefix = f"model.layers.{layer}.mlp"
            for first, step, linear in (
                [(0, 1, "down_proj")] if down else [(0, 2, "gate_proj"), (1, 2, "up_proj")]
            ):
                codes, own = _packed(self.source[f"{prefix}.{linear}.weight"])
                live = slice(first, first + step * len(codes), step)
                blocks[:, live, :groups], scales[:, live, :groups] = codes, own
        return {"blocks": blocks, "scales": scales}

    def _random(self, size: tuple[int, ...]) -> NDArray[np.uint8]:
        """Random bytes, from the mantissas of the pool's weights."""
        count = math.prod(size)
        words = self._pool.take((2 * count,)) & 15
        return (words[::2] | (words[1::2] << 4)).astype(np.uint8).reshape(size)


def _packed(words: Words) -> _PATCH:
    """Packs bfloat16 words (outputs, inputs) to codes (outputs, groups, bytes) and scales."""
    weight = torch.from_numpy(words.copy()).view(torch.bfloat16).float()
    leaves = mxfp4(weight)
    codes, scales = leaves["weight_packed"].numpy(), leaves["weight_scale"].numpy()
    return codes.reshape(*scales.shape, _GROUP // 2), scales
