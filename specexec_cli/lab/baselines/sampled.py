"""Drafters that draw the children of nodes from the draft model's distribution.

Children are drawn without replacement, and the distribution is kept for rejection sampling. A chain
draws as the target does, with its temperature and filters, so with greedy decoding its tokens are
the most probable ones. SpecInfer draws from the plain softmax at every temperature, as in the code
that SpecExec was compared with (specdec/spec_SI.py of yandex-research/specexec). With greedy
decoding the usual acceptance walk applies, whatever was drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.drafting.draft_rows import DraftRows
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.scoring import signals
from specexec_cli.drafting.search import ROOT, Floats, Frontier, Ints
from specexec_cli.drafting.tree_scores import TreeScores
from specexec_cli.lab.baselines.rejection import Draws, rejection_walk
from specexec_cli.sampling import Sampler, uniforms
from specexec_cli.transfers import downloaded
from specexec_cli.verify.accept import Accepted, accept
from specexec_cli.verify.rejection import DRAFT_STREAM, draw


class SampledChildren:
    """Draws the children of nodes, and verifies trees of them. Knows no model.

    Args:
        sampler: the target's sampler.
        plain: whether children are drawn from the draft model's softmax, without the sampler's
            temperature and filters.
    """

    def __init__(self, sampler: Sampler, *, plain: bool = False) -> None:
        self._sampler, self._plain = sampler, plain
        # by the id of an expanded node, the distribution of its children, (vocab,) float32
        self._log_probs: dict[int, Tensor] = {}

    def reset(self) -> None:
        """Forgets the last tree."""
        self._log_probs.clear()

    def children(
        self, frontier: Frontier, logits: Tensor, context: Sequence[int], width: int
    ) -> tuple[Floats, Ints]:
        """Draws up to `width` children of each node; see search.Expand.

        Args:
            frontier: n nodes.
            logits: (n, vocab) the draft model's, after each node.
            context: committed tokens.
            width: most children of a node.
        """
        kept = logits.float() if self._plain else self._sampler.filtered(logits, context)
        log_probs = kept.log_softmax(-1)
        self._log_probs.update(zip(frontier.ids.tolist(), log_probs, strict=True))
        width = min(width, log_probs.shape[-1])
        if self._sampler.config.temperature == 0.0 and not self._plain:
            best = np.split(downloaded(log_probs.topk(width, dim=-1)), 2, axis=1)
            return best[0], best[1].astype(np.int64)
        found = downloaded([log_probs, log_probs.exp()])
        tokens = np.zeros((len(log_probs), width), dtype=np.int64)
        scores = np.full((len(log_probs), width), -np.inf)
        for row, (depth, each) in enumerate(zip(frontier.depths.tolist(), found, strict=True)):
            own, probs = np.split(each, 2)
            drawn = self._drawn(probs, len(context) + depth, width)
            tokens[row, : len(drawn)] = drawn
            scores[row, : len(drawn)] = own[drawn]
        return scores, tokens

    def signals(self, ids: Ints) -> Floats:
        """The signals (policies.Signals) of expanded nodes, from the distributions drawn from."""
        return signals(torch.stack([self._log_probs[node] for node in ids.tolist()]))

    def _drawn(self, left: Floats, position: int, width: int) -> list[int]:
        """Draws at most `width` different tokens of probability above 0.

        Args:
            left: (vocab,) the probabilities, which become 0 as their tokens are drawn.
        """
        numbers = uniforms(self._sampler.config.seed, position, DRAFT_STREAM, width)
        drawn: list[int] = []
        for uniform in numbers.tolist():
            if not left.any():
                break
            drawn.append(draw(left, uniform))
            left[drawn[-1]] = 0.0
        return drawn

    def walk(
        self,
        tree: DraftTree,
        logits: Tensor,
        sampler: Sampler,
        context: Sequence[int],
        limit: int,
        eos_ids: Collection[int],
    ) -> Accepted:
        """Verifies the last tree by rejection sampling; replaces verify.accept.accept()."""
        if sampler.config.temperature == 0.0:
            return accept(tree, logits, sampler, context, limit, eos_ids)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents.tolist()):  # nodes are in the order drawn
            children.setdefault(parent, []).append(node)
        draws = {node: Draws(tuple(c), self._log_probs[node].exp()) for node, c in children.items()}
        return rejection_walk(tree, draws, logits, sampler, context, limit, eos_ids)


class SampledScores(TreeScores):
    """Scores that draw a node's children; a child's score is its draft log-probability.

    Args:
        rows, sampler, tree, learned: see TreeScores.
        plain: see SampledChildren.
    """

    def __init__(
        self,
        rows: DraftRows,
        sampler: Sampler,
        tree: TreeConfig,
        learned: Learned,
        *,
        plain: bool = False,
    ) -> None:
        super().__init__(rows, sampler, tree, learned)
        self.sampled = SampledChildren(sampler, plain=plain)

    def children(self, frontier: Frontier, logits: Tensor, width: int) -> tuple[Floats, Ints]:
        """See TreeScores. The first frontier of a tree is its root, which begins a new record."""
        if frontier.ids[0] == ROOT:
            self.sampled.reset()
        with torch.no_grad():
            return self.sampled.children(frontier, logits, self._rows.context, width)

    def signals(self, ids: Ints) -> Floats:
        """The signals of expanded nodes; see policies.Signals."""
        return self.sampled.signals(ids)


class SampledDrafter(ModelDrafter):
    """A ModelDrafter with SampledScores, which verifies by rejection sampling."""

    scores: SampledScores

    def walk(
        self,
        tree: DraftTree,
        logits: Tensor,
        sampler: Sampler,
        context: Sequence[int],
        limit: int,
        eos_ids: Collection[int],
    ) -> Accepted:
        """Verifies the last tree by rejection sampling; see SampledChildren.walk."""
        return self.scores.sampled.walk(tree, logits, sampler, context, limit, eos_ids)
