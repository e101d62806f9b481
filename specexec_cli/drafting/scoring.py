"""Turns draft logits into the scores by which the tree is searched.

The target's token at position i is argmax(target_logits / T + noise(seed, i)), a deterministic
function of the seed, which the drafter knows. So a node's children are ranked not by their draft
probability, but by how likely each is to win under the noise that the target will use:

    scores = log_softmax((log_softmax(draft_logits / T) + noise(seed, i)) / c)

With a perfect draft model and c -> 0 this is the target's own choice; c accounts for the
disagreement between the two models. It is fitted while decoding: every position that the target
settles shows which child was right, and c is the value under which those children were most
probable. With greedy decoding there is no noise, and c is a temperature of the draft's
distribution. calibration.py corrects what c leaves wrong.

Sampling with top-p, top-k or min-p excludes improbable tokens. The target excludes them by its own
probabilities, which the draft model only estimates. So a token that the draft's probabilities would
exclude stays in the ranking, lowered by a penalty, which is fitted together with c. A weak draft
model excludes a third of the target's tokens and comes to a penalty near 0; a copy of the target
excludes some 2 % of them and comes to several nats.

The target alone draws what is committed (verify/accept.py), and the noise is independent of its
logits. The ranking only decides how many draws one pass settles, so it does not change the
distribution of the text.

Source: coupling draft and target by shared Gumbel noise is drafter-invariant speculative decoding:
Daliri, Musco, Suresh, arXiv:2408.07978, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from specexec_kernels import dispatch
from torch import Tensor

from specexec_cli.config import DraftScoring
from specexec_cli.drafting.calibration import CHILDREN, Calibration
from specexec_cli.drafting.search import Floats, Ints
from specexec_cli.kept import numbers
from specexec_cli.sampling import Sampler, noise_on
from specexec_cli.transfers import downloaded, sent

# The candidates for c, each about 1.25 times the one before.
_SHARPNESS = torch.tensor([0.26, 0.33, 0.41, 0.51, 0.64, 0.8, 1.0, 1.25, 1.56, 1.95, 2.44, 3.05])
_ONE = _SHARPNESS.tolist().index(1.0)
# The candidates for the penalty, nats: tokens that the draft's probabilities exclude are lowered by
# it before the division by c.
_PENALTIES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FIRST_PENALTY = 2.0
# Excluded tokens are stored this many nats lower, so that one tensor holds the utilities and which
# tokens are excluded. float32 still has steps of 0.0001 there.
_APART = 1024.0
_DECAY = 0.99  # decay of the losses per position: about the last hundred count
_PRIOR_POSITIONS = 10.0  # the starting value counts as this many positions
_HIGHEST_LOSS = 1e6  # bound of the losses, nats; a file with larger numbers is damaged
# Where the second and later parts of DraftScorer._evidence begin.
_EVIDENCE = np.cumsum([1, len(_SHARPNESS), len(_SHARPNESS)])


TOP = 10  # number of probabilities among the signals


def signals(utilities: Tensor) -> Floats:
    """Signals of how sure the draft model is: its highest probabilities, and its entropy.

    Args:
        utilities: (rows, vocab) from DraftScorer.utilities.
    Returns:
        (rows, 11): the ten highest probabilities, falling, 0 where the vocabulary is smaller; then
        the entropy in nats.
    """
    log_probs = utilities.log_softmax(-1)
    chances = log_probs.exp()
    best = chances.topk(min(TOP, utilities.shape[-1]), dim=-1).values
    # a token that was filtered out has probability 0 and must add 0, not NaN
    entropy = -(chances * log_probs.clamp(min=-1e4)).sum(-1, keepdim=True)
    missing = torch.zeros(len(utilities), TOP - best.shape[1], device=utilities.device)
    return downloaded([best, missing, entropy])


class Trust:
    """How far the draft model's scores can be trusted: c, the penalty of excluded tokens, and the
    calibration after both.

    Args:
        start: the value of c to begin with.
    """

    def __init__(self, start: float) -> None:
        # (sharpness, penalty): the losses of each pair of candidates, nats. At first they are
        # parabolas around the starting values.
        sharpness = _PRIOR_POSITIONS * 0.5 * (_SHARPNESS / start).log().square()
        penalty = 0.5 * (_PENALTIES - _FIRST_PENALTY).square()
        self.losses = sharpness[:, None] + penalty
        self.calibration = Calibration()

    @property
    def sharpness(self) -> float:
        """The c that would have ranked the target's recent tokens best."""
        return float(_SHARPNESS[self.fitted[0]])

    @property
    def penalty(self) -> float:
        """The penalty, nats, that goes with this c."""
        return float(_PENALTIES[self.fitted[1]])

    @property
    def fitted(self) -> tuple[int, int]:
        """The indices of the sharpness and the penalty with the least loss together."""
        return divmod(int(self.losses.argmin()), len(_PENALTIES))

    def state(self) -> dict[str, Any]:
        """What was learned, for JSON."""
        return {"losses": self.losses.tolist(), "calibration": self.calibration.state()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Trust:
        """The trust that `state` described.

        Raises:
            ValueError, KeyError, TypeError: this is no valid state.
        """
        found = cls(1.0)
        losses = numbers(state["losses"], found.losses.shape, 0.0, _HIGHEST_LOSS)
        found.losses = torch.from_numpy(losses).float()
        found.calibration = Calibration.restored(state["calibration"])
        return found


class DraftScorer:
    """Scores draft logits for one set of sampling settings.

    Args:
        sampler: the target's sampler.
        scoring: whether the target's noise is used.
        calibrated: whether the calibration corrects the scores; it learns in any case.
        trust: learned from earlier generations of the same kind; it goes on learning.
    """

    def __init__(
        self,
        sampler: Sampler,
        scoring: DraftScoring,
        calibrated: bool = True,
        trust: Trust | None = None,
    ) -> None:
        self._sampler = sampler
        self._noisy = scoring == "noise" and sampler.config.temperature > 0.0
        self._calibrated = calibrated
        self.trust = trust or Trust(1.25 if self._noisy else 1.0)
        self._candidates = _SHARPNESS  # on the device of the last utilities

    @staticmethod
    def kind(sampler: Sampler, scoring: DraftScoring) -> str:
        """The kind of scores, 'greedy', 'noise' or 'probs'. Each kind is wrong in its own way, and
        has a trust of its own."""
        return "greedy" if sampler.config.temperature == 0.0 else scoring

    @property
    def sharpness(self) -> float:
        """The c that scores are computed with."""
        return self.trust.sharpness

    @property
    def constrained(self) -> bool:
        """Whether `utilities` needs each row's path, for a grammar."""
        return self._sampler.constraint is not None

    def utilities(
        self,
        logits: Tensor,
        positions: Sequence[int],
        context: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """What the target is expected to maximise: log-probabilities plus its noise.

        Tokens that top-p, top-k or min-p exclude by the draft's probabilities are 1024 nats lower.

        Args:
            logits: (rows, vocab) the draft model's.
            positions: (rows,) absolute position of the token that each row predicts.
            context: committed tokens, for the repetition penalty.
            paths: (rows,) the tokens from the root to each row's node; needed if `constrained`.
        Returns:
            (rows, vocab) float32.
        """
        tempered = self._sampler.tempered(logits, context, paths)
        utilities = tempered.log_softmax(-1)
        if self._sampler.truncates:
            # no token that is kept may be as low as those that are excluded
            utilities.masked_fill_(utilities < -_APART / 4, -torch.inf)
            utilities -= _APART * self._sampler.truncated(tempered).isneginf()
        if self._noisy:
            seed, vocab_size = self._sampler.config.seed, logits.shape[-1]
            device = utilities.device
            noise = {p: noise_on(device, seed, p, vocab_size) for p in set(positions)}
            utilities += torch.stack([noise[p] for p in positions])
        return utilities

    def best(self, utilities: Tensor, width: int, depths: Ints) -> tuple[Floats, Ints]:
        """The tokens most likely to be the target's.

        Args:
            utilities: (rows, vocab).
            width: most tokens per row.
            depths: (rows,) depth in the tree of the tokens, from 1.
        Returns:
            (rows, width) log-probabilities that a token is the target's, falling, and the tokens
            (rows, width); fewer columns where the vocabulary is smaller.
        """
        count = min(max(width, CHILDREN), utilities.shape[-1])
        found = dispatch.log_softmax_topk(self._penalised(utilities) / self.sharpness, count)
        log_probs, tokens = np.split(downloaded(found), 2, axis=1)
        log_probs = _known(log_probs)
        if self._calibrated:
            log_probs = self.trust.calibration.calibrated(log_probs, depths)
        return log_probs[:, :width], tokens[:, :width].astype(np.int64)

    def observe(self, settled: Sequence[tuple[Tensor, int, int]]) -> None:
        """Learns from positions that the target settled.

        Args:
            settled: for each position, in the text's order, the result of `utilities` for it,
                (vocab,); the position's depth in the tree, from 1; and the target's token.
        """
        if not settled:
            return
        numbers = [self._evidence(utilities, token) for utilities, _, token in settled]
        _, searched = self.trust.fitted
        for found, (_, depth, token) in zip(
            downloaded([torch.stack(numbers)]), settled, strict=True
        ):
            self._learn(found, depth, token, searched)

    def _evidence(self, utilities: Tensor, token: int) -> Tensor:
        """What a settled position teaches, whatever c is by then; stays on the device.

        Returns:
            float64: the utility of the target's token; for the tokens that are kept and, raised by
            _APART, for those that are excluded, the logarithm of the sum of exponentials of their
            utilities divided by each candidate for c; the log-probabilities of the best children
            under c = 1 and the present penalty, falling; and these children's tokens.
        """
        if self._candidates.device != utilities.device:
            self._candidates = sent(_SHARPNESS, utilities.device)
        groups = [utilities, torch.full_like(utilities[:1], -torch.inf)]
        if self._sampler.truncates:
            excluded = utilities < -_APART / 2
            groups = [utilities.masked_fill(excluded, -torch.inf),
                      (utilities + _APART).masked_fill(~excluded, -torch.inf)]  # fmt: skip
        totals = [(group / self._candidates[:, None]).logsumexp(-1) for group in groups]
        best = dispatch.log_softmax_topk(
            self._penalised(utilities[None]), min(CHILDREN, len(utilities))
        )
        parts = [utilities[token][None], *totals, best[0][0], best[1][0]]
        return torch.cat([part.double() for part in parts])

    def _penalised(self, utilities: Tensor) -> Tensor:
        """`utilities` with the excluded tokens lowered by the penalty in place of _APART."""
        if not self._sampler.truncates:
            return utilities
        raised = utilities + (_APART - self.trust.penalty)
        return torch.where(utilities < -_APART / 2, raised, utilities)

    def _learn(self, evidence: Floats, depth: int, token: int, searched: int) -> None:
        """Learns from one position.

        Args:
            evidence: what `_evidence` made of it.
            searched: index of the penalty at that time.
        """
        own, kept, excluded, rest = np.split(evidence, _EVIDENCE)
        log_probs, tokens = np.split(rest, 2)
        sharpness, penalties = _SHARPNESS.numpy()[:, None], _PENALTIES.numpy()
        with np.errstate(invalid="ignore"):  # a draft model's logits may be no numbers
            totals = np.logaddexp(kept[:, None], excluded[:, None] - penalties / sharpness)
        now, _ = self.trust.fitted
        utilities = log_probs + totals[_ONE, searched]
        accepted = np.flatnonzero(tokens == token)
        self.trust.calibration.observe(
            _known(utilities / float(_SHARPNESS[now]) - totals[now, searched]),
            depth,
            int(accepted[0]) if len(accepted) else None,
            self._calibrated,
        )
        if not np.isfinite(own[0]):
            return  # a grammar excluded the token, so no c could have ranked it
        if self._sampler.truncates and own[0] < -_APART / 2:
            own = own + _APART - penalties
        losses = torch.from_numpy(totals - own / sharpness).float().clamp(min=0.0)
        self.trust.losses = _DECAY * self.trust.losses + losses


def _known(log_probs: Floats) -> Floats:
    """-inf where a draft model's logits were not numbers: it proposes nothing."""
    return np.nan_to_num(log_probs, nan=-np.inf, neginf=-np.inf)
