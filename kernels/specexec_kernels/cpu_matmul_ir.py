"""LLVM IR of rows times weights of any format of formats/.

A strip of outputs goes through the inputs tile by tile. A tile's weights become items, one 32-bit
lane for each output of the strip: a float32, or two inputs' weights as a pair of bfloat16 where the
CPU multiplies such pairs (vdpbf16ps). Few rows multiply with the items in registers
(cpu_matmul_few); for more they are kept in memory, and every chunk of rows multiplies with them
(cpu_matmul_many). A format unpacks with what cpu_unpack_lanes offers; cpu_unpack_items calls it.

Sums begin anew with every block of inputs, in the order of a format's `order`, and are then
multiplied by the block's scale and added to OUT in float32. That order is the same for any rows and
any number of threads: a row's bits are its own. Where the CPU has tile registers (AMX) pairs are
multiplied in them whatever the number of rows, and the sums of pairs are rounded as cpu_tiles_ir
tells. In vdpbf16ps products are exact, and sums are rounded to nearest, with numbers below the
normal range taken as zero.

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
