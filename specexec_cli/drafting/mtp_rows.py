"""The rows of several MTP layers, each of which was trained to predict one more token ahead.

The children of a node at depth d are predicted by layer d + 1, and where that is more layers than
there are by the last one. Layer k joins a token to a row of k tokens before: the one that layer
k - 1 made of the token before or, where layers are not chained, the target's. So a node has a row
in the layer that drafts from it and in those behind, and each layer has rows of all committed
tokens but the first k. Where a row of draft tokens would have to be the target's, it is the one
that the children of its token were predicted from; of chained layers so is the last one's own.

Source: see offload/mtp.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specexec_cli.drafting.draft_rows import DraftRows
from specexec_cli.drafting.head_rows import BlockRows, HeadRows, LentRows, kept_rows
from specexec_cli.drafting.protocols import Committed
from specexec_cli.drafting.search import ROOT, Frontier, Ints
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.streamed import StreamedModel


class MtpRows(HeadRows):
    """Runs nodes through the MTP layers that they need, and keeps the rows of each.

    Args:
        model: the first layer, which has the others as `later`.
    Attributes:
        made: by node, the row that its children are predicted from, (hidden,).
        parents: by node, its parent.
    """

    made: dict[int, Tensor]
    parents: dict[int, int]

    def __init__(self, model: StreamedModel, target: Committed, slots: int = 0) -> None:
        self._layers: list[HeadRows] = [self]
        super().__init__(model, target, slots)
        for layer in model.later:
            self._layers.append(_LaterRows(layer, target, slots, self, self._layers[-1]))

    def drop_tree(self) -> None:
        """See DraftRows."""
        super().drop_tree()
        self.made, self.parents = {}, {}
        for layer in self._layers[1:]:
            layer.drop_tree()

    def begin(self, context: Sequence[int], wanted: int = 1) -> int:
        """See DraftRows. Nothing is drafted before every layer has a row of a committed token."""
        found = [super().begin(context, wanted)]
        found += [each.begin(context, wanted) for each in self._layers[1:]]
        return min(found) if len(context) > len(self._layers) else 0

    def needs_pass(self, frontier: Frontier) -> bool:
        """See DraftRows; said of the first layer."""
        return bool(frontier.ids[0] == ROOT)

    def logits_of(self, frontier: Frontier, made: Tensor | None) -> Tensor:
        """See DraftRows. Runs the layers behind the first."""
        if made is not None:
            last = len(self.context) - self.without_row
            self.made[ROOT] = kept_rows(self.state).between(last - 1, last)[0]
            self._run_later(frontier)
            return made
        self.parents.update(zip(frontier.ids.tolist(), frontier.parents.tolist(), strict=True))
        found = dict[int, Tensor]()  # by place in the frontier
        # the layer that each node drafts with
        drafting = np.minimum(frontier.depths + 1, len(self._layers))
        for number, layer in enumerate(self._layers[1:], 2):
            there = drafting <= number
            if not there.any():
                continue
            part = frontier.part(there)
            rows, state, _ = layer.rows_of(part)
            wanted = np.flatnonzero(drafting[there] == number)
            logits = layer.model.forward(rows, state, wanted.tolist())
            own = kept_rows(state).at(state.length - len(part.ids) + wanted)
            self.made.update(zip(part.ids[wanted].tolist(), own, strict=True))
            places = np.flatnonzero(drafting == number).tolist()
            found.update(zip(places, logits, strict=True))
        return torch.stack([found[place] for place in range(len(found))])

    def _run_later(self, root: Frontier) -> None:
        """Runs the root's rows through the layers behind the first."""
        for layer in self._layers[1:]:
            rows, state, _ = layer.rows_of(root)
            layer.model.forward(rows, state, ())
            layer.ran(root)

    def fed(self) -> None:
        """See DraftRows. Runs the layers behind the first."""
        self._run_later(Frontier.root())
        super().fed()

    def ran(self, frontier: Frontier) -> None:
        """See DraftRows."""
        if frontier.ids[0] == ROOT:
            super().ran(frontier)
        else:
            self._tree_rows(frontier)

    def commit(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """See HeadRows."""
        super().commit(path, tokens)
        for layer in self._layers[1:]:
            layer.commit(path, tokens)

    def crop(self, length: int) -> None:
        """See DraftRows."""
        super().crop(length)
        for layer in self._layers[1:]:
            layer.crop(length)

    def copy(self, other: DraftRows, length: int) -> None:
        """See DraftRows."""
        assert isinstance(other, MtpRows), "both texts are drafted by the same layers"
        super().copy(other, length)
        for own, theirs in zip(self._layers[1:], other._layers[1:], strict=True):
            own.copy(theirs, length)


class _LaterRows(HeadRows):
    """The rows of an MTP layer behind the first.

    Args:
        model, target, slots: see HeadRows.
        first: the first layer's.
        before: those of the layer before.
    """

    def __init__(
        self, model: StreamedModel, target: Committed, slots: int, first: MtpRows, before: HeadRows
    ) -> None:
        super().__init__(model, target, slots)
        assert model.skeleton.head is not None, "it is a trained head"
        self.without_row = before.without_row + 1
        self._first, self._before = first, before
        self._chained = model.skeleton.head.chained

    @property
    def read_state(self) -> ModelState:
        """See HeadRows."""
        return self._before.state if self._chained else self._target.state

    def before_nodes(self, frontier: Frontier, parents: Ints) -> Tensor:
        """See HeadRows."""
        number, found = self.without_row, []
        for node, depth in zip(frontier.ids.tolist(), frontier.depths.tolist(), strict=True):
            above = self._first.parents[node]
            if depth >= number:  # it is the last layer
                for _ in range(0 if self._chained else number - 1):
                    above = self._first.parents[above]
                found.append(self._first.made[above])
            elif self._chained:
                slot = self._before.filled + self._before.slots_of(np.array([above]))[0]
                found.append(kept_rows(self._before.state).between(slot, slot + 1)[0])
            else:
                slot = len(self.context) - 1 + depth - number
                found.append(kept_rows(self._target.state).between(slot, slot + 1)[0])
        return torch.stack(found)


def head_rows(model: StreamedModel, target: Committed, slots: int = 0) -> HeadRows:
    """The rows of a trained head of any kind; see HeadRows for the arguments."""
    if model.block is not None:
        return BlockRows(model, target, slots)
    if model.later:
        return MtpRows(model, target, slots)
    return (LentRows if model.others_layers else HeadRows)(model, target, slots)
