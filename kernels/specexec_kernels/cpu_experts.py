"""Computes a mixture's chosen experts for a row each as one call into compiled code, on a CPU.

An expert is a gated MLP without biases. Its arguments are written once, and a call replaces those
that change with the choice: rows and weights. The bits are those of the products by cpu_grouped
with PyTorch's operations in between.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specexec_kernels import cpu_jit
from specexec_kernels.cpu_activation import Activation
from specexec_kernels.cpu_arrange_ir import CHUNKS as ARRANGED_CHUNKS
from specexec_kernels.cpu_arrange_ir import ROWS, SOURCE
from specexec_kernels.cpu_calls import Calls, has_threads, machine_key
from specexec_kernels.cpu_grouped import Group, Placed
from specexec_kernels.cpu_layer import DTYPES, MOST_ROWS, Workspace
from specexec_kernels.cpu_layer_ir import GateSpec, RowArg
from specexec_kernels.cpu_matmul_plan import Plan, plan_for
from specexec_kernels.cpu_matmul_spec import X_SUMS, X
from specexec_kernels.formats.base import PackedWeight

_MOST_EXPERTS = 128  # of a call
_LEAST_EXPERTS = 8  # for which memory is made


@dataclass(frozen=True, slots=True)
class _Arranged:
    """Where rows are arranged for a plan of one row.

    Attributes:
        call: place of the arranging call's arguments.
        items, sums: addresses of what it writes.
        item_bytes, sum_bytes: of a row.
    """

    call: int
    items: int
    item_bytes: int
    sums: int
    sum_bytes: int


class Experts:
    """The kernels of up to `most` experts of one format and shape, with their arguments."""

    def __init__(
        self, inner: Plan, down: Plan, dtype: torch.dtype, activation: Activation, most: int
    ) -> None:
        """Writes all arguments but those that `run` writes.

        Args:
            inner: for one row and the gate's or the up-projection's weight.
            down: the same for the down-projection's.
            dtype: of the rows.
        """
        size = 8 * (most + 16) + most * (2 * len(inner.arguments) + len(down.arguments) + 6)
        self._calls, self._dtype = Calls(size), dtype
        width, hidden = inner.outputs, down.outputs
        gate, up, self._sums = (torch.zeros(most, n) for n in (width, width, hidden))
        gated = torch.zeros(most, width, dtype=dtype)
        self._rows = self._arrange(inner, torch.zeros(MOST_ROWS, hidden, dtype=dtype))
        starts = [gate.data_ptr(), up.data_ptr()]
        self._inner = [
            [self._product(inner, self._rows, 0, at + 4 * width * expert) for at in starts]
            for expert in range(most)
        ]
        flat = [place for pair in self._inner for place in pair]
        claims = inner.claims * len(flat)
        self._inner_count = self._calls.parallel([(inner.kernel, at) for at in flat], claims)
        address = self._calls.address
        self._gate = self._calls.serial(GateSpec(activation, DTYPES[dtype], cpu_jit.lanes()), {
            RowArg.WIDTH: width, RowArg.LEFT: address(gate), RowArg.LEFT_STRIDE: width,
            RowArg.RIGHT: address(up), RowArg.RIGHT_STRIDE: width, RowArg.OUT: address(gated),
        }, RowArg)  # fmt: skip
        self._gated = self._arrange(down, gated)
        to = address(self._sums)
        self._down = [
            self._product(down, self._gated, expert, to + 4 * hidden * expert)
            for expert in range(most)
        ]
        claims = down.claims * most
        self._down_count = self._calls.parallel([(down.kernel, at) for at in self._down], claims)
        self._calls.finish()

    def _arrange(self, plan: Plan, x: Tensor) -> _Arranged:
        items, sums = plan.arranged(len(x))
        call = self._calls.arranged(plan, x.view(-1), len(x), items, sums)
        return _Arranged(
            call, items.data_ptr(), 4 * items.shape[1], sums.data_ptr(), 4 * sums.shape[1]
        )

    def _product(self, plan: Plan, rows: _Arranged, row: int, out: int) -> int:
        items, sums = rows.items + rows.item_bytes * row, rows.sums + rows.sum_bytes * row
        return self._calls.product(plan, items, sums, out, 1)

    def run(self, x: Tensor, rows: Sequence[int], experts: Sequence[Sequence[Placed]]) -> Tensor:
        """Computes a row by each expert.

        Args:
            x: (at most MOST_ROWS, hidden), contiguous, of the experts' dtype.
            rows: for each expert, which of them.
            experts: the gate's, the up-projection's and the down-projection's weight of each.
        Returns:
            (experts, hidden) of the rows' dtype.
        """
        table, count, arranged = self._calls.table, len(rows), self._rows
        call = arranged.call
        table[call + SOURCE], table[call + ROWS] = x.data_ptr(), len(x)
        table[call + ARRANGED_CHUNKS] = len(x)
        table[self._gated.call + ROWS] = table[self._gated.call + ARRANGED_CHUNKS] = count
        table[self._gate + RowArg.ROWS] = count
        table[self._inner_count], table[self._down_count] = 2 * count, count
        for row, weights, inner, last in zip(rows, experts, self._inner, self._down, strict=False):
            items = arranged.items + arranged.item_bytes * row
            sums = arranged.sums + arranged.sum_bytes * row
            for place in inner:
                table[place + X], table[place + X_SUMS] = items, sums
            for place, placed in zip((*inner, last), weights, strict=True):
                for at, address in placed.addresses:
                    table[place + at] = address
        self._calls.go()
        return self._sums[:count].to(self._dtype, copy=True)


def experts(
    x: Tensor, count: int, group: Group, activation: Activation, space: Workspace
) -> Experts | None:
    """What computes rows like `x` by `count` experts; None where no single call can.

    Args:
        x: (rows, hidden).
        group: one of the experts: weights of gate, up- and down-projection.
        space: of the model, which keeps what was made.
    """
    if not 1 <= count <= _MOST_EXPERTS or len(x) > MOST_ROWS or not x.is_contiguous():
        return None
    most = max(_LEAST_EXPERTS, 1 << (count - 1).bit_length())
    key: Hashable = group.kinds, x.dtype, most, activation, machine_key()
    if key not in space.experts:
        space.experts[key] = _made(x.dtype, group, activation, most)
    return space.experts[key]


def _made(dtype: torch.dtype, group: Group, activation: Activation, most: int) -> Experts | None:
    if dtype not in DTYPES or len(set(group.kinds[:-1])) != 1 or len(group.kinds) != 3:
        return None
    if not has_threads() or not group.takes(dtype):
        return None
    inner, down = (_plan(dtype, group.weights[place].weight) for place in (0, 2))
    return None if inner is None or down is None else Experts(inner, down, dtype, activation, most)


def _plan(dtype: torch.dtype, weight: PackedWeight) -> Plan | None:
    """How a row is multiplied; None where its result is to be rearranged or itself converted."""
    plan = plan_for(dtype, 1, weight)
    if plan is None or plan.rows != 1 or plan.adds or plan.dtype != dtype:
        return None
    return plan if plan.has_plain_sums and plan.outputs % cpu_jit.lanes() == 0 else None
