"""How the children of a tree's nodes are scored, and what is learned from the target's tokens."""

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
        rows: whose utilities are noted behind each node, and kept with its row.
        learned: about the pair, by all generations so far; it goes on learning.
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
        """What corrects the scores that this generation's trees are searched by."""
        return self.scorer.trust.calibration

    def children(self, frontier: Frontier, logits: Tensor, width: int) -> tuple[Floats, Ints]:
        """Each node's children, best first; see search.Expand.

        Args:
            logits: (nodes, vocab) the draft model's, of tokens that the target knows.
        """
        rows = self._rows
        positions = (len(rows.context) + frontier.depths).tolist()
        slots = rows.slots_of(frontier.ids)
        paths = [rows.tree.path(slot) for slot in slots] if self.scorer.constrained else None
        utilities = self.scorer.utilities(logits, positions, rows.context, paths)
        rows.tree.utilities.update(zip(slots, utilities, strict=True))
        return self.scorer.best(utilities, width, frontier.depths + 1)

    def signals(self, ids: Ints) -> Floats:
        """What policies read of expanded nodes; see policies.Signals."""
        slots = self._rows.slots_of(ids)
        return signals(torch.stack([self._rows.tree.utilities[slot] for slot in slots]))

    def learn(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learns from the tokens that the target settled.

        Args:
            path: slots of the first of them.
        """
        utilities = self._rows.tree.utilities
        for depth, (slot, token) in enumerate(zip([ROOT, *path], tokens, strict=False), 1):
            if slot in utilities and token < utilities[slot].shape[-1]:
                self.scorer.observe(utilities[slot], depth, token)


MakeScores = Callable[[DraftRows, Sampler, TreeConfig, Learned], TreeScores]
