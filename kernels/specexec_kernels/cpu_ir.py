"""LLVM IR of the CPU kernels that read packed weights.

Three kernels over *strips* (`vectors * lanes` output columns), one generator:
- few: up to `rows` rows of x; their sums stay in registers while each weight is unpacked straight
  into the multiply.
- many: any number of rows; a block of weights is unpacked once into the L1 cache and used by all
  chunks of `rows` rows (the register tiling of Goto and van de Geijn, "Anatomy of High-Performance
  Matrix Multiplication", 2008, with unpacking in the place of packing).
- dequantize: writes a float32 tile for a library GEMM.
IR instead of compiled Python because the register tile must not be left to a vectorizer's guess
(docs/experiments.md has the numba numbers); LLVM through llvmlite needs no C compiler.

Knows nothing of torch, checkpoints or thread pools.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I64, build_module
from specexec_kernels.cpu_ir_unpack import Arg, KernelSpec, Unpacker

# Inputs per block, see Kernel.emit; the same for few and many, whose sums then are the same bits.
BLOCK_CODES = {"few": 128, "many": 128, "dequantize": 256}


class Kernel(Unpacker):
    """Emits one kernel."""

    def __init__(self, spec: KernelSpec, function: ir.Function) -> None:
        super().__init__(spec, function)
        if spec.mode == "many":  # 16 KiB of weights: half of the smallest L1 cache in use
            size = BLOCK_CODES["many"] * spec.strip
            array = self.b.alloca(ir.ArrayType(F32, size))
            array.align = 64
            self.block = self.b.ptrtoint(array, I64)

    def emit(self) -> None:
        """Claim tiles of strips until none is left; go through a tile block of inputs by block.

        A block of x (BLOCK_CODES inputs) is then read from a near cache by every strip of the tile.
        """
        units = self.arg[Arg.UNITS]
        step = BLOCK_CODES[self.spec.mode] // self.spec.unit_codes
        strip_of = {"few": self.few, "many": self.many, "dequantize": self.dequantize}
        body = strip_of[self.spec.mode]

        def work(start: Any, stop: Any) -> None:
            self.loop(start, stop, 1, [], self.prepare_strip)

            def block(first: Any, _: list[Any]) -> list[Any]:
                last = self.minimum(self.b.add(first, I64(step)), units)
                return self.loop(start, stop, 1, [], lambda s, _: body(s, first, last))

            self.loop(I64(0), units, step, [], block)

        counter = self.ptr(self.base, I64(0), 8)
        ends = self.arg[Arg.FIRST_STRIP], self.arg[Arg.END_STRIP]
        self.claim_strips(counter, *ends, self.arg[Arg.STRIPS_AT_ONCE], work)

    def few(self, strip: Any, first: Any, last: Any) -> list[Any]:
        """Multiply straight from the unpacking."""
        places = self.sum_places(I64(0), strip)

        def unit(u: Any, sums: list[Any]) -> list[Any]:
            for code, weights in self.unit_weights(u, strip):
                sums = self.multiply(I64(0), code, weights, sums)
            return sums

        self.add_all(self.loop(first, last, 1, self.no_sums(), unit), places)
        return []

    def many(self, strip: Any, first: Any, last: Any) -> list[Any]:
        """Unpack a block of weights, then multiply it with every chunk of rows."""
        b, spec = self.b, self.spec
        first_code = b.mul(first, I64(spec.unit_codes))
        last_code = b.mul(last, I64(spec.unit_codes))
        unroll = min(spec.unit_codes, 8)

        def unpack(u: Any, _: list[Any]) -> list[Any]:
            for code, weights in self.unit_weights(u, strip):
                self.store_all(weights, self.block_places(b.sub(code, first_code)), self.block)
            return []

        def chunk(c: Any, _: list[Any]) -> list[Any]:
            places = self.sum_places(c, strip)

            def multiply(code: Any, sums: list[Any]) -> list[Any]:
                for j in range(unroll):
                    one = b.add(code, I64(j))
                    at = self.block_places(b.sub(one, first_code))
                    sums = self.multiply(c, one, self.load_all(at, self.block), sums)
                return sums

            sums = self.loop(first_code, last_code, unroll, self.no_sums(), multiply)
            self.add_all(sums, places)
            return []

        self.loop(first, last, 1, [], unpack)
        return self.loop(I64(0), self.arg[Arg.CHUNKS], 1, [], chunk)

    def dequantize(self, strip: Any, first: Any, last: Any) -> list[Any]:
        """Write the weights to the tile."""
        b, spec = self.b, self.spec
        local = b.mul(b.sub(strip, self.arg[Arg.FIRST_STRIP]), I64(spec.strip))

        def unit(u: Any, _: list[Any]) -> list[Any]:
            for code, weights in self.unit_weights(u, strip):
                at = b.add(b.mul(code, self.arg[Arg.OUT_STRIDE]), local)
                places = [b.add(at, I64(v * spec.lanes)) for v in range(spec.vectors)]
                self.store_all(weights, places)
            return []

        return self.loop(first, last, 1, [], unit)

    def multiply(self, chunk: Any, code: Any, weights: list[Any], sums: list[Any]) -> list[Any]:
        """Add one input's products to the sums, ordered [row][vector]."""
        b, spec = self.b, self.spec
        inputs = b.mul(self.arg[Arg.UNITS], I64(spec.unit_codes))
        row = b.mul(b.add(b.mul(chunk, inputs), code), I64(spec.rows))
        sums = list(sums)
        for m in range(spec.rows):
            x = self.broadcast(self.arg[Arg.X], b.add(row, I64(m)))
            for v, weight in enumerate(weights):
                i = m * spec.vectors + v
                sums[i] = self.fma(weight, x, sums[i])
        return sums

    def sum_places(self, chunk: Any, strip: Any) -> list[Any]:
        """Elements of OUT where the sums of a chunk and strip lie, ordered [row][vector]."""
        b, spec = self.b, self.spec
        # strips of earlier calls are not in OUT: the caller runs few and many over all strips
        tile = b.add(b.mul(chunk, self.arg[Arg.END_STRIP]), strip)
        first = b.mul(tile, I64(spec.rows * spec.strip))
        return [b.add(first, I64(i * spec.lanes)) for i in range(spec.rows * spec.vectors)]

    def block_places(self, code: Any) -> list[Any]:
        """Elements of the L1 block where the weights of one input lie."""
        at = self.b.mul(code, I64(self.spec.strip))
        return [self.b.add(at, I64(v * self.lanes)) for v in range(self.spec.vectors)]

    def no_sums(self) -> list[Any]:
        """Zeros for the sums of one block.

        Each block has sums of its own, added to OUT at its end: rounding errors grow with the
        length of a block and the number of blocks, not with their product.
        """
        return [ir.Constant(self.vector, [0.0] * self.lanes)] * (self.spec.rows * self.spec.vectors)

    def add_all(self, values: list[Any], places: list[Any]) -> None:
        """Add vectors to those at `places` of OUT."""
        before = self.load_all(places)
        sums = [self.b.fadd(old, new) for old, new in zip(before, values, strict=True)]
        self.store_all(sums, places)

    def load_all(self, places: list[Any], base: Any = None) -> list[Any]:
        """The vectors at `places` of OUT, or of `base`."""
        return [self.load(base or self.arg[Arg.OUT], place, self.vector) for place in places]

    def store_all(self, values: list[Any], places: list[Any], base: Any = None) -> None:
        """Store vectors at `places` of OUT, or of `base`."""
        for value, place in zip(values, places, strict=True):
            self.store(value, base or self.arg[Arg.OUT], place)


def build(spec: KernelSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for `spec`."""
    return build_module(name, lambda function: Kernel(spec, function).emit())
