"""Chooses the implementation of an operation by device: LLVM on a CPU, Triton or PyTorch on a GPU.

Attention, activations and plain linears on a CPU are not chosen here: models call those kernels
(cpu_attention, cpu_activation, cpu_matmul) by name.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_matmul
from specexec_kernels.compact_kv import compact_kv_ref
from specexec_kernels.formats.base import PackedFormat, PackedWeight
from specexec_kernels.formats.gguf import GGUF_FORMATS
from specexec_kernels.row_blocks import in_row_blocks
from specexec_kernels.split_rows import SplitRows
from specexec_kernels.tree_attention import TreeMask, tree_attention_ref

FUSED_ROWS = 16  # rows of the smallest tile of the kernel that unpacks and multiplies at once
OLDEST_CAPABILITY = (8, 0)  # the least compute capability that Triton's documentation supports


@cache
def triton_obstacle(device: torch.device) -> str | None:
    """Why Triton's kernels do not run on a GPU; None if they do.

    Triton compiles a small C module when it starts, for which many container images lack a
    compiler. GPUs before Ampere have no tensor cores for tl.dot, so its kernels spill registers.
    """
    if importlib.util.find_spec("triton") is None:  # as on Windows
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below Triton's 8.0"
    import triton

    try:
        triton.runtime.driver.active.get_current_target()
    except (RuntimeError, OSError, AssertionError, subprocess.SubprocessError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"Triton, which needs a C compiler and Python's headers, does not start: {reason}"
    return None


def uses_triton(device: torch.device) -> bool:
    """Whether operations on this device run as Triton kernels."""
    return device.type == "cuda" and triton_obstacle(device) is None


def fuses(fmt: PackedFormat, device: torch.device) -> bool:
    """Whether weights of a format are unpacked inside the kernel that multiplies by them."""
    return device.type == "cuda" and fmt.has_triton() and uses_triton(device)


def rounding(device: torch.device) -> tuple[str, ...]:
    """Names all that decides how results are rounded on `device`, besides dtypes and inputs."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), "Triton" if uses_triton(device) else "PyTorch"
    native = [str(dtype) for dtype in (torch.bfloat16, torch.float16) if cpu_jit.has_matmul(dtype)]
    kinds = {"tiles": cpu_jit.has_tiles(), "pairs": cpu_jit.has_dot(), "int16": cpu_jit.has_int16()}
    pairs = next((kind for kind, there in kinds.items() if there), "single")
    return torch.backends.cpu.get_cpu_capability(), str(cpu_jit.lanes()), pairs, *native


def quantized_matmul(
    x: Tensor,
    weight: PackedWeight,
    out_dtype: torch.dtype | None = None,
    block_rows: int | None = None,
) -> Tensor:
    """Computes x @ W.T for a packed weight W, with sums in float32 or better.

    Args:
        x: (rows, inputs).
        weight: W, (outputs, inputs).
        out_dtype: dtype of the result: x's where not given, or float32.
        block_rows: the rows of every product that PyTorch computes on a GPU, so that a row has the
            same bits among any number of others (see row_blocks). Products in Triton need none.
    Returns:
        (rows, outputs)
    """
    out_dtype = out_dtype or x.dtype
    if fuses(weight.format, x.device):
        from specexec_kernels import triton_rows

        if triton_rows.reads(weight):
            return triton_rows.quantized_matmul(x, weight, out_dtype)
    if x.device.type == "cpu":
        return cpu_matmul.matmul(x, weight).to(out_dtype)
    return _matmul(x, weight.unpack_to(x.dtype).t(), out_dtype, block_rows)


def _matmul(x: Tensor, dense: Tensor, out_dtype: torch.dtype, block_rows: int | None) -> Tensor:
    """x @ dense on a GPU; with `out_dtype` float32 the sums are not rounded to x's dtype."""
    if block_rows is not None:
        return in_row_blocks(x, block_rows, lambda own: _matmul(own, dense, out_dtype, None))
    return x @ dense if out_dtype == x.dtype else torch.mm(x, dense, out_dtype=out_dtype)


def tree_attention(
    queries: Tensor,
    keys: Tensor | SplitRows,
    values: Tensor | SplitRows,
    mask: TreeMask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over the prefix and each row's ancestors; see tree_attention_ref for arguments."""
    if uses_triton(queries.device):
        from specexec_kernels import triton_tree_attention

        return triton_tree_attention.tree_attention(
            queries, keys, values, mask, scale, softcap, sinks
        )
    keys, values = (
        rows.whole[0] if isinstance(rows, SplitRows) else rows for rows in (keys, values)
    )
    return tree_attention_ref(queries, keys, values, mask, scale, softcap, sinks)


def log_softmax_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest log-probabilities of each row.

    Args:
        logits: (rows, vocab), any float dtype.
        k: 1 to vocab.
    Returns:
        log-probabilities (rows, k) float32, falling, and their columns (rows, k) int64; of equal
        logits any order.
    """
    if uses_triton(logits.device):
        from specexec_kernels import triton_topk

        return triton_topk.log_softmax_topk(logits, k)
    best = logits.float().log_softmax(-1).topk(k, dim=-1)
    return best.values, best.indices


def compact_kv(keys: Tensor, values: Tensor, kept: Tensor, start: int) -> None:
    """Moves the rows of slots `kept` to the slots from `start` on; see compact_kv_ref."""
    if uses_triton(keys.device):
        from specexec_kernels import triton_compact_kv

        triton_compact_kv.compact_kv(keys, values, kept, start)
    else:
        compact_kv_ref(keys, values, kept, start)


def choices(device: torch.device) -> dict[str, str]:
    """The implementation of each operation on `device`, as `specexec doctor` prints it."""
    if device.type == "cpu":
        vectors = f"{32 * cpu_jit.lanes()}-bit vectors"
        pairs = ", bfloat16 by pairs" if cpu_jit.has_dot() else ""
        if cpu_jit.has_tiles():
            pairs = ", bfloat16 in tiles"
        return {
            "quantized linears": f"LLVM-compiled, {vectors}{pairs}"
            + _unpacked(each.name for each in GGUF_FORMATS.values() if not each.compiled),
            "tree attention": f"LLVM-compiled, {vectors}",
            "log-softmax + top-k": "PyTorch",
            "cache compaction": "PyTorch",
        }
    name = "Triton" if uses_triton(device) else "PyTorch"
    operations = (
        "quantized linears", "tree attention", "log-softmax + top-k", "cache compaction",
    )  # fmt: skip
    found = dict.fromkeys(operations, name)
    if name == "Triton":
        found["quantized linears"] += _unpacked(
            each.name for each in GGUF_FORMATS.values() if not each.has_triton()
        )
    return found


def _unpacked(names: Iterable[str]) -> str:
    """The addition that names GGUF types without a kernel; empty if there are none."""
    listed = ", ".join(names)
    return f"; of GGUF's types PyTorch unpacks {listed}" if listed else ""
