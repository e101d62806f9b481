"""LLVM IR that rounds rows to 8 bits, and puts them into the order of the matmul kernels.

As llama.cpp does on a CPU, every 32 inputs become whole numbers from -127 to 127 and a float32, the
step that they are multiples of. Products are then exact integers, whatever instruction forms them.
Offsets are multiplied by the rounded inputs too: only so do errors of codes and offsets, which are
large beside the weight, cancel out.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_arrange_int16 import WholeArrange
from specexec_kernels.cpu_arrange_ir import ArrangeSpec
from specexec_kernels.cpu_ir_emit import F32, I8, I32, I64, build_module
from specexec_kernels.cpu_matmul_spec import ROUNDED_INPUTS

_MOST = 127.0
_LEAST = 1e-30  # runs with no larger input are zeros: the inverse of their step might be infinite


class EightBitArrange(WholeArrange):
    """Emits a kernel that arranges rows as quads of int8 or, where no instruction multiplies such
    quads by a format's codes, as pairs of int16. A run with an infinity or NaN has NaN as its step.
    """

    def __init__(self, spec: ArrangeSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        self.run = ROUNDED_INPUTS
        self.span = max(spec.unit, self.run)
        self.whole = self.reserve(self.span)

    def step(self, largest: Any) -> tuple[Any, Any]:
        b, value = self.b, self.b.bitcast(largest, F32)
        is_zero, zero = b.fcmp_ordered("<=", value, F32(_LEAST)), I32(0)
        step, inverse = b.fdiv(value, F32(_MOST)), b.fdiv(F32(_MOST), value)
        bits = [b.bitcast(each, I32) for each in (step, inverse)]
        return b.select(is_zero, zero, bits[0]), b.select(is_zero, zero, bits[1])

    def x_sum(self, first: Any, number: Any, step: Any, total: Any) -> Any:
        b = self.b
        return b.bitcast(b.fmul(b.bitcast(step, F32), b.sitofp(total, F32)), I32)

    def keep(self, integers: Any, place: Any) -> None:
        if not self.spec.quads:
            super().keep(integers, place)
            return
        narrow = self.b.trunc(integers, ir.VectorType(I8, integers.type.count))
        self.b.store(narrow, self.ptr(self.whole, place, 1), align=1)

    def whole_item(self, local: Any, number: int) -> Any:
        if not self.spec.quads:
            return super().whole_item(local, number)
        b, (first, *others) = self.b, self.spec.order[4 * number : 4 * number + 4]
        if tuple(others) == (first + 1, first + 2, first + 3):
            place = b.add(local, I64(first))
            return b.load(self.ptr(self.whole, place, 1), typ=I32, align=1)
        word = I32(0)
        for byte, at in enumerate((first, *others)):
            one = self.load(self.whole, b.add(local, I64(at)), I8, 1)
            word = b.or_(word, b.shl(b.zext(one, I32), I32(8 * byte)))
        return word


def build_eight_bit_arrange(spec: ArrangeSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for `spec`, which must have a `zero`."""
    return build_module(name, lambda function: EightBitArrange(spec, function).emit())
