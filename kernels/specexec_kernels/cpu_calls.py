"""Kernels with their arguments, written once and then run one after another as one compiled call.

For few rows, what Python does between two products takes as long as the products do.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team, cpu_team_ir
from specexec_kernels.cpu_arrange_ir import CHUNKS as ARRANGED_CHUNKS
from specexec_kernels.cpu_arrange_ir import INPUTS, ITEMS, ROWS, SOURCE, SUMS
from specexec_kernels.cpu_grouped import each_kernel
from specexec_kernels.cpu_layer_ir import Spec, build
from specexec_kernels.cpu_matmul_plan import Plan
from specexec_kernels.cpu_matmul_spec import CHUNKS, COUNTER, OUT, X_SUMS, X


class Calls:
    """A list of calls in a table of int64: blocks of arguments, and (function, arguments) of each.

    The compiled loop of cpu_grouped goes through the list on the calling thread. Products and
    attention are launches of the team's.

    Attributes:
        table: all arguments, which may be written between two runs.
    """

    def __init__(self, size: int) -> None:
        """Makes room for `size` numbers."""
        self.table = array("q", bytes(8 * size))
        self._used = 0
        self._calls: list[int] = []
        self._counters: list[int] = []  # places in the table that must be 0 before a run
        self._kept: list[Tensor] = []  # of addresses in the table

    def block(self, size: int) -> int:
        """The place of `size` numbers of the table that nothing uses yet."""
        place, self._used = self._used, self._used + size
        assert self._used <= len(self.table), "the table does not grow: its address is in use"
        return place

    def at(self, place: int) -> int:
        """The address of a place in the table."""
        return int(self.table.buffer_info()[0]) + 8 * place

    def address(self, tensor: Tensor) -> int:
        """The address of a tensor, which is kept as long as the calls."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def zeroed(self, *places: int) -> None:
        """Has places of the table set to 0 before each run."""
        self._counters += places

    def serial(self, spec: Spec, given: Mapping[int, int], args: Any) -> int:
        """Adds a call of one thread's; returns the place of its arguments.

        Args:
            given: arguments by their positions in `args`.
        """
        place = self.block(len(args))
        for at, value in given.items():
            self.table[place + at] = value
        self._calls += (kernel(spec).address, self.at(place))
        return place

    def arranged(self, plan: Plan, x: Tensor, rows: int, items: Tensor, totals: Tensor) -> int:
        """Adds the call that arranges rows for a plan; returns the place of its arguments.

        Args:
            x: (rows * inputs,) of the plan's dtype.
            items, totals: memory as `plan.arranged` makes it.
        """
        place = self.block(ARRANGED_CHUNKS + 1)
        given = {
            SOURCE: self.address(x), ROWS: rows, INPUTS: x.numel() // rows,
            ITEMS: self.address(items), SUMS: self.address(totals),
            ARRANGED_CHUNKS: -(-rows // plan.rows),
        }  # fmt: skip
        for at, value in given.items():
            self.table[place + at] = value
        self.zeroed(place)
        self._calls += (plan.arrange_kernel.address, self.at(place))
        return place

    def product(self, plan: Plan, items: int, totals: int, out: int, chunks: int) -> int:
        """Writes the arguments of a product but for the weight's; returns their place.

        Args:
            items, totals, out: addresses of arranged rows and of the sums.
        """
        place = self.block(len(plan.arguments))
        self.table[place : place + len(plan.arguments)] = array("q", plan.arguments)
        given = {X: items, X_SUMS: totals, OUT: out, CHUNKS: chunks}
        for at, value in given.items():
            self.table[place + at] = value
        self.zeroed(place + COUNTER)
        return place

    def parallel(self, launches: Sequence[tuple[Any, int]], claims: int) -> int:
        """Adds calls that the team's threads go through together.

        Args:
            launches: kernels and the places of their arguments.
            claims: how many claims their work comes to.
        Returns:
            the place of how many of the calls are made, which is all of them at first.
        """
        together = self.block(1 + 2 * len(launches))
        self.table[together] = len(launches)
        for number, (called, place) in enumerate(launches):
            at = together + 1 + 2 * number
            self.table[at], self.table[at + 1] = called.address, self.at(place)
        threads = min(torch.get_num_threads(), claims)
        if threads <= 1:
            self._calls += (each_kernel().address, self.at(together))
            return together
        team = cpu_team.team()
        given = team.launch(each_kernel(), self.at(together), threads)
        place = self.block(len(given))
        self.table[place : place + len(given)] = array("q", given)
        self._calls += (team.launch_kernel.address, self.at(place))
        return together

    def finish(self) -> None:
        """Writes the list of the calls; none can be added then."""
        place = self.block(len(self._calls) + 1)
        self.table[place] = len(self._calls) // 2
        self.table[place + 1 : place + 1 + len(self._calls)] = array("q", self._calls)
        self._begin, self._go = self.at(place), each_kernel()

    def go(self) -> None:
        """Makes the calls."""
        for at in self._counters:
            self.table[at] = 0
        self._go(self._begin)


def machine_key() -> tuple[int, object]:
    """What calls are made for besides their work: threads, and the process's team of them."""
    threads = torch.get_num_threads()
    return threads, cpu_team.team() if threads > 1 and cpu_team_ir.has_team() else None


def has_threads() -> bool:
    """Whether calls can be made that run on as many threads as torch uses."""
    return torch.get_num_threads() == 1 or cpu_team_ir.has_team()


def bits(number: float) -> int:
    """The bits of the float32 nearest to a number."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


@cache
def kernel(spec: Spec) -> Any:
    """The compiled kernel of a spec of cpu_layer_ir."""
    told = type(spec).__name__, spec
    return cpu_jit.compiled("layer", told, partial(build, spec))
