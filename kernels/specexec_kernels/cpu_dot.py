"""bfloat16 rows times weights on a CPU that multiplies pairs or tiles of bfloat16 (see cpu_dot_ir).

Reads weights stored in bfloat16 and packed ones; sums are float32, and a row's result depends on
neither the other rows nor the number of threads. `supports` says which weights it reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_quant, cpu_team
from specexec_kernels.cpu_arrange_ir import build_pairs
from specexec_kernels.cpu_dot_ir import LANES, X_PAIRS
from specexec_kernels.cpu_dot_packed_ir import WIDE_STRIPS, build_packed
from specexec_kernels.cpu_dot_stored_ir import StoredArg, StoredSpec, build_stored
from specexec_kernels.cpu_ir_unpack import Arg as PackedArg
from specexec_kernels.cpu_ir_unpack import KernelSpec
from specexec_kernels.cpu_products import product
from specexec_kernels.cpu_tiles_ir import TILE_ROWS
from specexec_kernels.packing import PackedWeight

_LONGEST_BLOCK = 128  # inputs of a packed block: 8 KiB of pairs for a strip of 32 outputs
_FEW = (1, 2, 4)  # rows that multiply straight from the registers, in strips of up to 4 vectors
# In tiles: rows of a chunk; from so many rows on chunks have 32
_TILE_ROWS, _FEWEST_OF_32 = (1, 2, 4, 8, 16), 97
# Up to so many rows strips of stored weights are narrow in tiles, since they are read faster.
_NARROW_ROWS = 128
_MANY = (1, 2, 4, 8, 10, 13)  # rows of a chunk; 13 and two vectors fill the 32 registers


def supports(weight: Tensor | PackedWeight) -> bool:
    """Whether the kernels multiply with this weight on this CPU.

    Args:
        weight: (outputs, inputs) as stored, or packed.
    """
    if not (cpu_jit.has_dot() and cpu_jit.has_matmul(torch.bfloat16)):
        return False
    if isinstance(weight, PackedWeight):
        return cpu_quant.supports(weight) and _block(weight) > 0
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.shape[0] % (2 * LANES) == 0
        and weight.shape[1] % (2 * LANES) == 0
    )


def matmul(x: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """x times a weight that `supports` accepts.

    Args:
        x: (rows, inputs) bfloat16.
    Returns:
        (rows, outputs) float32, unrounded sums.
    """
    return product(PACKED if isinstance(weight, PackedWeight) else STORED, x, weight)


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
        return {StoredArg.X: _arrange(x, spec.rows, 2)}

    def sums(self, chunks: int, spec: StoredSpec, weight: Tensor) -> Tensor:
        return torch.empty(chunks, spec.rows, weight.shape[0])

    def arguments(self, spec: StoredSpec, weight: Tensor) -> list[int]:
        outputs, inputs = weight.shape
        strips = outputs // spec.strip
        values = {
            StoredArg.OUT_STRIDE: outputs,
            StoredArg.UNITS: inputs // (2 * LANES),
            StoredArg.X_BLOCKS: _x_blocks(inputs),
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


class Packed(cpu_quant.Packed):
    """Packed weights, multiplied with bfloat16 rows; see cpu_products.Form."""

    dtype = torch.bfloat16

    def spec(self, rows: int, weight: PackedWeight) -> KernelSpec:
        return packed_spec(rows, weight)

    def kernel(self, spec: KernelSpec, weight: PackedWeight) -> Any:
        return _packed_kernel(spec, _block(weight))

    def arrange(self, x: Tensor, spec: KernelSpec) -> dict[int, Tensor]:
        return {PackedArg.X: _arrange(x, spec.rows, spec.unit_codes)}

    def sums(self, chunks: int, spec: KernelSpec, weight: PackedWeight) -> Tensor:
        return torch.empty(chunks, spec.rows, cpu_quant.strip_count(spec, weight) * spec.strip)

    def own(self, spec: KernelSpec, weight: PackedWeight) -> dict[int, Tensor]:
        return {}

    def arguments(self, spec: KernelSpec, weight: PackedWeight) -> list[int]:
        values = super().arguments(spec, weight)
        values[PackedArg.OUT_STRIDE] = cpu_quant.strip_count(spec, weight) * spec.strip
        values[PackedArg.X_BLOCKS] = _x_blocks(weight.in_features)
        values[PackedArg.GROUP_UNITS] = weight.group_size // spec.unit_codes
        values[PackedArg.STRIPS_AT_ONCE] = self._at_once(spec, weight)
        return values

    def tiles(self, spec: KernelSpec, weight: PackedWeight) -> int:
        return -(-cpu_quant.strip_count(spec, weight) // self._at_once(spec, weight))

    @staticmethod
    def _at_once(spec: KernelSpec, weight: PackedWeight) -> int:
        strips = cpu_quant.strip_count(spec, weight)
        if spec.mode == "tiles" and spec.rows <= TILE_ROWS:
            return cpu_team.strips_at_once(strips, WIDE_STRIPS)
        return cpu_team.strips_at_once(strips)

    def flat(self, sums: Tensor, spec: KernelSpec, weight: PackedWeight) -> Tensor:
        return cpu_quant.in_order(sums.view(-1, sums.shape[-1]), spec, weight)


STORED, PACKED = Stored(), Packed()


@cache
def _stored_spec(rows: int) -> StoredSpec:
    if cpu_jit.has_tiles():
        return StoredSpec(tile_rows(rows), 1 if rows <= _NARROW_ROWS else 2, "tiles")
    if rows <= _MANY[-1]:
        return StoredSpec(chunk_rows(rows), 1, "few")
    return StoredSpec(chunk_rows(rows), 2, "many")


def packed_spec(rows: int, weight: PackedWeight) -> KernelSpec:
    """What the kernel for this many rows is compiled for."""
    widths = cpu_quant.widths(weight)
    if uses_tiles(weight):
        vectors = max(v for v in widths if v <= 2)
        spec = cpu_quant.spec_for("tiles", weight, tile_rows(rows), vectors)
        return replace(spec, awq_rows=8)
    # AWQ's words are read once where all their nibbles are multiplied together
    most = 8 if weight.format.awq and rows <= 2 else 4
    widest = max((v for v in widths if v <= most), default=0)
    if widest and rows <= _FEW[-1]:
        size = next(size for size in _FEW if size >= rows)
        spec = cpu_quant.spec_for("few", weight, size, widest)
    else:
        vectors = min((v for v in widths if v > 1), default=1)
        spec = cpu_quant.spec_for("many", weight, chunk_rows(rows), vectors)
    return replace(spec, awq_rows=8)


def uses_tiles(weight: PackedWeight) -> bool:
    """Whether its rows are multiplied in tiles, however many they are; see cpu_tiles_ir."""
    whole = _block(weight) % (2 * X_PAIRS) == weight.in_features % (2 * X_PAIRS) == 0
    return cpu_jit.has_tiles() and whole


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


def _block(weight: PackedWeight) -> int:
    """Inputs of a block: whole units, all in one group; 0 where groups are not such runs."""
    unit = 8 if weight.format.awq else weight.format.input_multiple
    if weight.g_idx is not None or weight.group_size % unit or weight.in_features % unit:
        return 0
    if weight.group_size <= _LONGEST_BLOCK:
        return weight.group_size
    return _LONGEST_BLOCK if weight.group_size % _LONGEST_BLOCK == 0 else 0


def _x_blocks(inputs: int) -> int:
    """Blocks of pairs in which rows are laid out; see _arrange."""
    return -(-inputs // (2 * X_PAIRS))


def _arrange(x: Tensor, size: int, unit: int) -> Tensor:
    """Rows as the kernels read them.

    Args:
        x: (chunks * size, inputs) bfloat16.
        size: rows of a chunk.
        unit: inputs j and j + unit / 2 of each run of this many are a pair.
    Returns:
        (chunks, blocks, size, 2 * X_PAIRS) bfloat16; inputs too many are zero.
    """
    x = x.contiguous()
    (rows, inputs), blocks = x.shape, _x_blocks(x.shape[1])
    chunks = rows // size
    packed = torch.empty(chunks, blocks, size, 2 * X_PAIRS, dtype=x.dtype)
    # in the order of the positions that cpu_arrange_ir names
    table = array("q", (0, x.data_ptr(), inputs, blocks, packed.data_ptr(), chunks))
    cpu_team.run(_arrange_kernel(size, unit), table.buffer_info()[0], chunks)
    return packed


@cache
def _arrange_kernel(rows: int, unit: int) -> Any:
    return cpu_jit.compiled("arrange_pairs", (rows, unit), partial(build_pairs, rows, unit))


@cache
def _stored_kernel(spec: StoredSpec) -> Any:
    return cpu_jit.compiled("dot", spec, partial(build_stored, spec))


@cache
def _packed_kernel(spec: KernelSpec, block: int) -> Any:
    return cpu_jit.compiled("packed_dot", (spec, block), partial(build_packed, spec, block))
