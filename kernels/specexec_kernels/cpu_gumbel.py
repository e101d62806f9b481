"""Gumbel noise on a CPU as compiled code, in every bit that of gumbel.gumbel_noise_ref.

numpy draws the words one by one and goes through memory for each operation that follows. Here they
stay in registers. Where a logarithm in float64 does not decide on the nearest float32, the kernel
writes NaN, and the reference computes the number.

Source: the logarithm: log(m) = 2 (s + s^3 / 3 + ...) with s = (m - 1) / (m + 1), as in fdlibm's
e_log.c, which is off by less than three units in the last place here.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_ir_emit import F32, I32, I64, Emitter, build_module
from specexec_kernels.gumbel import BELOW_ONE, MARGIN, gumbel_of

_F64 = ir.DoubleType()
_WORDS = 4  # of a value of the counter
_BLOCK = 8192  # numbers of one claim
_SHARED_BLOCKS = 3  # up to this many blocks one thread is faster than waking others
# of Philox-4x64: two multipliers, and what is added to the two halves of the key after each round
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_ADDED, _ROUNDS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B), 10
_TERMS = 11  # of the logarithm's series: the next one is below 2^-58
_ROOT_OF_HALF, _ONE = 0x3FE6A09E667F3BCD, 1 << 52  # bits of sqrt(1/2), and of the lowest exponent
# log(2) as a number whose products with exponents are exact, and the rest (fdlibm's e_log.c)
_LOG_2 = 6.93147180369123816490e-01, 1.90821492927058770002e-10


class Arg(IntEnum):
    """Positions in the int64 argument array of the kernel."""

    COUNTER = 0  # next block to claim; set to 0 before a call
    OUT = auto()  # address of (BLOCKS * _BLOCK,) float32
    BLOCKS = auto()
    SEED = auto()
    POSITION = auto()


@dataclass(frozen=True, slots=True)
class GumbelSpec:
    """What the kernel is compiled for.

    Attributes:
        lanes: 64-bit lanes of a vector register.
        margin: see gumbel.gumbel_of.
    """

    lanes: int
    margin: float = MARGIN


class Kernel(Emitter):
    """Emits the kernel."""

    def __init__(self, spec: GumbelSpec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), spec.lanes)
        base = self.b.ptrtoint(function.args[0], I64)
        self.arg = {arg: self.load(base, I64(arg), I64, 8) for arg in Arg}
        self.counter, self.margin = self.ptr(base, I64(Arg.COUNTER), 8), spec.margin
        self.longs = ir.VectorType(I64, spec.lanes)
        self.doubles, self.floats = (ir.VectorType(each, spec.lanes) for each in (_F64, F32))
        fused = ir.FunctionType(self.doubles, [self.doubles] * 3)
        name = f"llvm.fma.v{spec.lanes}f64"
        self._fused = ir.Function(self.b.function.module, fused, name)

    def emit(self) -> None:
        """Emits the kernel: claims blocks until none is left."""
        b, lanes = self.b, self.lanes
        lane = ir.Constant(self.longs, list(range(1, lanes + 1)))

        def some(at: Any, _: list[Any]) -> list[Any]:
            counter = b.add(self.splat(b.udiv(at, I64(_WORDS)), lanes), lane)
            noise = [self.noise(word) for word in self.drawn(counter)]
            low, high = (self.side_by_side(noise[i], noise[i + 1], 1) for i in (0, 2))
            self.store(self.side_by_side(low, high, 2), self.arg[Arg.OUT], at)
            return []

        def work(block: Any, _: Any) -> None:
            first = b.mul(block, I64(_BLOCK))
            self.loop(first, b.add(first, I64(_BLOCK)), _WORDS * lanes, [], some)

        self.claim_strips(self.counter, I64(0), self.arg[Arg.BLOCKS], I64(1), work)

    def long(self, value: int) -> Any:
        """A vector of one int64."""
        return ir.Constant(self.longs, [value] * self.lanes)

    def double(self, value: float) -> Any:
        """A vector of one float64."""
        return ir.Constant(self.doubles, [value] * self.lanes)

    def side_by_side(self, left: Any, right: Any, run: int) -> Any:
        """`run` numbers of one vector, as many of the other, the next ones of the first, ..."""
        count = left.type.count
        order = [at + i + own for at in range(0, count, run) for own in (0, count)
                 for i in range(run)]  # fmt: skip
        return self.b.shuffle_vector(left, right, self.ints(order))

    def drawn(self, counter: Any) -> tuple[Any, Any, Any, Any]:
        """The four words of each value of the counter's first word (Philox-4x64-10)."""
        b, lanes = self.b, self.lanes
        a, second = counter, self.splat(self.arg[Arg.POSITION], lanes)
        third = fourth = self.long(0)
        key, other = self.splat(self.arg[Arg.SEED], lanes), self.long(0)
        for _ in range(_ROUNDS):
            (high_a, low_a), (high_c, low_c) = (
                self.product(each, by) for each, by in zip((a, third), _MULTIPLIERS, strict=True)
            )
            a, third = b.xor(b.xor(high_c, second), key), b.xor(b.xor(high_a, fourth), other)
            second, fourth = low_c, low_a
            key, other = (
                b.add(each, self.long(more))
                for each, more in zip((key, other), _ADDED, strict=True)
            )
        return a, second, third, fourth

    def product(self, x: Any, by: int) -> tuple[Any, Any]:
        """The upper and the lower 64 bits of x * by, from products of 32 bits each."""
        b, half, lower = self.b, self.long(32), self.long(0xFFFFFFFF)
        x_low, x_high = b.and_(x, lower), b.lshr(x, half)
        by_low, by_high = self.long(by & 0xFFFFFFFF), self.long(by >> 32)
        lowest, middle = b.mul(x_low, by_low), b.mul(x_high, by_low)
        other, highest = b.mul(x_low, by_high), b.mul(x_high, by_high)
        carried = b.add(middle, b.lshr(lowest, half))
        both = b.add(other, b.and_(carried, lower))
        high = b.add(b.add(highest, b.lshr(carried, half)), b.lshr(both, half))
        return high, b.or_(b.and_(lowest, lower), b.shl(both, half))

    def noise(self, word: Any) -> Any:
        """The float32 nearest to the noise of each word, NaN where float64 cannot tell it."""
        b = self.b
        uniform = b.uitofp(b.lshr(word, self.long(11)), self.doubles)
        uniform = b.fmul(b.fadd(uniform, self.double(0.5)), self.double(2.0**-53))
        most = self.double(BELOW_ONE)
        uniform = b.select(b.fcmp_ordered("<", uniform, most), uniform, most)
        noise = b.fneg(self.log(b.fneg(self.log(uniform))))
        size = b.select(b.fcmp_ordered("<", noise, self.double(0.0)), b.fneg(noise), noise)
        error = b.fmul(b.fadd(size, self.double(1.0)), self.double(self.margin))
        low, high = (
            b.fptrunc(each, self.floats) for each in (b.fsub(noise, error), b.fadd(noise, error))
        )
        unsure = ir.Constant(self.floats, [float("nan")] * self.lanes)
        return b.select(b.fcmp_ordered("==", low, high), low, unsure)

    def log(self, x: Any) -> Any:
        """log(x) for positive x that are not denormal."""
        b = self.b
        bits = b.bitcast(x, self.longs)
        above = b.ashr(b.sub(bits, self.long(_ROOT_OF_HALF)), self.long(52))
        m = b.bitcast(b.sub(bits, b.mul(above, self.long(_ONE))), self.doubles)
        power = b.sitofp(b.trunc(above, ir.VectorType(I32, self.lanes)), self.doubles)
        one = self.double(1.0)
        s = b.fdiv(b.fsub(m, one), b.fadd(m, one))
        square, series = b.fmul(s, s), self.double(2.0 / (2 * _TERMS + 1))
        for term in range(_TERMS - 1, 0, -1):
            series = self.fused(series, square, self.double(2.0 / (2 * term + 1)))
        rest = self.fused(power, self.double(_LOG_2[1]), b.fmul(b.fmul(s, square), series))
        rest = self.fused(s, self.double(2.0), rest)
        return self.fused(power, self.double(_LOG_2[0]), rest)

    def fused(self, left: Any, right: Any, addend: Any) -> Any:
        """left * right + addend in float64, rounded once."""
        return self.b.call(self._fused, [left, right, addend])


def gumbel_noise(seed: int, position: int, count: int, margin: float = MARGIN) -> Tensor:
    """Standard Gumbel noise of one position; see gumbel.gumbel_noise_ref.

    Args:
        seed: 0 to 2^64 - 1.
        position: 0 to 2^63 - 1.
        margin: see gumbel.gumbel_of.
    Returns:
        (count,) float32.
    """
    blocks = -(-count // _BLOCK)
    out = torch.empty(blocks * _BLOCK)
    values = {
        Arg.COUNTER: 0,
        Arg.OUT: out.data_ptr(),
        Arg.BLOCKS: blocks,
        Arg.SEED: seed if seed < 1 << 63 else seed - (1 << 64),
        Arg.POSITION: position,
    }
    table = array("q", [values[arg] for arg in Arg])
    kernel = _kernel(GumbelSpec(cpu_jit.lanes() // 2, margin))
    cpu_team.run(kernel, table.buffer_info()[0], blocks if blocks > _SHARED_BLOCKS else 1)
    found = out[:count]
    numbers = found.numpy()
    for index in np.flatnonzero(np.isnan(numbers)).tolist():
        at, which = divmod(index, _WORDS)
        words = np.random.Philox(key=seed, counter=[at, position, 0, 0]).random_raw(_WORDS)
        numbers[index] = gumbel_of(words[which : which + 1], margin)[0]
    return found


@cache
def _kernel(spec: GumbelSpec) -> Any:
    return cpu_jit.compiled(
        "gumbel", spec,
        lambda name: build_module(name, lambda function: Kernel(spec, function).emit()),
    )  # fmt: skip
