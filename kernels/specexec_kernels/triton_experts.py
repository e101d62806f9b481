# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels for a mixture's layer with all of its experts on the GPU.

The host learns nothing of the router's choices. One launch sorts the places of a pass by expert, a
place being one row at one of its chosen experts; one launch multiplies all places by one linear of
their experts, or by several of one format and shape; one launch sums each row's outputs in the
order of the experts' numbers. Experts lie anywhere in memory: a table has the addresses of their
tensors.

A product is cut and stepped as triton_rows does it for an expert alone, so that a row has the same
bits there, and among any number of other rows here. The reference is models/expert_mlp.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexec_kernels import triton_rows, triton_tiles
from specexec_kernels.formats.base import PackedWeight, TritonForm
from specexec_kernels.formats.plain import DTYPES, Plain
from specexec_kernels.triton_rows import cuts_of, step_of, tiling

TILES = (16, 32, 64)  # places of one expert that a program multiplies by
_BLOCK = 1024  # places that are sorted at a time, and columns that are summed
_ALIGNED_BYTES = 16  # that a thread loads at once


@triton.jit(do_not_specialize=["COUNT", "MOST"])
def _route_kernel(
    choices, order, COUNT, MOST, EXPERTS: tl.constexpr, BINS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    position, tiles = order + COUNT, order + 2 * COUNT
    counts = tl.zeros((BINS,), dtype=tl.int32)  # the last bins take what is beyond the places
    for first in range(0, COUNT, BLOCK):
        place = first + tl.arange(0, BLOCK)
        chosen = tl.load(choices + place, mask=place < COUNT, other=EXPERTS).to(tl.int32)
        counts += tl.histogram(chosen, BINS)
    number = tl.arange(0, BINS)
    at = tl.sum(tl.where(number < expert, counts, 0), axis=0)
    last = at + tl.sum(tl.where(number == expert, counts, 0), axis=0)
    tile = tl.sum(tl.where(number < expert, tl.cdiv(counts, ROWS), 0), axis=0)
    for start in range(at, last, ROWS):
        tl.store(tiles + tile, expert)
        tl.store(tiles + MOST + tile, start)
        tl.store(tiles + 2 * MOST + tile, tl.minimum(start + ROWS, last))
        tile += 1
    if expert == EXPERTS - 1:
        for unused in range(tile, MOST):
            tl.store(tiles + MOST + unused, 0)
            tl.store(tiles + 2 * MOST + unused, 0)
    for first in range(0, COUNT, BLOCK):
        place = first + tl.arange(0, BLOCK)
        chosen = tl.load(choices + place, mask=place < COUNT, other=EXPERTS).to(tl.int32)
        own = (chosen == expert).to(tl.int32)
        sorted_at = at + tl.cumsum(own, axis=0) - 1
        tl.store(order + sorted_at, place, mask=own == 1)
        tl.store(position + place, sorted_at, mask=own == 1)
        at += tl.sum(own, axis=0)


@triton.jit
def _address(place, like, ALIGNED: tl.constexpr):
    """A pointer of the dtype of `like` from a table of addresses."""
    return tl.multiple_of(tl.load(place).to(like.dtype), ALIGNED)


@triton.jit
def _parts_at(entry, p0, p1, p2, p3, p4, ALIGNED: tl.constexpr):
    """The tensors of a weight, whose addresses begin at `entry`."""
    return (
        _address(entry, p0, ALIGNED[0]), _address(entry + 1, p1, ALIGNED[1]),
        _address(entry + 2, p2, ALIGNED[2]), _address(entry + 3, p3, ALIGNED[3]),
        _address(entry + 4, p4, ALIGNED[4]),
    )  # fmt: skip


@triton.jit
def _finished(sums, bias, output, N, BIAS: tl.constexpr, dtype: tl.constexpr):
    """Adds the bias behind the rounding, as for packed weights alone, or before it."""
    if BIAS == "":
        return sums.to(dtype)
    added = tl.load(bias + output % N).to(dtype).to(tl.float32)[:, None]
    if BIAS == "rounded":
        sums = sums.to(dtype).to(tl.float32)
    return (sums + added).to(dtype)


@triton.jit
def _product_of_a_cut(
    rows, parts, n, cut, each, K, N, READ: tl.constexpr, SETTINGS: tl.constexpr,
    STEP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, ROWS) sums over the inputs of one cut; `rows` points to a step of each row."""
    DTYPE: tl.constexpr = rows.dtype.element_ty
    first = cut * each
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for k in range(first, tl.minimum(first + each, K), STEP):
        weight = READ(parts, n, k, K, N, SETTINGS, STEP, DTYPE)
        sums = tl.dot(weight.to(DTYPE), tl.load(rows + k), acc=sums, input_precision="ieee")
    return sums


# the numbers of places and tiles differ from pass to pass and must not be compiled into the kernel
@triton.jit(do_not_specialize=["PLACES", "MOST"])
def _product_kernel(
    p0, p1, p2, p3, p4, p5, addresses, order, x, out, sums_of_parts, arrived, PLACES, MOST,
    K, N, READ: tl.constexpr, SETTINGS: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr,
    LINEARS: tl.constexpr, CHOSEN: tl.constexpr, STEP: tl.constexpr, LONGEST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CUTS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(2)
    tiles = order + 2 * PLACES
    begin, end = tl.load(tiles + MOST + tile), tl.load(tiles + 2 * MOST + tile)
    if begin == end:
        return
    linear = tl.program_id(0) % LINEARS
    output = tl.program_id(0) // LINEARS * BLOCK_N + tl.arange(0, BLOCK_N)
    entry = addresses + (tl.load(tiles + tile) * LINEARS + linear) * 6
    parts = _parts_at(entry, p0, p1, p2, p3, p4, ALIGNED)
    # in place of what lies beyond the last, others are computed again, and not stored
    n = output % N
    m = tl.minimum(begin + tl.arange(0, ROWS), end - 1)
    if CHOSEN > 0:  # the input of a place is its row; else `x` has an input for each place, sorted
        m = tl.load(order + m) // CHOSEN
    # cut at the same inputs whatever the step
    each = tl.cdiv(K // LONGEST, CUTS) * LONGEST
    rows = x + m[None, :].to(tl.int64) * K + tl.arange(0, STEP)[:, None]
    if ALONE and CUTS > 1:
        sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
        for cut in range(CUTS):
            sums += _product_of_a_cut(
                rows, parts, n, cut, each, K, N, READ, SETTINGS, STEP, ROWS, BLOCK_N
            )
    else:
        sums = _product_of_a_cut(
            rows, parts, n, tl.program_id(1), each, K, N, READ, SETTINGS, STEP, ROWS, BLOCK_N
        )
    # loaded again: kept while the loop runs, they would be one register too many
    place = tl.load(tiles + MOST + tile, volatile=True) + tl.arange(0, ROWS)
    inside = (place < tl.load(tiles + 2 * MOST + tile, volatile=True))[None, :]
    inside &= (output < N)[:, None]
    size = PLACES.to(tl.int64) * N
    target = linear * size + place[None, :].to(tl.int64) * N + output[:, None]
    bias = _address(entry + 5, p5, ALIGNED[5])
    DTYPE: tl.constexpr = out.dtype.element_ty
    if ALONE:
        tl.store(out + target, _finished(sums, bias, output, N, BIAS, DTYPE), mask=inside)
    else:
        size *= LINEARS
        tl.store(sums_of_parts + tl.program_id(1) * size + target, sums, mask=inside)
        tl.debug_barrier()  # all threads have stored before the program counts as arrived
        counter = arrived + tile * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == CUTS - 1:
            total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
            for part in range(CUTS):
                # past the first-level cache, which does not see what other programs store
                total += tl.load(
                    sums_of_parts + part * size + target, mask=inside, other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
            tl.store(out + target, _finished(total, bias, output, N, BIAS, DTYPE), mask=inside)
            tl.store(counter, 0)  # as the next product expects it


@triton.jit
def _sum_kernel(
    found, choices, weights, order, out, N, CHOSEN: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    position = order + tl.num_programs(0) * CHOSEN
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    place = row * CHOSEN + slot
    chosen = tl.load(choices + place, mask=slot < CHOSEN, other=0).to(tl.int32)
    sorted_at = tl.load(position + place, mask=slot < CHOSEN, other=0).to(tl.int64)
    weight = tl.load(weights + place, mask=slot < CHOSEN, other=0).to(tl.float32)
    key = tl.where(slot < CHOSEN, chosen * SLOTS + slot, 0x7FFFFFFF)
    dtype = found.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(CHOSEN):  # each output and each sum is rounded
        here = key == tl.min(key, axis=0)
        source = tl.sum(tl.where(here, sorted_at, 0), axis=0) * N + column
        part = tl.load(found + source, mask=column < N, other=0.0).to(tl.float32)
        part = (part * tl.sum(tl.where(here, weight, 0.0), axis=0)).to(dtype).to(tl.float32)
        total = (total + part).to(dtype).to(tl.float32)
        key = tl.where(here, 0x7FFFFFFF, key)
    target = out + row.to(tl.int64) * N + column
    tl.store(target, total.to(out.dtype.element_ty), mask=column < N)


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """Where the tensors of all experts of a layer lie, of one linear or of several alike.

    Valid while the tensors that it was made from are alive, which it does not see to.
    """

    # (experts, linears, PARTS and the bias) int64, on the CPU until the caller has sent them
    addresses: Tensor
    like: tuple[Tensor, ...]  # tensors of the first expert, whose dtypes all have
    inputs: int
    outputs: int
    experts: int
    linears: int
    step: int  # inputs of a tile of weights, where a product has few rows
    constants: dict[str, Any]  # of the product's kernel


def table_of(
    weights: Sequence[Sequence[PackedWeight]], biases: Sequence[Sequence[Tensor | None]]
) -> ExpertTable | None:
    """The table of some linears of all experts, which are on a GPU.

    Args:
        weights: for each expert, the weights of these linears.
        biases: their biases.
    Returns:
        The table, its addresses on the CPU; None if no kernel reads the weights, or if they differ
        in more than their values.
    """
    kinds = {_kind(*each) for own in zip(weights, biases, strict=True)
             for each in zip(*own, strict=True)}  # fmt: skip
    if len(kinds) > 1 or not _reads(weights[0][0]):
        return None
    stored = [
        [(*parts, parts[0] if bias is None else bias)
         for parts, bias in zip(map(_parts, own), own_biases, strict=True)]
        for own, own_biases in zip(weights, biases, strict=True)
    ]  # fmt: skip
    addresses = torch.tensor([[[t.data_ptr() for t in each] for each in own] for own in stored])
    first, bias = weights[0][0], biases[0][0]
    form = _form(first)
    constants = {
        "READ": form.read,
        "SETTINGS": form.settings,
        "ALIGNED": tuple(
            math.gcd(_ALIGNED_BYTES, *place.tolist()) for place in addresses.flatten(0, 1).T
        ),
        "BIAS": "" if bias is None else "sums" if isinstance(first.format, Plain) else "rounded",
        "LINEARS": len(weights[0]),
    }
    return ExpertTable(
        addresses, stored[0][0], first.in_features, first.out_features, len(weights),
        len(weights[0]), form.step, constants,
    )  # fmt: skip


def _kind(weight: PackedWeight, bias: Tensor | None) -> tuple[object, ...]:
    """Equal for linears that one launch can multiply by."""
    laid_out = all(tensor.is_contiguous() for tensor in weight.tensors.values())
    shape = weight.format, weight.in_features, weight.out_features
    tensors = (*(weight.tensors[part.leaf] for part in weight.format.parts), bias)
    return *shape, laid_out, *(t if t is None else (t.dtype, t.device) for t in tensors)


def _reads(weight: PackedWeight) -> bool:
    if not all(tensor.is_contiguous() for tensor in weight.tensors.values()):
        return False
    if isinstance(weight.format, Plain):
        known = weight.format.dtype in DTYPES.values() and not weight.format.transposed
        return known and weight.in_features % 16 == 0
    return triton_rows.reads(weight)


def _form(weight: PackedWeight) -> TritonForm:
    if isinstance(weight.format, Plain):
        return _PLAIN
    return triton_rows.form_of(weight.format)


def _parts(weight: PackedWeight) -> tuple[Tensor, ...]:
    if isinstance(weight.format, Plain):
        return (weight.tensors["weight"],) * triton_rows.PARTS
    return triton_rows.arguments(weight)[0]


_PLAIN = TritonForm(triton_tiles.plain)


def tile_rows(places: int, experts: int, dtype: torch.dtype) -> int:
    """Places of one expert that a program multiplies by."""
    if dtype == torch.float32:  # not for the matrix units: larger tiles would spill
        return TILES[0]
    return next((size for size in TILES if size * experts >= places), TILES[-1])


def most_tiles(places: int, experts: int, rows: int) -> int:
    """The most tiles that places may need, however they are shared out among the experts."""
    return min(places, min(experts, places) + places // rows)


def routes(choices: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """Sorts the places of a pass by expert.

    Args:
        choices: (rows, chosen) integers, the experts of each row.
        experts: experts of the layer.
        dtype: of the rows.
    Returns:
        int32: the places in the order of their experts and rows, where each place is in that
        order, and for each of most_tiles() its expert, its first and its last + 1 in that order.
    """
    places = choices.numel()
    rows = tile_rows(places, experts, dtype)
    most = most_tiles(places, experts, rows)
    found = torch.empty(2 * places + 3 * most, dtype=torch.int32, device=choices.device)
    _route_kernel[experts,](
        choices.contiguous(), found, places, most, EXPERTS=experts,
        BINS=triton.next_power_of_2(experts + 1), ROWS=rows, BLOCK=_BLOCK,
    )  # fmt: skip
    return found


def products(x: Tensor, table: ExpertTable, found: Tensor, chosen: int, places: int) -> Tensor:
    """Multiplies every place by the linears of its expert.

    Args:
        x: (rows, inputs), or (places, inputs) in the order of experts.
        found: the result of routes().
        chosen: experts of a row; 0 where x has an input for each place.
        places: rows * chosen.
    Returns:
        (linears, places, outputs) in x's dtype, in the order of experts.
    """
    x = x.contiguous()
    shape = table.linears, places, table.outputs
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    tile = tile_rows(places, table.experts, x.dtype)
    most = most_tiles(places, table.experts, tile)
    tile, block_n, step, stages = tiling(tile, table.step, x.dtype)
    cuts = cuts_of(table.outputs, table.inputs)
    blocks = table.linears * triton.cdiv(table.outputs, block_n)
    # where the places alone keep a GPU busy, a program adds up its cuts: their sums would take
    # more memory than the outputs, and a prompt has many
    alone = cuts == 1 or blocks * most >= 2 * triton_rows.PROGRAMS
    sums = arrived = out
    if not alone:
        sums = torch.empty(cuts, *shape, dtype=torch.float32, device=x.device)
        arrived = triton_rows.counters(x.device, blocks * most)
    # by their shared memory a GeForce runs three programs with the largest tiles at most: left to
    # itself the assembler spills registers of theirs for a fourth
    registers = 255 if tile == TILES[-1] else None
    _product_kernel[blocks, 1 if alone else cuts, most](
        *table.like, table.addresses, found, x, out, sums, arrived,
        places, most, table.inputs, table.outputs, **table.constants, CHOSEN=chosen,
        STEP=step_of(table.inputs, step), LONGEST=step_of(table.inputs, 128),
        ROWS=tile, BLOCK_N=block_n, CUTS=cuts, ALONE=alone, num_warps=4, num_stages=stages,
        maxnreg=registers, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def row_sums(outputs: Tensor, choices: Tensor, weights: Tensor, found: Tensor) -> Tensor:
    """Weighted sum of each row's outputs, in the order of its experts' numbers.

    Args:
        outputs: (places, hidden), in the order of experts.
        choices, weights: (rows, chosen).
        found: the result of routes().
    Returns:
        (rows, hidden) in the dtype of the outputs; each weighted output, and each sum of them, is
        rounded to it.
    """
    (rows, chosen), hidden = choices.shape, outputs.shape[1]
    out = torch.empty(rows, hidden, dtype=outputs.dtype, device=outputs.device)
    _sum_kernel[rows, triton.cdiv(hidden, _BLOCK)](
        outputs, choices.contiguous(), weights.contiguous(), found, out, hidden,
        CHOSEN=chosen, SLOTS=triton.next_power_of_2(chosen), BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return out
