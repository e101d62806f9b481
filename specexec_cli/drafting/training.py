"""Trains the classifier of the policy disco, and says what it is worth beside fixed lengths.

All of it happens on texts that the target has written: the draft model reads along (teacher
forcing), and a drafted token is accepted if it is the text's own. As long as a draft is accepted
its prefix is the text's, so what a chain of any length would have met from any position on is
known exactly, and a policy's latency is counted, not sampled (Mamou et al., arXiv:2405.04304,
appendix D).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specexec_cli.drafting.classifier import FEATURES, Classifier
from specexec_cli.drafting.search import Floats, Ints

LONGEST = 32  # drafts that are looked at
_LENGTHS = (2, 4, 8, 16, LONGEST)  # of which one is the classifier's maximum
_THRESHOLDS = np.arange(0.02, 1.0, 0.02)
_HIDDEN = 64
STEPS = 600  # of Adam, over all examples at once

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Text:
    """A text of the target as the draft model saw it, one entry per token."""

    signals: Floats  # (n, 11) see scoring.signals
    accepted: Bools  # (n,) the draft model's first choice was the token


@dataclass(frozen=True, slots=True)
class Costs:
    """What the two models take on this machine, in seconds."""

    target_s: float  # a target pass
    draft_s: float  # a draft step


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Policies on the same texts. Seconds are per token; F1 is of 'the next token is accepted'."""

    plain_s: float  # without drafting
    static_length: int
    static_s: float
    disco_s: float
    oracle_s: float
    static_f1: float
    disco_f1: float


def examples(texts: Sequence[Text]) -> tuple[Floats, Floats]:
    """What a chain from any position on would have been asked: features (n, FEATURES), labels (n,).

    It ends with the first token that is not accepted; nothing behind it is ever drafted again.
    """
    features, labels = [], []
    for text in texts:
        runs = _runs(text)
        for depth in range(1, LONGEST + 1):
            starts = np.flatnonzero(runs[: len(runs) - depth + 1] >= depth - 1)
            at = starts + depth - 1
            features.append(_with_depth(text.signals[at], depth))
            labels.append(text.accepted[at].astype(np.float64))
    return np.concatenate(features), np.concatenate(labels)


def train(
    features: Floats, labels: Floats, progress: Callable[[], None] = lambda: None
) -> dict[str, Floats]:
    """The classifier's tensors; the same for the same examples.

    The loss is the cross-entropy plus the total variation distance between the predicted and the
    observed distribution, |p - y| for two outcomes.
    """
    mean, deviation = features.mean(axis=0), features.std(axis=0)
    scale = 1.0 / np.maximum(deviation, 1e-6)
    generator = torch.Generator().manual_seed(0)
    hidden, out = nn.Linear(FEATURES, _HIDDEN), nn.Linear(_HIDDEN, 1)
    for layer in (hidden, out):
        bound = layer.in_features**-0.5
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
    net = nn.Sequential(hidden, nn.ReLU(), out)
    inputs = torch.from_numpy((features - mean) * scale).float()
    truth = torch.from_numpy(labels).float()
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(STEPS):
        logits = net(inputs)[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, truth)
        loss = loss + (logits.sigmoid() - truth).abs().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        progress()
    tensors = {"hidden.weight": hidden.weight, "hidden.bias": hidden.bias,
               "out.weight": out.weight, "out.bias": out.bias}  # fmt: skip
    found = {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}
    return {"norm.mean": mean, "norm.scale": scale, **found}


def tune(tensors: dict[str, Floats], texts: Sequence[Text], costs: Costs) -> Classifier:
    """The threshold and maximum with the least latency on these texts."""
    any_one = Classifier(tensors, 0.0, LONGEST)
    chances = [_chances(any_one, text) for text in texts]
    best = (np.inf, 0.0, 1)
    for threshold in _THRESHOLDS.tolist():
        for longest in _LENGTHS:
            lengths = [_lengths(chance, threshold, longest) for chance in chances]
            best = min(best, (latency(texts, lengths, costs), threshold, longest))
    return Classifier(tensors, best[1], best[2])


def best_static(texts: Sequence[Text], costs: Costs) -> int:
    """The fixed length with the least latency on these texts."""
    return min(range(1, LONGEST + 1), key=lambda n: latency(texts, _static(texts, n), costs))


def evaluate(
    classifier: Classifier, static_length: int, texts: Sequence[Text], costs: Costs
) -> Evaluation:
    """The classifier beside a fixed length, no drafting, and the oracle.

    Args:
        static_length: the best one of other texts, as the classifier's threshold is.
    """
    chances = [_chances(classifier, text) for text in texts]
    lengths = [_lengths(c, classifier.threshold, classifier.max_length) for c in chances]
    # the oracle, too, drafts the wrong token before it sees that it is wrong
    oracle = [np.minimum(_runs(text) + 1, LONGEST) for text in texts]
    features, labels = examples(texts)
    positions = features[:, -1]
    goes_on = classifier.probabilities(features) >= classifier.threshold
    return Evaluation(
        plain_s=costs.target_s,
        static_length=static_length,
        static_s=latency(texts, _static(texts, static_length), costs),
        disco_s=latency(texts, lengths, costs),
        oracle_s=latency(texts, oracle, costs),
        static_f1=f1(positions <= static_length, labels > 0.5),
        disco_f1=f1(goes_on & (positions <= classifier.max_length), labels > 0.5),
    )


def latency(texts: Sequence[Text], lengths: Sequence[Ints], costs: Costs) -> float:
    """Seconds per token of decoding the texts with chains.

    Args:
        lengths: per text (n,), tokens drafted if an iteration begins at a position.
    """
    passes = steps = tokens = 0
    for text, wanted in zip(texts, lengths, strict=True):
        runs, at = _runs(text), 0
        while at < len(runs):
            # the last token of a text is never drafted: the pass gives it for free
            drafted = min(int(wanted[at]), len(runs) - at - 1)
            passes, steps = passes + 1, steps + drafted
            at += min(drafted, int(runs[at])) + 1
        tokens += len(runs)
    return (passes * costs.target_s + steps * costs.draft_s) / tokens


def f1(predicted: Bools, true: Bools) -> float:
    """The F1 score of the positive class; 0 where nothing is found."""
    hits = float((predicted & true).sum())
    return 2.0 * hits / max(float(predicted.sum() + true.sum()), 1.0)


def _runs(text: Text) -> Ints:
    """(n,) how many tokens from each position on would be accepted in a row."""
    runs = np.zeros(len(text.accepted) + 1, dtype=np.int64)
    for at in range(len(text.accepted) - 1, -1, -1):
        runs[at] = runs[at + 1] + 1 if text.accepted[at] else 0
    return runs[:-1]


def _static(texts: Sequence[Text], length: int) -> list[Ints]:
    return [np.full(len(text.accepted), length, dtype=np.int64) for text in texts]


def _with_depth(signals: Floats, depth: int) -> Floats:
    return np.column_stack([signals, np.full(len(signals), float(depth))])


def _chances(classifier: Classifier, text: Text) -> Floats:
    """(n, LONGEST) of the token drafted at depth j of an iteration that begins at a position;
    0 behind the text."""
    count = len(text.accepted)
    found = np.zeros((count, LONGEST))
    for depth in range(1, min(LONGEST, count) + 1):
        features = _with_depth(text.signals[depth - 1 :], depth)
        found[: count - depth + 1, depth - 1] = classifier.probabilities(features)
    return found


def _lengths(chances: Floats, threshold: float, longest: int) -> Ints:
    """(n,) tokens drafted from each position on: to the first doubtful one, that one included."""
    doubtful = chances[:, :longest] < threshold
    doubtful[:, -1] = True
    return np.asarray(doubtful.argmax(axis=1) + 1, dtype=np.int64)
