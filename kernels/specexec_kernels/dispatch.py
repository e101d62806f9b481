"""Which kernel runs where: compiled for the CPU by LLVM, Triton on a GPU, PyTorch otherwise.

Callers name the operation; only this file knows the implementations. `choices` is what `doctor`
prints.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_quant
from specexec_kernels.dequantize import dequantize_ref
from specexec_kernels.packing import PackedWeight

# Rows from which a library GEMM over dequantized tiles beats the fused kernel, by the dtype of that
# GEMM. float32 measured by scripts/bench_kernels.py (docs/experiments.md, "Quantized linears on the
# CPU"); bfloat16 from the 500 GFLOP/s that CPUs with such matrix instructions reach there.
CPU_TILED_ROWS = {torch.float32: 768, torch.bfloat16: 32}
GPU_FUSED_ROWS = 16


@cache
def has_triton() -> bool:
    """Whether Triton is installed (it is not on Windows and macOS)."""
    return importlib.util.find_spec("triton") is not None


def quantized_matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """x (rows, inputs) @ W (inputs, outputs), in x's dtype; sums in float32 or better."""
    if x.device.type == "cpu":
        if not cpu_quant.supports(weight):
            return x @ dequantize_ref(weight, x.dtype)
        wide = x if x.dtype == torch.bfloat16 and cpu_jit.has_bf16_matmul() else x.float()
        if x.shape[0] < CPU_TILED_ROWS[wide.dtype]:
            return cpu_quant.matmul(x, weight).to(x.dtype)
        return cpu_quant.tiled_matmul(wide, weight).to(x.dtype)
    if x.device.type == "cuda" and has_triton():
        from specexec_kernels import triton_quant

        if x.shape[0] <= GPU_FUSED_ROWS:
            return triton_quant.quantized_matmul(x, weight)
        return x @ triton_quant.dequantize(weight, x.dtype)
    return x @ dequantize_ref(weight, x.dtype)


def choices(device: torch.device) -> dict[str, str]:
    """Implementation of each operation on `device`, for people."""
    if device.type == "cpu":
        return {
            "quantized linears": f"LLVM-compiled, {32 * cpu_jit.lanes()}-bit vectors",
            "tree attention": "PyTorch",
            "log-softmax + top-k": "PyTorch",
            "cache compaction": "PyTorch",
        }
    name = "Triton" if device.type == "cuda" and has_triton() else "PyTorch"
    operations = (
        "quantized linears", "tree attention", "log-softmax + top-k", "cache compaction",
    )  # fmt: skip
    return dict.fromkeys(operations, name)
