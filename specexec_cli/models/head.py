"""The output head, with float32 results in every compute dtype.

Tokens are chosen by comparing logits. In bfloat16 two logits between 16 and 32 are equal or at
least 1/8 apart, so that on the demo pair the two best were exactly equal at one position in a
hundred, and which of them won was decided by their place in the vocabulary or by what a pass with
another number of rows rounded the other way. The logits of a few rows are the one result that is
small enough to be kept as it was summed: in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.packed_linear import QuantizedLinear


class Head(nn.Module):
    """Takes the place of a model's output head, and computes those rows alone that are wanted.

    Args:
        linear: from hidden to vocabulary, the weight in any dtype.
        dtype: the model's compute dtype.
    """

    def __init__(self, linear: MixedLinear | QuantizedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = linear
        self.dtype = dtype
        self.rows: Tensor | None = None  # (wanted,) indices of the pass's rows; None: all of them

    def forward(self, hidden: Tensor) -> Tensor:
        """(1, rows, hidden) of any float dtype -> (1, wanted, vocab) float32."""
        rows = hidden if self.rows is None else hidden[:, self.rows]
        rows = rows.float()
        if rows.device.type == "cpu" or self.dtype == torch.float32:
            logits: Tensor = self.linear(rows)
            return logits
        # A GPU multiplies operands of two bytes and sums in float32. With rows in float32 it would
        # convert the whole head in every pass, and what rounding the rows takes from the logits is
        # far below what the layers before took.
        return self.linear.wide(rows.to(self.dtype))
