"""LLVM IR of a linear recurrence whose rows follow the ancestors of a tree.

A head keeps a matrix, its state, of key dimensions x value dimensions. A row makes its own state of
its parent's and reads its output from it:

    S = decay * S_parent;  S = S + key (value - key S) beta;  output = query S

This is the gated delta rule (arXiv:2412.06464, equation 10). Without the term `key S` it is the
recurrence of Mamba-2 (arXiv:2405.21060) and of linear attention with a decay. A decay is one number
for a head, or one for each key dimension, or for each element of the state, as Mamba-1
(arXiv:2312.00752) has it, whose channels are the value dimensions of one head.

A unit of work is a head and a block of its value dimensions, none of which needs the others. It
takes the rows depth first, so that few states are alive at once and stay in the cache. Every sum is
one chain over the key dimensions in rising order, so a row's bits depend on its ancestors alone.

Knows nothing of torch or thread pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I64, Emitter, build_module

UNROLL = 2  # key dimensions per turn of the loops; divides every head's


class Arg(IntEnum):
    """Positions in the int64 argument array of a kernel; addresses and sizes."""

    COUNTER = 0  # next unit to claim; set to 0 before a call
    THREADS = auto()  # threads that have begun; set to 0 before a call
    QUERIES = auto()  # float32 (rows, key_heads, key_dim)
    KEYS = auto()  # float32 (rows, key_heads, key_dim)
    VALUES = auto()  # float32 (rows, heads, value_dim)
    DECAYS = auto()  # float32 (rows, heads), (rows, heads, key_dim) or (..., key_dim, value_dim)
    BETAS = auto()  # float32 (rows, heads)
    STATE = auto()  # float32 (heads, key_dim, value_dim), behind which all rows come
    LAST = auto()  # likewise, written: the state behind the last row
    OUT = auto()  # float32 (rows, heads, value_dim)
    ORDER = auto()  # int64 (STEPS, 3): a row, the place of its parent's state, and that of its own
    SCRATCH = auto()  # float32 (threads, PLACES, key_dim, block); place 0 holds STATE at first
    HEADS = auto()
    KEY_HEADS = auto()
    KEY_DIM = auto()
    STEPS = auto()
    PLACES = auto()


@dataclass(frozen=True, slots=True)
class RecurrenceSpec:
    """What a kernel is compiled for."""

    blocks: int  # of a head's value dimensions
    vectors: int  # of a block
    lanes: int
    corrects: bool  # whether a row subtracts what the state already answers to its key
    decay_dims: int  # 0: a decay for each head; 1: and key dimension; 2: and value dimension

    @property
    def block(self) -> int:
        """Value dimensions of a block."""
        return self.vectors * self.lanes

    @property
    def value_dim(self) -> int:
        """Value dimensions of a head."""
        return self.blocks * self.block


class Kernel(Emitter):
    """Emits one kernel."""

    def __init__(self, spec: RecurrenceSpec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), spec.lanes)
        b, self.spec = self.b, spec
        self.base = b.ptrtoint(function.args[0], I64)
        self.arg = {arg: self.load(self.base, I64(arg), I64, 8) for arg in Arg}
        self.place_size = b.mul(self.arg[Arg.KEY_DIM], I64(spec.block))
        begun = self.ptr(self.base, I64(Arg.THREADS), 8)
        thread = b.atomic_rmw("add", begun, I64(1), "monotonic")
        self.scratch = b.mul(thread, b.mul(self.arg[Arg.PLACES], self.place_size))

    def emit(self) -> None:
        """Claims units until none is left."""
        b, spec = self.b, self.spec

        def work(unit: Any, _: Any) -> None:
            head, block = b.udiv(unit, I64(spec.blocks)), b.urem(unit, I64(spec.blocks))
            column = b.mul(block, I64(spec.block))
            self.copy_state(head, column, Arg.STATE, self.scratch, into_scratch=True)

            def step(at: Any, carried: list[Any]) -> list[Any]:
                first = b.mul(at, I64(3))
                row, parent, own = (
                    self.load(self.arg[Arg.ORDER], b.add(first, I64(i)), I64, 8) for i in range(3)
                )
                place = b.add(self.scratch, b.mul(own, self.place_size))
                source = b.add(self.scratch, b.mul(parent, self.place_size))
                self.row(row, head, column, source, place)
                return [place]

            last = self.loop(I64(0), self.arg[Arg.STEPS], 1, [self.scratch], step)[0]
            self.copy_state(head, column, Arg.LAST, last, into_scratch=False)

        units = b.mul(self.arg[Arg.HEADS], I64(spec.blocks))
        self.claim_strips(self.ptr(self.base, I64(Arg.COUNTER), 8), I64(0), units, I64(1), work)

    def copy_state(
        self, head: Any, column: Any, whole: Arg, place: Any, *, into_scratch: bool
    ) -> None:
        """Copies a block of a head's state from STATE to a place, or from a place to LAST."""
        b, spec = self.b, self.spec
        first = b.mul(head, self.arg[Arg.KEY_DIM])

        def dimension(i: Any, _: list[Any]) -> list[Any]:
            outside = b.add(b.mul(b.add(first, i), I64(spec.value_dim)), column)
            inside = b.add(place, b.mul(i, I64(spec.block)))
            ends = (self.arg[whole], outside), (self.arg[Arg.SCRATCH], inside)
            (source, read_at), (target, written_at) = ends if into_scratch else ends[::-1]
            for v in range(spec.vectors):
                offset = I64(v * spec.lanes)
                values = self.load(source, b.add(read_at, offset), self.vector)
                self.store(values, target, b.add(written_at, offset))
            return []

        self.loop(I64(0), self.arg[Arg.KEY_DIM], 1, [], dimension)

    def row(self, row: Any, head: Any, column: Any, source: Any, place: Any) -> None:
        """One row: its state from `source` to `place`, both in SCRATCH, and its output."""
        b, spec = self.b, self.spec
        group = b.udiv(self.arg[Arg.HEADS], self.arg[Arg.KEY_HEADS])
        key_head = b.add(b.mul(row, self.arg[Arg.KEY_HEADS]), b.udiv(head, group))
        keys = b.mul(key_head, self.arg[Arg.KEY_DIM])
        own = b.add(b.mul(row, self.arg[Arg.HEADS]), head)
        values = b.add(b.mul(own, I64(spec.value_dim)), column)
        zeros = [self.constant(0.0)] * spec.vectors
        answers = self.decay(own, keys, column, source, place, zeros)
        beta = self.scalar(Arg.BETAS, own)
        written = []
        for v, answer in enumerate(answers):
            value = self.load(self.arg[Arg.VALUES], b.add(values, I64(v * spec.lanes)), self.vector)
            if spec.corrects:
                value = b.fsub(value, answer)
            written.append(b.fmul(value, beta))

        def write(i: Any, outputs: list[Any]) -> list[Any]:
            for j in range(UNROLL):
                at = b.add(i, I64(j))
                key = self.scalar(Arg.KEYS, b.add(keys, at))
                query = self.scalar(Arg.QUERIES, b.add(keys, at))
                cell = b.add(place, b.mul(at, I64(spec.block)))
                found = []
                for v, output in enumerate(outputs):
                    there = b.add(cell, I64(v * spec.lanes))
                    kept = self.load(self.arg[Arg.SCRATCH], there, self.vector)
                    kept = self.fma(key, written[v], kept)
                    self.store(kept, self.arg[Arg.SCRATCH], there)
                    found.append(self.fma(query, kept, output))
                outputs = found
            return outputs

        outputs = self.loop(I64(0), self.arg[Arg.KEY_DIM], UNROLL, zeros, write)
        for v, output in enumerate(outputs):
            self.store(output, self.arg[Arg.OUT], b.add(values, I64(v * spec.lanes)))

    def decay(
        self, own: Any, keys: Any, column: Any, source: Any, place: Any, zeros: list[Any]
    ) -> list[Any]:
        """Writes the decayed state of the parent to `place`.

        Returns:
            what this state answers to the row's key, for each vector; zeros where nobody asks.
        """
        b, spec = self.b, self.spec
        of_head = None if spec.decay_dims else self.scalar(Arg.DECAYS, own)
        first = b.mul(own, self.arg[Arg.KEY_DIM])

        def decay_of(at: Any, v: int) -> Any:
            if of_head is not None:
                return of_head
            row = b.add(first, at)
            if spec.decay_dims == 1:
                return self.scalar(Arg.DECAYS, row)
            element = b.add(b.mul(row, I64(spec.value_dim)), b.add(column, I64(v * spec.lanes)))
            return self.load(self.arg[Arg.DECAYS], element, self.vector)

        def read(i: Any, answers: list[Any]) -> list[Any]:
            for j in range(UNROLL):
                at = b.add(i, I64(j))
                decays = [
                    decay_of(at, v) for v in range(spec.vectors if spec.decay_dims > 1 else 1)
                ]
                key = self.scalar(Arg.KEYS, b.add(keys, at)) if spec.corrects else None
                cell, found = b.mul(at, I64(spec.block)), []
                for v, answer in enumerate(answers):
                    offset = b.add(cell, I64(v * spec.lanes))
                    kept = self.load(self.arg[Arg.SCRATCH], b.add(source, offset), self.vector)
                    kept = b.fmul(kept, decays[v if len(decays) > 1 else 0])
                    self.store(kept, self.arg[Arg.SCRATCH], b.add(place, offset))
                    found.append(answer if key is None else self.fma(key, kept, answer))
                answers = found
            return answers

        return self.loop(I64(0), self.arg[Arg.KEY_DIM], UNROLL, zeros, read)

    def scalar(self, array: Arg, index: Any) -> Any:
        """Element `index` of a float32 array, in every lane."""
        return self.splat(self.load(self.arg[array], index, F32), self.lanes)


def build(spec: RecurrenceSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for `spec`."""
    return build_module(name, lambda function: Kernel(spec, function).emit())
