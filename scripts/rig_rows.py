"""A speed rig with packed linears: a plain rig that is packed as it is written.

A GPTQ rig computes exactly what its quantized source computes. This one computes nearly that, since
a group of the rig's inputs, or a tile, may hold weights of several groups of the source. Its bytes
and arithmetic are those of the format, and drafts are accepted as often as with the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from quantize_columns import PACKERS
from rig_gptq import is_linear
from rig_routing import Routers
from rig_shapes import Shape
from rig_tensors import Array, RandomPool, Rig, Source
from specexec_kernels.formats.base import described
from torch import Tensor


class RowRig:
    """Makes the rig's tensors, with the interface of rig_tensors.Rig."""

    def __init__(
        self,
        source: Source,
        shape: Shape,
        pool: RandomPool,
        recipe: str,
        routers: Routers | None = None,
    ) -> None:
        """Begins from a plain rig.

        Raises:
            ConfigError: the source does not fit into the shape.
        """
        self._plain = Rig(source, shape, pool, routers)
        self.source, self._recipe = source, PACKERS[recipe]
        self.norms_in_float32 = self._plain.norms_in_float32
        self._leaves: dict[tuple[int, ...], dict[str, tuple[str, tuple[int, ...]]]] = {}
        self._packed: tuple[str, dict[str, Tensor]] = ("", {})
        self._sizes: dict[str, tuple[int, ...]] = {}

    def config(self, shape_name: str) -> dict[str, Any]:
        """The rig's config.json."""
        return {
            **self._plain.config(shape_name),
            "quantization_config": dict(self._recipe.settings),
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """The names, shapes and safetensors dtypes, in the order of transformers' state dict."""
        for name, size, dtype in self._plain.tensors():
            if not is_linear(name):
                yield name, size, dtype
                continue
            linear = name.removesuffix(".weight")
            self._sizes[linear] = size
            if size not in self._leaves:
                self._leaves[size] = described(self._recipe.pack(torch.zeros(size)))
            for leaf, (kind, shape) in self._leaves[size].items():
                yield f"{linear}.{leaf}", shape, kind

    def array(self, name: str, size: tuple[int, ...]) -> Array:
        """A tensor's bytes; the tensors of a linear are made together."""
        linear = next((each for each in _beginnings(name) if each in self._sizes), None)
        if linear is None:
            return self._plain.array(name, size)
        if self._packed[0] != linear:
            words = self._plain.array(f"{linear}.weight", self._sizes[linear])
            weight = torch.from_numpy(words).view(torch.bfloat16).float()
            self._packed = linear, self._recipe.pack(weight)
        tensor = self._packed[1][name.removeprefix(f"{linear}.")]
        found: Array = tensor.reshape(-1).view(torch.uint8).numpy()
        return found


def _beginnings(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name
