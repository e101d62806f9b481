"""LLVM IR of rows times weights of any format of formats/.

The words of all matmul kernels:
- item: what one output multiplies at a time, 32 bits: one weight as float32; or the weights of two
  inputs, as a pair of bfloat16 where the CPU multiplies such pairs (vdpbf16ps), or as a pair of
  int16 where it does not and the format has integers (vpmaddwd; see cpu_arrange_int16); or the
  codes of four inputs, as bytes, for rows that are rounded to 8 bits (cpu_quads_ir);
- unit: the inputs that a format unpacks together;
- block: the inputs that share a scale and an offset (the block's terms); each block's products are
  summed by themselves, in the format's `order`, then scaled and added to the total in float32;
- tile: whole blocks of a strip, as many as are unpacked before they are multiplied;
- strip: outputs that are multiplied together, one or more vector registers of them; threads claim
  strips;
- chunk: rows that are multiplied together.

Few rows are multiplied by the items in registers (cpu_matmul_few). For more rows the items are kept
in memory, and every chunk is multiplied by them (cpu_matmul_many). A format unpacks itself with the
methods of cpu_unpack_lanes; cpu_unpack_items calls it.

The order of all sums is the same for any number of rows and threads, so a row's bits are its own.
Where the CPU has tile registers (AMX), pairs are multiplied in them whatever the number of rows;
cpu_tiles_ir says how they round. vdpbf16ps forms exact products and rounds its sums to nearest,
with numbers below the normal range taken as zero.

Knows nothing of torch or thread pools.
"""

from __future__ import annotations

from specexec_kernels.cpu_ir_emit import build_module
from specexec_kernels.cpu_matmul_few import Few
from specexec_kernels.cpu_matmul_many import InTiles, Many
from specexec_kernels.cpu_matmul_spec import MatmulSpec

_KERNELS: dict[str, type[Few | Many | InTiles]] = {"few": Few, "many": Many, "tiles": InTiles}


def build_matmul(spec: MatmulSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for `spec`."""
    return build_module(name, lambda function: _KERNELS[spec.mode](spec, function).emit())
