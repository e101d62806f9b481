"""From draft logits to the scores by which the tree is searched.

The target's token at position i is argmax(target_logits / T + noise(seed, i)): a deterministic
function once the seed is known, and the drafter knows the seed. So a node's children are ranked not
by how probable the draft finds them but by how likely each is to win under the very noise that the
target will use:

    scores = log_softmax((log_softmax(draft_logits / T) + noise(seed, i)) / c)

With a perfect draft and c -> 0 this is the target's own choice; c absorbs the disagreement between
the two models. It is calibrated online: every position that the target settles shows which child
was the right one, and c is the value under which those children were most probable. With greedy
decoding there is no noise and c is a temperature of the draft's own distribution.

What is committed is drawn by the target alone (verify/accept.py), and the noise is independent of
the target's logits. The tree, however it was ranked, only decides how many draws one pass settles;
so the output distribution is untouched. Coupling draft and target by shared Gumbel noise is
drafter-invariant speculative decoding: Daliri, Musco, Suresh, arXiv:2408.07978, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specexec_kernels import dispatch
from torch import Tensor

from specexec_cli.config import DraftScoring
from specexec_cli.sampling import Sampler, gumbel_noise

# Candidates for c, a factor of about 1.25 apart.
_SHARPNESS = torch.tensor([0.26, 0.33, 0.41, 0.51, 0.64, 0.8, 1.0, 1.25, 1.56, 1.95, 2.44, 3.05])
_DECAY = 0.99  # the last hundred positions decide
_PRIOR_POSITIONS = 10.0  # how many positions the starting value is worth


class DraftScorer:
    """Scores draft logits for one set of sampling settings, and learns how far to trust them."""

    def __init__(self, sampler: Sampler, scoring: DraftScoring) -> None:
        self._sampler = sampler
        self._noisy = scoring == "noise" and sampler.config.temperature > 0.0
        # Losses of the candidates in nats; the prior is a parabola around the starting value.
        start = 1.25 if self._noisy else 1.0
        self._losses = _PRIOR_POSITIONS * 0.5 * (_SHARPNESS / start).log().square()

    def learn_from(self, earlier: DraftScorer) -> None:
        """Starts from what another generation taught, where both know of noise or neither does."""
        if earlier._noisy == self._noisy:
            self._losses = earlier._losses

    @property
    def sharpness(self) -> float:
        """The current c."""
        return float(_SHARPNESS[self._losses.argmin()])

    def utilities(self, logits: Tensor, positions: Sequence[int], context: Sequence[int]) -> Tensor:
        """What the target is expected to maximise: filtered log-probabilities plus its noise.

        Args:
            logits: (rows, vocab) the draft's.
            positions: (rows,) absolute position of the token that each row predicts.
            context: committed tokens, for the repetition penalty.
        Returns:
            (rows, vocab) float32.
        """
        utilities = self._sampler.filtered(logits, context).log_softmax(-1)
        if self._noisy:
            seed, vocab_size = self._sampler.config.seed, logits.shape[-1]
            noise = {p: gumbel_noise(seed, p, vocab_size) for p in set(positions)}
            utilities += torch.stack([noise[p] for p in positions]).to(utilities.device)
        return utilities

    def best(self, utilities: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The tokens most likely to be the target's.

        Args:
            utilities: (rows, vocab).
        Returns:
            Their log-probabilities (rows, width), falling, and the tokens (rows, width); fewer
            columns where the vocabulary is smaller.
        """
        count = min(width, utilities.shape[-1])
        return dispatch.log_softmax_topk(utilities / self.sharpness, count)

    def observe(self, utilities: Tensor, token: int) -> None:
        """Learns from a settled position: `token` was the target's.

        Args:
            utilities: (vocab,) what `utilities` gave for this position.
        """
        if not torch.isfinite(utilities[token]):
            return  # the draft's filter excluded it: no c could have found it
        candidates = _SHARPNESS.to(utilities.device)
        losses = (utilities / candidates[:, None]).logsumexp(-1) - utilities[token] / candidates
        self._losses = _DECAY * self._losses + losses.cpu()
