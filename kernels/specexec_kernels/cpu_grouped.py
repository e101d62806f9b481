"""Multiplies rows by many weights of one format and shape in one launch, on a CPU.

A mixture's layer multiplies a few rows by the matrices of many experts. Each product has a counter
of its own from which threads claim strips of outputs, so the threads of one launch go from product
to product without waiting for one another. A product has the same bits as alone (cpu_matmul).
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
    """A weight and the addresses of its tensors, which are looked up once."""

    __slots__ = ("_addresses", "_stored", "weight")

    def __init__(self, weight: PackedWeight) -> None:
        self.weight = weight
        self._stored: Mapping[int, Tensor] = {}  # keeps the memory at the addresses alive
        self._addresses: list[tuple[int, int]] = []

    @property
    def addresses(self) -> list[tuple[int, int]]:
        """(position in the kernel's arguments, address) of each of the weight's tensors."""
        if not self._addresses:
            self._stored = stored(self.weight)
            self._addresses = [(at, tensor.data_ptr()) for at, tensor in self._stored.items()]
        return self._addresses


class Group:
    """The weights of one group, such as an expert, with what is derived from them once.

    Attributes:
        weights: the weights.
        kinds: format and shape of each weight; groups with equal `kinds` differ by values alone.
    """

    __slots__ = ("_taken", "kinds", "weights")

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self.weights = [Placed(weight) for weight in weights]
        self.kinds = tuple(map(_kind, weights))
        self._taken: dict[torch.dtype, bool] = {}

    def takes(self, rows: torch.dtype) -> bool:
        """Whether kernels multiply rows of a dtype by all of the weights."""
        if rows not in self._taken:
            self._taken[rows] = all(_takes(rows, placed.weight) for placed in self.weights)
        return self._taken[rows]


def _kind(weight: PackedWeight) -> tuple[Hashable, ...]:
    shape = weight.in_features, weight.out_features
    return weight.format, *shape, weight.eight_bit_rows, _in_one_piece(weight)


def _in_one_piece(weight: PackedWeight) -> bool:
    return all(tensor.is_contiguous() for tensor in weight.tensors.values())


def _takes(rows: torch.dtype, weight: PackedWeight) -> bool:
    if isinstance(weight.format, Plain) and not takes_plain(rows):
        return False
    return _in_one_piece(weight) and reads(weight)


def takes_together(rows: Tensor, groups: Sequence[Group]) -> bool:
    """Whether one launch can multiply rows by all weights of these groups.

    It can if the groups' first weights are all of one format and shape, and so are their second
    weights, and so on.

    Args:
        rows: any tensor of the dtype and device of the rows.
        groups: at least one.
    """
    first = groups[0]
    alike = all(first.kinds == group.kinds for group in groups[1:])
    return rows.device.type == "cpu" and alike and first.takes(rows.dtype)


def products(
    x: Tensor, takes: Sequence[Sequence[int]], weights: Sequence[Sequence[Placed]]
) -> Tensor:
    """Multiplies each group's rows by the group's weights, in one launch.

    Args:
        x: (rows, inputs).
        takes: for each group, the numbers of the rows of x that it multiplies, at least one.
        weights: for each group its weights, the same number in each. All weights are of one format
            and shape.
    Returns:
        (weights of a group, rows of all takes, outputs) float32, rows in the order of `takes`.
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
    """Puts the groups' results together in the order of `takes`.

    Args:
        found: for each plan, the rows of a chunk, the numbers of the groups that it multiplied, and
            their results (weights, rows of whole chunks, outputs).
        takes: as for `products`.
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
    """Adds the products of groups that share a plan to a launch.

    Returns:
        the memory of the results, (weights of a group * chunks of all groups, rows of a chunk,
        outputs of all strips); all groups' first weights come first, then their second ones.
    """
    chunks = [-(-len(take) // plan.rows) for take in takes]
    firsts = [end - count for end, count in zip(accumulate(chunks), chunks, strict=True)]
    in_all = sum(chunks)
    arranged, firsts_of_x = _arranged(plan, x, takes, chunks)
    sums = plan.sums(len(weights[0]) * in_all)
    out_address, out_bytes = sums.data_ptr(), _item_bytes(sums)
    starts_of_x = [(at, tensor.data_ptr(), _item_bytes(tensor)) for at, tensor in arranged.items()]
    # a line of arguments for each weight, group by group
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
    """Arranges rows for the kernel; equal takes share their chunks.

    Returns:
        the arranged rows, as Plan.arrange has them, and the first chunk of each take.
    """
    rows: list[int] = []
    starts: dict[tuple[int, ...], int] = {}
    keys = [tuple(take) for take in takes]
    for take, count in zip(keys, chunks, strict=True):
        if take not in starts:
            starts[take] = len(rows) // plan.rows
            rows += take
            # any row fills the last chunk; those results are not used
            rows += take[:1] * (count * plan.rows - len(take))
    if rows != list(range(x.shape[0])):
        x = x[rows]
    return plan.arrange(x, len(rows) // plan.rows), [starts[take] for take in keys]


def _item_bytes(tensor: Tensor) -> int:
    """The bytes of tensor[0]; the tensor must be contiguous."""
    return tensor.element_size() * (tensor.numel() // len(tensor))


class _Launch:
    """A list of kernel calls that every thread goes through."""

    def __init__(self) -> None:
        self._calls: list[int] = []  # for each call, the kernel's address and its arguments'
        self._claims = 0
        self._kept: list[Any] = []

    def add(self, plan: Plan, lines: list[int]) -> None:
        """Adds a call for each line of arguments; the first argument of a line is its counter."""
        table, width = array("q", lines), len(plan.arguments)
        first, end = table.buffer_info()[0], len(table) * table.itemsize
        for at in range(0, end, width * table.itemsize):
            self._calls += (plan.kernel.address, first + at)
        self._claims += plan.claims * (len(table) // width)
        self._kept.append(table)

    def keep(self, kept: Any) -> None:
        """Keeps tensors alive until the calls that read them are done."""
        self._kept.append(kept)

    def run(self) -> None:
        calls = array("q", (len(self._calls) // 2, *self._calls))
        cpu_team.run(each_kernel(), calls.buffer_info()[0], self._claims)
        self._kept.clear()


# Calls kernel after kernel. `args` is the count, and then a kernel and its arguments for each. A
# thread that finds nothing left to claim in one call goes on to the next.
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
