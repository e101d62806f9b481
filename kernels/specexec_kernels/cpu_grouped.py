"""Products of rows with many weights of one kind in one launch, on a CPU.

A mixture's layer multiplies a few rows with the matrices of many experts. Kernels claim strips of
outputs from a counter of their own, so the threads of one launch can go from product to product
without waiting for one another. A product has the same bits alone (cpu_matmul) and among others.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_matmul import stored, takes_plain
from specexec_kernels.cpu_matmul_plan import Plan, plan_for, reads
from specexec_kernels.cpu_matmul_spec import CHUNKS, OUT
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.plain import Plain


class Placed:
    """A weight, and where its tensors lie, which is looked up once."""

    __slots__ = ("_addresses", "_stored", "weight")

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight
        self._stored: Mapping[int, Tensor] = {}  # kept while addresses are
        self._addresses: list[tuple[int, int]] = []

    @property
    def addresses(self) -> list[tuple[int, int]]:
        """Arguments of the weight's own tensors, each with its address."""
        if not self._addresses:
            self._stored = stored(self.weight)
            self._addresses = [(at, tensor.data_ptr()) for at, tensor in self._stored.items()]
        return self._addresses


class Group:
    """The weights of one group, such as an expert's, looked at once."""

    __slots__ = ("_taken", "kinds", "weights")

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self.weights = [Placed(weight) for weight in weights]
        self.kinds = tuple(map(_kind, weights))  # equal where weights differ by values alone
        self._taken: dict[torch.dtype, bool] = {}

    def takes(self, rows: torch.dtype) -> bool:
        """Whether kernels multiply all of the weights with rows of a dtype."""
        if rows not in self._taken:
            self._taken[rows] = all(_takes(rows, placed.weight) for placed in self.weights)
        return self._taken[rows]


def _kind(weight: PackedWeight) -> tuple[Hashable, ...]:
    return weight.format, weight.in_features, weight.out_features, _in_one_piece(weight)


def _in_one_piece(weight: PackedWeight) -> bool:
    return all(tensor.is_contiguous() for tensor in weight.tensors.values())


def _takes(rows: torch.dtype, weight: PackedWeight) -> bool:
    if isinstance(weight.format, Plain) and not takes_plain(rows):
        return False
    return _in_one_piece(weight) and reads(weight)


def takes_together(rows: Tensor, groups: Sequence[Group]) -> bool:
    """Whether one launch multiplies rows with all of these weights.

    Args:
        rows: of the dtype and on the device of those that will be multiplied.
        groups: whose weights at one place are alike, as `products` wants them.
    """
    first = groups[0]
    alike = all(first.kinds == group.kinds for group in groups[1:])
    return rows.device.type == "cpu" and alike and first.takes(rows.dtype)


def products(
    x: Tensor, takes: Sequence[Sequence[int]], weights: Sequence[Sequence[Placed]]
) -> Tensor:
    """Some rows times some weights, others times others, in one launch.

    Args:
        x: (rows, inputs).
        takes: for each group of weights the rows of x that it multiplies, one at least.
        weights: the groups, of as many weights each; all weights are alike but for their values.
    Returns:
        (weights of a group, rows of all takes, outputs) float32, in the order of `takes`.
    """
    alike, each = weights[0][0].weight, len(weights[0])
    by_plan: dict[Plan, list[int]] = {}
    for group, take in enumerate(takes):
        plan = plan_for(x.dtype, len(take), alike)
        assert plan is not None, "weights are those that takes_together accepts"
        by_plan.setdefault(plan, []).append(group)
    launch = _Launch()
    sums = [
        _enqueue(launch, plan, x.to(plan.dtype), [takes[group] for group in groups],
                 [weights[group] for group in groups])
        for plan, groups in by_plan.items()
    ]  # fmt: skip
    launch.run()
    found = []
    for (plan, groups), own in zip(by_plan.items(), sums, strict=True):
        flat = plan.flat(own)
        found.append((plan.rows, groups, flat.view(each, -1, flat.shape[1])))
    return _in_order(found, takes)


def _in_order(
    found: Sequence[tuple[int, Sequence[int], Tensor]], takes: Sequence[Sequence[int]]
) -> Tensor:
    """What groups came to, put together.

    Args:
        found: rows of a chunk, groups, and their (weights, rows of whole chunks, outputs).
    """
    ends = list(accumulate(map(len, takes)))
    first = found[0][2]
    if len(found) == 1 and first.shape[1] == ends[-1]:
        return first
    together = first.new_empty(first.shape[0], ends[-1], first.shape[2])
    for chunk, groups, flat in found:
        computed: list[int] = []
        wanted: list[int] = []
        row = 0
        for group in groups:
            count = len(takes[group])
            computed += range(row, row + count)
            wanted += range(ends[group] - count, ends[group])
            row += -(-count // chunk) * chunk
        together[:, wanted] = flat[:, computed]
    return together


def _enqueue(
    launch: _Launch,
    plan: Plan,
    x: Tensor,
    takes: Sequence[Sequence[int]],
    weights: Sequence[Sequence[Placed]],
) -> Tensor:
    """Groups that share a plan; returns where their results will be, by weight of a group."""
    chunks = [-(-len(take) // plan.rows) for take in takes]
    firsts = [end - count for end, count in zip(accumulate(chunks), chunks, strict=True)]
    in_all = sum(chunks)
    arranged, firsts_of_x = _arranged(plan, x, takes, chunks)
    sums = plan.sums(len(weights[0]) * in_all)
    out_address, out_bytes = sums.data_ptr(), _item_bytes(sums)
    starts_of_x = [(at, tensor.data_ptr(), _item_bytes(tensor)) for at, tensor in arranged.items()]
    # a line of arguments for each weight, one group's after another's
    lines: list[int] = []
    for number, group in enumerate(weights):
        for place_of_weight, placed in enumerate(group):
            line = list(plan.arguments)
            for at, address in placed.addresses:
                line[at] = address
            for at, address, size in starts_of_x:
                line[at] = address + size * firsts_of_x[number]
            line[OUT] = out_address + out_bytes * (firsts[number] + in_all * place_of_weight)
            line[CHUNKS] = chunks[number]
            scratch = plan.scratch()
            for at, tensor in scratch.items():
                line[at] = tensor.data_ptr()
            launch.keep(scratch)
            lines += line
    launch.keep(arranged)
    launch.add(plan, lines)
    return sums


def _arranged(
    plan: Plan, x: Tensor, takes: Sequence[Sequence[int]], chunks: Sequence[int]
) -> tuple[Mapping[int, Tensor], list[int]]:
    """Rows as the kernel reads them, and each take's first chunk; takes that are equal share."""
    rows: list[int] = []
    starts: dict[tuple[int, ...], int] = {}
    keys = [tuple(take) for take in takes]
    for take, count in zip(keys, chunks, strict=True):
        if take not in starts:
            starts[take] = len(rows) // plan.rows
            rows += take
            # rows too many are computed for nobody
            rows += take[:1] * (count * plan.rows - len(take))
    if rows != list(range(x.shape[0])):
        x = x[rows]
    return plan.arrange(x, len(rows) // plan.rows), [starts[take] for take in keys]


def _item_bytes(tensor: Tensor) -> int:
    """Bytes of tensor[0], of a tensor that lies in one piece."""
    return tensor.element_size() * (tensor.numel() // len(tensor))


class _Launch:
    """Calls of kernels that all threads go through one after another."""

    def __init__(self) -> None:
        self._calls: list[int] = []  # kernel and arguments, in turns
        self._claims = 0
        self._kept: list[Any] = []

    def add(self, plan: Plan, lines: list[int]) -> None:
        """A call for each line of arguments, which begins with the call's own counter."""
        table, width = array("q", lines), len(plan.arguments)
        first, end = table.buffer_info()[0], len(table) * table.itemsize
        for at in range(0, end, width * table.itemsize):
            self._calls += (plan.kernel.address, first + at)
        self._claims += plan.claims * (len(table) // width)
        self._kept.append(table)

    def keep(self, kept: Any) -> None:
        """What the calls read stays until they are done."""
        self._kept.append(kept)

    def run(self) -> None:
        calls = array("q", (len(self._calls) // 2, *self._calls))
        cpu_team.run(each_kernel(), calls.buffer_info()[0], self._claims)
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
def each_kernel() -> Any:
    """The kernel that runs the calls of a launch."""
    return cpu_jit.compiled("each", _EACH, lambda name: _EACH.replace("@each", f"@{name}"))
