"""The frame that all CPU kernels share, and the LLVM IR building blocks that they are made of.

A kernel is `void name(int64 *args)`. Its work is a range of pieces, such as strips of outputs.
Threads claim them from a counter in args[0], so any number of threads may call it at once with the
same arguments. What is done with a piece is written in the modules that emit a kernel.

Knows nothing of torch or thread pools.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from llvmlite import ir

ScaleType = Literal["float16", "bfloat16", "float32"]
# Instructions that multiply four bytes: x86's vpdpbusd, and vpmaddubsw, whose sums of two products
# are int16; Arm's sdot, and smmla, which multiplies eight of two outputs by eight of two rows.
Quads = Literal["vnni", "int16 sums", "sdot", "smmla"]

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32, PTR = ir.FloatType(), ir.PointerType()
_LOG2_E = 1.4426950408889634
_LN2 = (
    0.693359375,
    -2.12194440e-4,
)  # a high part that is exact in 9 bits, and the rest (Cody and Waite, 1980)
_SMALLEST = -87.0  # exp(x) is zero for x below
_GELU = (1.5957691216057308, 0.044715)  # see Emitter.activated
_NEAR = 0.5  # tanh(x) is a fraction of polynomials for |x| below
_ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds a float32 to a whole number


class Bfloat(ir.types.Type):
    """LLVM's type bfloat, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat)

    def __hash__(self) -> int:
        return hash(Bfloat)


class Emitter:
    """An IRBuilder with the composite operations that kernels are made of."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.b, self.lanes = builder, lanes
        self.vector = ir.VectorType(F32, lanes)
        self.words = ir.VectorType(I32, lanes)
        module = builder.function.module
        prefetch = ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32])
        self._prefetch = ir.Function(module, prefetch, "llvm.prefetch.p0")
        fma = ir.FunctionType(self.vector, [self.vector] * 3)
        self._fma = ir.Function(module, fma, f"llvm.fma.v{lanes}f32")

    def claim_strips(
        self,
        counter: Any,
        first: Any,
        end: Any,
        at_once: Any,
        work: Callable[[Any, Any], None],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """Emits the body of a kernel: claims strips first..end until none is left, then returns.

        Args:
            counter: address of the int64 that counts claims; it must be 0 before a call.
            at_once: strips of one claim.
            work: emits what is done with strips start..stop.
            finish: emits what a thread does when none is left.
        """
        b = self.b
        claim, found, done = (b.append_basic_block(name) for name in ("claim", "work", "done"))
        b.branch(claim)
        b.position_at_end(claim)
        turn = b.atomic_rmw("add", counter, I64(1), "monotonic")
        start = b.add(first, b.mul(turn, at_once))
        b.cbranch(b.icmp_signed("<", start, end), found, done)
        b.position_at_end(found)
        work(start, self.minimum(b.add(start, at_once), end))
        b.branch(claim)
        b.position_at_end(done)
        finish()
        b.ret_void()

    def fma(self, left: Any, right: Any, addend: Any) -> Any:
        """left * right + addend, rounded once."""
        return self.b.call(self._fma, [left, right, addend])

    def prefetch(self, base: Any, index: Any) -> None:
        """Prefetches the cache line of 4-byte element `index`, which may lie outside the array.

        The line goes to the L2 cache. The L1 cache tracks only few misses at a time, and
        prefetches into it hold up the reads of the moment: one thread then read 7.8 GB/s, and
        13.9 GB/s with prefetches into L2.
        """
        read, into_l2, data = I32(0), I32(2), I32(1)
        self.b.call(self._prefetch, [self.ptr(base, index), read, into_l2, data])

    def ptr(self, base: Any, index: Any, size: int = 4) -> Any:
        """Address of element `index` of `size` bytes."""
        offset = self.b.mul(index, I64(size))
        return self.b.inttoptr(self.b.add(base, offset), PTR)

    def load(self, base: Any, index: Any, typ: Any, size: int = 4) -> Any:
        """Unaligned load of `typ` at element `index`."""
        return self.b.load(self.ptr(base, index, size), typ=typ, align=size)

    def store(self, value: Any, base: Any, index: Any) -> None:
        """Unaligned store at 4-byte element `index`."""
        self.b.store(value, self.ptr(base, index), align=4)

    def loop(
        self,
        start: Any,
        stop: Any,
        step: int | ir.Value,
        carried: list[Any],
        body: Callable[[Any, list[Any]], list[Any]],
    ) -> list[Any]:
        """Emits `for i in range(start, stop, step): carried = body(i, carried)`.

        Returns:
            the carried SSA values after the loop.
        """
        b = self.b
        before = b.block
        head, inside, after = (b.append_basic_block(n) for n in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        index.add_incoming(start, before)
        phis = [b.phi(value.type) for value in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", index, stop), inside, after)
        b.position_at_end(inside)
        new = body(index, phis)
        index.add_incoming(b.add(index, I64(step) if isinstance(step, int) else step), b.block)
        for phi, value in zip(phis, new, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        return phis

    def reserve(self, size: int) -> Any:
        """Reserves `size` 32-bit words on the stack, aligned to 64 bytes; their address."""
        array = self.b.alloca(ir.ArrayType(F32, size))
        array.align = 64
        return self.b.ptrtoint(array, I64)

    def minimum(self, left: Any, right: Any) -> Any:
        """The smaller of two signed integers."""
        return self.b.select(self.b.icmp_signed("<", left, right), left, right)

    def maximum(self, left: Any, right: Any) -> Any:
        """The larger of two signed integers."""
        return self.b.select(self.b.icmp_signed(">", left, right), left, right)

    def transpose(self, rows: list[Any]) -> list[Any]:
        """Transposes each n x n square of n vectors of words; n is a power of two up to the lanes.

        Swaps blocks of 1, 2, 4 ... words across the diagonal, in all squares at once.
        """
        b, lanes = self.b, self.lanes
        rows, size = list(rows), 1
        while size < len(rows):
            # lanes of the upper row are numbered from `lanes` on
            upper = [i if not i & size else i - size + lanes for i in range(lanes)]
            lower = [i + size if not i & size else i + lanes for i in range(lanes)]
            for i in (i for i in range(len(rows)) if not i & size):
                pair = rows[i], rows[i + size]
                rows[i] = b.shuffle_vector(*pair, self.ints(upper))
                rows[i + size] = b.shuffle_vector(*pair, self.ints(lower))
            size *= 2
        return rows

    def splat(self, scalar: Any, lanes: int) -> Any:
        """A vector with `scalar` in every lane."""
        typ = ir.VectorType(scalar.type, lanes)
        one = self.b.insert_element(ir.Constant(typ, ir.Undefined), scalar, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.b.shuffle_vector(one, ir.Constant(typ, ir.Undefined), zeros)

    def ints(self, values: list[int]) -> Any:
        """A constant int32 vector."""
        return ir.Constant(ir.VectorType(I32, len(values)), values)

    def field(self, bits: int, low: Any, high: Any, shifts: list[int]) -> Any:
        """The `bits`-bit codes that begin at bits `shifts` of `low`, one for each lane; those that
        do not fit go on in `high`."""
        value = self.b.lshr(low, self.ints(shifts))
        if any(shift + bits > 32 for shift in shifts):
            # (high << 1) << (31 - shift) is high << (32 - shift) without the undefined shift by 32
            up = self.b.shl(high, self.ints([1] * len(shifts)))
            rest = self.b.shl(up, self.ints([31 - shift for shift in shifts]))
            value = self.b.or_(value, rest)
        return self.b.and_(value, self.ints([2**bits - 1] * len(shifts)))

    def constant(self, value: float) -> Any:
        """A constant float32 vector with `value` in every lane."""
        return ir.Constant(self.vector, [value] * self.lanes)

    def exp(self, x: Any) -> Any:
        """exp(x) for x <= 0, to about one unit in the last place; zero below _SMALLEST.

        x = n ln 2 + f with |f| <= ln 2 / 2, so exp(x) = 2**n * exp(f), with the Taylor polynomial
        of degree 7 for exp(f).
        """
        b = self.b
        is_zero = b.fcmp_ordered("<", x, self.constant(_SMALLEST))
        x = b.select(is_zero, self.constant(_SMALLEST), x)
        shifted = self.fma(x, self.constant(_LOG2_E), self.constant(_ROUND))
        n = b.fsub(shifted, self.constant(_ROUND))
        f = self.fma(n, self.constant(-_LN2[0]), x)
        f = self.fma(n, self.constant(-_LN2[1]), f)
        factorial = 5040.0
        result = self.constant(1.0 / factorial)
        for degree in range(6, -1, -1):
            factorial /= degree + 1
            result = self.fma(result, f, self.constant(1.0 / factorial))
        # the low bits of `shifted` are n, which is added to the exponent
        power = b.shl(b.bitcast(shifted, self.words), self.ints([23] * self.lanes))
        scaled = b.bitcast(b.add(b.bitcast(result, self.words), power), self.vector)
        return b.select(is_zero, self.constant(0.0), scaled)

    def tanh(self, x: Any) -> Any:
        """tanh(x), to a few units in the last place.

        Computed from exp(-2|x|). That loses bits by cancellation where x is small, so below _NEAR
        it is Lambert's continued fraction x / (1 + x**2 / (3 + x**2 / (5 + ...))), cut off after 9.
        """
        b, one = self.b, self.constant(1.0)
        negative = b.fcmp_ordered("<", x, self.constant(0.0))
        power = self.exp(b.fmul(b.select(negative, x, b.fneg(x)), self.constant(2.0)))
        above = b.fsub(one, power)
        square = b.fmul(x, x)
        near = self.fma(square, b.fadd(square, self.constant(105.0)), self.constant(945.0))
        below = self.fma(square, self.constant(15.0), self.constant(420.0))
        is_near = b.fcmp_ordered("<", square, self.constant(_NEAR**2))
        above = b.select(is_near, b.fmul(x, near), b.select(negative, b.fneg(above), above))
        below = b.select(is_near, self.fma(square, below, self.constant(945.0)), b.fadd(one, power))
        return b.fdiv(above, below)

    def to_float(self, codes: Any) -> Any:
        """int32 lanes as float32; exact below 2**24."""
        return self.b.sitofp(codes, ir.VectorType(F32, codes.type.count))

    def bfloat_bits(self, values: Any) -> Any:
        """float32 lanes as bfloat16, to nearest even, in the lower halves of int32 lanes."""
        b = self.b

        def same(value: int) -> Any:
            return self.ints([value] * self.lanes)

        bits = b.bitcast(values, self.words)
        odd = b.and_(b.lshr(bits, same(16)), same(1))
        rounded = b.lshr(b.add(bits, b.add(odd, same(0x7FFF))), same(16))
        # rounding a NaN with all bits set would carry over to a zero
        is_number = b.fcmp_ordered("==", values, values)
        return b.select(is_number, rounded, same(0x7FC0))

    def store_as(self, kind: ScaleType, values: Any, base: Any, index: Any) -> None:
        """Stores float32 lanes from element `index` on, as they are or rounded to bfloat16."""
        assert kind != "float16", "nothing stores it"
        if kind == "float32":
            self.store(values, base, index)
            return
        short = self.b.trunc(self.bfloat_bits(values), ir.VectorType(I16, self.lanes))
        self.b.store(short, self.ptr(base, index, 2), align=2)

    def activated(self, activation: str, x: Any) -> Any:
        """The silu, gelu_tanh or sigmoid of float32 lanes.

        The tanh form of GELU is written with a sigmoid:
        gelu(x) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x**3))
        """
        inner = x
        if activation == "gelu_tanh":
            square = self.b.fmul(x, x)
            factor = self.fma(square, self.constant(_GELU[1]), self.constant(1.0))
            inner = self.b.fmul(self.b.fmul(x, self.constant(_GELU[0])), factor)
        return self.times_sigmoid(self.constant(1.0) if activation == "sigmoid" else x, inner)

    def times_sigmoid(self, x: Any, inner: Any) -> Any:
        """x * sigmoid(inner), computed from exp(-|inner|), which cannot overflow."""
        b, one = self.b, self.constant(1.0)
        negative = b.fcmp_ordered("<", inner, self.constant(0.0))
        power = self.exp(b.select(negative, inner, b.fneg(inner)))
        return b.fdiv(b.fmul(x, b.select(negative, power, one)), b.fadd(one, power))

    def load_scales(self, kind: ScaleType, base: Any, index: Any, lanes: int, step: int = 1) -> Any:
        """Loads `lanes` numbers of a dtype, every `step`-th from element `index` on, as float32."""
        wide = ir.VectorType(F32, lanes)
        if kind == "float32":
            return self.load_every(step, base, index, wide, 4)
        if kind == "float16":
            half = self.load_every(step, base, index, ir.VectorType(ir.HalfType(), lanes), 2)
            return self.b.fpext(half, wide)
        raw = self.load_every(step, base, index, ir.VectorType(I16, lanes), 2)
        bits = self.b.shl(self.b.zext(raw, ir.VectorType(I32, lanes)), self.ints([16] * lanes))
        return self.b.bitcast(bits, wide)

    def load_every(self, step: int, base: Any, index: Any, typ: Any, size: int) -> Any:
        """Loads a vector of type `typ`: every `step`-th element of `size` bytes from `index` on."""
        if step == 1:
            return self.load(base, index, typ, size)
        vector = ir.Constant(typ, ir.Undefined)
        for lane in range(typ.count):
            place = self.b.add(index, I64(lane * step))
            one = self.load(base, place, typ.element, size)
            vector = self.b.insert_element(vector, one, I32(lane))
        return vector


def build_module(name: str, emit: Callable[[ir.Function], None]) -> str:
    """The LLVM IR of a module with one kernel.

    Args:
        name: name of the kernel.
        emit: fills in the function `void name(int64 *args)`.
    """
    module = ir.Module(name)
    emit(ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR]), name))
    return str(module)
