"""LLVM IR of what a decoder layer does between its products and its attention, row by row.

Each kernel gives the bits that PyTorch's operations give one after another: what PyTorch rounds
between two of them is rounded here, and nothing is contracted to a fused multiplication. One thread
runs a kernel, since a few rows are too little for several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I32, I64, Emitter, ScaleType, build_module

_ACCUMULATORS, _LEVELS, _LEAST_POWER = 4, 4, 4  # of PyTorch's sums, see RowKernel.sum_of_squares


class NormArg(IntEnum):
    """Positions in the int64 argument array of a norm."""

    ROWS = 0
    X = auto()  # float32 (ROWS, width)
    WEIGHT = auto()  # float32 (width,)
    OUT = auto()  # (ROWS, width) of the spec's dtype
    EPSILON = auto()  # bits of a float32


class HeadArg(IntEnum):
    """Positions in the int64 argument array of a kernel that lays heads out; strides in numbers."""

    ROWS = 0
    KV_HEADS = auto()
    GROUP = auto()  # heads that share a key/value head
    SOURCE = auto()  # float32 (ROWS, SOURCE_STRIDE), of which a row's heads lie side by side
    SOURCE_STRIDE = auto()
    COS = auto()  # float32 (ROWS, rotary)
    SIN = auto()  # float32 (ROWS, rotary)
    BIAS = auto()  # float32, one number for each of a row
    WEIGHT = auto()  # float32 (head_dim,) of a norm of each head
    EPSILON = auto()  # bits of the norm's float32
    OUT = auto()
    OUT_KV_STRIDE = auto()
    OUT_HEAD_STRIDE = auto()  # from a head of a group to the next
    OUT_ROW_STRIDE = auto()


class RowArg(IntEnum):
    """Positions in the int64 argument array of the kernels of AddSpec and GateSpec."""

    ROWS = 0
    WIDTH = auto()  # whole vectors
    LEFT = auto()  # float32 (ROWS, LEFT_STRIDE)
    LEFT_STRIDE = auto()
    RIGHT = auto()  # float32 (ROWS, RIGHT_STRIDE)
    RIGHT_STRIDE = auto()
    OUT = auto()  # (ROWS, WIDTH): float32 sums, or products of the spec's dtype
    BIAS = auto()  # float32 (WIDTH,), of AddSpec.biased


class ClearArg(IntEnum):
    """Positions in the int64 argument array of the kernel of ClearSpec."""

    COUNT = 0  # whole vectors
    OUT = auto()  # float32 (COUNT,)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMSNorm (arXiv:1910.07467) as Llama's modelling code has it for rows of float32.

    Attributes:
        width: numbers of a row.
        dtype: that the norm returns.
        sum_lanes: float32 lanes of the registers in which PyTorch sums on this CPU.
        behind: whether the rows are a linear's sums, which are rounded to `dtype` in place, and
            the results are float32 that were rounded to it.
    """

    width: int
    dtype: ScaleType
    sum_lanes: int
    lanes: int
    behind: bool = False


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Rounds a linear's sums to `dtype`, and writes them head by head.

    Attributes:
        dtype: that the model computes in.
        out: dtype of what is written.
        rotary: numbers of a head, the first ones, to which rotary positions are applied
            (arXiv:2104.09864), as Llama's code does; 0 where there are none.
        biased: whether a bias is added to the sums.
        rounds_first: whether the sums are rounded before the bias is added.
        pairs: whether the sums of a head are pairs of a number of its first half and one of its
            second, as in GGUF files.
        sum_lanes: of the norm of each head, as in NormSpec; 0 where there is none.
        rounds_once: whether that norm rounds only behind its weight, as Gemma's does, and not
            before it too, as Llama's.
    """

    head_dim: int
    dtype: ScaleType
    out: ScaleType
    rotary: int
    biased: bool
    rounds_first: bool
    pairs: bool
    sum_lanes: int
    rounds_once: bool
    lanes: int


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """Writes the heads that attention found as rows of `dtype`; arguments as for HeadSpec, with
    SOURCE and OUT in each other's place."""

    head_dim: int
    dtype: ScaleType
    lanes: int


@dataclass(frozen=True, slots=True)
class AddSpec:
    """LEFT + RIGHT, the residual stream and a linear's sums, which are rounded to `dtype`.

    Attributes:
        biased, rounds_first: as in HeadSpec.
    """

    dtype: ScaleType
    lanes: int
    biased: bool = False
    rounds_first: bool = False


@dataclass(frozen=True, slots=True)
class GateSpec:
    """activation(LEFT) * RIGHT, where both are sums that are rounded to `dtype`."""

    activation: str
    dtype: ScaleType
    lanes: int


@dataclass(frozen=True, slots=True)
class ClearSpec:
    """Writes zeros, which the products of many rows are added to."""

    lanes: int
    dtype: ScaleType = "float32"


Spec = NormSpec | HeadSpec | JoinSpec | AddSpec | GateSpec | ClearSpec


class RowKernel(Emitter):
    """Emits a kernel over rows."""

    def __init__(self, args: type[IntEnum], spec: Spec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), spec.lanes)
        base = self.b.ptrtoint(function.args[0], I64)
        self.dtype = spec.dtype
        self.arg = {arg: self.load(base, I64(arg), I64, 8) for arg in args}

    def number(self, arg: IntEnum) -> Any:
        """An argument that holds the bits of a float32."""
        return self.b.bitcast(self.b.trunc(self.arg[arg], I32), F32)

    def place(self, *terms: tuple[Any, IntEnum]) -> Any:
        """The sum of each index times the stride that an argument gives."""
        total = I64(0)
        for index, stride in terms:
            total = self.b.add(total, self.b.mul(index, self.arg[stride]))
        return total

    def over(self, stop: Any, body: Callable[[Any], None], step: int = 1) -> None:
        """Emits a loop from 0 to `stop`."""

        def inside(index: Any, _: list[Any]) -> list[Any]:
            body(index)
            return []

        self.loop(I64(0), stop, step, [], inside)

    def rounded(self, values: Any) -> Any:
        """float32 lanes as the computing dtype holds them."""
        if self.dtype == "float32":
            return values
        bits = self.b.shl(self.bfloat_bits(values), self.ints([16] * self.lanes))
        return self.b.bitcast(bits, self.vector)

    def round_in_place(self, base: Any, first: Any, width: int) -> None:
        """Emits the rounding of `width` float32 to the computing dtype."""
        if self.dtype == "float32":
            return

        def some(index: Any) -> None:
            at = self.b.add(first, index)
            self.store(self.rounded(self.load(base, at, self.vector)), base, at)

        self.over(I64(width), some, self.lanes)

    def sum_of_squares(self, base: Any, first: Any, width: int, lanes: int) -> Any:
        """The sum of x * x of `width` float32, in PyTorch's order for a contiguous row.

        Four accumulators take vectors in turns, and every so many terms go up a level, so that no
        sum is long (`row_sum` and `multi_row_sum` in aten/src/ATen/native/cpu/SumKernel.cpp).
        """
        b, typ = self.b, ir.VectorType(F32, lanes)
        zero = ir.Constant(typ, [0.0] * lanes)
        vectors = width // lanes
        turns = vectors // _ACCUMULATORS
        power = max(_LEAST_POWER, max(turns - 1, 0).bit_length() // _LEVELS)
        step = 1 << power

        def square(index: Any) -> Any:
            at = b.add(first, b.mul(index, I64(lanes)))
            x = self.load(base, at, typ)
            return b.fmul(x, x)

        def turn(number: Any, sums: list[Any]) -> list[Any]:
            at = b.mul(number, I64(_ACCUMULATORS))
            return [b.fadd(each, square(b.add(at, I64(k)))) for k, each in enumerate(sums)]

        levels = [[zero] * _ACCUMULATORS for _ in range(_LEVELS)]
        done = 0
        while done + step <= turns:
            levels[0] = self.loop(I64(done), I64(done + step), 1, levels[0], turn)
            done += step
            for level in range(1, _LEVELS):
                pairs = zip(levels[level], levels[level - 1], strict=True)
                levels[level] = [b.fadd(upper, lower) for upper, lower in pairs]
                levels[level - 1] = [zero] * _ACCUMULATORS
                if done & ((step - 1) << (level * power)):
                    break
        total = self.loop(I64(done), I64(turns), 1, levels[0], turn)
        for upper_level in levels[1:]:
            total = [b.fadd(lower, upper) for lower, upper in zip(total, upper_level, strict=True)]
        for index in range(turns * _ACCUMULATORS, vectors):
            total[0] = b.fadd(total[0], square(I64(index)))
        for other in total[1:]:
            total[0] = b.fadd(total[0], other)
        found = F32(0.0)
        for index in range(vectors * lanes, width):
            x = self.load(base, b.add(first, I64(index)), F32)
            found = b.fadd(found, b.fmul(x, x))
        for lane in range(lanes):
            found = b.fadd(found, b.extract_element(total[0], I32(lane)))
        return found

    def normed(
        self, base: Any, first: Any, width: int, sum_lanes: int, epsilon: Any
    ) -> Callable[[Any], Any]:
        """The function that gives normed lanes of a row of float32, before the weight, from an
        index within the row."""
        b = self.b
        mean = b.fdiv(self.sum_of_squares(base, first, width, sum_lanes), F32(float(width)))
        kind = ir.FunctionType(F32, [F32])
        root = b.function.module.globals.get("llvm.sqrt.f32") or ir.Function(
            b.function.module, kind, "llvm.sqrt.f32"
        )
        factor = b.fdiv(F32(1.0), b.call(root, [b.fadd(mean, epsilon)]))
        lanes = self.splat(factor, self.lanes)
        return lambda at: b.fmul(self.load(base, b.add(first, at), self.vector), lanes)


def build(spec: Spec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for `spec`."""
    emit = _EMITTERS[type(spec)]
    return build_module(name, lambda function: emit(spec, function))


def _norm(spec: NormSpec, function: ir.Function) -> None:
    kernel = RowKernel(NormArg, spec, function)
    b, arg = kernel.b, kernel.arg

    def row(number: Any) -> None:
        first = b.mul(number, I64(spec.width))
        if spec.behind:
            kernel.round_in_place(arg[NormArg.X], first, spec.width)
        epsilon = kernel.number(NormArg.EPSILON)
        of = kernel.normed(arg[NormArg.X], first, spec.width, spec.sum_lanes, epsilon)

        def some(at: Any) -> None:
            weight = kernel.load(arg[NormArg.WEIGHT], at, kernel.vector)
            found, to = b.fmul(weight, of(at)), b.add(first, at)
            if spec.behind:
                kernel.store(kernel.rounded(found), arg[NormArg.OUT], to)
            else:
                kernel.store_as(spec.dtype, found, arg[NormArg.OUT], to)

        kernel.over(I64(spec.width), some, spec.lanes)

    kernel.over(arg[NormArg.ROWS], row)
    b.ret_void()


class _Heads(RowKernel):
    """A kernel that goes through the heads of every row."""

    def each(self, body: Callable[[Any, Any, Any], None]) -> None:
        """Emits body(row, head, place of the head in the layout by heads) for all of them."""
        b, arg = self.b, self.arg

        def row(number: Any) -> None:
            def kv_head(kv: Any) -> None:
                def head(inside: Any) -> None:
                    place = self.place(
                        (kv, HeadArg.OUT_KV_STRIDE), (inside, HeadArg.OUT_HEAD_STRIDE),
                        (number, HeadArg.OUT_ROW_STRIDE),
                    )  # fmt: skip
                    body(number, b.add(b.mul(kv, arg[HeadArg.GROUP]), inside), place)

                self.over(arg[HeadArg.GROUP], head)

            self.over(arg[HeadArg.KV_HEADS], kv_head)

        self.over(arg[HeadArg.ROWS], row)
        b.ret_void()


class _LaidOut(_Heads):
    """The kernel of a HeadSpec. A head is held on the stack as the computing dtype has it."""

    def __init__(self, spec: HeadSpec, function: ir.Function) -> None:
        super().__init__(HeadArg, spec, function)
        self.spec, self.dim = spec, spec.head_dim
        self.held = self.reserve(self.dim)

    def one(self, row: Any, head: Any, place: Any) -> None:
        """Emits what is done with a head of a row."""
        self.collect(row, head)
        if self.spec.sum_lanes:
            self.norm()
        rotary = self.spec.rotary
        self.over(I64(rotary // 2), lambda at: self.rotate(row, at, place), self.lanes)

        def some(number: Any) -> None:
            at = self.b.add(number, I64(rotary))
            found = self.load(self.held, at, self.vector)
            self.store_as(self.spec.out, found, self.arg[HeadArg.OUT], self.b.add(place, at))

        self.over(I64(self.dim - rotary), some, self.lanes)

    def collect(self, row: Any, head: Any) -> None:
        """Emits the reading of a head: its sums, with the bias if there is one."""
        b, half = self.b, I64(self.dim // 2)
        inside = b.mul(head, I64(self.dim))
        first = b.add(self.place((row, HeadArg.SOURCE_STRIDE)), inside)

        def sums(at: Any) -> Any:
            found = self.load(self.arg[HeadArg.SOURCE], b.add(first, at), self.vector)
            if self.spec.biased:
                bias = self.load(self.arg[HeadArg.BIAS], b.add(inside, at), self.vector)
                found = self.rounded(found) if self.spec.rounds_first else found
                found = b.fadd(found, bias)
            return self.rounded(found)

        def of_pairs(at: Any) -> None:
            twice = b.mul(at, I64(2))
            both = sums(twice), sums(b.add(twice, I64(self.lanes)))
            for odd, to in enumerate((at, b.add(at, half))):
                lanes = self.ints([2 * lane + odd for lane in range(self.lanes)])
                self.store(b.shuffle_vector(*both, lanes), self.held, to)

        if self.spec.pairs:
            self.over(half, of_pairs, self.lanes)
        else:
            self.over(I64(self.dim), lambda at: self.store(sums(at), self.held, at), self.lanes)

    def norm(self) -> None:
        """Emits the norm of the head."""
        epsilon = self.number(HeadArg.EPSILON)
        of = self.normed(self.held, I64(0), self.dim, self.spec.sum_lanes, epsilon)

        def some(at: Any) -> None:
            weight = self.load(self.arg[HeadArg.WEIGHT], at, self.vector)
            normed = of(at) if self.spec.rounds_once else self.rounded(of(at))
            self.store(self.rounded(self.b.fmul(weight, normed)), self.held, at)

        self.over(I64(self.dim), some, self.lanes)

    def rotate(self, row: Any, at: Any, place: Any) -> None:
        """Emits rotary positions of the lanes from `at` on, and of their partners in the upper
        half."""
        b, rotary = self.b, self.spec.rotary
        upper = b.add(at, I64(rotary // 2))
        x, y = (self.load(self.held, half, self.vector) for half in (at, upper))
        for here, own, other in ((at, x, b.fneg(y)), (upper, y, x)):
            angle = b.add(b.mul(row, I64(rotary)), here)
            cos, sin = (
                self.load(self.arg[arg], angle, self.vector) for arg in (HeadArg.COS, HeadArg.SIN)
            )
            parts = self.rounded(b.fmul(own, cos)), self.rounded(b.fmul(other, sin))
            found = self.rounded(b.fadd(*parts))
            self.store_as(self.spec.out, found, self.arg[HeadArg.OUT], b.add(place, here))


def _heads(spec: HeadSpec, function: ir.Function) -> None:
    kernel = _LaidOut(spec, function)
    kernel.each(kernel.one)


def _join(spec: JoinSpec, function: ir.Function) -> None:
    kernel = _Heads(HeadArg, spec, function)
    b, arg = kernel.b, kernel.arg

    def one(row: Any, head: Any, place: Any) -> None:
        to = b.add(kernel.place((row, HeadArg.SOURCE_STRIDE)), b.mul(head, I64(spec.head_dim)))

        def some(at: Any) -> None:
            found = kernel.load(arg[HeadArg.OUT], b.add(place, at), kernel.vector)
            kernel.store_as(spec.dtype, found, arg[HeadArg.SOURCE], b.add(to, at))

        kernel.over(I64(spec.head_dim), some, spec.lanes)

    kernel.each(one)


def _of_two(
    spec: AddSpec | GateSpec,
    function: ir.Function,
    join: Callable[[RowKernel, Any, Any], Any],
    out: ScaleType,
) -> None:
    kernel = RowKernel(RowArg, spec, function)
    b, arg = kernel.b, kernel.arg

    def row(number: Any) -> None:
        left = kernel.place((number, RowArg.LEFT_STRIDE))
        right = kernel.place((number, RowArg.RIGHT_STRIDE))
        first = kernel.place((number, RowArg.WIDTH))

        def some(at: Any) -> None:
            x = kernel.load(arg[RowArg.LEFT], b.add(left, at), kernel.vector)
            y = kernel.load(arg[RowArg.RIGHT], b.add(right, at), kernel.vector)
            if isinstance(spec, AddSpec) and spec.biased:
                y = kernel.rounded(y) if spec.rounds_first else y
                y = b.fadd(y, kernel.load(arg[RowArg.BIAS], at, kernel.vector))
            found = join(kernel, x, kernel.rounded(y))
            kernel.store_as(out, found, arg[RowArg.OUT], b.add(first, at))

        kernel.over(arg[RowArg.WIDTH], some, spec.lanes)

    kernel.over(arg[RowArg.ROWS], row)
    b.ret_void()


def _add(spec: AddSpec, function: ir.Function) -> None:
    _of_two(spec, function, lambda kernel, x, y: kernel.b.fadd(x, y), "float32")


def _gate(spec: GateSpec, function: ir.Function) -> None:
    def join(kernel: RowKernel, x: Any, y: Any) -> Any:
        gate = kernel.rounded(kernel.activated(spec.activation, kernel.rounded(x)))
        return kernel.b.fmul(gate, y)

    _of_two(spec, function, join, spec.dtype)


def _clear(spec: ClearSpec, function: ir.Function) -> None:
    kernel = RowKernel(ClearArg, spec, function)
    zeros, out = kernel.constant(0.0), kernel.arg[ClearArg.OUT]
    kernel.over(kernel.arg[ClearArg.COUNT], lambda at: kernel.store(zeros, out, at), spec.lanes)
    kernel.b.ret_void()


_EMITTERS: dict[type, Callable[[Any, ir.Function], None]] = {
    NormSpec: _norm,
    HeadSpec: _heads,
    JoinSpec: _join,
    AddSpec: _add,
    GateSpec: _gate,
    ClearSpec: _clear,
}
