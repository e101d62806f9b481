"""How rows and weights reach a kernel: one product, or many of one kind in one launch.

A form (cpu_dot, cpu_half, cpu_quant) says how its kernels want rows and weights. Kernels claim
strips of outputs from a counter of their own, so the threads of one launch can go from product to
product without waiting for one another. A product has the same bits alone and among others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from specexec_kernels import cpu_jit


class Form(Protocol):
    """One kind of weights and of rows."""

    @property
    def dtype(self) -> torch.dtype:
        """Of rows."""

    @property
    def places(self) -> tuple[int, int, int]:
        """Where in the arguments X, OUT and the number of chunks are."""

    def spec(self, rows: int, weight: Any) -> Any:
        """What the kernel for so many rows is compiled for; its `rows` are those of a chunk."""

    def kernel(self, spec: Any, weight: Any) -> Any:
        """The compiled kernel."""

    def arrange(self, x: Tensor, spec: Any) -> Tensor:
        """(chunks * spec.rows, inputs) as the kernel reads it, (chunks, ...)."""

    def sums(self, chunks: int, spec: Any, weight: Any) -> Tensor:
        """Memory for the results of so many chunks, (chunks, ...) float32."""

    def arguments(self, spec: Any, weight: Any, x: Tensor, sums: Tensor) -> list[int]:
        """Arguments that all weights alike have in common; x and sums are of any of them."""

    def addresses(self, spec: Any, weight: Any) -> tuple[list[tuple[int, int]], Any]:
        """(argument, address) of each tensor of a weight, and what must live until the call."""

    def tiles(self, spec: Any, weight: Any) -> int:
        """Claims of one product."""

    def flat(self, sums: Tensor, spec: Any, weight: Any) -> Tensor:
        """What the kernel wrote as (chunks * spec.rows, outputs)."""


def product(form: Form, x: Tensor, weight: Any) -> Tensor:
    """(rows, inputs) times one weight, (rows, outputs) float32."""
    x, rows = x.to(form.dtype), x.shape[0]
    spec = form.spec(rows, weight)
    chunks = max(-(-rows // spec.rows), 1)
    if chunks * spec.rows != rows:
        x = torch.nn.functional.pad(x, (0, 0, 0, chunks * spec.rows - rows))
    arranged = form.arrange(x, spec)
    sums = form.sums(chunks, spec, weight)
    values = form.arguments(spec, weight, arranged, sums)
    places, kept = form.addresses(spec, weight)
    for place, address in places:
        values[place] = address
    x_place, out_place, chunks_place = form.places
    values[x_place], values[out_place] = arranged.data_ptr(), sums.data_ptr()
    values[chunks_place] = chunks
    table = array("q", values)
    cpu_jit.run(form.kernel(spec, weight), table.buffer_info()[0], form.tiles(spec, weight))
    del kept
    return form.flat(sums, spec, weight)[:rows]


def products(
    form: Form, x: Tensor, takes: Sequence[Sequence[int]], weights: Sequence[Sequence[Any]]
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
    alike, each = weights[0][0], len(weights[0])
    specs = {count: form.spec(count, alike) for count in set(map(len, takes))}
    by_spec: dict[Any, list[int]] = {}
    for group, take in enumerate(takes):
        by_spec.setdefault(specs[len(take)], []).append(group)
    launch = _Launch()
    done = [
        (spec, groups, _enqueue(launch, form, spec, x, groups, takes, weights))
        for spec, groups in by_spec.items()
    ]
    launch.run()
    flats = [form.flat(sums, spec, alike) for spec, _, sums in done]
    found = [
        (spec, groups, flat.view(each, -1, flat.shape[1]))
        for (spec, groups, _), flat in zip(done, flats, strict=True)
    ]
    return _in_order(found, takes)


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
    spec: Any,
    x: Tensor,
    groups: list[int],
    takes: Sequence[Sequence[int]],
    weights: Sequence[Sequence[Any]],
) -> Tensor:
    """The groups whose rows are as many as one kernel takes; where their results will be."""
    rows: list[int] = []
    chunks = [-(-len(takes[group]) // spec.rows) for group in groups]
    for group, count in zip(groups, chunks, strict=True):
        take = takes[group]
        rows += take
        # rows too many are computed for nobody
        rows += [take[0]] * (count * spec.rows - len(take))
    arranged = form.arrange(x[rows], spec)
    alike, each, in_all = weights[0][0], len(weights[0]), sum(chunks)
    sums = form.sums(each * in_all, spec, alike)
    common = form.arguments(spec, alike, arranged, sums)
    kernel, tiles = form.kernel(spec, alike), form.tiles(spec, alike)
    x_place, out_place, chunks_place = form.places
    x_address, x_bytes = arranged.data_ptr(), arranged.element_size() * arranged[0].numel()
    out_address, out_bytes = sums.data_ptr(), sums.element_size() * sums[0].numel()
    launch.keep(arranged)
    first = 0
    for group, count in zip(groups, chunks, strict=True):
        for number, weight in enumerate(weights[group]):
            values = common.copy()
            places, kept = form.addresses(spec, weight)
            for place, address in places:
                values[place] = address
            values[x_place] = x_address + first * x_bytes
            values[out_place] = out_address + (number * in_all + first) * out_bytes
            values[chunks_place] = count
            launch.add(kernel, values, tiles)
            launch.keep(kept)
        first += count
    return sums


class _Launch:
    """Calls of kernels that all threads go through one after another."""

    def __init__(self) -> None:
        self._kernels: list[int] = []
        self._starts: list[int] = []  # of each call's arguments in the table
        self._table = array("q")
        self._tiles = 0
        self._kept: list[Any] = []

    def add(self, kernel: Any, values: list[int], tiles: int) -> None:
        """One call, with arguments that begin with its counter."""
        self._kernels.append(kernel.address)
        self._starts.append(len(self._table))
        self._table.extend(values)
        self._tiles += tiles

    def keep(self, kept: Any) -> None:
        """What the calls read stays until they are done."""
        self._kept.append(kept)

    def run(self) -> None:
        base = self._table.buffer_info()[0]
        calls = array("q", [len(self._kernels)])
        for kernel, start in zip(self._kernels, self._starts, strict=True):
            calls.append(kernel)
            calls.append(base + 8 * start)
        cpu_jit.run(_each_kernel(), calls.buffer_info()[0], self._tiles)
        self._kept.clear()


@cache
def _each_kernel() -> Any:
    """void specexec_each(int64 *args): calls kernel after kernel, of args = count, (kernel, its
    arguments) * count. A thread that finds nothing left to claim of one goes on to the next."""
    name = "specexec_each"
    text = f"""
define void @{name}(ptr %args) {{
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
}}
"""
    return cpu_jit.compile_ir(text, name)
