"""The output head, with float32 results in every compute dtype.

Tokens are chosen by comparing logits. In bfloat16 two logits between 16 and 32 are equal or at
least 1/8 apart. On the demo pair the two best logits were exactly equal at one position in a
hundred: their places in the vocabulary decided, or how a pass with another number of rows rounded.
The logits of a few rows are small enough to keep the float32 sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.packed_linear import QuantizedLinear


class Head(nn.Module):
    """Takes the place of a model's output head, and computes only the rows that are wanted.

    Args:
        linear: the head's linear, from hidden size to vocabulary, with a weight of any dtype.
        dtype: the model's compute dtype.
        tokens: (outputs,) int64, the token that each output is the logit of; None where the outputs
            are the vocabulary.
        vocab: tokens of the vocabulary.
    """

    def __init__(
        self,
        linear: MixedLinear | QuantizedLinear,
        dtype: torch.dtype,
        tokens: Tensor | None = None,
        vocab: int = 0,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.dtype = dtype
        self._tokens, self._vocab = tokens, vocab
        self.rows: Tensor | None = None  # (wanted,) indices of rows in the pass; None: all rows
        self.keep: Callable[[Tensor], None] | None = None  # is given what the head reads, all rows

    @property
    def weight(self) -> Tensor:
        """Of the dtype that modelling code should hand rows over in, and empty."""
        return torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        """(1, rows, hidden) of any float dtype -> (1, wanted, vocab) float32.

        Tokens without an output have logits of minus infinity.
        """
        if self.keep is not None:
            self.keep(hidden)
        rows = hidden if self.rows is None else hidden[:, self.rows]
        logits = self._logits(rows.float())
        if self._tokens is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self._vocab), -torch.inf)
        whole[..., self._tokens] = logits
        return whole

    def _logits(self, rows: Tensor) -> Tensor:
        if rows.device.type == "cpu" or self.dtype == torch.float32:
            logits: Tensor = self.linear(rows)
            return logits
        # A GPU multiplies operands of two bytes and sums in float32. Rows in float32 would make it
        # convert the whole head in every pass. The error from rounding the rows is far below the
        # error of the layers before.
        return self.linear.wide(rows.to(self.dtype))
