"""Fits the scale and zero point of groups of weights on a CPU, and rounds them, as compiled code.

PyTorch goes through memory for every operation. Here a group of a few outputs stays in the L1 cache
while all scales are tried and its columns are rounded one after another. An output's bits depend
on neither the other outputs nor the number of threads.

Source: fitted.py for scales and zero points, and calibrated.py for how a column's error moves on.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_ir_emit import F32, I64, Emitter, build_module

RANGES = (1.0, 0.85, 0.7, 0.55)  # shares of a group's range that fitting begins with
_LEAST_SCALE, _MOST_SCALE = 2.0**-24, 65504.0  # of float16, positive
_ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds a float32 to a whole number, halves to even
_TINY = 2.0**-126  # the smallest normal float32


class Arg(IntEnum):
    """Positions in the int64 argument array of the kernel; addresses and sizes."""

    COUNTER = 0  # next claim; set to 0 before a call
    STRIPS = auto()  # vectors of outputs
    AT_ONCE = auto()  # strips of a claim
    TARGETS = auto()  # float32 (group, outputs): what is rounded, errors of earlier groups included
    WEIGHTS = auto()  # float32 (group, outputs), overwritten with weight - rounded weight
    SHARES = auto()  # float32 (group,), by which squared errors count; their mean is 1
    FACTOR = auto()  # float32 (group, group), a part of rows that are FACTOR_STEP apart
    FACTOR_STEP = auto()  # elements
    CODES = auto()  # int32 (group, outputs), written
    SCALES = auto()  # float32 (outputs,), written: exact in float16
    ZEROS = auto()  # int32 (outputs,), written


@dataclass(frozen=True, slots=True)
class FitSpec:
    """What a kernel is compiled for."""

    bits: int
    group: int  # inputs
    corrects: bool  # whether errors move on by FACTOR; else WEIGHTS and FACTOR are not read
    lanes: int


class Kernel(Emitter):
    """Emits one kernel."""

    def __init__(self, spec: FitSpec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), spec.lanes)
        self.spec, self.top = spec, self.constant(2.0**spec.bits - 1)
        self.base = self.b.ptrtoint(function.args[0], I64)
        self.arg = {arg: self.load(self.base, I64(arg), I64, 8) for arg in Arg}
        self.outputs = self.b.mul(self.arg[Arg.STRIPS], I64(spec.lanes))
        self.tile = self.reserve(spec.group * spec.lanes)  # the strip's targets, [input][output]

    def emit(self) -> None:
        """Claims strips until none is left."""

        def work(start: Any, stop: Any) -> None:
            self.loop(start, stop, 1, [], strip)

        def strip(index: Any, _: list[Any]) -> list[Any]:
            column = self.b.mul(index, I64(self.spec.lanes))
            scale, zero = self.fitted(column)
            self.store(scale, self.arg[Arg.SCALES], column)
            self.store(self.b.fptosi(zero, self.words), self.arg[Arg.ZEROS], column)
            self.round(column, scale, zero)
            return []

        counter = self.ptr(self.base, I64(Arg.COUNTER), 8)
        self.claim_strips(counter, I64(0), self.arg[Arg.STRIPS], self.arg[Arg.AT_ONCE], work)

    def fitted(self, column: Any) -> tuple[Any, Any]:
        """The scale and zero point with the least error; copies the targets into the tile."""
        b, zeros = self.b, self.constant(0.0)

        def read(k: Any, carried: list[Any]) -> list[Any]:
            value = self.load(self.arg[Arg.TARGETS], self.place(k, column), self.vector)
            self.store(value, self.tile, b.mul(k, I64(self.lanes)))
            lowest, highest, total = carried
            total = self.fma(self.share(k), value, total)
            return [self.lesser(value, lowest), self.greater(value, highest), total]

        lowest, highest, total = self.loop(I64(0), I64(self.spec.group), 1, [zeros] * 3, read)
        width = b.fsub(highest, lowest)
        # the scale and zero point of round-to-nearest
        wide = b.fmul(self.constant(2.0), self.greater(b.fneg(lowest), highest))
        scale = self.storable(b.fdiv(wide, self.top))
        zero = self.constant(2.0 ** (self.spec.bits - 1))
        best = self.sums(scale, zero, False)[0], scale, zero
        for share in RANGES:
            scale = self.storable(b.fdiv(b.fmul(self.constant(share), width), self.top))
            zero = self.whole(b.fdiv(b.fmul(self.constant(-share), lowest), scale), zeros, self.top)
            error, product, square, steps = self.sums(scale, zero, True)
            best = self.better(best, (error, scale, zero))
            fit = b.fdiv(product, self.greater(square, self.constant(_TINY)))
            moved = b.fsub(steps, b.fdiv(total, scale))
            moved = self.fma(moved, self.constant(1.0 / self.spec.group), zero)
            scale = self.storable(b.select(b.fcmp_ordered(">", fit, zeros), fit, scale))
            zero = self.whole(moved, zeros, self.top)
            best = self.better(best, (self.sums(scale, zero, False)[0], scale, zero))
        return best[1], best[2]

    def sums(self, scale: Any, zero: Any, every: bool) -> list[Any]:
        """Sums over the tile with s = code - zero, all by the shares: of (w - scale s)^2, and where
        `every` is given also of w s, of s^2 and of s."""
        b, inverse, minus = self.b, self.b.fdiv(self.constant(1.0), scale), self.b.fneg(scale)
        least, most = b.fneg(zero), b.fsub(self.top, zero)

        def column(k: Any, carried: list[Any]) -> list[Any]:
            value = self.load(self.tile, b.mul(k, I64(self.lanes)), self.vector)
            share = self.share(k)
            step = self.whole(b.fmul(value, inverse), least, most)
            off = self.fma(minus, step, value)
            found = [self.fma(b.fmul(off, share), off, carried[0])]
            if every:
                counted = b.fmul(step, share)
                found.append(self.fma(counted, value, carried[1]))
                found.append(self.fma(counted, step, carried[2]))
                found.append(b.fadd(counted, carried[3]))
            return found

        count = 4 if every else 1
        return self.loop(I64(0), I64(self.spec.group), 1, [self.constant(0.0)] * count, column)

    def round(self, column: Any, scale: Any, zero: Any) -> None:
        """Rounds the tile's inputs one after another; an error moves on to those behind it."""
        b, inverse, minus = self.b, self.b.fdiv(self.constant(1.0), scale), self.b.fneg(scale)
        least, most = b.fneg(zero), b.fsub(self.top, zero)

        def one(k: Any, _: list[Any]) -> list[Any]:
            value = self.load(self.tile, b.mul(k, I64(self.lanes)), self.vector)
            step = self.whole(b.fmul(value, inverse), least, most)
            codes = b.fptosi(b.fadd(step, zero), self.words)
            self.store(codes, self.arg[Arg.CODES], self.place(k, column))
            if not self.spec.corrects:
                return []
            weight = self.load(self.arg[Arg.WEIGHTS], self.place(k, column), self.vector)
            error = self.fma(minus, step, weight)
            self.store(error, self.arg[Arg.WEIGHTS], self.place(k, column))
            row = b.mul(k, self.arg[Arg.FACTOR_STEP])

            def later(i: Any, _: list[Any]) -> list[Any]:
                factor = self.load(self.arg[Arg.FACTOR], b.add(row, i), F32)
                at = b.mul(i, I64(self.lanes))
                old = self.load(self.tile, at, self.vector)
                self.store(self.fma(self.splat(factor, self.lanes), error, old), self.tile, at)
                return []

            self.loop(b.add(k, I64(1)), I64(self.spec.group), 1, [], later)
            return []

        self.loop(I64(0), I64(self.spec.group), 1, [], one)

    def place(self, k: Any, column: Any) -> Any:
        """The index of input `k` and output `column` in a (group, outputs) array."""
        return self.b.add(self.b.mul(k, self.outputs), column)

    def share(self, k: Any) -> Any:
        """Input k's share in every lane."""
        return self.splat(self.load(self.arg[Arg.SHARES], k, F32), self.lanes)

    def better(self, best: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
        """In each lane the (error, scale, zero) with the smaller error; of equals the first."""
        less = self.b.fcmp_ordered("<", other[0], best[0])
        return tuple(self.b.select(less, new, old) for new, old in zip(other, best, strict=True))

    def whole(self, value: Any, least: Any, most: Any) -> Any:
        """The nearest whole number in the bounds, which are whole; a NaN is the lower one."""
        b, shift = self.b, self.constant(_ROUND)
        return b.fsub(b.fadd(self.lesser(self.greater(value, least), most), shift), shift)

    def storable(self, scale: Any) -> Any:
        """A scale rounded to float16 and back; at least the smallest positive float16."""
        least, most = self.constant(_LEAST_SCALE), self.constant(_MOST_SCALE)
        bounded = self.lesser(self.greater(scale, least), most)
        half = self.b.fptrunc(bounded, ir.VectorType(ir.HalfType(), self.lanes))
        return self.b.fpext(half, self.vector)

    def lesser(self, left: Any, right: Any) -> Any:
        """The smaller of two numbers; `right` where one is no number."""
        return self.b.select(self.b.fcmp_ordered("<", left, right), left, right)

    def greater(self, left: Any, right: Any) -> Any:
        """The larger of two numbers; `right` where one is no number."""
        return self.b.select(self.b.fcmp_ordered(">", left, right), left, right)


def fit_groups(
    columns: Tensor, bits: int, group: int, shares: Tensor, factor: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zero points and scales of a weight that lies column by column.

    Args:
        columns: (inputs, outputs) float32, outputs a multiple of cpu_jit.lanes(); with a factor
            each column becomes the error of its rounding.
        group: inputs of a group; divides the inputs.
        shares: (inputs,) positive float32, by which squared errors count in a group; their mean in
            each group is 1.
        factor: (inputs, inputs) float32 with rows as they lie in memory: factor[i, j] is the share
            of column i's error that is added to a later column j before it is rounded.
    Returns:
        (inputs, outputs) int32, (groups, outputs) int32 and (groups, outputs) float32.
    """
    inputs, outputs = columns.shape
    assert factor is None or factor.stride(1) == 1
    lanes, shares = cpu_jit.lanes(), shares.contiguous()
    strips = outputs // lanes
    at_once = cpu_team.strips_at_once(strips)
    codes = torch.empty(inputs, outputs, dtype=torch.int32)
    zeros = torch.empty(inputs // group, outputs, dtype=torch.int32)
    scales = torch.empty(inputs // group, outputs)
    kernel = _kernel(FitSpec(bits, group, factor is not None, lanes))
    for number in range(inputs // group):
        first, end = number * group, (number + 1) * group
        own = targets = columns[first:end]
        part, step = 0, 0
        if factor is not None:
            part, step = factor[first:end, first:end].data_ptr(), factor.stride(0)
            targets = torch.addmm(own, factor[:first, first:end].T, columns[:first])
        values = {
            Arg.COUNTER: 0, Arg.STRIPS: strips, Arg.AT_ONCE: at_once,
            Arg.TARGETS: targets.data_ptr(), Arg.WEIGHTS: own.data_ptr(),
            Arg.SHARES: shares[first:end].data_ptr(),
            Arg.FACTOR: part, Arg.FACTOR_STEP: step,
            Arg.CODES: codes[first:end].data_ptr(), Arg.SCALES: scales[number].data_ptr(),
            Arg.ZEROS: zeros[number].data_ptr(),
        }  # fmt: skip
        table = array("q", [values[arg] for arg in Arg])
        cpu_team.run(kernel, table.buffer_info()[0], -(-strips // at_once))
    return codes, zeros, scales


@cache
def _kernel(spec: FitSpec) -> Any:
    return cpu_jit.compiled(
        "fit", spec,
        lambda name: build_module(name, lambda function: Kernel(spec, function).emit()),
    )  # fmt: skip
