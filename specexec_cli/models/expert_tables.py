"""A mixture's layer with all experts on a GPU: few launches, and choices that the host never sees.

Experts lie in memory as their tensors were loaded or streamed. Tables of their addresses are
uploaded once for as long as the layer's parameters stay bound (expert_mlp.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specexec_kernels.formats.base import PackedWeight
from torch import Tensor, nn

if TYPE_CHECKING:
    from specexec_kernels.triton_experts import ExpertTable


class OnDevice:
    """All experts of a layer, which a GPU computes together."""

    def __init__(
        self,
        weights: Sequence[Sequence[PackedWeight]],
        biases: Sequence[Sequence[Tensor | None]],
        gate: nn.Module,
    ) -> None:
        """Writes down where the weights lie.

        Args:
            weights: for each expert its weights, `down` last; no expert where Triton does not run.
            biases: the same for biases.
            gate: see PerExpert.
        """
        self._weights, self._biases = weights, biases  # keep alive what the tables point to
        self._gate = gate
        self._tables: list[ExpertTable] = self._made() if weights else []  # of `down` last

    @property
    def takes(self) -> bool:
        """Whether kernels read the weights, which must be alike in all experts."""
        return bool(self._tables)

    def _made(self) -> list[ExpertTable]:
        """The tables; none if there are weights that no kernel reads."""
        count = len(self._weights[0])
        together = self._table(0, count - 1)
        if together is not None:
            found = [together, self._table(count - 1, count)]
        else:  # each linear has a launch of its own
            found = [self._table(place, place + 1) for place in range(count)]
        return [] if None in found else [table for table in found if table is not None]

    def _table(self, first: int, last: int) -> ExpertTable | None:
        from specexec_kernels import triton_experts

        return triton_experts.table_of(
            [each[first:last] for each in self._weights],
            [each[first:last] for each in self._biases],
        )

    def forward(self, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts; see PerExpert.forward."""
        from specexec_kernels import triton_experts

        *inner, down = self._tables
        chosen, places = top_k_index.shape[1], top_k_index.numel()
        routes = triton_experts.routes(top_k_index, down.experts, rows.dtype)
        parts = [
            part
            for table in inner
            for part in triton_experts.products(rows, table, routes, chosen, places)
        ]
        [outputs] = triton_experts.products(self._gate(*parts), down, routes, 0, places)
        return triton_experts.row_sums(outputs, top_k_index, top_k_weights, routes)
