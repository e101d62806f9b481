"""A speed rig in GPTQ format: computes the round-to-nearest quantized source exactly.

The source's linears are quantized first (as scripts/quantize_rtn.py does). Then codes and scales
are placed in the rig as rig_tensors places weights: a weight that moves keeps its code and scale, a
weight of zero has the code of the zero point, and q_proj's factor goes into its scales. A group of
the rig must not mix two groups of the source, so the rig's groups are no longer than a head, since
the columns of o_proj are moved head by head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from quantize_gptq import round_to_nearest
from quantize_rtn import GROUP_SIZE, LINEARS, quantization_config
from rig_routing import Routers
from rig_shapes import Shape
from rig_tensors import Array, RandomPool, Rig, Source, Words, source_name
from specexec_kernels.packing import pack_rows, store_zeros

from specexec_cli.errors import ConfigError

_LEAVES = ("qweight", "qzeros", "scales")


class _Codes(RandomPool):
    """Random codes minus the zero point (modulo 2**bits), so that 0 is a weight of zero."""

    def __init__(self, seed: int, bits: int) -> None:
        super().__init__(seed)
        self._mask = np.uint16(2**bits - 1)

    def take(self, shape: tuple[int, ...]) -> Words:
        return super().take(shape) & self._mask


class _NoScales(RandomPool):
    """Scales that are zero wherever there is no weight of the source."""

    def take(self, shape: tuple[int, ...]) -> Words:
        return np.zeros(shape, dtype=np.uint16)


class _Plane(Source):
    """The codes or the scales of the quantized source, a uint16 for each weight."""

    def __init__(self, source: Source, planes: dict[str, NDArray[np.uint16]]) -> None:
        self.folder, self.config, self.shape = source.folder, source.config, source.shape
        self._planes = planes

    def __getitem__(self, name: str) -> Words:
        return self._planes[name]


class _CodePlane(_Plane):
    def scaled_words(self, name: str, factor: float) -> Words:
        """The codes, which a factor does not change."""
        return self._planes[name]


class _ScalePlane(_Plane):
    def scaled_words(self, name: str, factor: float) -> Words:
        """The fp16 bits of the scales times a factor, which must be a power of two."""
        return (self._planes[name].view(np.float16) * np.float16(factor)).view(np.uint16)


class GptqRig:
    """Makes the rig's tensors, with the interface of rig_tensors.Rig."""

    def __init__(
        self,
        source: Source,
        shape: Shape,
        pool: RandomPool,
        bits: int,
        routers: Routers | None = None,
    ) -> None:
        """Quantizes the source.

        Args:
            routers: of a mixture; random ones where not given.
        Raises:
            ConfigError: it does not fit into the shape, or groups do not.
        """
        self._plain = Rig(source, shape, pool, routers)
        self.source, self.bits = source, bits
        self.norms_in_float32 = self._plain.norms_in_float32
        self.group_size = math.gcd(GROUP_SIZE, shape.head_dim, shape.hidden, shape.intermediate)
        if GROUP_SIZE % source.shape.head_dim:
            raise ConfigError(f"the source's heads of {source.shape.head_dim} do not divide its "
                              f"quantization groups of {GROUP_SIZE}")  # fmt: skip
        codes, scales = {}, {}
        for name in source.names():
            if is_linear(name):
                codes[name], scales[name] = _quantized(source, name, bits)
        seed = int(pool.take((4,)).view(np.uint64)[0])
        self._codes = Rig(_CodePlane(source, codes), shape, _Codes(seed, bits))
        self._scales = Rig(_ScalePlane(source, scales), shape, _NoScales(seed))
        self._random = np.random.default_rng(seed)
        self._packed: tuple[str, dict[str, Array]] = ("", {})

    def config(self, shape_name: str) -> dict[str, Any]:
        """The rig's config.json."""
        quantization = quantization_config(self.bits, self.group_size)
        return {**self._plain.config(shape_name), "quantization_config": quantization}

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """The names, shapes and safetensors dtypes, in the order of transformers' state dict."""
        for name, size, dtype in self._plain.tensors():
            if not is_linear(name):
                yield name, size, dtype
                continue
            (outputs, inputs), linear = size, name.removesuffix(".weight")
            groups, words = inputs // self.group_size, outputs * self.bits // 32
            yield f"{linear}.qweight", (inputs * self.bits // 32, outputs), "I32"
            yield f"{linear}.qzeros", (groups, words), "I32"
            yield f"{linear}.scales", (groups, outputs), "F16"

    def array(self, name: str, size: tuple[int, ...]) -> Array:
        """A tensor; the three tensors of a linear are made together."""
        linear, _, leaf = name.rpartition(".")
        if leaf not in _LEAVES:
            return self._plain.array(name, size)
        if self._packed[0] != linear:
            whole = next(s for n, s, _ in self._plain.tensors() if n == f"{linear}.weight")
            self._packed = (linear, self._pack(f"{linear}.weight", whole))
        return self._packed[1][leaf]

    def _pack(self, name: str, size: tuple[int, ...]) -> dict[str, Array]:
        outputs, inputs = size
        groups, zero = inputs // self.group_size, 2 ** (self.bits - 1)
        codes = (self._codes.array(name, size) + np.uint16(zero)) & np.uint16(2**self.bits - 1)
        # positive fp16 numbers are ordered as their bits are
        scales = self._scales.array(name, size).reshape(outputs, groups, -1).max(-1)
        free = scales == 0
        random = self._random.uniform(0.002, 0.01, int(free.sum())).astype(np.float16)
        scales[free] = random.view(np.uint16)
        zeros = torch.full((groups, outputs), zero)
        return {
            "qweight": pack_rows(torch.from_numpy(codes.astype(np.int32)).T, self.bits).numpy(),
            "qzeros": store_zeros(zeros, self.bits, minus_one=True).numpy(),
            "scales": np.ascontiguousarray(scales.T),
        }


def is_linear(name: str) -> bool:
    """Whether a tensor of a rig is the weight of a linear that is quantized."""
    return source_name(name).removesuffix(".weight").rpartition(".")[2] in LINEARS


def _quantized(source: Source, name: str, bits: int) -> tuple[Words, Words]:
    """The codes minus the zero point, and the fp16 bits of each weight's scale."""
    weight = torch.from_numpy(source.scaled(name, 1.0))
    group = min(GROUP_SIZE, weight.shape[1])
    codes, scales = round_to_nearest(weight, bits, group)
    signed = (codes - 2 ** (bits - 1)) & (2**bits - 1)
    spread = scales.repeat_interleave(group, dim=1)[:, : weight.shape[1]]
    return signed.to(torch.uint16).numpy(), spread.contiguous().view(torch.uint16).numpy()
