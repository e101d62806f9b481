"""LLVM IR of bfloat16 rows times weights, where the CPU multiplies pairs of bfloat16 (vdpbf16ps).

The same frame for every stored form: a strip of outputs goes through the inputs block by block. A
block of its weights becomes pairs of bfloat16, one 32-bit lane for two inputs of an output, in the
registers (few rows) or in the L1 cache (more rows), and every chunk of rows multiplies with it;
the chunk's sums live in registers (the register tiling of Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008). What differs between forms is how pairs are made:
- PackedDot: code - zero point, an integer that bfloat16 holds exactly; a block lies inside one
  group, and its sums are multiplied by the group's scale in float32. No weight is rounded.
- StoredDot: weights stored in bfloat16, transposed as 32-bit words.

Rounding: products are exact, sums are float32 as the instruction rounds them (to nearest, numbers
below the normal range to zero), in the order of the pairs inside a block and then of the blocks.
That order is the same for any rows and any number of threads: a row's bits are its own.

Knows nothing of torch or thread pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I16, I64, Bfloat, Emitter, build_module
from specexec_kernels.cpu_ir_unpack import Arg as PackedArg
from specexec_kernels.cpu_ir_unpack import KernelSpec, Unpacker

LANES = 16  # every CPU with the instruction has registers of 512 bits
X_PAIRS = 16  # pairs of one row of X that lie side by side
STORED_BLOCK = 256  # inputs; with a strip of 32 outputs 16 KiB, half of the smallest L1 cache
UNROLL = 4  # pairs per turn of the multiplying loop
AHEAD = 8  # units of stored weights that are asked for before they are multiplied


class StoredArg(IntEnum):
    """Positions in the int64 argument array of a StoredDot; addresses and sizes."""

    COUNTER = 0  # next strip to claim; set to 0 before a call
    WEIGHT = auto()  # (outputs, inputs) bfloat16, row-major
    X = auto()  # see Products.x_pairs
    CHUNKS = auto()
    OUT = auto()  # float32 (chunks * rows, stride)
    OUT_STRIDE = auto()
    UNITS = auto()  # inputs / 32
    X_BLOCKS = auto()
    FIRST_STRIP = auto()
    END_STRIP = auto()
    STRIPS_AT_ONCE = auto()  # of one claim


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """What a StoredDot is compiled for."""

    rows: int  # of a chunk
    vectors: int  # of outputs in a strip; few: 1
    few: bool  # one chunk, multiplied from the registers

    @property
    def strip(self) -> int:
        """Outputs of a strip."""
        return self.vectors * LANES


class Products(Emitter):
    """The frame. A form has `spec` with rows, vectors and strip, and `arg` with the common names.

    Attributes:
        units: the inputs, in the form's units.
        unit_pairs: pairs of one unit; divides X_PAIRS.
        block_units: units of a block.
    """

    spec: Any
    units: Any
    unit_pairs: int
    block_units: int

    def begin(self, arg: Any, names: Any) -> None:
        """Take the common arguments and set the instruction and the block's memory up."""
        self.x, self.out = arg[names.X], arg[names.OUT]
        self.chunks, self.x_blocks = arg[names.CHUNKS], arg[names.X_BLOCKS]
        self.out_stride, self.units = arg[names.OUT_STRIDE], arg[names.UNITS]
        self.claims = arg[names.FIRST_STRIP], arg[names.END_STRIP], arg[names.STRIPS_AT_ONCE]
        self.pairs = ir.VectorType(Bfloat(), 2 * LANES)
        self.shorts = ir.VectorType(I16, 2 * LANES)
        module = self.b.function.module
        dot = ir.FunctionType(self.vector, [self.vector, self.pairs, self.pairs])
        self._dot = ir.Function(module, dot, "llvm.x86.avx512bf16.dpbf16ps.512")
        self.block: Any = None

    def reserve_block(self) -> None:
        """Memory on the stack for the pairs of a block, [pair][output]."""
        size = self.block_units * self.unit_pairs * self.spec.strip
        array = self.b.alloca(ir.ArrayType(F32, size))
        array.align = 64
        self.block = self.b.ptrtoint(array, I64)

    def begin_block(self, strip: Any, first: Any) -> None:
        """Read what all of a block needs, which begins with unit `first`."""

    def fill(self, strip: Any, first: Any, last: Any) -> None:
        """Put the pairs of units first..last into the block."""
        raise NotImplementedError

    def unit_words(self, unit: Any, strip: Any) -> Iterator[list[Any]]:
        """For each pair of a unit one vector of pairs (as int32 lanes) per vector of the strip."""
        raise NotImplementedError

    def add_block(self, before: Any, sums: Any, vector: int) -> Any:
        """What OUT is after a block, in one vector of the strip."""
        raise NotImplementedError

    def fetch_ahead(self, strip: Any, last: Any, chunk: Any, pair: Any) -> None:
        """Ask for a part of the block that begins with unit `last`, at pair `pair` of a chunk."""

    def emit(self) -> None:
        """Claim tiles of strips until none is left."""
        base = self.b.ptrtoint(self.b.function.args[0], I64)
        self.claim_strips(self.ptr(base, I64(0), 8), *self.claims, self.tile)

    def tile(self, start: Any, stop: Any) -> None:
        """Strips start..stop, in the order in which their weights lie in memory."""
        raise NotImplementedError

    def block_of(self, strip: Any, first: Any) -> list[Any]:
        """The block of a strip that begins with unit `first`."""
        last = self.minimum(self.b.add(first, I64(self.block_units)), self.units)
        return self.strip_block(strip, first, last)

    def strip_block(self, strip: Any, first: Any, last: Any) -> list[Any]:
        """One block of a strip, multiplied with every row."""
        b = self.b
        self.begin_block(strip, first)
        zeros = [ir.Constant(self.vector, [0.0] * LANES)] * (self.spec.rows * self.spec.vectors)
        if self.block is None:

            def unit(u: Any, sums: list[Any]) -> list[Any]:
                pair = b.mul(u, I64(self.unit_pairs))
                for j, words in enumerate(self.unit_words(u, strip)):
                    sums = self.multiply(I64(0), pair, j, words, sums)
                return sums

            self.add_sums(I64(0), strip, first, self.loop(first, last, 1, zeros, unit))
            return []
        self.fill(strip, first, last)
        first_pair = b.mul(first, I64(self.unit_pairs))
        last_pair = b.mul(last, I64(self.unit_pairs))
        unroll = min(UNROLL, self.unit_pairs)

        def chunk(c: Any, _: list[Any]) -> list[Any]:
            def step(pair: Any, sums: list[Any]) -> list[Any]:
                at = b.mul(b.sub(pair, first_pair), I64(self.spec.strip))
                self.fetch_ahead(strip, last, c, b.sub(pair, first_pair))
                for j in range(unroll):
                    places = [
                        b.add(at, I64(j * self.spec.strip + v * LANES))
                        for v in range(self.spec.vectors)
                    ]
                    words = [self.load(self.block, place, self.words) for place in places]
                    sums = self.multiply(c, pair, j, words, sums)
                return sums

            sums = self.loop(first_pair, last_pair, unroll, zeros, step)
            self.add_sums(c, strip, first, sums)
            return []

        return self.loop(I64(0), self.chunks, 1, [], chunk)

    def x_pairs(self, chunk: Any, pair: Any, j: int, row: int) -> Any:
        """Pair `pair` + j of a row in every lane.

        X is (chunks, X_BLOCKS, rows, X_PAIRS) pairs, in the order of the form's pairs: neighbouring
        rows are a cache line apart whatever the number of inputs, and 16 pairs share one.
        """
        b, rows = self.b, self.spec.rows
        block = b.add(b.mul(chunk, self.x_blocks), b.ashr(pair, I64(4)))
        at = b.add(b.mul(block, I64(rows * X_PAIRS)), b.and_(pair, I64(X_PAIRS - 1)))
        word = self.load(self.x, b.add(at, I64(row * X_PAIRS + j)), ir.IntType(32))
        return self.splat(word, LANES)

    def multiply(
        self, chunk: Any, pair: Any, j: int, words: list[Any], sums: list[Any]
    ) -> list[Any]:
        """Add one pair of inputs to the sums, ordered [row][vector]."""
        b, sums = self.b, list(sums)
        weights = [b.bitcast(word, self.pairs) for word in words]
        for m in range(self.spec.rows):
            x = b.bitcast(self.x_pairs(chunk, pair, j, m), self.pairs)
            for v, weight in enumerate(weights):
                i = m * self.spec.vectors + v
                sums[i] = b.call(self._dot, [sums[i], weight, x])
        return sums

    def add_sums(self, chunk: Any, strip: Any, first: Any, sums: list[Any]) -> None:
        """Add a block's sums to OUT, which the first block writes."""
        b, spec = self.b, self.spec
        column = b.mul(strip, I64(spec.strip))
        is_first = b.icmp_signed("==", first, I64(0))
        nothing = ir.Constant(self.vector, [0.0] * LANES)
        for m in range(spec.rows):
            row = b.add(b.mul(chunk, I64(spec.rows)), I64(m))
            at = b.add(b.mul(row, self.out_stride), column)
            for v in range(spec.vectors):
                place = b.add(at, I64(v * LANES))
                before = b.select(is_first, nothing, self.load(self.out, place, self.vector))
                after = self.add_block(before, sums[m * spec.vectors + v], v)
                self.store(after, self.out, place)


class StoredDot(Products):
    """Weights stored in bfloat16."""

    unit_pairs = LANES
    block_units = STORED_BLOCK // (2 * LANES)

    def __init__(self, spec: StoredSpec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), LANES)
        self.spec = spec
        base = self.b.ptrtoint(function.args[0], I64)
        self.arg = {arg: self.load(base, I64(arg), I64, 8) for arg in StoredArg}
        self.begin(self.arg, StoredArg)
        if not spec.few:
            self.reserve_block()
        per_chunk = spec.strip * UNROLL // LANES  # cache lines of a block for each turn of a chunk
        up = self.b.add(self.chunks, I64(per_chunk - 1))
        self.lines_per_turn = self.b.udiv(up, self.chunks)

    def tile(self, start: Any, stop: Any) -> None:
        def strip(number: Any, _: list[Any]) -> list[Any]:
            return self.loop(
                I64(0), self.units, self.block_units, [], lambda u, _: self.block_of(number, u)
            )

        self.loop(start, stop, 1, [], strip)

    def unit_words(self, unit: Any, strip: Any) -> Iterator[list[Any]]:
        b = self.b
        words = b.mul(self.units, I64(LANES))  # of one output
        output, local = b.mul(strip, I64(LANES)), b.mul(unit, I64(LANES))
        # at the end of its output's weights the next strip's begin
        later = b.add(unit, I64(AHEAD))
        is_next = b.icmp_signed(">=", later, self.units)
        skipped = b.select(is_next, b.mul(words, I64(LANES - 1)), I64(0))
        rows = []
        for lane in range(LANES):
            at = b.add(b.mul(b.add(output, I64(lane)), words), local)
            self.prefetch(self.arg[StoredArg.WEIGHT], b.add(b.add(at, skipped), I64(AHEAD * LANES)))
            rows.append(self.load(self.arg[StoredArg.WEIGHT], at, self.words))
        for word in self.transpose(rows):
            yield [word]

    def fill(self, strip: Any, first: Any, last: Any) -> None:
        b, strip_outputs = self.b, self.spec.strip
        words = b.mul(self.units, I64(LANES))  # of one output
        output = b.mul(strip, I64(strip_outputs))

        def unit(u: Any, _: list[Any]) -> list[Any]:
            local = b.mul(b.sub(u, first), I64(LANES * strip_outputs))

            def vector(start: Any, _: list[Any]) -> list[Any]:
                rows = []
                for lane in range(LANES):
                    row = b.add(b.add(output, start), I64(lane))
                    at = b.add(b.mul(row, words), b.mul(u, I64(LANES)))
                    rows.append(self.load(self.arg[StoredArg.WEIGHT], at, self.words))
                for pair, word in enumerate(self.transpose(rows)):
                    place = b.add(start, I64(pair * strip_outputs))
                    self.store(word, self.block, b.add(local, place))
                return []

            return self.loop(I64(0), I64(strip_outputs), LANES, [], vector)

        self.loop(first, last, 1, [], unit)

    def add_block(self, before: Any, sums: Any, vector: int) -> Any:
        return self.b.fadd(before, sums)

    def fetch_ahead(self, strip: Any, last: Any, chunk: Any, pair: Any) -> None:
        """Spread over the multiplying: all at once they would wait for memory, one for another."""
        b = self.b
        lines = self.spec.strip * self.block_units  # a unit of an output is a cache line
        turns = self.block_units * self.unit_pairs // UNROLL  # of a chunk
        turn = b.add(b.mul(chunk, I64(turns)), b.udiv(pair, I64(UNROLL)))
        words = b.mul(self.units, I64(LANES))

        def line(number: Any, _: list[Any]) -> list[Any]:
            output = b.add(
                b.mul(strip, I64(self.spec.strip)), b.udiv(number, I64(self.block_units))
            )
            unit = b.add(last, b.urem(number, I64(self.block_units)))
            at = b.add(b.mul(output, words), b.mul(unit, I64(LANES)))
            self.prefetch(self.arg[StoredArg.WEIGHT], at)
            return []

        first = b.mul(turn, self.lines_per_turn)
        stop = self.minimum(b.add(first, self.lines_per_turn), I64(lines))
        self.loop(first, stop, 1, [], line)


class PackedDot(Products, Unpacker):
    """Packed weights of 2, 3, 4 and 8 bits; groups are whole runs of inputs."""

    def __init__(self, spec: KernelSpec, block: int, function: ir.Function) -> None:
        """With `block` inputs to a block: a group, or a part of one that divides it."""
        Unpacker.__init__(self, spec, function)
        self.begin(self.arg, PackedArg)
        self.unit_pairs = spec.unit_codes // 2
        self.block_units = block // spec.unit_codes
        if spec.mode == "many":
            self.reserve_block()
        permute = ir.FunctionType(self.shorts, [self.shorts, self.shorts])
        self._permute = ir.Function(
            self.b.function.module, permute, "llvm.x86.avx512.permvar.hi.512"
        )

    def tile(self, start: Any, stop: Any) -> None:
        def block(first: Any, _: list[Any]) -> list[Any]:
            return self.loop(start, stop, 1, [], lambda strip, _: self.block_of(strip, first))

        self.loop(I64(0), self.units, self.block_units, [], block)

    def begin_block(self, strip: Any, first: Any) -> None:
        """Scale and zero point of each vector of outputs; a block lies in one group."""
        spec, column = self.spec, self.column(strip)
        group = self.b.sdiv(first, self.arg[PackedArg.GROUP_UNITS])
        if spec.awq:
            pairs = self.awq_group(group, *column)
        else:
            both = self.gptq_group(group, column[0])
            pairs = [(self.part(both[0], v), self.part(both[1], v)) for v in range(spec.vectors)]
        self.scales = [scale for scale, _ in pairs]
        self.zeros = [self.in_both_halves(zero) for _, zero in pairs]

    def part(self, wide: Any, vector: int) -> Any:
        """One vector of a strip that lies in one wide vector."""
        lanes = self.ints(list(range(vector * LANES, (vector + 1) * LANES)))
        return self.b.shuffle_vector(wide, ir.Constant(wide.type, ir.Undefined), lanes)

    def in_both_halves(self, zero: Any) -> Any:
        """Zero points of each lane's two codes."""
        b = self.b
        return b.bitcast(b.or_(zero, b.shl(zero, self.ints([16] * LANES))), self.shorts)

    def fill(self, strip: Any, first: Any, last: Any) -> None:
        b, spec = self.b, self.spec

        def unit(u: Any, _: list[Any]) -> list[Any]:
            at = b.mul(b.sub(u, first), I64(self.unit_pairs * spec.strip))
            for j, words in enumerate(self.unit_words(u, strip)):
                for v, word in enumerate(words):
                    self.store(word, self.block, b.add(at, I64(j * spec.strip + v * LANES)))
            return []

        self.loop(first, last, 1, [], unit)

    def unit_words(self, unit: Any, strip: Any) -> Iterator[list[Any]]:
        words = self.load_words(unit, *self.column(strip))
        for j in range(self.unit_pairs):
            yield [self.pair(words, j, v) for v in range(self.spec.vectors)]

    def pair(self, words: list[list[Any]], j: int, v: int) -> Any:
        """Codes j and j + unit_pairs less their zero points, as a pair of bfloat16."""
        b, bits = self.b, self.spec.bits
        codes = self.code_pair(words, j, v)
        differences = b.sub(b.bitcast(codes, self.shorts), self.zeros[v])
        if bits <= 4:  # from -16 to 15: five bits that choose from 32 values
            table = ir.Constant(self.shorts, [_bfloat_bits(_signed(i)) for i in range(2 * LANES)])
            return b.bitcast(b.call(self._permute, [table, differences]), self.words)
        wide = b.bitcast(differences, self.words)
        sixteen = self.ints([16] * LANES)
        low = b.ashr(b.shl(wide, sixteen), sixteen)
        low_float, high_float = (
            b.bitcast(self.to_float(half), self.words) for half in (low, b.ashr(wide, sixteen))
        )
        return b.or_(b.lshr(low_float, sixteen), high_float)  # 8 bits: nothing below the upper half

    def code_pair(self, words: list[list[Any]], j: int, v: int) -> Any:
        """Codes j and j + unit_pairs in the halves of each lane."""
        b, spec = self.b, self.spec
        mask = self.ints([(2**spec.bits - 1) * 0x10001] * LANES)
        if spec.awq:  # nibble v of two rows of words, of which four are joined at once
            low, high = words[j][v], words[j + self.unit_pairs][v]
            sixteen = self.ints([16] * LANES)
            if v < 4:
                low, high = b.and_(low, self.ints([0xFFFF] * LANES)), b.shl(high, sixteen)
            else:
                low, high = b.lshr(low, sixteen), b.and_(high, self.ints([-0x10000] * LANES))
            return b.and_(b.lshr(b.or_(low, high), self.ints([4 * (v % 4)] * LANES)), mask)
        if spec.bits == 3:
            low, high = (self.code(words, k, v) for k in (j, j + self.unit_pairs))
            return b.or_(low, b.shl(high, self.ints([16] * LANES)))
        return b.and_(b.lshr(words[0][v], self.ints([spec.bits * j] * LANES)), mask)

    def add_block(self, before: Any, sums: Any, vector: int) -> Any:
        return self.fma(self.scales[vector], sums, before)


def _signed(index: int) -> int:
    """Five bits as a signed number."""
    return index if index < 16 else index - 32


def _bfloat_bits(value: int) -> int:
    """A small integer as the bits of a bfloat16."""
    if value == 0:
        return 0
    exponent = abs(value).bit_length() - 1
    fraction = (abs(value) << (7 - exponent)) & 0x7F
    return (0x8000 if value < 0 else 0) | ((127 + exponent) << 7) | fraction


def build_stored(spec: StoredSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for bfloat16 weights."""
    return build_module(name, lambda function: StoredDot(spec, function).emit())


def build_packed(spec: KernelSpec, block: int, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for packed weights."""
    return build_module(name, lambda function: PackedDot(spec, block, function).emit())
