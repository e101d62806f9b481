"""LLVM IR of float32 rows times a weight stored in bfloat16, float16 or float32.

A strip of outputs goes through the inputs block by block. A block of its weights is widened once
into the L1 cache, transposed so that neighbouring outputs are neighbouring lanes, and then used by
every chunk of rows, whose sums live in registers (the register tiling of Goto and van de Geijn,
"Anatomy of High-Performance Matrix Multiplication", 2008). No wide copy of the weight is written
to memory. Weights of two bytes are transposed two at a time, as the 32-bit words they pair up to.

Each output of a row is summed in an order that depends on neither the other rows nor their number:
the same row gives the same bits in every pass. Each block of inputs has a sum of its own, which is
added to those before; chained, the inputs are one sum, in which zeros may stand anywhere.

Knows nothing of torch or thread pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, Literal

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I64, Emitter, build_module

Stored = Literal["bfloat16", "float16", "float32"]
BLOCK_INPUTS = 128  # with a strip of 32 outputs 16 KiB, half of the smallest L1 cache in use
UNROLL = 4  # inputs per turn of the multiplying loop; divides the inputs of any block


class Arg(IntEnum):
    """Positions in the int64 argument array of a kernel; addresses and sizes."""

    COUNTER = 0  # next strip to claim; set to 0 before a call
    WEIGHT = auto()  # (outputs, inputs), or (inputs, outputs), row-major, in the stored dtype
    X = auto()  # float32 (chunks, inputs, rows)
    OUT = auto()  # float32 (chunks * rows, outputs), zeros before a call
    CHUNKS = auto()
    INPUTS = auto()  # a multiple of the lanes times the weights of a word; transposed: of UNROLL
    OUTPUTS = auto()  # a multiple of the strip
    STRIPS_AT_ONCE = auto()  # of one claim


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What a kernel is compiled for."""

    stored: Stored
    rows: int  # of a chunk
    vectors: int  # of outputs in a strip
    lanes: int
    transposed: bool = False  # the weight is stored as (inputs, outputs)
    chained: bool = False  # all inputs are one sum

    @property
    def strip(self) -> int:
        """Outputs of a strip."""
        return self.vectors * self.lanes

    @property
    def per_word(self) -> int:
        """Weights in 32 bits."""
        return 1 if self.stored == "float32" else 2


class Kernel(Emitter):
    """Emits one kernel."""

    def __init__(self, spec: KernelSpec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), spec.lanes)
        self.spec = spec
        self.base = self.b.ptrtoint(function.args[0], I64)
        self.arg = {arg: self.load(self.base, I64(arg), I64, 8) for arg in Arg}
        array = self.b.alloca(ir.ArrayType(F32, BLOCK_INPUTS * spec.strip))
        array.align = 64
        self.block = self.b.ptrtoint(array, I64)

    def emit(self) -> None:
        """Claim strips until none is left."""
        b = self.b

        widen = self.widen_transposed if self.spec.transposed else self.widen
        step = 1 if self.spec.transposed else self.spec.per_word * self.lanes

        def work(start: Any, stop: Any) -> None:
            def block(first: Any, _: list[Any]) -> list[Any]:
                last = self.minimum(b.add(first, I64(BLOCK_INPUTS)), self.arg[Arg.INPUTS])

                def strip(number: Any, _: list[Any]) -> list[Any]:
                    output = b.mul(number, I64(self.spec.strip))
                    self.loop(first, last, step, [], lambda k, _: widen(output, first, k))
                    return self.loop(
                        I64(0), self.arg[Arg.CHUNKS], 1, [],
                        lambda c, _: self.multiply(c, output, first, last),
                    )  # fmt: skip

                return self.loop(start, stop, 1, [], strip)

            self.loop(I64(0), self.arg[Arg.INPUTS], BLOCK_INPUTS, [], block)

        strips = b.udiv(self.arg[Arg.OUTPUTS], I64(self.spec.strip))
        counter = self.ptr(self.base, I64(Arg.COUNTER), 8)
        self.claim_strips(counter, I64(0), strips, self.arg[Arg.STRIPS_AT_ONCE], work)

    def widen_transposed(self, output: Any, first: Any, k: Any) -> list[Any]:
        """Put the strip's weights of input k into the block; they lie side by side."""
        b, spec = self.b, self.spec
        at = b.add(b.mul(k, self.arg[Arg.OUTPUTS]), output)
        local = b.mul(b.sub(k, first), I64(spec.strip))
        for v in range(spec.vectors):
            place = I64(v * self.lanes)
            weights = self.load_scales(
                spec.stored, self.arg[Arg.WEIGHT], b.add(at, place), self.lanes
            )
            self.store(weights, self.block, b.add(local, place))
        return []

    def widen(self, output: Any, first: Any, k: Any) -> list[Any]:
        """Put `lanes` words of inputs, from input `k` on, of the strip's weights into the block."""
        b, inputs, per_word = self.b, self.arg[Arg.INPUTS], self.spec.per_word
        local = b.mul(b.sub(k, first), I64(self.spec.strip))

        def vector(start: Any, _: list[Any]) -> list[Any]:
            words = []
            for lane in range(self.lanes):
                row = b.add(b.add(output, start), I64(lane))
                at = b.add(b.mul(row, inputs), k)
                words.append(self.load(self.arg[Arg.WEIGHT], at, self.words, 4 // per_word))
                # the same row's weights in the next block, counted in words
                ahead = b.udiv(b.add(at, I64(BLOCK_INPUTS)), I64(per_word))
                self.prefetch(self.arg[Arg.WEIGHT], ahead)
            for i, word in enumerate(self.transpose(words)):
                for part, weights in enumerate(self.widen_word(word)):
                    place = b.add(start, I64((per_word * i + part) * self.spec.strip))
                    self.store(weights, self.block, b.add(local, place))
            return []

        return self.loop(I64(0), I64(self.spec.strip), self.lanes, [], vector)

    def widen_word(self, words: Any) -> tuple[Any, ...]:
        """The weights of words, lower halves first, as float32."""
        b, count = self.b, self.lanes
        if self.spec.stored == "float32":
            return (b.bitcast(words, self.vector),)
        if self.spec.stored == "bfloat16":
            low = b.shl(words, self.ints([16] * count))
            high = b.and_(words, self.ints([-65536] * count))
            return b.bitcast(low, self.vector), b.bitcast(high, self.vector)
        narrow, half = ir.VectorType(ir.IntType(16), count), ir.VectorType(ir.HalfType(), count)

        def as_float(low: Any) -> Any:
            return b.fpext(b.bitcast(b.trunc(low, narrow), half), self.vector)

        return as_float(words), as_float(b.lshr(words, self.ints([16] * count)))

    def multiply(self, chunk: Any, output: Any, first: Any, last: Any) -> list[Any]:
        """Add the block's products with a chunk of rows to OUT."""
        b, spec = self.b, self.spec
        start = b.add(b.mul(chunk, self.arg[Arg.INPUTS]), first)
        cells = [(m, v) for m in range(spec.rows) for v in range(spec.vectors)]

        def place(m: int, v: int) -> Any:
            """Where in OUT a vector of a row's outputs is."""
            row = b.add(b.mul(chunk, I64(spec.rows)), I64(m))
            at = b.add(b.mul(row, self.arg[Arg.OUTPUTS]), output)
            return b.add(at, I64(v * self.lanes))

        def before(m: int, v: int) -> Any:
            return self.load(self.arg[Arg.OUT], place(m, v), self.vector)

        def step(k: Any, sums: list[Any]) -> list[Any]:
            sums = list(sums)
            weights_at = b.mul(k, I64(spec.strip))
            x_at = b.mul(b.add(start, k), I64(spec.rows))
            for j in range(UNROLL):
                weights = [
                    self.load(self.block, b.add(weights_at, I64(j * spec.strip + v * self.lanes)),
                              self.vector)
                    for v in range(spec.vectors)
                ]  # fmt: skip
                for m in range(spec.rows):
                    scalar = self.load(self.arg[Arg.X], b.add(x_at, I64(j * spec.rows + m)), F32)
                    x = self.splat(scalar, self.lanes)
                    for v, weight in enumerate(weights):
                        i = m * spec.vectors + v
                        sums[i] = self.fma(weight, x, sums[i])
            return sums

        begun = [before(m, v) if spec.chained else self.constant(0.0) for m, v in cells]
        sums = self.loop(I64(0), b.sub(last, first), UNROLL, begun, step)
        for (m, v), found in zip(cells, sums, strict=True):
            whole = found if spec.chained else b.fadd(before(m, v), found)
            self.store(whole, self.arg[Arg.OUT], place(m, v))
        return []


def build(spec: KernelSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for `spec`."""
    return build_module(name, lambda function: Kernel(spec, function).emit())
