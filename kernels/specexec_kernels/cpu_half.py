"""float32 rows times weights stored in bfloat16, float16 or float32, on a CPU.

The weight is read once and widened in the L1 cache (see cpu_half_ir). `reads` says of which kind it
may be; both its sizes are multiples of two vectors.
"""

from __future__ import annotations

import itertools
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_jit
from specexec_kernels.cpu_half_ir import Arg, KernelSpec, Stored, build

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
_names = itertools.count()


def reads(weight: Tensor) -> bool:
    """Whether this (outputs, inputs) weight is stored as the kernel reads it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _STORED
        and weight.is_contiguous()
        and sys.byteorder == "little"  # pairs of weights are split as words
    )


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with sums in float32.

    Args:
        x: (rows, inputs) float32.
        weight: (outputs, inputs) that `reads` accepts, both sizes multiples of two vectors.
    Returns:
        (rows, outputs) float32. A row's result does not depend on the other rows.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    size = chunk_rows(rows)
    chunks = -(-rows // size)
    if chunks * size != rows:
        x = torch.cat([x, x.new_zeros(chunks * size - rows, inputs)])
    packed = x.reshape(chunks, size, inputs).transpose(1, 2).contiguous()
    out = torch.zeros(chunks * size, outputs)
    spec = KernelSpec(_STORED[weight.dtype], size, _VECTORS, cpu_jit.lanes())
    values = {
        Arg.COUNTER: 0,
        Arg.WEIGHT: weight.data_ptr(),
        Arg.X: packed.data_ptr(),
        Arg.OUT: out.data_ptr(),
        Arg.CHUNKS: chunks,
        Arg.INPUTS: inputs,
        Arg.OUTPUTS: outputs,
    }
    args = torch.tensor([values[arg] for arg in Arg], dtype=torch.int64)
    cpu_jit.run(_kernel(spec), args.data_ptr(), outputs // spec.strip)
    return out[:rows]


def chunk_rows(rows: int) -> int:
    """Rows of a chunk: as few rows too many as possible, and then large chunks."""
    sizes = _CHUNKS.get(cpu_jit.lanes(), _MANY_REGISTERS)
    if rows <= sizes[-1]:
        return next(size for size in sizes if size >= rows)
    return min(sizes[-3:], key=lambda size: (-(-rows // size) * size, -size))


@cache
def _kernel(spec: KernelSpec) -> Any:
    name = f"specexec_half_{next(_names)}"
    return cpu_jit.compile_ir(build(spec, name), name)
