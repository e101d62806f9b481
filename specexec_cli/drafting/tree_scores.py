"""Scores the children of a tree's nodes, and learns from the target's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specexec_cli.config import TreeConfig
from specexec_cli.drafting.calibration import Calibration, Reliability
from specexec_cli.drafting.draft_rows import DraftRows
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.scoring import DraftScorer, signals
from specexec_cli.drafting.search import ROOT, Floats, Frontier, Ints
from specexec_cli.sampling import Sampler


class TreeScores:
    """Scores for one generation: how likely each child is to be the target's own token.

    Args:
        rows: the tree's rows, where each node's utilities are stored.
        sampler: the target's sampler.
        tree: the tree's settings.
        learned: what all generations so far taught about the pair; it goes on learning.
    """

    def __init__(
        self, rows: DraftRows, sampler: Sampler, tree: TreeConfig, learned: Learned
    ) -> None:
        self._rows = rows
        kind = DraftScorer.kind(sampler, tree.scoring)
        self.scorer = DraftScorer(sampler, tree.scoring, tree.calibrated, learned.trust(kind))
        self.calibration.reliability = Reliability()
        learned.keep(kind, self.scorer.trust)

    @property
    def calibration(self) -> Calibration:
        """The calibration that corrects the scores of this generation's trees."""
        return self.scorer.trust.calibration

    def children(self, frontier: Frontier, logits: Tensor, width: int) -> tuple[Floats, Ints]:
        """The children of nodes, the best first, as search.Expand says.

        Args:
            frontier: the nodes.
            logits: (nodes, vocab) the draft model's, cut to the target's vocabulary.
            width: most children of a node.
        """
        rows = self._rows
        positions = (len(rows.context) + frontier.depths).tolist()
        slots = rows.slots_of(frontier.ids)
        paths = [rows.tree.path(slot) for slot in slots] if self.scorer.constrained else None
        utilities = self.scorer.utilities(logits, positions, rows.context, paths)
        rows.tree.utilities.update(zip(slots, utilities, strict=True))
        return self.scorer.best(utilities, width, frontier.depths + 1)

    def signals(self, ids: Ints) -> Floats:
        """The signals of expanded nodes; see policies.Signals."""
        slots = self._rows.slots_of(ids)
        return signals(torch.stack([self._rows.tree.utilities[slot] for slot in slots]))

    def learn(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learns from the tokens that the target settled.

        Args:
            path: slots of the first of them, as far as they were expanded.
            tokens: the tokens.
        """
        utilities = self._rows.tree.utilities
        self.scorer.observe(
            [
                (utilities[slot], depth, token)
                for depth, (slot, token) in enumerate(zip([ROOT, *path], tokens, strict=False), 1)
                if slot in utilities and token < utilities[slot].shape[-1]
            ]
        )


MakeScores = Callable[[DraftRows, Sampler, TreeConfig, Learned], TreeScores]
