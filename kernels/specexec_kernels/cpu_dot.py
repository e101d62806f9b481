"""bfloat16 rows times weights on a CPU that multiplies pairs or tiles of bfloat16 (see cpu_dot_ir).

Reads weights stored in bfloat16; cpu_rows multiplies with packed ones. Sums are float32, and a
row's result depends on neither the other rows nor the number of threads. `supports` says which
weights it reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_arrange_ir import ArrangeSpec, build_arrange
from specexec_kernels.cpu_dot_ir import LANES, X_PAIRS
from specexec_kernels.cpu_dot_stored_ir import StoredArg, StoredSpec, build_stored
from specexec_kernels.cpu_products import product

# In tiles: rows of a chunk; from so many rows on chunks have 32
_TILE_ROWS, _FEWEST_OF_32 = (1, 2, 4, 8, 16), 97
# Up to so many rows strips of stored weights are narrow in tiles, since they are read faster.
_NARROW_ROWS = 128
_MANY = (1, 2, 4, 8, 10, 13)  # rows of a chunk; 13 and two vectors fill the 32 registers


def supports(weight: Tensor) -> bool:
    """Whether the kernels multiply with this weight on this CPU.

    Args:
        weight: (outputs, inputs) as stored.
    """
    if not (cpu_jit.has_dot() and cpu_jit.has_matmul(torch.bfloat16)):
        return False
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.shape[0] % (2 * LANES) == 0
        and weight.shape[1] % (2 * LANES) == 0
    )


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x times a weight that `supports` accepts.

    Args:
        x: (rows, inputs) bfloat16.
    Returns:
        (rows, outputs) float32, unrounded sums.
    """
    return product(STORED, x, weight)


class Stored:
    """Weights stored in bfloat16; see cpu_products.Form."""

    dtype = torch.bfloat16
    places = (StoredArg.OUT, StoredArg.CHUNKS)

    def kind(self, weight: Tensor) -> Hashable:
        return weight.shape

    def spec(self, rows: int, weight: Tensor) -> StoredSpec:
        return _stored_spec(rows)

    def kernel(self, spec: StoredSpec, weight: Tensor) -> Any:
        return _stored_kernel(spec)

    def arrange(self, x: Tensor, spec: StoredSpec) -> dict[int, Tensor]:
        return {StoredArg.X: _arrange(x, spec.rows)}

    def sums(self, chunks: int, spec: StoredSpec, weight: Tensor) -> Tensor:
        return torch.empty(chunks, spec.rows, weight.shape[0])

    def arguments(self, spec: StoredSpec, weight: Tensor) -> list[int]:
        outputs, inputs = weight.shape
        strips = outputs // spec.strip
        values = {
            StoredArg.OUT_STRIDE: outputs,
            StoredArg.UNITS: inputs // (2 * LANES),
            StoredArg.X_BLOCKS: inputs // (2 * X_PAIRS),
            StoredArg.END_STRIP: strips,
            StoredArg.STRIPS_AT_ONCE: self._at_once(spec, strips),
        }
        return [values.get(arg, 0) for arg in StoredArg]

    def stored(self, weight: Tensor) -> dict[int, Tensor]:
        return {StoredArg.WEIGHT: weight}

    def own(self, spec: StoredSpec, weight: Tensor) -> dict[int, Tensor]:
        return {}

    def tiles(self, spec: StoredSpec, weight: Tensor) -> int:
        strips = weight.shape[0] // spec.strip
        return -(-strips // self._at_once(spec, strips))

    def flat(self, sums: Tensor, spec: StoredSpec, weight: Tensor) -> Tensor:
        return sums.view(-1, weight.shape[0])

    @staticmethod
    def _at_once(spec: StoredSpec, strips: int) -> int:
        return 1 if spec.mode == "many" else cpu_team.strips_at_once(strips)


STORED = Stored()


@cache
def _stored_spec(rows: int) -> StoredSpec:
    if cpu_jit.has_tiles():
        return StoredSpec(tile_rows(rows), 1 if rows <= _NARROW_ROWS else 2, "tiles")
    if rows <= _MANY[-1]:
        return StoredSpec(chunk_rows(rows), 1, "few")
    return StoredSpec(chunk_rows(rows), 2, "many")


def tile_rows(rows: int) -> int:
    """Rows of a chunk in tiles."""
    if rows >= _FEWEST_OF_32:
        return 32
    return next((size for size in _TILE_ROWS if size >= rows), _TILE_ROWS[-1])


def chunk_rows(rows: int) -> int:
    """Rows of a chunk: as few rows too many as possible, and then large chunks."""
    if rows <= _MANY[-1]:
        return next(size for size in _MANY if size >= rows)
    return min(_MANY[-3:], key=lambda size: (-(-rows // size) * size, -size))


def _arrange(x: Tensor, size: int) -> Tensor:
    """Rows as the kernels read them.

    Args:
        x: (chunks * size, inputs) bfloat16.
        size: rows of a chunk.
    Returns:
        (chunks, blocks, size, 2 * X_PAIRS) bfloat16.
    """
    x = x.contiguous()
    rows, inputs = x.shape
    chunks = rows // size
    packed = torch.empty(chunks, inputs // (2 * X_PAIRS), size, 2 * X_PAIRS, dtype=x.dtype)
    # in the order of the positions that cpu_arrange_ir names; no sums
    table = array("q", (0, x.data_ptr(), rows, inputs, packed.data_ptr(), 0, chunks))
    cpu_team.run(_arrange_kernel(size), table.buffer_info()[0], chunks)
    return packed


@cache
def _arrange_kernel(rows: int) -> Any:
    spec = ArrangeSpec(True, rows, 0, LANES, order=(0, 1), tiles=True)
    return cpu_jit.compiled("arrange", spec, partial(build_arrange, spec))


@cache
def _stored_kernel(spec: StoredSpec) -> Any:
    return cpu_jit.compiled("dot", spec, partial(build_stored, spec))
