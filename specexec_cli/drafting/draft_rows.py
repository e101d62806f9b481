"""The draft model's cache of one text: the rows of committed tokens and of the present tree.

Where the draft model is the target's own copy, the rows and states of committed tokens are the
target's.
Where a text is longer than the draft model's window, the draft model sees the text's end alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specexec_cli.core import common_prefix
from specexec_cli.drafting.protocols import Committed
from specexec_cli.drafting.search import ROOT, Frontier, Ints
from specexec_cli.drafting.tree_rows import TreeRows
from specexec_cli.models.graphs import StepRunner
from specexec_cli.models.kv_cache import SlotCache
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.pass_rows import PassRows, embeddable
from specexec_cli.models.shared_cache import sharing
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.planning.memory import OWN_PROMPT_ROWS


class DraftRows:
    """Runs nodes through the draft model and keeps their rows.

    Between trees the cache holds the rows of committed tokens. While a tree grows, the row of each
    expanded node is appended, in the order of expansion.

    Args:
        model: the draft model.
        shared: the target, if the draft model is a copy that goes on from the target's state. The
            target's `commit` must be called before this one's.
        slots: cache rows that memory is planned for; 0 lets the cache grow freely.
        window: most tokens that the draft model is to see; by default as many as it can.
    Attributes:
        without_row: how many of a text's first tokens have no row.
        window: most tokens of a text and of a path behind it that have rows.
        tokens: the committed tokens with rows in the cache, behind those without.
        cuts: how often committed rows were dropped, counted before they are.
        context: every committed token; the last is the tree's root.
        tree: the rows of expanded nodes, after those of `tokens`.
    """

    without_row = 0
    moves_window = True  # whether the window follows a longer text
    tree: TreeRows

    def __init__(
        self,
        model: StreamedModel,
        shared: Committed | None = None,
        slots: int = 0,
        window: int | None = None,
    ) -> None:
        self.model = model
        self.window = min(model.context_length, window or model.context_length)
        self.tokens: list[int] = []
        self.cuts = 0
        self.context: Sequence[int] = ()
        self._shared = shared
        self.state: ModelState = model.new_state()
        if shared is not None:
            self.state = sharing(self.state, shared.state)
        self.steps: StepRunner | None = None
        captured = model.device.type == "cuda" and model.capturable
        if captured and shared is not None:
            assert isinstance(shared.state, SlotCache), "a model that can be captured attends"
            shared.state.let_steps_read()
        self.state.planned_slots = slots + 1  # captured steps need one slot for padding
        if captured:
            assert isinstance(self.state, SlotCache), "a model that can be captured attends"
            self.steps = StepRunner(model, self.state, capture=True)
        self.drop_tree()

    @property
    def filled(self) -> int:
        """Rows of committed tokens in the cache."""
        return max(0, len(self.tokens) - self.without_row)

    def drop_tree(self) -> None:
        """Forgets the present tree; the next tree's rows overwrite its rows."""
        self.tree = TreeRows()
        self._slots = {ROOT: ROOT}  # by node id of the search, the node's slot in `tree`

    def begin(self, context: Sequence[int], wanted: int = 1) -> int:
        """Prepares the tree after `context`.

        Args:
            wanted: the longest path that is of use, tokens. Where the window has no room for it, it
                moves on.
        Returns:
            the longest path that the draft model can find; below 1 it cannot draft.
        """
        self.drop_tree()
        self.context = context
        self._crop_to_common_prefix()
        if self._shared is not None and len(context) - len(self.tokens) > OWN_PROMPT_ROWS:
            return 0  # the rows of a long prompt are left to the target's next pass, to share
        if self.moves_window and self._shared is None:
            self._move_window(wanted)
        return self.window - len(context) + self.without_row  # negative beyond the window

    def run(self, frontier: Frontier) -> Tensor:
        """Runs a frontier and appends its rows; the logits after each node, (nodes, vocab)."""
        if not self.needs_pass(frontier):
            return self.logits_of(frontier, None)
        rows, state, logit_rows = self.rows_of(frontier)
        if self.steps is not None:
            return self.steps.forward(rows, logit_rows)
        return self.logits_of(frontier, self.model.forward(rows, state, logit_rows))

    def needs_pass(self, frontier: Frontier) -> bool:
        """Whether what follows a frontier is known by a pass of the draft model alone."""
        return True

    def logits_of(self, frontier: Frontier, made: Tensor | None) -> Tensor:
        """The logits after each node of a frontier, (nodes, vocab).

        Args:
            made: what the frontier's pass gave; None if it needs none.
        """
        assert made is not None, "every frontier has a pass"
        return made

    def rows_of(self, frontier: Frontier) -> tuple[PassRows, ModelState, Sequence[int]]:
        """The arguments of the draft model for a frontier: rows, cache, and the rows to predict
        from. The root's rows are all committed tokens that the cache lacks."""
        if frontier.ids[0] != ROOT:
            rows = self._tree_rows(frontier)
            return rows, self.state, range(len(rows.tokens))
        pending = list(self.context[self.filled + self.without_row :])
        rows = PassRows.chain(embeddable(pending, self.model.vocab_size), self.filled)
        return rows, self.state, range(len(pending) - 1, len(pending))

    def _tree_rows(self, frontier: Frontier) -> PassRows:
        """The frontier as rows after those already expanded; gives each node its slot."""
        old = len(self.tree)
        positions = len(self.context) - self.without_row - 1 + frontier.depths
        parents = self.slots_of(frontier.parents)
        mask = self.tree.add(parents, frontier.tokens.tolist(), positions)
        self._slots.update({node: old + row for row, node in enumerate(frontier.ids.tolist())})
        return PassRows(
            tokens=frontier.tokens.tolist(),
            positions=positions.tolist(),
            prefix_len=self.filled,
            pending=0,
            tree_mask=mask,
            tree_positions=self.tree.positions,
            parents=self.filled + np.array(parents),  # ROOT, -1, gives the last committed row
        )

    def ran(self, frontier: Frontier) -> None:
        """Notes that a frontier's rows have been run; after the root's, all of `context` is
        cached."""
        if frontier.ids[0] == ROOT:
            self.tokens = list(self.context)

    def readable(self, context: Sequence[int]) -> Sequence[int]:
        """The first tokens of a text with a prompt under way, behind which a root can be run."""
        return context

    def fed(self) -> None:
        """As `ran` of the root, for a text with a prompt under way: it gets no tree."""
        self.ran(Frontier.root())

    def slots_of(self, ids: Ints) -> list[int]:
        """The slots of expanded nodes; the root's is ROOT."""
        return [self._slots[node] for node in ids.tolist()]

    def commit(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Keeps the rows of a path from the root, and drops the other rows of the tree.

        Args:
            path: slots of the path; its tokens are the first of `tokens`.
            tokens: every token committed.
        """
        self.tree = TreeRows()  # first, so that no tree is kept if what follows is interrupted
        if self._shared is not None:
            self._share(self._shared)
            return
        prefix_len = self.filled
        self.state.commit(prefix_len, [prefix_len + slot for slot in path])
        self.tokens += tokens[: len(path)]

    def copy(self, other: DraftRows, length: int) -> None:
        """Replaces the cache by a copy of another text's first rows.

        Args:
            other: the rows of another text.
            length: committed tokens to copy, at most those in the other's cache.
        """
        self.forget()
        if rows := self.state.copy(other.state, max(0, length - other.without_row)):
            self.without_row = other.without_row
            self.tokens = other.tokens[: rows + self.without_row]

    def forget(self) -> None:
        """Empties the cache; captured steps stay."""
        self.drop_tree()
        self.crop(0)

    def crop(self, length: int) -> None:
        """Drops the rows of every committed token from `length` on, and perhaps some before."""
        if length < len(self.tokens):
            self.cuts += 1
        length = min(length, len(self.tokens))
        rows = self.state.crop(max(0, length - self.without_row))
        if not rows and self.moves_window:
            self.without_row = 0
        del self.tokens[min(length, rows + self.without_row) :]

    def keep_at(self, length: int) -> None:
        """See ModelState."""
        if length > len(self.tokens):
            self.state.keep_at(length - self.without_row)

    def _crop_to_common_prefix(self) -> None:
        """Drops the rows that do not belong to `context`, and the row of its last token, which must
        be run again to predict from it."""
        if self._shared is not None:
            self._share(self._shared)
            return
        if (left := self.state.length + self.without_row) < len(self.tokens):
            self.crop(left)  # its growth ran out of memory, and emptied it
        self.crop(common_prefix(self.tokens, self.context[:-1]))

    def _move_window(self, wanted: int) -> None:
        """Has the window end with `context`, where that has outgrown it or left it nearly empty.

        Half of it is filled then, so that it moves once in as many tokens, each of which is read
        twice at most. Positions are counted from its beginning.
        """
        seen, room = len(self.context) - self.without_row, min(wanted, self.window // 4)
        nearly_empty = self.without_row and seen < self.window // 4  # the text was cut back
        if seen + room > self.window or nearly_empty:
            self.crop(0)
            self.without_row = max(0, len(self.context) - self.window // 2)

    def _share(self, target: Committed) -> None:
        """Drops all own rows, and goes on from the target's state behind its committed tokens."""
        self.tokens = target.tokens[: self.state.copy(target.state, len(target.tokens))]
