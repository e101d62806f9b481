"""LLVM IR of products of four bytes at a time, summed as int32: exact, so in any order the same.

Weights are codes from 0 on, rows are whole numbers from -127 to 127.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from specexec_kernels import cpu_ir_emit
from specexec_kernels.cpu_ir_emit import I8, I16, I32

# The most bits of codes whose products fit: vpmaddubsw sums two of them as int16.
MOST_BITS = {"vnni": 8, "int16 sums": 7, "sdot": 8, "smmla": 8}
_HALF = 128


def lowered_by(kind: cpu_ir_emit.Quads, bits: int) -> int:
    """The number that is subtracted from each code before an instruction multiplies it: 128 where
    Arm's, which take bytes as signed, multiply codes of 8 bits, and otherwise 0."""
    return _HALF if kind in ("sdot", "smmla") and bits == 8 else 0


def most_in_int16(bits: int) -> int:
    """The most items whose products an int16 can sum. Each item adds two products of a code and a
    number up to 127; `bits` is the width of a code."""
    return (2**15 - 1) // (2 * 127 * (2**bits - 1))


class Quads:
    """Emits the instruction."""

    def __init__(
        self, builder: ir.IRBuilder, lanes: int, kind: cpu_ir_emit.Quads, bits: int
    ) -> None:
        """Declares the instruction for codes of `bits` bits."""
        self.b, self.kind = builder, kind
        self._lowers = lowered_by(kind, bits) > 0
        self.words = ir.VectorType(I32, lanes)
        self.bytes, self.int16s = ir.VectorType(I8, 4 * lanes), ir.VectorType(I16, 2 * lanes)
        bits = 32 * lanes
        if kind == "vnni":
            name, types = f"llvm.x86.avx512.vpdpbusd.{bits}", [self.words, self.bytes, self.bytes]
            self._multiply = self._declared(name, self.words, types)
        elif kind in ("sdot", "smmla"):
            name = f"llvm.aarch64.neon.{kind}.v4i32.v16i8"
            types = [self.words, *[self.bytes] * 2]
            self._multiply = self._declared(name, self.words, types)
        else:
            two = "llvm.x86.avx512.pmaddubs.w.512" if lanes == 16 else "llvm.x86.avx2.pmadd.ub.sw"
            four = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
            self._multiply = self._declared(two, self.int16s, [self.bytes] * 2)
            self._join = self._declared(four, self.words, [self.int16s] * 2)

    def _declared(self, name: str, result: Any, arguments: list[Any]) -> Any:
        module = self.b.function.module
        if name in module.globals:
            return module.globals[name]
        return ir.Function(module, ir.FunctionType(result, arguments), name)

    def multiply(self, total: Any, weights: Any, x: Any) -> Any:
        """The total with the products added: vectors of words, of which weights and rows have four
        bytes each; for smmla as `of_two` and `of_rows` put them together."""
        codes, numbers = self._bytes_of(weights, x)
        if self._lowers:
            codes = self.b.xor(codes, ir.Constant(self.bytes, [_HALF] * self.bytes.count))
        return self.b.call(self._multiply, [total, codes, numbers])

    def of_two(self, first: Any, second: Any) -> tuple[Any, Any]:
        """Weights for smmla from two items of four outputs, of the first two outputs and of the
        last two: [item][output] becomes [output][item]."""
        low, high = ([0, 4, 1, 5], [2, 6, 3, 7])
        return self._shuffled(first, second, low), self._shuffled(first, second, high)

    def of_rows(self, first: Any, second: Any) -> Any:
        """Rows for smmla from two items of two rows, each a vector of two words."""
        return self._shuffled(first, second, [0, 2, 1, 3])

    def begun_of_rows(self, first: Any, second: Any) -> list[Any]:
        """What smmla's sums of two rows and four outputs begin with, [output][row] of two outputs
        each, from vectors with a row's number in every lane."""
        return [self._shuffled(first, second, [0, 4, 1, 5])] * 2

    def by_rows(self, low: Any, high: Any) -> list[Any]:
        """smmla's sums of two rows and four outputs as a vector of each row."""
        return [self._shuffled(low, high, order) for order in ([0, 2, 4, 6], [1, 3, 5, 7])]

    def _shuffled(self, first: Any, second: Any, order: list[int]) -> Any:
        return self.b.shuffle_vector(
            first, second, ir.Constant(ir.VectorType(I32, len(order)), order)
        )

    def in_int16(self, weights: Any, x: Any) -> Any:
        """The products of weights and rows, each two of neighbours summed as int16."""
        return self.b.call(self._multiply, self._bytes_of(weights, x))

    def with_int16(self, total: Any, sums: Any) -> Any:
        """The total with sums of `in_int16` added."""
        ones = ir.Constant(self.int16s, [1] * self.int16s.count)
        return self.b.add(total, self.b.call(self._join, [sums, ones]))

    def at_once(self, sums: list[Any]) -> list[Any]:
        """The same sums of `in_int16`, which LLVM must have all at this point.

        It would otherwise finish one sum after the other, and keep all of their weights meanwhile,
        for which there are not enough registers.
        """
        # LLVM returns a single output as itself, not as a struct, and finds no place for more
        # outputs than vector registers: AVX2 has 16, AVX-512 32.
        most = 32 if self.words.count == 16 else 16
        assert 2 <= len(sums) <= most, f"{len(sums)} sums at once, not 2 to {most}"
        types = [each.type for each in sums]
        tied = ",".join(["=v"] * len(sums) + list(map(str, range(len(sums)))))
        kind = ir.FunctionType(ir.LiteralStructType(types), types)
        found = self.b.asm(kind, "", tied, sums, side_effect=False)
        return [self.b.extract_value(found, number) for number in range(len(sums))]

    def _bytes_of(self, *words: Any) -> list[Any]:
        return [self.b.bitcast(each, self.bytes) for each in words]
