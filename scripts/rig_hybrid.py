"""A speed rig most of whose layers keep a recurrent state, and which computes its source exactly.

It is a Bamba: every fourth layer attends as a Llama does and holds a layer of the source, as in a
plain rig. The three before it run Mamba-2 over random weights. The values that a row would write
into their states are zero for live input, so such a layer adds exactly zero to the residual, as do
the extra layers of a plain rig; every product and every recurrence is run all the same.

Qwen3.5's own layers (rig_random.py) could not hold a Llama: they norm queries and keys in each
head, which no product in front of it can undo.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rig_shapes import Shape
from rig_tensors import Array, RandomPool, Rig, Source

from specexec_cli.errors import ConfigError

MODEL_TYPE = "bamba"
EVERY = 4  # one of so many layers attends, the last of them, as in Qwen3.5
_CONVOLVED = 4  # tokens that a convolution sees
_GROUPS = 8  # of heads that share keys, where their number allows
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OWN_NAMES = {"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm",
              "model.norm.": "model.final_layernorm."}  # fmt: skip


class HybridRig:
    """Makes the rig's tensors, with the interface of rig_tensors.Rig."""

    def __init__(self, source: Source, shape: Shape, pool: RandomPool) -> None:
        """Begins from a plain rig of the layers that attend.

        Raises:
            ConfigError: the source does not fit into the shape, or the shape's layers do not end
                with one that attends.
        """
        if shape.layers % EVERY:
            raise ConfigError(f"one layer of {EVERY} attends: layers must be a multiple of {EVERY},"
                              f" not {shape.layers}")  # fmt: skip
        self._plain = Rig(source, replace(shape, layers=shape.layers // EVERY, state_heads=0), pool)
        self.source, self._shape, self._pool = source, shape, pool
        self.norms_in_float32 = self._plain.norms_in_float32

    def config(self, shape_name: str) -> dict[str, Any]:
        """The rig's config.json."""
        shape, own = self._shape, self.source.config
        rope = own.get("rope_parameters") or {
            "rope_type": "default", "rope_theta": own.get("rope_theta", 10000.0)
        }  # fmt: skip
        return {
            **self._plain.config(shape_name),
            "model_type": MODEL_TYPE,
            "architectures": ["BambaForCausalLM"],
            "num_hidden_layers": shape.layers,
            "attn_layer_indices": list(range(EVERY - 1, shape.layers, EVERY)),
            "rope_parameters": {**rope, "partial_rotary_factor": 1.0},
            "mamba_n_heads": shape.state_heads,
            "mamba_d_head": shape.hidden // shape.state_heads,
            "mamba_d_state": shape.hidden // shape.state_heads,
            "mamba_n_groups": self._groups,
            "mamba_d_conv": _CONVOLVED,
            "mamba_expand": 1,
        }

    @property
    def _groups(self) -> int:
        return math.gcd(_GROUPS, self._shape.state_heads)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """The names, shapes and safetensors dtypes of all tensors."""
        for name, size, dtype in self._plain.tensors():
            found = _LAYER.match(name)
            if not found:
                yield _own_name(name), size, dtype
                continue
            first, leaf = EVERY * int(found[1]), _own_name(name[found.end() :])
            yield f"model.layers.{first + EVERY - 1}.{leaf}", size, dtype
            for layer in range(first, first + EVERY - 1):
                if not leaf.startswith("self_attn"):
                    yield f"model.layers.{layer}.{leaf}", size, dtype
                elif leaf.startswith("self_attn.q_proj"):
                    for part, part_size in self._mixer_sizes():
                        yield f"model.layers.{layer}.mamba.{part}", part_size, "BF16"

    def _mixer_sizes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        shape = self._shape
        heads, wide = shape.state_heads, shape.hidden
        convolved = wide + 2 * self._groups * (wide // heads)
        yield from ((name, (heads,)) for name in ("dt_bias", "A_log", "D"))
        yield "conv1d.weight", (convolved, 1, _CONVOLVED)
        yield "conv1d.bias", (convolved,)
        yield "in_proj.weight", (wide + convolved + heads, wide)
        yield "norm.weight", (wide,)
        yield "out_proj.weight", (wide, wide)

    def array(self, name: str, size: tuple[int, ...]) -> Array:
        """A tensor, as bits of bfloat16, or as float32 for norms that need it."""
        found = _LAYER.match(name)
        plain = _plain_name(name)
        if not found:
            return self._plain.array(plain, size)
        layer, leaf = int(found[1]), plain[found.end() :]
        attends = layer % EVERY == EVERY - 1
        if not leaf.startswith("mamba."):
            # a layer behind the source's adds zero
            place = layer // EVERY if attends else self.source.shape.layers
            return self._plain.array(f"model.layers.{place}.{leaf}", size)
        array, wide = self._pool.take(size), self._shape.hidden
        if leaf == "mamba.in_proj.weight":  # gates, values, keys, queries and steps, in this order
            array[wide : 2 * wide, : self.source.shape.hidden] = 0
        elif leaf == "mamba.conv1d.bias":
            array[:wide] = 0
        return array


def _own_name(plain: str) -> str:
    """What a Bamba calls a Llama's tensor."""
    for theirs, own in _OWN_NAMES.items():
        plain = plain.replace(theirs, own)
    return plain


def _plain_name(own: str) -> str:
    """What a Llama calls a Bamba's tensor."""
    for theirs, name in _OWN_NAMES.items():
        own = own.replace(name, theirs)
    return own
