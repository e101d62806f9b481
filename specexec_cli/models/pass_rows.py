"""The rows of one forward pass: their tokens, rotary positions and attention masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunks:
    """A span by which rows attend only within their own chunk of `size` positions (Llama 4)."""

    size: int


# How far back a layer's rows attend, if not to all rows: a sliding window of this many positions,
# or chunks.
Span = int | Chunks

# Keys and values that another model keeps, (1, heads, slots, head_dim) each, by the kind of layer.
OthersKeys = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRows:
    """Rows in slot order: `pending` committed tokens, then nodes of a draft tree.

    After the pass the cache holds `prefix_len` slots, the pending rows, and `tree_mask.shape[1]`
    tree slots, the last len(tokens) - pending of them written by this pass (a drafter adds its
    tree in several passes). Every row attends to the whole prefix; pending rows attend causally;
    a node attends to all pending rows and to the tree slots that `tree_mask` marks. Recurrent
    layers use `parents` instead: a row's state follows from the state after its parent's row.
    """

    tokens: Sequence[int]  # (rows,)
    positions: Sequence[int]  # (rows,) rotary indices
    prefix_len: int
    pending: int
    tree_mask: NDArray[np.bool_]  # (rows - pending, tree slots), True = attend
    tree_positions: NDArray[np.int64]  # (tree slots,)
    parents: NDArray[np.int64]  # (rows,) the slot of each row's parent, -1 for none
    # (rows, hidden) what a model reads beside each token, if it is a trained head
    hidden_rows: Tensor | None = None
    # What the rows of a model without keys of its own attend to: `prefix_len` slots.
    others_keys: OthersKeys | None = None

    @classmethod
    def chain(cls, tokens: Sequence[int], prefix_len: int) -> PassRows:
        """Rows of committed tokens only, each of which attends to all rows before it."""
        return cls(
            tokens=tokens,
            positions=range(prefix_len, prefix_len + len(tokens)),
            prefix_len=prefix_len,
            pending=len(tokens),
            tree_mask=np.zeros((0, 0), dtype=bool),
            tree_positions=np.zeros(0, dtype=np.int64),
            parents=np.arange(prefix_len - 1, prefix_len - 1 + len(tokens)),
        )

    def part(self, start: int, stop: int) -> PassRows:
        """Rows start..stop as those of a pass behind the others: pending ones, or with them the
        tree."""
        if (start, stop) == (0, len(self.tokens)):
            return self
        if stop <= self.pending:
            return PassRows.chain(self.tokens[start:stop], self.prefix_len + start)
        return replace(
            self,
            tokens=self.tokens[start:],
            positions=self.positions[start:],
            prefix_len=self.prefix_len + start,
            pending=self.pending - start,
            parents=self.parents[start:],
        )

    def first_seen(self, start: int, stop: int, span: Span) -> NDArray[np.int64]:
        """The first position that each of rows start..stop attends to, (stop - start,)."""
        rows_at = np.asarray(self.positions[start:stop])
        if isinstance(span, Chunks):
            return rows_at // span.size * span.size
        return np.maximum(rows_at - span + 1, 0)

    def mask(self, start: int, stop: int, span: Span | None) -> Tensor:
        """The attention mask of rows start..stop over all slots up to and including their own.

        Args:
            span: how far back the layer's rows attend; with a sliding window, only to positions
                above their own minus `span`. None is full attention.
        Returns:
            (1, 1, stop - start, slots) bool, True = attend.
        """
        nodes_to_come = len(self.tokens) - max(stop, self.pending)
        tree_slots_after = max(0, self.tree_mask.shape[1] - nodes_to_come)
        slots = self.prefix_len + min(stop, self.pending) + tree_slots_after
        mask = torch.zeros(stop - start, slots, dtype=torch.bool)
        tree_start = self.prefix_len + self.pending
        causal_rows = max(0, min(stop, self.pending) - start)
        if causal_rows:
            columns = torch.arange(slots)
            rows = torch.arange(start, start + causal_rows) + self.prefix_len
            mask[:causal_rows] = columns <= rows[:, None]
        if stop > self.pending:
            first = max(start, self.pending)
            mask[first - start :, :tree_start] = True
            nodes = slice(first - self.pending, stop - self.pending)
            visible = self.tree_mask[nodes, : slots - tree_start]
            mask[first - start :, tree_start:] = torch.from_numpy(visible)
        if span is not None:
            seen_at = np.concatenate([np.arange(tree_start), self.tree_positions])[:slots]
            visible_at = seen_at >= self.first_seen(start, stop, span)[:, None]
            mask &= torch.from_numpy(visible_at)
        return mask[None, None]


def embeddable(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The tokens, with id 0 in place of ids that a model with `vocab_size` embeddings lacks.

    The target may pad its vocabulary beyond the draft model's, so a committed token can have an id
    without an embedding in the draft model. Drafts after such a token may be worse; the target
    itself is given the true token.
    """
    return [token if token < vocab_size else 0 for token in tokens]
