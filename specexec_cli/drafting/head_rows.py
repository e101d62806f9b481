"""The rows of a trained head: each joins a token to the hidden row of the token before it.

Of committed tokens the hidden rows are the target's, of draft nodes the head's own. So an accepted
node's row is run again, with the target's hidden row, before the next tree. A text's first token
has no hidden row before it, so it has no row, and a slot is one less than its token's.

A head that attends to its target's keys and values has rows of the present tree alone, and one that
drafts a block in a pass has rows of committed tokens alone. Several MTP layers: mtp_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from specexec_cli.drafting.draft_rows import DraftRows
from specexec_cli.drafting.protocols import Committed
from specexec_cli.drafting.search import ROOT, Frontier, Ints
from specexec_cli.models.kv_cache import HiddenRows
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.pass_context import CHUNK_ROWS
from specexec_cli.models.pass_rows import PassRows, embeddable
from specexec_cli.models.streamed import StreamedModel

if TYPE_CHECKING:
    from torch import Tensor


class HeadRows(DraftRows):
    """Runs nodes through a trained head and keeps their rows.

    Args:
        model: the head, as a model.
        target: its target, whose state keeps hidden rows. Its `commit` must be called before this
            one's.
        slots: cache rows that memory is planned for.
    """

    without_row = 1
    moves_window = False

    def __init__(self, model: StreamedModel, target: Committed, slots: int = 0) -> None:
        super().__init__(model, None, slots)
        self._target = target

    def begin(self, context: Sequence[int], wanted: int = 1) -> int:
        """See DraftRows. Without the target's hidden rows, as before a prompt, nothing is drafted:
        they come with its next pass."""
        longest = super().begin(context, wanted)
        has_rows = len(self._target.tokens) >= len(context) - 1 >= 1
        return longest if has_rows else 0

    def readable(self, context: Sequence[int]) -> Sequence[int]:
        """See DraftRows: those that the target has read, whose hidden rows are there."""
        return context[: len(self._target.tokens) + 1]

    def rows_of(self, frontier: Frontier) -> tuple[PassRows, ModelState, Sequence[int]]:
        """See DraftRows."""
        rows, state, wanted = super().rows_of(frontier)
        if frontier.ids[0] == ROOT:
            kept = kept_rows(self.read_state)
            hidden = self.model.of_target(kept, self.filled, len(self.context) - self.without_row)
        else:
            hidden = self.before_nodes(frontier, rows.parents)
        return replace(rows, hidden_rows=hidden), state, wanted

    @property
    def read_state(self) -> ModelState:
        """The state with the rows that committed tokens are joined to."""
        return self._target.state

    def before_nodes(self, frontier: Frontier, parents: Ints) -> Tensor:
        """The rows that draft nodes are joined to, (nodes, hidden).

        Args:
            parents: (nodes,) the slots of their parents.
        """
        return kept_rows(self.state).at(parents)

    def commit(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Drops the tree's rows."""
        self.drop_tree()
        self.state.crop(self.filled)


class LentRows(HeadRows):
    """Runs nodes through a trained head that attends to its target's keys and values.

    No row stays from tree to tree, and none attends to another: every node is at the position of
    the last committed token, and knows of its ancestors by the row that its parent made.
    """

    def __init__(self, model: StreamedModel, target: Committed, slots: int = 0) -> None:
        self._lent = dict[str, Any]()  # the target's keys and values, by kind
        super().__init__(model, target, slots)
        model.keep_read_layers_in_one_piece(target.state)

    def drop_tree(self) -> None:
        """See DraftRows. The target's keys are let go too, whose buffers grow from pass to pass."""
        super().drop_tree()
        self._lent.clear()  # the model keeps its last pass's rows, and in them this mapping

    def readable(self, context: Sequence[int]) -> Sequence[int]:
        """See DraftRows: none, as no row of a committed token is kept."""
        return ()

    def _crop_to_common_prefix(self) -> None:
        """Drops the rows of the tree before."""
        self.state.crop(0)

    def ran(self, frontier: Frontier) -> None:
        """Does nothing: no row of a committed token is kept."""

    def rows_of(self, frontier: Frontier) -> tuple[PassRows, ModelState, Sequence[int]]:
        """See DraftRows."""
        last = len(self.context) - 1
        if frontier.ids[0] == ROOT:
            self._lent = dict(self.model.keys_of_target(self._target.state, last))
            tokens, parents = [self.context[last]], np.array([-1])
            hidden = self.model.of_target(kept_rows(self._target.state), last - 1, last)
        else:
            tokens = list(self._tree_rows(frontier).tokens)
            parents = 1 + np.array(self.slots_of(frontier.parents))  # behind the root's row
            hidden = kept_rows(self.state).at(parents)
        rows = PassRows(
            tokens=embeddable(tokens, self.model.vocab_size),
            positions=[last] * len(tokens),
            prefix_len=last,
            pending=0,
            tree_mask=np.zeros((len(tokens), 0), dtype=bool),
            tree_positions=np.zeros(0, dtype=np.int64),
            parents=parents,
            hidden_rows=hidden,
            others_keys=self._lent,
        )
        return rows, self.state, range(len(tokens))


class BlockRows(HeadRows):
    """Runs a block through a trained head that drafts one in a pass, once for each tree.

    A committed token's row is made of the target's row of that token. What a block predicts of a
    place holds for every node there, whatever its ancestors: so a tree takes one pass.
    """

    without_row = 0

    def __init__(self, model: StreamedModel, target: Committed, slots: int = 0) -> None:
        assert model.block is not None, "it drafts blocks"
        self._block = model.block
        self._made: Tensor | None = None  # (rows - 1, vocab) logits of the places behind the root
        super().__init__(model, target, slots)

    def drop_tree(self) -> None:
        """See DraftRows."""
        super().drop_tree()
        self._made = None

    def begin(self, context: Sequence[int], wanted: int = 1) -> int:
        """See DraftRows."""
        return min(super().begin(context, wanted), self._block.rows - 1)

    def needs_pass(self, frontier: Frontier) -> bool:
        """See DraftRows."""
        return bool(frontier.ids[0] == ROOT)

    def rows_of(self, frontier: Frontier) -> tuple[PassRows, ModelState, Sequence[int]]:
        """See DraftRows: committed tokens that the cache lacks, and a block behind them."""
        assert frontier.ids[0] == ROOT, "no other needs a pass"
        first, last, count = self.filled, len(self.context) - 1, self._block.rows
        if last - first + count > CHUNK_ROWS:  # rows of a block see each other within a chunk alone
            self.model.forward(self._committed(first, last), self.state, ())
            first = last
        before = self._committed(first, last)
        hidden = before.hidden_rows
        assert hidden is not None, "they are made of them"
        rows_beside = hidden.new_zeros(len(hidden) + count, hidden.shape[1])
        rows_beside[: len(hidden)] = hidden
        block = embeddable([self.context[last]], self.model.vocab_size)
        block += [self._block.mask_token] * (count - 1)
        places = np.arange(last, last + count)
        sees = np.ones((count, count), dtype=bool)
        rows = replace(
            before,
            tokens=[*before.tokens, *block],
            positions=[*before.positions, *places.tolist()],
            tree_mask=np.tril(sees) if self._block.causal else sees,
            tree_positions=places,
            parents=np.arange(first - 1, last + count - 1),
            hidden_rows=rows_beside,
        )
        return rows, self.state, range(last - first + 1, last - first + count)

    def _committed(self, first: int, last: int) -> PassRows:
        """The rows of committed tokens first..last."""
        tokens = embeddable(self.context[first:last], self.model.vocab_size)
        hidden = self.model.of_target(kept_rows(self._target.state), first, last)
        return replace(PassRows.chain(tokens, first), hidden_rows=hidden)

    def logits_of(self, frontier: Frontier, made: Tensor | None) -> Tensor:
        """See DraftRows."""
        if made is not None:
            self._made = made
        assert self._made is not None, "the root's pass has been"
        # of several texts some may have longer paths than this one's block
        return self._made[np.minimum(frontier.depths, len(self._made) - 1)]

    def ran(self, frontier: Frontier) -> None:
        """See DraftRows; the block's rows are dropped."""
        if frontier.ids[0] != ROOT:
            self._tree_rows(frontier)
            return
        self.tokens = list(self.context[:-1])
        self.state.crop(self.filled)


def kept_rows(state: ModelState) -> HiddenRows:
    """The hidden rows that a model keeps beside what its layers keep."""
    found = state.layers[-1]
    assert isinstance(found, HiddenRows), "the model keeps them"
    return found
