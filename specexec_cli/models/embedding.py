"""Embedding tables that stay in the file's dtype or packed format."""

from __future__ import annotations

import torch
from specexec_kernels.formats.base import PackedFormat
from torch import Tensor, nn
from torch.func import functional_call

from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.transfers import sent


class MixedEmbedding(nn.Module):
    """An embedding table in the file's dtype or packed blocks; only looked-up rows are converted.

    The wrapped module may scale its output (Gemma's does), so it still runs, over a small table of
    the looked-up rows. The table of a model on a GPU may be in RAM: its rows are then looked up by
    `host_ids` and copied to the device.
    """

    def __init__(
        self,
        embedding: nn.Module,
        table: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        packed: PackedFormat | None = None,
    ) -> None:
        """Wraps an embedding module.

        Args:
            table: (vocab, hidden), or (vocab, bytes of a row) where it is packed.
            dtype: dtype of the looked-up rows.
            device: of the looked-up rows.
            packed: the table's packed format; None for a plain table.
        """
        super().__init__()
        # padding_idx only matters for gradients, and the small table lacks that row
        embedding.padding_idx = None  # type: ignore[assignment]
        self.embedding = embedding
        self.table = table
        self.dtype = dtype
        self.device = device
        self.packed = packed
        # Ids that the next pass looks up, (batch, rows) on the CPU: reading them back from the GPU
        # would wait for the GPU.
        self.host_ids: Tensor | None = None
        # The table's rows of the present pass, on the device, where they come with its other
        # inputs: see graphs.py.
        self.looked_up: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The table, for modelling code that reads attributes of the weight: Llama 4 sends its ids
        to the weight's device. One in RAM has a stand-in, without memory, where rows go."""
        if self.table.device.type == self.device.type:
            return self.table
        return torch.empty(1, dtype=self.table.dtype, device=self.device).expand(self.table.shape)

    @property
    def hidden(self) -> int:
        """Numbers in a row."""
        if self.packed is None:
            return self.table.shape[1]
        (part,) = self.packed.parts
        return self.table.shape[1] // part.items * part.inputs

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, rows) int64 -> (batch, rows, hidden) in `dtype`."""
        found = self.looked_up
        if found is None:
            known = self.host_ids if self.table.device != ids.device else ids
            assert known is not None, "a table in RAM is looked up by ids in RAM"
            assert known.shape == ids.shape, "a pass looks its tokens up once"
            found = sent(self.table[known.reshape(-1)], ids.device)
        if self.packed is not None:
            found = self.packed.unpack({"weight": found}, found.shape[0], self.hidden)
        order = torch.arange(found.shape[0], device=ids.device).view(ids.shape)
        weight = {"weight": found.to(self.dtype)}
        output: Tensor = functional_call(self.embedding, weight, (order,))
        return output

    def as_linear(self) -> MixedLinear | QuantizedLinear:
        """An output head over the same table."""
        if self.packed is None:
            return resident_linear(self.table)
        stored = {"weight": (tuple(self.table.shape), torch.uint8)}
        head = QuantizedLinear(self.hidden, self.table.shape[0], self.packed, stored, bias=False)
        head.weight = nn.Parameter(self.table, requires_grad=False)
        return head


def resident_linear(weight: Tensor) -> MixedLinear:
    """A linear without a bias over a weight that stays in memory."""
    linear = MixedLinear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
