"""float32 rows times weights stored in bfloat16, float16 or float32, on a CPU.

The weight is read once and widened in the L1 cache (see cpu_half_ir). `reads` says of which kind it
may be; both its sizes are multiples of two vectors.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_half_ir import Arg, KernelSpec, Stored, build
from specexec_kernels.cpu_products import product

_STORED: dict[torch.dtype, Stored] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
# Rows of a chunk that kernels are compiled for. With two vectors of outputs, 13 rows and their
# weights fill the 32 registers of AVX-512 and NEON, 6 the 16 of AVX2.
_CHUNKS = {8: (1, 2, 4, 6)}
_MANY_REGISTERS = (1, 2, 4, 8, 10, 13)
_VECTORS = 2


def reads(weight: Tensor) -> bool:
    """Whether this (outputs, inputs) weight is stored as the kernel reads it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _STORED
        and weight.is_contiguous()
        and sys.byteorder == "little"  # pairs of weights are split as words
    )


def matmul(x: Tensor, weight: Tensor | Transposed) -> Tensor:
    """x @ weight.T with sums in float32.

    Args:
        x: (rows, inputs) float32.
        weight: (outputs, inputs) that `reads` accepts, both sizes multiples of two vectors.
    Returns:
        (rows, outputs) float32. A row's result does not depend on the other rows.
    """
    return product(HALF, x, weight)


@dataclass(frozen=True, slots=True)
class Transposed:
    """A weight that is stored as (inputs, outputs)."""

    stored: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        inputs, outputs = self.stored.shape
        return outputs, inputs


class Half:
    """Weights of two and four bytes; see cpu_products.Form."""

    dtype = torch.float32
    places = (Arg.OUT, Arg.CHUNKS)

    def kind(self, weight: Tensor | Transposed) -> Hashable:
        stored = weight.stored if isinstance(weight, Transposed) else weight
        return isinstance(weight, Transposed), stored.dtype, stored.shape

    def spec(self, rows: int, weight: Tensor | Transposed) -> KernelSpec:
        transposed = isinstance(weight, Transposed)
        stored = weight.stored if isinstance(weight, Transposed) else weight
        return KernelSpec(
            _STORED[stored.dtype], chunk_rows(rows), _VECTORS, cpu_jit.lanes(), transposed
        )

    def kernel(self, spec: KernelSpec, weight: Tensor | Transposed) -> Any:
        return _kernel(spec)

    def arrange(self, x: Tensor, spec: KernelSpec) -> dict[int, Tensor]:
        return {Arg.X: x.reshape(-1, spec.rows, x.shape[1]).transpose(1, 2).contiguous()}

    def sums(self, chunks: int, spec: KernelSpec, weight: Tensor | Transposed) -> Tensor:
        return torch.zeros(chunks, spec.rows, weight.shape[0])

    def arguments(self, spec: KernelSpec, weight: Tensor | Transposed) -> list[int]:
        outputs, inputs = weight.shape
        values = {
            Arg.INPUTS: inputs,
            Arg.OUTPUTS: outputs,
            Arg.STRIPS_AT_ONCE: self._at_once(spec, weight),
        }
        return [values.get(arg, 0) for arg in Arg]

    def stored(self, weight: Tensor | Transposed) -> dict[int, Tensor]:
        return {Arg.WEIGHT: weight.stored if isinstance(weight, Transposed) else weight}

    def own(self, spec: KernelSpec, weight: Tensor | Transposed) -> dict[int, Tensor]:
        return {}

    def tiles(self, spec: KernelSpec, weight: Tensor | Transposed) -> int:
        return -(-(weight.shape[0] // spec.strip) // self._at_once(spec, weight))

    def flat(self, sums: Tensor, spec: KernelSpec, weight: Tensor | Transposed) -> Tensor:
        return sums.view(-1, weight.shape[0])

    @staticmethod
    def _at_once(spec: KernelSpec, weight: Tensor | Transposed) -> int:
        """Strips of one claim: transposed, those whose weights of an input share pages."""
        return cpu_team.strips_at_once(weight.shape[0] // spec.strip) if spec.transposed else 1


class Chained(Half):
    """Sums that are one chain over the inputs, in which zeros may stand anywhere."""

    def spec(self, rows: int, weight: Tensor | Transposed) -> KernelSpec:
        return replace(super().spec(rows, weight), chained=True)


HALF = Half()
CHAINED = Chained()


def chunk_rows(rows: int) -> int:
    """Rows of a chunk: as few rows too many as possible, and then large chunks."""
    sizes = _CHUNKS.get(cpu_jit.lanes(), _MANY_REGISTERS)
    if rows <= sizes[-1]:
        return next(size for size in sizes if size >= rows)
    return min(sizes[-3:], key=lambda size: (-(-rows // size) * size, -size))


@cache
def _kernel(spec: KernelSpec) -> Any:
    return cpu_jit.compiled("half", spec, partial(build, spec))
