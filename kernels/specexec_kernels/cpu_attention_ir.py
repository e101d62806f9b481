"""LLVM IR of masked attention that forms all sums in one order, whatever else a pass carries.

A unit of work is one key/value head and a tile of a few query rows. Their scores are written to
memory, turned into the weights of the softmax in place, and then the values are summed slot after
slot.

Every sum is a single chain in rising order: a score over the head's dimensions, the softmax's
denominator and the output over the slots. A slot that a row does not see adds exactly zero. So a
row's bits depend on the slots that it sees and on their order, but neither on other rows nor on the
slots of other branches of a tree in between. The online softmax of FlashAttention
(arXiv:2205.14135) would not do: it rescales at the end of each block of slots. A sink's weight is
the first term of the denominator.

Keys and values may lie in several parts, one behind the other: blocks that texts share, then the
text's own. Slots are taken in the same order, so the bits are those of one piece.

Knows nothing of torch or thread pools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

from llvmlite import ir

from specexec_kernels.cpu_ir_emit import F32, I32, I64, Emitter, ScaleType, build_module

UNROLL = 4  # dimensions per iteration of the loop over a score; divides the dimensions of a head
_SUMS = 24  # vector registers for the sums of outputs


class Arg(IntEnum):
    """Positions in the int64 argument array of a kernel; addresses and sizes."""

    COUNTER = 0  # next unit to claim; set to 0 before a call
    THREADS = auto()  # threads that have begun; set to 0 before a call
    QUERIES = auto()  # float32 (kv_heads, tiles * rows, head_dim)
    MASK = auto()  # bytes (PASS_ROWS, MASK_STRIDE), not 0 = attend
    SINKS = auto()  # float32 (kv_heads, tiles * rows), where the attention has sinks
    OUT = auto()  # float32 (kv_heads, tiles * rows, value_dim)
    SCORES = auto()  # float32 (threads, rows, MASK_STRIDE)
    KV_HEADS = auto()
    TILES = auto()  # tiles of query rows of each key/value head
    PASS_ROWS = auto()  # rows of the pass: query row n of a key/value head is row n % PASS_ROWS
    MASK_STRIDE = auto()  # slots, rounded up to whole vectors
    SCALE = auto()  # bits of the float32 that multiplies scores, divided by the cap if there is one
    SOFTCAP = auto()  # bits of the float32 that scores are capped at
    BLOCKS = auto()  # address of the parts in front of the last, each as PART says
    BLOCK_COUNT = auto()  # 0 where all slots lie in one piece
    # the last part, or the only one, see PART
    KEYS = auto()  # (kv_heads, slots, head_dim) by the strides below, from where slot 0 would be
    VALUES = auto()  # (kv_heads, slots, value_dim) by the strides below, likewise
    KEY_HEAD_STRIDE = auto()  # elements from a head's keys to the next head's
    KEY_SLOT_STRIDE = auto()
    VALUE_HEAD_STRIDE = auto()
    VALUE_SLOT_STRIDE = auto()
    FIRST = auto()  # the part's first slot; a multiple of the lanes
    SLOTS = auto()  # the end of the part's slots; of the last part, of all


PART = tuple(Arg)[Arg.KEYS :]  # what says where a part lies


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What an attention kernel is compiled for."""

    stored: ScaleType  # dtype of keys and values
    rows: int  # query rows of a tile
    vectors: int  # vectors of a head's key dimensions
    value_vectors: int  # vectors of a head's value dimensions
    lanes: int
    capped: bool = False  # whether scores are soft-capped
    sinks: bool = False  # whether the softmax has a sink in each head

    @property
    def head_dim(self) -> int:
        """Dimensions of a head's keys."""
        return self.vectors * self.lanes

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values."""
        return self.value_vectors * self.lanes


class Kernel(Emitter):
    """Emits an attention kernel."""

    def __init__(self, spec: AttentionSpec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), spec.lanes)
        b, self.spec = self.b, spec
        self.base = b.ptrtoint(function.args[0], I64)
        self.arg = {arg: self.load(self.base, I64(arg), I64, 8) for arg in Arg}
        array = b.alloca(ir.ArrayType(F32, spec.head_dim * spec.lanes))
        array.align = 64
        self.block = b.ptrtoint(array, I64)  # keys of some slots, [dimension][slot]
        begun = self.ptr(self.base, I64(Arg.THREADS), 8)
        thread = b.atomic_rmw("add", begun, I64(1), "monotonic")
        self.scores = b.mul(thread, b.mul(I64(spec.rows), self.arg[Arg.MASK_STRIDE]))
        self.scale, self.softcap = (
            self.splat(b.bitcast(b.trunc(self.arg[arg], I32), F32), spec.lanes)
            for arg in (Arg.SCALE, Arg.SOFTCAP)
        )

    def emit(self) -> None:
        """Emits the kernel: claims units until none is left."""
        b = self.b

        def work(unit: Any, _: Any) -> None:
            head = b.udiv(unit, self.arg[Arg.TILES])
            first_row = b.mul(b.urem(unit, self.arg[Arg.TILES]), I64(self.spec.rows))
            masks = self.mask_rows(first_row)
            end = self.seen_end(masks)
            sinks = self.sinks(unit)
            maxima = self.score(unit, head, masks, end, sinks)
            totals = self.exponentiate(maxima, end, sinks)
            self.sum_values(unit, head, self.minimum(end, self.arg[Arg.SLOTS]), totals)

        units = b.mul(self.arg[Arg.KV_HEADS], self.arg[Arg.TILES])
        self.claim_strips(self.ptr(self.base, I64(Arg.COUNTER), 8), I64(0), units, I64(1), work)

    def score_at(self, row: int, slot: Any) -> Any:
        """Index in SCORES of a row's score of a slot."""
        return self.b.add(
            self.b.add(self.scores, self.b.mul(I64(row), self.arg[Arg.MASK_STRIDE])), slot
        )

    def mask_rows(self, first_row: Any) -> list[Any]:
        """Index in MASK of each row of the tile."""
        b, found = self.b, []
        for m in range(self.spec.rows):
            row = b.urem(b.add(first_row, I64(m)), self.arg[Arg.PASS_ROWS])
            found.append(b.mul(row, self.arg[Arg.MASK_STRIDE]))
        return found

    def seen_end(self, masks: list[Any]) -> Any:
        """The end of the last vector of slots that any row of the tile sees a slot of.

        Rows of a long prompt do not see the rows after them; skipping slots that no row sees
        changes no sum, since they would add zero. Every row sees a slot, so the search ends.
        """
        b = self.b
        before = b.block
        search, found = b.append_basic_block("search"), b.append_basic_block("found")
        b.branch(search)
        b.position_at_end(search)
        end = b.phi(I64)
        start = b.sub(end, I64(self.lanes))
        seen_type = ir.IntType(8 * self.lanes)
        seen = seen_type(0)
        for row in masks:
            seen = b.or_(seen, self.load(self.arg[Arg.MASK], b.add(row, start), seen_type, 1))
        end.add_incoming(self.arg[Arg.MASK_STRIDE], before)
        end.add_incoming(start, search)
        b.cbranch(b.icmp_unsigned("==", seen, seen_type(0)), search, found)
        b.position_at_end(found)
        return end

    def sinks(self, unit: Any) -> list[Any]:
        """For each row the score of its head's sink in every lane; minus infinity without sinks."""
        if not self.spec.sinks:
            return [self.constant(float("-inf"))] * self.spec.rows
        first = self.b.mul(unit, I64(self.spec.rows))
        places = [self.b.add(first, I64(m)) for m in range(self.spec.rows)]
        return [self.splat(self.load(self.arg[Arg.SINKS], at, F32), self.lanes) for at in places]

    def score(
        self, unit: Any, head: Any, masks: list[Any], end: Any, sinks: list[Any]
    ) -> list[Any]:
        """Writes the tile's scores for the slots before `end`; minus infinity for slots not seen.

        Returns:
            for each row, a vector whose largest lane is its largest score, the sink's included.
        """
        b, spec = self.b, self.spec
        queries = b.mul(unit, I64(spec.rows * spec.head_dim))
        seen_type = ir.VectorType(ir.IntType(8), spec.lanes)

        def block(part: Mapping[Arg, Any], slot: Any, maxima: list[Any]) -> list[Any]:
            self.transpose_keys(part, head, slot)

            def step(d: Any, sums: list[Any]) -> list[Any]:
                sums = list(sums)
                for j in range(UNROLL):
                    at = b.add(d, I64(j))
                    keys = self.load(self.block, b.mul(at, I64(spec.lanes)), self.vector)
                    for m in range(spec.rows):
                        place = b.add(queries, b.add(at, I64(m * spec.head_dim)))
                        query = self.splat(self.load(self.arg[Arg.QUERIES], place, F32), spec.lanes)
                        sums[m] = self.fma(query, keys, sums[m])
                return sums

            zeros = [self.constant(0.0)] * spec.rows
            sums = self.loop(I64(0), I64(spec.head_dim), UNROLL, zeros, step)
            found = []
            for m in range(spec.rows):
                mask = self.load(self.arg[Arg.MASK], b.add(masks[m], slot), seen_type, 1)
                seen = b.icmp_unsigned("!=", mask, ir.Constant(seen_type, [0] * spec.lanes))
                scaled = b.fmul(sums[m], self.scale)
                if spec.capped:
                    scaled = b.fmul(self.tanh(scaled), self.softcap)
                shown = b.select(seen, scaled, self.constant(float("-inf")))
                self.store(shown, self.arg[Arg.SCORES], self.score_at(m, slot))
                larger = b.fcmp_ordered(">", shown, maxima[m])
                found.append(b.select(larger, shown, maxima[m]))
            return found

        return self.slots(end, spec.lanes, sinks, block)

    def slots(
        self,
        end: Any,
        step: int,
        carried: list[Any],
        body: Callable[[Mapping[Arg, Any], Any, list[Any]], list[Any]],
    ) -> list[Any]:
        """Emits `for slot in range(0, end, step): carried = body(part, slot, carried)`.

        Args:
            body: given where the part lies that the slot is in, the values of PART.
        Returns:
            the carried SSA values after the loop.
        """
        b, blocks = self.b, self.arg[Arg.BLOCK_COUNT]
        last = b.add(self.base, I64(8 * PART[0]))

        def run(number: Any, carried: list[Any]) -> list[Any]:
            is_last = b.icmp_unsigned("==", number, blocks)
            block = b.add(self.arg[Arg.BLOCKS], b.mul(number, I64(8 * len(PART))))
            place = b.select(is_last, last, block)
            part = {arg: self.load(place, I64(at), I64, 8) for at, arg in enumerate(PART)}
            stop = b.select(is_last, end, self.minimum(end, part[Arg.SLOTS]))
            return self.loop(
                part[Arg.FIRST], stop, step, carried, lambda slot, own: body(part, slot, own)
            )

        return self.loop(I64(0), b.add(blocks, I64(1)), 1, carried, run)

    def transpose_keys(self, part: Mapping[Arg, Any], head: Any, slot: Any) -> None:
        """Loads the keys of as many slots as there are lanes to `block`, as [dimension][slot]."""
        b, spec = self.b, self.spec
        last = b.sub(part[Arg.SLOTS], I64(1))
        start = b.mul(head, part[Arg.KEY_HEAD_STRIDE])
        places = []
        for lane in range(spec.lanes):  # beyond the last slot that slot is read, and masked
            one = self.minimum(b.add(slot, I64(lane)), last)
            places.append(b.add(start, b.mul(one, part[Arg.KEY_SLOT_STRIDE])))

        def dimensions(d: Any, _: list[Any]) -> list[Any]:
            rows = [
                self.load_scales(spec.stored, part[Arg.KEYS], b.add(place, d), spec.lanes)
                for place in places
            ]
            for j, slots in enumerate(self.transpose(rows)):
                self.store(slots, self.block, b.mul(b.add(d, I64(j)), I64(spec.lanes)))
            return []

        self.loop(I64(0), I64(spec.head_dim), spec.lanes, [], dimensions)

    def exponentiate(self, maxima: list[Any], end: Any, sinks: list[Any]) -> list[Any]:
        """Turns scores to exp(score - the row's largest score), in place.

        Returns:
            for each row, the same of its sink in every lane; zeros without sinks.
        """
        totals = []
        for m, lanes in enumerate(maxima):
            largest = self.splat(self.largest(lanes), self.lanes)
            self.loop(I64(0), end, self.lanes, [], self.exponentiate_row(m, largest))
            sink = self.b.fsub(sinks[m], largest)
            totals.append(self.exp(sink) if self.spec.sinks else self.constant(0.0))
        return totals

    def exponentiate_row(self, row: int, largest: Any) -> Callable[[Any, list[Any]], list[Any]]:
        """The body of `exponentiate`'s loop over slots."""

        def block(slot: Any, _: list[Any]) -> list[Any]:
            at = self.score_at(row, slot)
            score = self.load(self.arg[Arg.SCORES], at, self.vector)
            self.store(self.exp(self.b.fsub(score, largest)), self.arg[Arg.SCORES], at)
            return []

        return block

    def largest(self, lanes: Any) -> Any:
        """The largest lane of a vector."""
        found = self.b.extract_element(lanes, ir.IntType(32)(0))
        for lane in range(1, self.lanes):
            other = self.b.extract_element(lanes, ir.IntType(32)(lane))
            found = self.b.select(self.b.fcmp_ordered(">", other, found), other, found)
        return found

    def sum_values(self, unit: Any, head: Any, end: Any, totals: list[Any]) -> None:
        """Writes the tile's outputs: values weighted by the exponentials, divided by their sum.

        Args:
            unit, head: numbers of the unit of work and of its key/value head.
            end: end of the slots that are summed.
            totals: for each row, what the sum of its exponentials begins with.
        """
        b, spec = self.b, self.spec
        together = max(1, min(_SUMS // spec.rows - 1, spec.value_vectors))
        for first in range(0, spec.value_vectors, together):
            vectors = range(first, min(first + together, spec.value_vectors))
            counts = first == 0  # the first group of vectors also sums the exponentials themselves

            def slot(
                part: Mapping[Arg, Any],
                s: Any,
                sums: list[Any],
                vectors: range = vectors,
                counts: bool = counts,
            ) -> list[Any]:
                sums = list(sums)
                start = b.mul(head, part[Arg.VALUE_HEAD_STRIDE])
                row = b.add(start, b.mul(s, part[Arg.VALUE_SLOT_STRIDE]))
                values = [
                    self.load_scales(
                        spec.stored, part[Arg.VALUES], b.add(row, I64(v * spec.lanes)),
                        spec.lanes,
                    )
                    for v in vectors
                ]  # fmt: skip
                for m in range(spec.rows):
                    score = self.load(self.arg[Arg.SCORES], self.score_at(m, s), F32)
                    weight = self.splat(score, spec.lanes)
                    for i, value in enumerate(values):
                        at = m * len(vectors) + i
                        sums[at] = self.fma(weight, value, sums[at])
                    if counts:
                        at = spec.rows * len(vectors) + m
                        sums[at] = b.fadd(sums[at], weight)
                return sums

            zeros = [self.constant(0.0)] * (spec.rows * len(vectors))
            sums = self.slots(end, 1, zeros + totals if counts else zeros, slot)
            totals = sums[len(zeros) :] if counts else totals
            for m in range(spec.rows):
                at = b.mul(b.add(b.mul(unit, I64(spec.rows)), I64(m)), I64(spec.value_dim))
                for i, v in enumerate(vectors):
                    output = b.fdiv(sums[m * len(vectors) + i], totals[m])
                    self.store(output, self.arg[Arg.OUT], b.add(at, I64(v * spec.lanes)))


def build(spec: AttentionSpec, name: str) -> str:
    """LLVM IR of the kernel `void name(int64 *args)` for `spec`."""
    return build_module(name, lambda function: Kernel(spec, function).emit())
