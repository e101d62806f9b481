"""How fast rows go through linears on this machine, measured as the models call them."""

from __future__ import annotations

import torch
from specexec_kernels import dispatch
from torch import Tensor

from specexec_cli.models.linear import mixed_linear
from specexec_cli.planning.arithmetic import FlopsByRows
from specexec_cli.planning.probe import probe_flops


def probe_arithmetic(dtype: str, packed_bits: int = 0) -> FlopsByRows:
    """FLOP/s of a CPU by rising number of rows, in less than two seconds where nothing disturbs.

    Args:
        dtype: of the rows.
        packed_bits: of the weights; 0 are weights of two bytes.
    """
    if packed_bits:
        return probe_flops(packed_bits, getattr(torch, dtype), dispatch.quantized_matmul)
    return probe_flops(torch.bfloat16, getattr(torch, dtype), _linear)


def _linear(rows: Tensor, weight: Tensor) -> Tensor:
    return mixed_linear(rows, weight, None)
