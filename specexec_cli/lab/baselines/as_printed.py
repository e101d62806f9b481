"""The scores of SpecExec's paper: nodes are ranked by the draft model's probabilities alone.

Equations 2 to 5 of appendix A, arXiv:2406.02532, use neither the temperature of the target's
sampling nor its noise, and nothing is learned from what was accepted. The authors' code
(get_next_beams in specdec/specexec.py of yandex-research/specexec) also multiplies by 0.95 per
token and takes at most 16 children per node; the paper mentions neither, and neither is done here.
"""

from __future__ import annotations

import numpy as np
from specexec_kernels import dispatch
from torch import Tensor

from specexec_cli.drafting.search import Floats, Frontier, Ints
from specexec_cli.drafting.tree_scores import TreeScores


class PrintedScores(TreeScores):
    """The draft model's own log-probabilities."""

    def children(self, frontier: Frontier, logits: Tensor, width: int) -> tuple[Floats, Ints]:
        """See TreeScores. Stores no utilities, so that there is nothing to learn from."""
        count = min(width, logits.shape[-1])
        log_probs, tokens = dispatch.log_softmax_topk(logits.float(), count)
        # where the draft model's logits are not numbers, nothing is proposed
        known = log_probs.double().nan_to_num(nan=-np.inf, neginf=-np.inf)
        return known.cpu().numpy(), tokens.cpu().numpy()
