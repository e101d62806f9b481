"""The rows of one text in the draft model's cache: committed tokens, and nodes of the present tree.

Where the draft model shares layers with the target, the rows of committed tokens are the target's.
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
from specexec_cli.models.shared_cache import SharedCache
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.planning.memory import OWN_PROMPT_ROWS


class DraftRows:
    """Runs nodes through the draft model and keeps their rows.

    Between trees the cache holds the committed tokens `tokens`. While a tree grows, the row of each
    expanded node joins them, in order of expansion.

    Args:
        shared: the target that the draft model is a copy of, whose cache rows it is to read; its
            `commit` is called before this one's.
        slots: cache rows that memory is planned for; unless told, the cache grows as it likes.
    """

    tree: TreeRows  # of expanded nodes, behind the committed ones

    def __init__(
        self, model: StreamedModel, shared: Committed | None = None, slots: int = 0
    ) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.context: Sequence[int] = ()  # every committed token, the last being the tree's root
        self._shared = shared
        self.state: ModelState = model.new_state() if shared is None else _sharing(shared)
        self.steps: StepRunner | None = None
        captured = model.device.type == "cuda" and model.capturable
        if captured and shared is not None:
            assert isinstance(shared.state, SlotCache), "a model that can be captured attends"
            shared.state.let_steps_read()
        self.state.planned_slots = slots + 1  # captured steps have one for padding
        if captured:
            assert isinstance(self.state, SlotCache), "a model that can be captured attends"
            self.steps = StepRunner(model, self.state, capture=True)
        self.drop_tree()

    def drop_tree(self) -> None:
        """Forgets the present tree; its rows go with the next tree."""
        self.tree = TreeRows()
        self._slots = {ROOT: ROOT}  # node id of the search -> slot in the tree

    def begin(self, context: Sequence[int]) -> int:
        """Makes ready for the tree behind `context`.

        Returns:
            the longest path that the draft model may find; none where it is below 1.
        """
        self.drop_tree()
        self.context = context
        self._crop_to_common_prefix()
        if self._shared is not None and len(context) - len(self.tokens) > OWN_PROMPT_ROWS:
            return 0  # a prompt would take rows that the target is about to have
        return self.model.context_length - len(context)  # negative beyond its window's end

    def run(self, frontier: Frontier) -> Tensor:
        """The logits behind the nodes of a frontier, (nodes, vocab), whose rows join the others."""
        rows, state, logit_rows = self.rows_of(frontier)
        if self.steps is not None:
            return self.steps.forward(rows, logit_rows)
        return self.model.forward(rows, state, logit_rows)

    def rows_of(self, frontier: Frontier) -> tuple[PassRows, ModelState, Sequence[int]]:
        """What the draft model is to be given: rows, their cache, and the rows of the frontier."""
        if frontier.ids[0] != ROOT:
            rows = self._tree_rows(frontier)
            return rows, self.state, range(len(rows.tokens))
        pending = list(self.context[len(self.tokens) :])
        rows = PassRows.chain(embeddable(pending, self.model.vocab_size), len(self.tokens))
        return rows, self.state, range(len(pending) - 1, len(pending))

    def _tree_rows(self, frontier: Frontier) -> PassRows:
        """The frontier as rows behind those already expanded; they join the slots."""
        old = len(self.tree)
        positions = len(self.context) - 1 + frontier.depths
        parents = self.slots_of(frontier.parents)
        mask = self.tree.add(parents, frontier.tokens.tolist(), positions)
        self._slots.update({node: old + row for row, node in enumerate(frontier.ids.tolist())})
        return PassRows(
            tokens=frontier.tokens.tolist(),
            positions=positions.tolist(),
            prefix_len=len(self.tokens),
            pending=0,
            tree_mask=mask,
            tree_positions=self.tree.positions,
            parents=len(self.tokens) + np.array(parents),  # ROOT is -1: the last committed row
        )

    def ran(self, frontier: Frontier) -> None:
        """Notes that the frontier's rows have been through the draft model."""
        if frontier.ids[0] == ROOT:
            self.tokens = list(self.context)

    def slots_of(self, ids: Ints) -> list[int]:
        """The slots of nodes that have been through the draft model, the root's being ROOT."""
        return [self._slots[node] for node in ids.tolist()]

    def commit(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Keeps the rows of a path from the root.

        Args:
            path: slots, of the first of the committed tokens.
            tokens: every token committed.
        """
        self.tree = TreeRows()  # until all is done: whatever comes in between, nothing is kept
        if self._shared is not None:
            self._share(self._shared.tokens)
            return
        prefix_len = len(self.tokens)
        self.state.commit(prefix_len, [prefix_len + slot for slot in path])
        self.tokens += tokens[: len(path)]

    def copy(self, other: DraftRows, length: int) -> None:
        """Takes the rows of the first `length` committed tokens of another text.

        Args:
            length: at most what the other has in its cache; this one is emptied first.
        """
        self.forget()
        self.tokens = other.tokens[: self.state.copy(other.state, length)]

    def forget(self) -> None:
        """Empties the cache; captured steps stay."""
        self.drop_tree()
        self.tokens.clear()
        self.state.crop(0)

    def _crop_to_common_prefix(self) -> None:
        """Forgets what the context does not begin with; its last token must be run again."""
        if self._shared is not None:
            self._share(self._shared.tokens)
            return
        del self.tokens[self.state.length :]  # growth that ran out of memory has emptied it
        common = common_prefix(self.tokens, self.context[:-1])
        del self.tokens[self.state.crop(common) :]

    def _share(self, tokens: Sequence[int]) -> None:
        """Reads the rows of these committed tokens from the target's cache; drops all its own."""
        assert isinstance(self.state, SharedCache)
        self.tokens = list(tokens)
        self.state.share(len(tokens))


def _sharing(shared: Committed) -> SharedCache:
    assert isinstance(shared.state, SlotCache), "plans share a state only where all attend"
    return SharedCache(shared.state)
