"""Weights that are plain floats: (outputs, inputs), or (inputs, outputs) as Conv1D stores them.

Rows are multiplied by weights of their own dtype. Weights that are stored in another dtype are
rounded to it as they are read, in the way of torch's `.to`, so the product has the same bits as one
with a weight that was converted beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specexec_kernels.formats.base import PackedFormat, PackedWeight, Part

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes

_BLOCK = 128  # items; with 32 outputs a tile of 16 KiB, half of the smallest L1 cache in use
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class Plain(PackedFormat):
    """Floats of two or four bytes."""

    name: ClassVar[str] = "plain"
    dtype: str
    transposed: bool = False  # whether it is stored as (inputs, outputs)
    rounded: str = "F32"  # the dtype to which values are rounded
    chained: bool = False  # type: ignore[misc]
    block: int = _BLOCK

    @property
    def unit(self) -> int:  # type: ignore[override]
        """As many inputs as are transposed together, or a few lines where codes go down the
        inputs."""
        return 4 if self.transposed else 32

    @property
    def compiled(self) -> bool:  # type: ignore[override]
        """Whether the kernels know the dtype: DTYPES are all that they read."""
        return self.dtype in DTYPES.values()

    @property
    def fetches_early(self) -> bool:
        return True

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("weight", self.dtype, down=self.transposed),)

    def for_rows(self, rows: torch.dtype, *, pairs: bool) -> Plain:
        own = self if DTYPES[rows] == self.dtype else replace(self, rounded=DTYPES[rows])
        return replace(own, block=2 * _BLOCK) if pairs and not self.transposed else own

    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        rounded = next(dtype for dtype, name in DTYPES.items() if name == self.rounded)
        weight = tensors["weight"].to(rounded).float()
        return weight.T.contiguous() if self.transposed else weight

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for value in self._stored(lanes):
            yield lanes.rounded(value, self.rounded)

    def _stored(self, lanes: Lanes) -> Iterator[Any]:
        if self.transposed:
            for place in range(self.unit):
                yield lanes.line_number("weight", place)
            return
        for word in lanes.read_words("weight", run=lanes.lanes):
            yield from lanes.floats(word, self.dtype)

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        if not self.transposed:
            yield from lanes.read_pairs("weight")
            return
        values = self._stored(lanes)
        pair = lanes.exact_pair if self.dtype == "BF16" else lanes.pair
        for first in values:
            yield pair(first, next(values))


def plain_weight(stored: Tensor, *, transposed: bool = False) -> PackedWeight:
    """A plain tensor of a checkpoint as a weight.

    Args:
        stored: (outputs, inputs) floats.
        transposed: whether it is (inputs, outputs) instead.
    """
    inputs, outputs = stored.shape if transposed else stored.shape[::-1]
    fmt = _format(stored.dtype, transposed, chained=False)
    return PackedWeight(fmt, inputs, outputs, {"weight": stored})


def chained_weight(stored: Tensor) -> PackedWeight:
    """Activations as a weight with products that are summed in rising order of the inputs.

    In such a sum, zeros among the inputs change no bit, wherever they are.

    Args:
        stored: (inputs, outputs) floats.
    """
    inputs, outputs = stored.shape
    fmt = _format(stored.dtype, transposed=True, chained=True)
    return PackedWeight(fmt, inputs, outputs, {"weight": stored})


@cache
def _format(dtype: torch.dtype, transposed: bool, chained: bool) -> Plain:
    return Plain(DTYPES.get(dtype, str(dtype)), transposed, chained=chained)
