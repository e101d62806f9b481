"""How rows and weights reach a kernel: one product, or many of one kind in one launch.

A form (cpu_dot, cpu_half, cpu_rows) says how its kernels want rows and weights. Kernels
claim strips of outputs from a counter of their own, so the threads of one launch can go from
product to product without waiting for one another. A product has the same bits alone and among
others.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team


class Form(Protocol):
    """One kind of weights and of rows."""

    @property
    def dtype(self) -> torch.dtype:
        """Of rows."""

    @property
    def places(self) -> tuple[int, int]:
        """Where in the arguments OUT and the number of chunks are."""

    def kind(self, weight: Any) -> Hashable:
        """Equal for weights that differ by nothing but their values."""

    def spec(self, rows: int, weight: Any) -> Any:
        """What the kernel for so many rows is compiled for; its `rows` are those of a chunk."""

    def kernel(self, spec: Any, weight: Any) -> Any:
        """The compiled kernel."""

    def arrange(self, x: Tensor, spec: Any) -> Mapping[int, Tensor]:
        """(chunks * spec.rows, inputs) as the kernel reads it, by argument, (chunks, ...) each."""

    def sums(self, chunks: int, spec: Any, weight: Any) -> Tensor:
        """Memory for the results of so many chunks, (chunks, ...) float32."""

    def arguments(self, spec: Any, weight: Any) -> list[int]:
        """Arguments that all weights alike have in common."""

    def stored(self, weight: Any) -> Mapping[int, Tensor]:
        """The tensors of a weight as the kernel reads them, by argument."""

    def own(self, spec: Any, weight: Any) -> Mapping[int, Tensor]:
        """Tensors of one call beside those, by argument."""

    def tiles(self, spec: Any, weight: Any) -> int:
        """Claims of one product."""

    def flat(self, sums: Tensor, spec: Any, weight: Any) -> Tensor:
        """What the kernel wrote as (chunks * spec.rows, outputs)."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What calls of one kernel have in common, whatever the rows and the weight hold."""

    spec: Any
    kernel: Any
    tiles: int
    values: tuple[int, ...]  # arguments; addresses are still to be told


# Few weights and numbers of rows come again and again, and in a pass of one row all that is around
# a product takes as long as the product. Prompts of a server have every number of rows, so that
# those that are kept are forgotten once there are this many.
_MOST_CALLS = 4096
_calls: dict[Hashable, _Call] = {}


def _call(form: Form, rows: int, weight: Any) -> _Call:
    """How so many rows are multiplied with this weight, and with every other that is alike."""
    key = form, form.kind(weight), rows, torch.get_num_threads()
    found = _calls.get(key)
    if found is None:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        spec = form.spec(rows, weight)
        found = _calls[key] = _Call(
            spec,
            form.kernel(spec, weight),
            form.tiles(spec, weight),
            tuple(form.arguments(spec, weight)),
        )
    return found


class Placed:
    """A weight, and where its tensors lie, which is looked up once."""

    __slots__ = ("_found", "weight")

    def __init__(self, weight: Any) -> None:
        self.weight = weight
        self._found: dict[Form, tuple[list[tuple[int, int]], Mapping[int, Tensor]]] = {}

    def at(self, form: Form) -> list[tuple[int, int]]:
        """Arguments of the weight's own tensors, each with its address."""
        found = self._found.get(form)
        if found is None:
            stored = form.stored(self.weight)
            addresses = [(place, tensor.data_ptr()) for place, tensor in stored.items()]
            found = self._found[form] = addresses, stored
        return found[0]


def product(form: Form, x: Tensor, weight: Any) -> Tensor:
    """(rows, inputs) times one weight, (rows, outputs) float32."""
    x, rows = x.to(form.dtype), x.shape[0]
    call = _call(form, rows, weight)
    spec = call.spec
    chunks = max(-(-rows // spec.rows), 1)
    if chunks * spec.rows != rows:
        x = torch.nn.functional.pad(x, (0, 0, 0, chunks * spec.rows - rows))
    arranged = form.arrange(x, spec)
    sums = form.sums(chunks, spec, weight)
    kept = {**form.stored(weight), **form.own(spec, weight), **arranged}
    values = list(call.values)
    for place, tensor in kept.items():
        values[place] = tensor.data_ptr()
    out_place, chunks_place = form.places
    values[out_place], values[chunks_place] = sums.data_ptr(), chunks
    table = array("q", values)
    cpu_team.run(call.kernel, table.buffer_info()[0], call.tiles)
    del kept
    found = form.flat(sums, spec, weight)
    return found if len(found) == rows else found[:rows]


def products(
    form: Form, x: Tensor, takes: Sequence[Sequence[int]], weights: Sequence[Sequence[Placed]]
) -> Tensor:
    """Some rows times some weights, others times others, in one launch.

    Args:
        x: (rows, inputs).
        takes: for each group of weights the rows of x that it multiplies, one at least.
        weights: the groups, of as many weights each; all weights are alike but for their values.
    Returns:
        (weights of a group, rows of all takes, outputs) float32, in the order of `takes`.
    """
    x = x.to(form.dtype)
    alike, each = weights[0][0].weight, len(weights[0])
    calls = {count: _call(form, count, alike) for count in set(map(len, takes))}
    by_spec: dict[Any, list[int]] = {}
    for count, call in calls.items():
        own = [group for group, take in enumerate(takes) if len(take) == count]
        by_spec.setdefault(call.spec, []).extend(own)
    launch = _Launch()
    done = [
        (
            spec,
            groups,
            _enqueue(launch, form, calls[len(takes[groups[0]])], x, groups, takes, weights),
        )
        for spec, groups in ((spec, sorted(groups)) for spec, groups in by_spec.items())
    ]
    launch.run()
    flats = [form.flat(sums, spec, alike) for spec, _, sums in done]
    found = [
        (spec, groups, flat.view(each, -1, flat.shape[1]))
        for (spec, groups, _), flat in zip(done, flats, strict=True)
    ]
    return _in_order(found, takes)


def batched_product(form: Form, x: Tensor, weights: Sequence[Any]) -> Tensor:
    """Each matrix of rows times a weight of its own, in one launch.

    Args:
        x: (weights, rows, inputs).
        weights: alike but for their values.
    Returns:
        (weights, rows, outputs) float32.
    """
    count, rows, inputs = x.shape
    call = _call(form, rows, weights[0])
    chunks = -(-rows // call.spec.rows)
    padded = torch.nn.functional.pad(x.to(form.dtype), (0, 0, 0, chunks * call.spec.rows - rows))
    launch = _Launch()
    sums = _with_each(
        launch, form, call, form.arrange(padded.reshape(-1, inputs), call.spec),
        range(0, count * chunks, chunks), [chunks] * count,
        [[Placed(weight)] for weight in weights],
    )  # fmt: skip
    launch.run()
    flat = form.flat(sums, call.spec, weights[0])
    return flat.view(count, -1, flat.shape[1])[:, :rows]


def _in_order(
    found: Sequence[tuple[Any, Sequence[int], Tensor]], takes: Sequence[Sequence[int]]
) -> Tensor:
    """What each spec's groups came to, (weights, whole chunks of rows, outputs), put together."""
    ends = list(accumulate(map(len, takes)))
    first = found[0][2]
    if len(found) == 1 and first.shape[1] == ends[-1]:
        return first
    together = first.new_empty(first.shape[0], ends[-1], first.shape[2])
    for spec, groups, flat in found:
        computed: list[int] = []
        wanted: list[int] = []
        row = 0
        for group in groups:
            count = len(takes[group])
            computed += range(row, row + count)
            wanted += range(ends[group] - count, ends[group])
            row += -(-count // spec.rows) * spec.rows
        together[:, wanted] = flat[:, computed]
    return together


def _enqueue(
    launch: _Launch,
    form: Form,
    call: _Call,
    x: Tensor,
    groups: list[int],
    takes: Sequence[Sequence[int]],
    weights: Sequence[Sequence[Placed]],
) -> Tensor:
    """The groups whose rows are as many as one kernel takes; where their results will be."""
    spec = call.spec
    chunks = [-(-len(takes[group]) // spec.rows) for group in groups]
    arranged, firsts_of_x = _arranged(form, spec, x, [takes[group] for group in groups], chunks)
    return _with_each(
        launch, form, call, arranged, firsts_of_x, chunks, [weights[group] for group in groups]
    )


def _with_each(
    launch: _Launch,
    form: Form,
    call: _Call,
    arranged: Mapping[int, Tensor],
    firsts_of_x: Sequence[int],
    chunks: Sequence[int],
    weights: Sequence[Sequence[Placed]],
) -> Tensor:
    """Chunks of rows times the weights of each group; where their results will be.

    Args:
        arranged: all rows as the kernel reads them.
        firsts_of_x: of each group, its first chunk among them.
        chunks: of each group, how many.
    """
    spec, alike, each = call.spec, weights[0][0].weight, len(weights[0])
    firsts = [end - count for end, count in zip(accumulate(chunks), chunks, strict=True)]
    in_all = sum(chunks)
    sums = form.sums(each * in_all, spec, alike)
    out_address, out_bytes = sums.data_ptr(), _item_bytes(sums)
    out_place, chunks_place = form.places
    starts_of_x = [
        (place, tensor.data_ptr(), _item_bytes(tensor)) for place, tensor in arranged.items()
    ]
    # a line of arguments for each weight, one group's after another's
    lines: list[int] = []
    for number, group in enumerate(weights):
        for place_of_weight, placed in enumerate(group):
            line = list(call.values)
            for place, address in placed.at(form):
                line[place] = address
            for place, address, size in starts_of_x:
                line[place] = address + size * firsts_of_x[number]
            line[out_place] = out_address + out_bytes * (firsts[number] + in_all * place_of_weight)
            line[chunks_place] = chunks[number]
            own = form.own(spec, placed.weight)
            if own:
                for place, tensor in own.items():
                    line[place] = tensor.data_ptr()
                launch.keep(own)
            lines += line
    launch.keep(arranged)
    launch.add(call.kernel, lines, len(call.values), call.tiles)
    return sums


def _arranged(
    form: Form, spec: Any, x: Tensor, takes: Sequence[Sequence[int]], chunks: Sequence[int]
) -> tuple[Mapping[int, Tensor], list[int]]:
    """Rows as the kernel reads them, and each take's first chunk; takes that are equal share."""
    rows: list[int] = []
    starts: dict[tuple[int, ...], int] = {}
    keys = [tuple(take) for take in takes]
    for take, count in zip(keys, chunks, strict=True):
        if take not in starts:
            starts[take] = len(rows) // spec.rows
            rows += take
            # rows too many are computed for nobody
            rows += take[:1] * (count * spec.rows - len(take))
    if rows != list(range(x.shape[0])):
        x = x[rows]
    return form.arrange(x, spec), [starts[take] for take in keys]


def _item_bytes(tensor: Tensor) -> int:
    """Bytes of tensor[0], of a tensor that lies in one piece."""
    return tensor.element_size() * (tensor.numel() // len(tensor))


class _Launch:
    """Calls of kernels that all threads go through one after another."""

    def __init__(self) -> None:
        self._calls: list[int] = []  # kernel and arguments, in turns
        self._tiles = 0
        self._kept: list[Any] = []

    def add(self, kernel: Any, lines: list[int], width: int, tiles: int) -> None:
        """A call for each line of `width` arguments, which begins with the call's own counter."""
        table = array("q", lines)
        first, bytes_of_line = table.buffer_info()[0], width * table.itemsize
        end = first + len(table) * table.itemsize
        for arguments in range(first, end, bytes_of_line):
            self._calls += (kernel.address, arguments)
        self._tiles += tiles * (len(table) // width)
        self._kept.append(table)

    def keep(self, kept: Any) -> None:
        """What the calls read stays until they are done."""
        self._kept.append(kept)

    def run(self) -> None:
        calls = array("q", (len(self._calls) // 2, *self._calls))
        cpu_team.run(_each_kernel(), calls.buffer_info()[0], self._tiles)
        self._kept.clear()


# Calls kernel after kernel, of args = count, (kernel, its arguments) * count. A thread that finds
# nothing left to claim of one goes on to the next.
_EACH = """
define void @each(ptr %args) {
entry:
  %count = load i64, ptr %args
  br label %head
head:
  %call = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %call, %count
  br i1 %more, label %body, label %done
body:
  %twice = mul i64 %call, 2
  %first = add i64 %twice, 1
  %second = add i64 %twice, 2
  %kernel_at = getelementptr i64, ptr %args, i64 %first
  %arguments_at = getelementptr i64, ptr %args, i64 %second
  %kernel = load ptr, ptr %kernel_at
  %arguments = load ptr, ptr %arguments_at
  call void %kernel(ptr %arguments)
  %next = add i64 %call, 1
  br label %head
done:
  ret void
}
"""


@cache
def _each_kernel() -> Any:
    return cpu_jit.compiled("each", _EACH, lambda name: _EACH.replace("@each", f"@{name}"))
