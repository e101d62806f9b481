"""CPU path of quantized linears: fused few rows, fused many rows, tiles for a library GEMM.

Packed words are read once per call and unpacked in registers (see cpu_ir); nothing of the size of
the dequantized weight is ever written, except tile by tile in `dequantize_tile`. Sums are float32.
`supports` says which weights these kernels read; others go the reference way.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_ir import build
from specexec_kernels.cpu_ir_emit import ScaleType
from specexec_kernels.cpu_ir_unpack import Arg, KernelSpec, Mode
from specexec_kernels.cpu_products import product
from specexec_kernels.packing import AWQ_ORDER, PackedWeight

_SCALE_TYPES: dict[torch.dtype, ScaleType] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


def supports(weight: PackedWeight) -> bool:
    """Whether the compiled kernels read this weight: whole strips and a known scale dtype."""
    return (
        weight.qweight.device.type == "cpu"
        and weight.scales.dtype in _SCALE_TYPES
        and bool(widths(weight))
        and weight.in_features % weight.format.input_multiple == 0
        and weight.out_features % weight.format.output_multiple == 0
    )


def matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """x (rows, inputs) times the packed weight, as float32 (rows, outputs).

    The sums of a few rows live in registers; of more, blocks of weights are unpacked once for all
    rows. Neither writes the dequantized weight to memory.
    """
    return product(FUSED, x, weight)


class Packed:
    """What kernels of packed weights have in common; see cpu_products.Form."""

    places = (Arg.OUT, Arg.CHUNKS)

    def kind(self, weight: PackedWeight) -> Hashable:
        return (
            weight.format, weight.in_features, weight.out_features, weight.group_size,
            weight.g_idx is None, weight.scales.dtype, weight.scales.shape,
        )  # fmt: skip

    def arguments(self, spec: KernelSpec, weight: PackedWeight) -> list[int]:
        return arguments(spec, weight, 0, range(strip_count(spec, weight)))

    def stored(self, weight: PackedWeight) -> dict[int, Tensor]:
        return {
            Arg.WEIGHT: weight.qweight.contiguous(),
            Arg.ZEROS: weight.qzeros.contiguous(),
            Arg.SCALES: weight.scales.contiguous(),
        }

    def tiles(self, spec: KernelSpec, weight: PackedWeight) -> int:
        strips = strip_count(spec, weight)
        return -(-strips // cpu_team.strips_at_once(strips))


class Fused(Packed):
    """Packed weights, multiplied with float32 rows; see cpu_products.Form."""

    dtype = torch.float32

    def spec(self, rows: int, weight: PackedWeight) -> KernelSpec:
        mode, tile_rows, vectors = plan(rows, weight)
        return spec_for(mode, weight, tile_rows, vectors)

    def kernel(self, spec: KernelSpec, weight: PackedWeight) -> Any:
        return _kernel(spec)

    def arrange(self, x: Tensor, spec: KernelSpec) -> dict[int, Tensor]:
        return {Arg.X: x.reshape(-1, spec.rows, x.shape[1]).transpose(1, 2).contiguous()}

    def sums(self, chunks: int, spec: KernelSpec, weight: PackedWeight) -> Tensor:
        return torch.zeros(chunks, strip_count(spec, weight), spec.rows, spec.strip)

    def own(self, spec: KernelSpec, weight: PackedWeight) -> dict[int, Tensor]:
        return _groups_and_scratch(spec, weight, strip_count(spec, weight))

    def flat(self, sums: Tensor, spec: KernelSpec, weight: PackedWeight) -> Tensor:
        chunks, strips, rows, width = sums.shape
        flat = sums.permute(0, 2, 1, 3).reshape(chunks * rows, strips * width)
        return in_order(flat, spec, weight)


FUSED = Fused()


def dequantize_tile(weight: PackedWeight, first: int, last: int, out: Tensor) -> Tensor:
    """Weights of strips first..last as float32 (inputs, columns), columns in strip order.

    Args:
        out: (inputs, at least the strips' columns) float32. Give the same one for every tile: fresh
            memory of this size costs more in page faults than the unpacking.
    Returns:
        The part of `out` that was written.
    """
    spec = tile_spec(weight)
    run(spec, weight, out, range(first, last))
    return out[:, : (last - first) * spec.strip]


def dequantize(weight: PackedWeight) -> Tensor:
    """The whole weight as float32 (inputs, outputs)."""
    spec = tile_spec(weight)
    strips = strip_count(spec, weight)
    out = torch.empty(weight.in_features, strips * spec.strip)
    return in_order(dequantize_tile(weight, 0, strips, out), spec, weight)


def tiled_matmul(x: Tensor, weight: PackedWeight, tile_columns: int = 256) -> Tensor:
    """Dequantize a tile, multiply it with torch's GEMM in x's dtype, and so on; (rows, outputs)."""
    spec = tile_spec(weight)
    strips = strip_count(spec, weight)
    step = max(tile_columns // spec.strip, 1)
    out = x.new_empty(x.shape[0], strips * spec.strip)
    buffer = torch.empty(weight.in_features, step * spec.strip)
    for first in range(0, strips, step):
        last = min(first + step, strips)
        tile = dequantize_tile(weight, first, last, buffer).to(x.dtype)
        torch.mm(x, tile, out=out[:, first * spec.strip : last * spec.strip])
    return in_order(out, spec, weight)


def plan(rows: int, weight: PackedWeight) -> tuple[Mode, int, int]:
    """Mode, rows per register tile and vectors per strip for a product with `rows` rows.

    The sums of a tile, its weights and one broadcast of x fill the vector registers. "few" walks
    down the whole weight strip by strip. Tensors lie in a checkpoint as they come, so a strip
    begins in the middle of a cache line, and the next strip fetches its last line again: that is
    why only wide strips are walked so, and more rows take blocks (docs/experiments.md).
    """
    found = widths(weight)
    widest = max((v for v in found if v <= 4), default=0)
    sizes = [size for size in (1, 2, 4, 6) if widest and size <= _most_rows(widest)]
    if sizes and rows <= sizes[-1]:
        return "few", next(size for size in sizes if size >= rows), widest
    vectors = min((v for v in found if v > 1), default=1)
    most = _most_rows(vectors)
    # unpacking for a tile takes about as long as two rows of it
    best = min(range(max(most - 6, 1), most + 1), key=lambda n: (-(-rows // n) * (n + 2), -n))
    return "many", best, vectors


def _most_rows(vectors: int) -> int:
    registers = 16 if cpu_jit.lanes() == 8 else 32  # AVX2 has 16, AVX-512 and NEON 32
    return max((registers - vectors - 2) // vectors, 1)


def widths(weight: PackedWeight) -> list[int]:
    """Possible strip widths in vectors, ascending.

    A strip fits into the outputs (AWQ: one vector into a row of words), and the zero points of
    its columns are whole words.
    """
    lanes, fmt = cpu_jit.lanes(), weight.format
    if fmt.awq:
        return [1, 2, 4, 8] if weight.out_features >= 8 * lanes else []
    multiple = fmt.output_multiple
    return [
        v for v in (1, 2, 4, 8) if v * lanes % multiple == 0 and v * lanes <= weight.out_features
    ]


def _widest(weight: PackedWeight) -> int:
    """Vectors of a dequantized strip; wide units of 3-bit codes would only compile longer."""
    found = widths(weight)
    return found[0] if weight.format.bits == 3 else found[-1]


def tile_spec(weight: PackedWeight) -> KernelSpec:
    """The dequantize kernel's description; its `strip` is the width of one strip in columns."""
    return spec_for("dequantize", weight, 0, _widest(weight))


def spec_for(mode: Mode, weight: PackedWeight, rows: int, vectors: int) -> KernelSpec:
    fmt = weight.format
    unit = fmt.input_multiple
    per_code = weight.g_idx is not None or weight.group_size % unit != 0
    return KernelSpec(
        mode=mode,
        bits=fmt.bits,
        awq=fmt.awq,
        stored_minus_one=fmt.stored_minus_one,
        scale_type=_SCALE_TYPES[weight.scales.dtype],
        group_per_code=per_code,
        rows=rows,
        vectors=vectors,
        lanes=cpu_jit.lanes(),
    )


def strip_count(spec: KernelSpec, weight: PackedWeight) -> int:
    if spec.awq:
        return -(-(weight.out_features // 8) // spec.lanes) * spec.nibble_groups
    return -(-weight.out_features // spec.strip)


@cache
def _kernel(spec: KernelSpec) -> Any:
    return cpu_jit.compiled("quant", spec, partial(build, spec))


def run(spec: KernelSpec, weight: PackedWeight, out: Tensor, strips: range) -> None:
    """Dequantize strips of `weight` to `out`."""
    kept = {
        Arg.WEIGHT: weight.qweight.contiguous(),
        Arg.ZEROS: weight.qzeros.contiguous(),
        Arg.SCALES: weight.scales.contiguous(),
        Arg.OUT: out,
        **_groups_and_scratch(spec, weight, strips.stop),
    }
    values = arguments(spec, weight, out.shape[-1], strips)
    for arg, tensor in kept.items():
        values[arg] = tensor.data_ptr()
    table = array("q", values)
    tiles = -(-len(strips) // values[Arg.STRIPS_AT_ONCE])
    cpu_team.run(_kernel(spec), table.buffer_info()[0], tiles)


def _groups_and_scratch(spec: KernelSpec, weight: PackedWeight, strips: int) -> dict[int, Tensor]:
    unit = 1 if spec.group_per_code else spec.unit_codes
    groups = weight.group_index()[::unit].int().contiguous()
    scratch = torch.empty(strips * weight.scales.shape[0] * 2 * spec.strip)
    return {Arg.GROUPS: groups, Arg.SCRATCH: scratch}


def arguments(spec: KernelSpec, weight: PackedWeight, out_stride: int, strips: range) -> list[int]:
    """Arguments of a kernel that reads packed weights; addresses are still to be told."""
    values = {
        Arg.CHUNKS: 1,
        Arg.OUT_STRIDE: out_stride,
        Arg.UNITS: weight.in_features // spec.unit_codes,
        Arg.WEIGHT_STRIDE: weight.qweight.shape[1],
        Arg.ZEROS_STRIDE: weight.qzeros.shape[1],
        Arg.COLUMNS: weight.out_features // 8 if spec.awq else weight.out_features,
        Arg.N_GROUPS: weight.scales.shape[0],
        Arg.FIRST_STRIP: strips.start,
        Arg.END_STRIP: strips.stop,
        Arg.STRIPS_AT_ONCE: cpu_team.strips_at_once(len(strips)),
    }
    return [values.get(arg, 0) for arg in Arg]


def in_order(flat: Tensor, spec: KernelSpec, weight: PackedWeight) -> Tensor:
    """Columns from strip order to the outputs' order; the last strip may overlap the one before."""
    if not spec.awq:
        if weight.out_features % spec.strip == 0:
            return flat
        whole = weight.out_features // spec.strip * spec.strip
        rest = weight.out_features - whole
        return torch.cat([flat[:, :whole], flat[:, flat.shape[1] - rest :]], dim=1)
    words = weight.out_features // 8
    blocks = flat.view(flat.shape[0], -1, 8, spec.lanes)  # (rows, word blocks, nibbles, words)
    by_nibble = blocks.transpose(1, 2).reshape(flat.shape[0], 8, -1)
    whole = words // spec.lanes * spec.lanes
    if whole != words:
        tail = by_nibble[..., by_nibble.shape[2] - (words - whole) :]
        by_nibble = torch.cat([by_nibble[..., :whole], tail], dim=2)
    order = [AWQ_ORDER.index(column) for column in range(8)]
    return by_nibble[:, order].transpose(1, 2).reshape(flat.shape[0], -1)
