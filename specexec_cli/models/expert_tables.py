"""A mixture's layer with all experts on a GPU: few launches, and choices that the host never sees.

Experts lie in memory as their tensors were loaded or streamed. Tables of their addresses are
uploaded once for as long as the layer's parameters stay bound, and once for each ring buffer in
which a streamed layer arrives (expert_mlp.py). The host does not wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from specexec_kernels.formats.base import PackedWeight
from torch import Tensor, nn

from specexec_cli.transfers import sent

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
        """Writes down where the weights lie; they must live as long as this is used.

        Args:
            weights: for each expert its weights, `down` last; no expert where Triton does not run.
            biases: the same for biases.
            gate: see PerExpert.
        """
        self._gate = gate
        self._tables: list[ExpertTable] = []  # of `down` last
        made = _tables(weights, biases) if weights else []
        if made:
            device = next(iter(weights[0][0].tensors.values())).device
            every = [table.addresses.flatten() for table in made]
            there = torch.split(sent(torch.cat(every), device), [len(each) for each in every])
            self._tables = [
                replace(table, addresses=own) for table, own in zip(made, there, strict=True)
            ]

    @property
    def takes(self) -> bool:
        """Whether kernels read the weights, which must be alike in all experts."""
        return bool(self._tables)

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


def _tables(
    weights: Sequence[Sequence[PackedWeight]], biases: Sequence[Sequence[Tensor | None]]
) -> list[ExpertTable]:
    """The tables of all launches; none if there are weights that no kernel reads."""
    from specexec_kernels import triton_experts

    def table(first: int, last: int) -> ExpertTable | None:
        return triton_experts.table_of(
            [each[first:last] for each in weights], [each[first:last] for each in biases]
        )

    count = len(weights[0])
    together = table(0, count - 1)
    if together is not None:
        found = [together, table(count - 1, count)]
    else:  # each linear has a launch of its own
        found = [table(place, place + 1) for place in range(count)]
    return [] if None in found else [each for each in found if each is not None]
