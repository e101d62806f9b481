"""Products of rows with weights of any stored float dtype on a CPU; a row's bits are its own.

bfloat16 rows and weights are multiplied as pairs where the CPU can (cpu_dot), everything else as
float32 (cpu_half). Both sum in float32, in an order that depends on nothing but the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specexec_kernels import cpu_dot, cpu_half, cpu_jit
from specexec_kernels.cpu_half_ir import UNROLL

_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes(rows: torch.dtype, weight: Tensor) -> bool:
    """Whether `product` multiplies rows of this dtype with a weight.

    Not where PyTorch has arithmetic in the dtype of both and the kernels have none: it is faster.
    """
    if rows not in _ROW_DTYPES or not cpu_half.reads(weight):
        return False
    pairs = rows == torch.bfloat16 and cpu_jit.has_dot()
    library = rows == weight.dtype and cpu_jit.has_matmul(rows)
    return rows == torch.float32 or pairs or not library


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight.T.

    Args:
        rows: (rows, inputs) of a dtype that `takes` accepts with this weight.
        weight: (outputs, inputs).
    Returns:
        (rows, outputs) float32. A row's bits depend on neither the other rows nor the threads.
    """
    strip = 2 * cpu_jit.lanes()  # of outputs, and the kernels' step over the inputs
    outputs, inputs = weight.shape
    if inputs % strip:
        padding = (0, -inputs % strip)
        rows = torch.nn.functional.pad(rows, padding)
        weight = torch.nn.functional.pad(weight, padding)
    rest = outputs % strip
    if not rest:
        return _whole_strips(rows, weight)
    tail = torch.nn.functional.pad(weight[outputs - rest :], (0, 0, 0, strip - rest))
    last = _whole_strips(rows, tail)[:, :rest]
    if rest == outputs:
        return last
    return torch.cat([_whole_strips(rows, weight[: outputs - rest]), last], dim=1)


def transposed_product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight; see `product`.

    Args:
        rows: (rows, inputs) of a dtype that `takes` accepts with this weight.
        weight: (inputs, outputs).
    """
    if fits_transposed(weight):
        return cpu_half.matmul(rows, cpu_half.Transposed(weight))
    return product(rows.float(), weight.t().contiguous())


def fits_transposed(weight: Tensor) -> bool:
    """Whether the kernels multiply with an (inputs, outputs) weight as it lies."""
    inputs, outputs = weight.shape
    return inputs % UNROLL == 0 and outputs % (2 * cpu_jit.lanes()) == 0


def _whole_strips(rows: Tensor, weight: Tensor) -> Tensor:
    if rows.dtype == torch.bfloat16 and cpu_dot.supports(weight):
        return cpu_dot.matmul(rows, weight)
    return cpu_half.matmul(rows.float(), weight)
