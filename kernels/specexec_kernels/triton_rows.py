# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels for packed weights of any format: unpacking, and the fused product with rows.

A program of the product multiplies a block of outputs by a tile of 16 to 128 rows, and reads each
packed byte once for all of them. Where a weight has too few blocks of outputs to fill a GPU, its
inputs are cut into parts, each for a program of its own; the program that ends last adds up the
parts in their order. A weight's shape alone decides how its inputs are cut and stepped through, so
a row has the same bits among any number of others. Weights are the first operand of the matrix
units, so that tiles of few and of many rows take the same instructions.

The references are PackedWeight.unpack and x @ unpack().T. Each format names the function of
triton_tiles that reads its weights (PackedFormat.triton); everything else is shared.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexec_kernels import triton_tiles
from specexec_kernels.dispatch import FUSED_ROWS
from specexec_kernels.formats.base import PackedFormat, PackedWeight, TritonForm
from specexec_kernels.triton_launch import launch

TILES = (FUSED_ROWS, 32, 64, 128)  # rows that a program multiplies by
BLOCK_OUTPUTS = 64  # of a program
# So many rows or more unpack a weight once into memory, instead of once for each tile of rows.
UNPACKED_ROWS = 4 * TILES[-1]
PROGRAMS = 512  # of a product; weights with fewer blocks of outputs have their inputs cut
LEAST_INPUTS = 1024  # of each part of the inputs
PARTS = 5  # tensors that the kernels take at most


@triton.jit
def _unpack_kernel(
    p0, p1, p2, p3, p4, out, K, N, READ: tl.constexpr, SETTINGS: tl.constexpr, STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * STEP
    DTYPE: tl.constexpr = out.dtype.element_ty
    weight = READ((p0, p1, p2, p3, p4), output % N, k, K, N, SETTINGS, STEP, DTYPE)
    place = out + output[:, None].to(tl.int64) * K + k + tl.arange(0, STEP)[None, :]
    tl.store(place, weight.to(DTYPE), mask=(output < N)[:, None])


# the number of rows differs from pass to pass and must not be compiled into the kernel
@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    p0, p1, p2, p3, p4, x, out, sums_of_parts, arrived, M, K, N,
    READ: tl.constexpr, SETTINGS: tl.constexpr, STEP: tl.constexpr, LONGEST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    block, cut, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tile * ROWS + tl.arange(0, ROWS)
    # in place of what lies beyond the last, others are computed again, and not stored
    n = output % N
    m = row % M
    DTYPE: tl.constexpr = x.dtype.element_ty
    # cut at the same inputs whatever the step
    each = tl.cdiv(K // LONGEST, CUTS) * LONGEST
    first = cut * each
    rows = x + m[None, :].to(tl.int64) * K + tl.arange(0, STEP)[:, None]
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for k in range(first, tl.minimum(first + each, K), STEP):
        weight = READ((p0, p1, p2, p3, p4), n, k, K, N, SETTINGS, STEP, DTYPE)
        inputs = tl.load(rows + k)
        sums = tl.dot(weight.to(DTYPE), inputs, acc=sums, input_precision="ieee")
    place = row[None, :].to(tl.int64) * N + output[:, None]
    inside = (row < M)[None, :] & (output < N)[:, None]
    if CUTS == 1:
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)
    else:
        size = M.to(tl.int64) * N
        tl.store(sums_of_parts + cut * size + place, sums, mask=inside)
        tl.debug_barrier()  # all threads have stored before the program counts as arrived
        counter = arrived + tile * tl.num_programs(0) + block
        if tl.atomic_add(counter, 1, sem="acq_rel") == CUTS - 1:
            total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
            for part in range(CUTS):
                # past the first-level cache, which does not see what other programs store
                total += tl.load(
                    sums_of_parts + part * size + place, mask=inside, other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
            tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
            tl.store(counter, 0)  # as the next product expects it


def reads(weight: PackedWeight) -> bool:
    """Whether the kernels read a weight; else PyTorch unpacks it."""
    whole = 32 if getattr(weight.format, "bits", 0) == 3 else 16  # inputs that fill whole words
    return weight.format.has_triton() and weight.in_features % whole == 0


def unpack(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight of PackedWeight.unpack, rounded to `dtype`: (outputs, inputs)."""
    inputs, outputs = weight.in_features, weight.out_features
    parts, constants = arguments(weight)
    out = torch.empty(outputs, inputs, dtype=dtype, device=parts[0].device)
    step, block_n = step_of(inputs, 64), BLOCK_OUTPUTS
    # without fused multiply-add, weights are rounded as `unpack` rounds them
    _unpack_kernel[inputs // step, triton.cdiv(outputs, block_n)](
        *parts, out, inputs, outputs, **constants, STEP=step, BLOCK_N=block_n,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def quantized_matmul(
    x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Computes x @ W.T with W in x's dtype and float32 sums.

    Args:
        x: (rows, inputs).
        weight: W, (outputs, inputs).
        out_dtype: dtype of the result; x's where not given.
    Returns:
        (rows, outputs); a row has the same bits among any number of others.
    """
    x = x.contiguous()
    rows = x.shape[0]
    out = torch.empty(rows, weight.out_features, dtype=out_dtype or x.dtype, device=x.device)
    form = form_of(weight.format)
    most, step = form.rows, form.step
    if rows >= UNPACKED_ROWS or not most:
        most, parts = TILES[-1], (unpack(weight, x.dtype),) * PARTS
        constants = {"READ": triton_tiles.plain, "SETTINGS": ()}
    else:
        parts, constants = arguments(weight)
    whole = rows - rows % most
    if whole:
        _multiply(x[:whole], parts, out[:whole], constants, most, step)
    if whole < rows:
        tile = next(size for size in TILES if size >= rows - whole)
        _multiply(x[whole:], parts, out[whole:], constants, tile, step)
    return out


def cuts_of(outputs: int, inputs: int) -> int:
    """Into how many parts the inputs of a weight are cut."""
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(outputs, BLOCK_OUTPUTS))
    return max(1, min(wanted, inputs // LEAST_INPUTS))


def tiling(tile: int, step: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """How a program of a product goes about it.

    Args:
        tile: rows that are to be multiplied at a time.
        step: see TritonForm.step.
        dtype: of the rows.
    Returns:
        rows, outputs and inputs of a tile, and stages in which tiles are copied ahead.
    """
    if dtype == torch.float32:  # not for the matrix units: larger tiles would spill
        return TILES[0], BLOCK_OUTPUTS // 2, 64, 2
    return tile, BLOCK_OUTPUTS, step if tile <= 32 else min(step, 64), 3  # more would not fit


def _multiply(
    x: Tensor,
    parts: tuple[Tensor, ...],
    out: Tensor,
    constants: dict[str, Any],
    tile: int,
    step: int,
) -> None:
    (rows, inputs), outputs = x.shape, out.shape[1]
    tile, block_n, step, stages = tiling(tile, step, x.dtype)
    cuts = cuts_of(outputs, inputs)
    blocks, tiles = triton.cdiv(outputs, block_n), triton.cdiv(rows, tile)
    sums = arrived = out
    if cuts > 1:
        sums = torch.empty(cuts, rows, outputs, dtype=torch.float32, device=x.device)
        arrived = counters(x.device, blocks * tiles)
    sizes = {
        "STEP": step_of(inputs, step), "LONGEST": step_of(inputs, 128), "ROWS": tile,
        "BLOCK_N": block_n, "CUTS": cuts,
    }  # fmt: skip
    tensors = (*parts, x, out, sums, arrived)
    launch(
        _product_kernel, (blocks, cuts, tiles), tensors, (rows,), (inputs, outputs),
        constants | sizes, stages=stages,
    )  # fmt: skip


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` zeros, which a product leaves as zeros.

    Products of one stream run one after another and share them.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _zeros(device, stream, max(4096, triton.next_power_of_2(count)))


@cache
def _zeros(device: torch.device, stream: int, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def arguments(weight: PackedWeight) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The tensors that a format's function reads, its table included, as many as the kernels take;
    and the kernels' constants."""
    found = form_of(weight.format)
    parts = [weight.tensors[part.leaf].contiguous() for part in weight.format.parts]
    # GPUs before Ada have no E4M3, so float8 are given as bytes and decoded with integers
    parts = [part.view(torch.uint8) if part.is_floating_point() and part.element_size() == 1
             else part for part in parts]  # fmt: skip
    if found.table:
        parts.append(_table(found.table, parts[0].device))
    parts += (PARTS - len(parts)) * parts[:1]
    return tuple(parts), {"READ": found.read, "SETTINGS": found.settings}


@cache
def form_of(fmt: PackedFormat) -> TritonForm:
    found = fmt.triton()
    assert found is not None, f"{fmt.name} has no Triton form"
    return found


def step_of(inputs: int, most: int) -> int:
    """Inputs of a tile of weights: at most so many."""
    return next(step for step in (128, 64, 32, 16) if step <= most and inputs % step == 0)


@cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
