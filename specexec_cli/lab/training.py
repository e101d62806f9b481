"""Trains the classifier of the policy disco, and compares it with fixed lengths.

Both use texts that the target has written. The draft model reads along (teacher forcing), and a
drafted token is accepted if it is the text's own. As long as drafts are accepted, the draft model's
prefix is the text's. So the result of a chain of any length from any position is known exactly, and
a policy's latency is counted, not sampled (Mamou et al., arXiv:2405.04304, appendix D.1). When an
iteration ends with its first wrong token, the next one begins after that token, so an oracle's
iterations meet every token of a text once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specexec_cli.drafting.classifier import FEATURES, Classifier
from specexec_cli.drafting.search import Floats, Ints

LONGEST = 32  # longest chains that are considered
_LENGTHS = (2, 4, 8, 16, LONGEST)  # possible maxima for the classifier's chains
_THRESHOLDS = np.arange(0.02, 1.0, 0.02)
_HIDDEN = 64
STEPS = 600  # training steps of Adam, each over all examples

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Text:
    """The draft model's predictions along a text of the target, one entry per token."""

    signals: Floats  # (n, 11) see scoring.signals
    accepted: Bools  # (n,) the draft model's first choice was the token
    # (n,) 1 - TV(draft, target), where TV is the total variation distance of the two distributions
    # over the vocabulary
    conformity: Floats


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds that the two models take on this machine."""

    target_s: float  # seconds of a target pass
    draft_s: float  # seconds of a draft step


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of several policies on the same texts. Seconds are per token.

    F1 scores the prediction 'the next token is accepted', once for each token, as an oracle's
    iterations meet it.
    """

    plain_s: float  # without drafting
    static_lengths: tuple[int, ...]  # of each trial
    static_s: float
    static_5_s: float  # with always five draft tokens, the paper's other static length
    heuristic_s: float  # with transformers' schedule, the paper's dynHeur
    disco_s: float
    oracle_s: float
    static_f1: float
    disco_f1: float
    always_f1: float  # F1 of predicting acceptance for every token
    oracle_length: float  # mean accepted tokens in an oracle's iteration (table 2)
    oracle_deviation: float
    # for each policy (plain, heuristic, static, disco, oracle) seconds and tokens of each text
    by_text: Mapping[str, Sequence[tuple[float, float]]]
    # of each text, for accepted and for rejected tokens: the sum of the classifier's probabilities
    # that they are accepted, and their number
    expected: tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]]

    @property
    def gain(self) -> float:
        """The latency saved, as a share of the latency with the static length (table 5)."""
        return 1.0 - self.disco_s / self.static_s


@dataclass(frozen=True, slots=True)
class Trial:
    """What was learned from some texts, and other texts to test it on."""

    classifier: Classifier
    static_length: int  # the best one on the texts on which the threshold was chosen
    texts: Sequence[Text]


Labels = Literal["conformity", "accepted"]  # what a classifier is trained on; see Text

_Item = TypeVar("_Item")


def split(items: Sequence[_Item], seed: int) -> tuple[list[_Item], list[_Item], list[_Item]]:
    """Random parts for training, validation and tests: three fifths, one fifth and one fifth.

    There must be at least five items.
    Source: "randomly selected samples" (appendix B; table 3 has 500, 80 and 80).
    """
    order = random.Random(seed).sample(range(len(items)), len(items))
    fifth = len(items) // 5
    chosen = [items[at] for at in order]
    return chosen[2 * fifth :], chosen[:fifth], chosen[fifth : 2 * fifth]


def folds(items: Sequence[_Item], seed: int) -> list[tuple[list[_Item], list[_Item], list[_Item]]]:
    """Five divisions into parts for training, validation and tests, which test each item once.

    There must be at least five items.
    """
    order = random.Random(seed).sample(range(len(items)), len(items))
    fifths = [[items[at] for at in order[start::5]] for start in range(5)]
    turned = [fifths[start:] + fifths[:start] for start in range(5)]
    return [([*one, *two, *three], validation, test)
            for test, validation, one, two, three in turned]  # fmt: skip


def examples(texts: Sequence[Text], labels: Labels = "conformity") -> tuple[Floats, Floats]:
    """The classifier's training examples: features (n, FEATURES), and labels (n,).

    One example per token of a text: the draft model reads the text and drafts one token at each
    position, and a token is labelled accepted or rejected (appendix D.1). The loss of section 4
    names the total variation distance, so that the conformity is the label by default.
    """
    return (
        np.concatenate([_features(text) for text in texts]),
        np.concatenate([getattr(text, labels).astype(np.float64) for text in texts]),
    )


def train(
    features: Floats, labels: Floats, progress: Callable[[], None] = lambda: None
) -> dict[str, Floats]:
    """Trains the classifier; returns its tensors, which are the same for the same examples.

    It predicts "the conformity between" the two models "by employing cross-entropy loss with" the
    total variation distance (section 4). We take this as the cross-entropy between the classifier's
    probability C and the conformity 1 - TV (the probability that rejection sampling accepts a
    token): -(1 - TV) log C - TV log(1 - C).
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
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        progress()
    tensors = {"hidden.weight": hidden.weight, "hidden.bias": hidden.bias,
               "out.weight": out.weight, "out.bias": out.bias}  # fmt: skip
    found = {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}
    return {"norm.mean": mean, "norm.scale": scale, **found}


def tune(tensors: dict[str, Floats], texts: Sequence[Text], costs: Costs) -> Classifier:
    """The classifier with the threshold and maximum that have the least latency on these texts."""
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
    """Compares the classifier with a fixed length, no drafting, and the oracle.

    Args:
        static_length: the best length on other texts, on which the threshold was chosen too.
    """
    return evaluate_trials([Trial(classifier, static_length, texts)], costs)


def evaluate_trials(trials: Sequence[Trial], costs: Costs) -> Evaluation:
    """Compares what several trials learned on the texts of each, taken together."""
    texts = [text for trial in trials for text in trial.texts]
    tested = [(trial, text) for trial in trials for text in trial.texts]
    chances = [_chances(trial.classifier, text) for trial, text in tested]
    by_text = _by_policy(tested, chances, costs)
    iterations = np.concatenate([oracle_lengths(text) for text in texts])
    accepted = np.concatenate([text.accepted for text in texts])
    depths = np.concatenate([_oracle_depths(text) for text in texts])
    goes_on = np.concatenate([
        (chance >= trial.classifier.threshold)
        & (_oracle_depths(text) <= trial.classifier.max_length)
        for (trial, text), chance in zip(tested, chances, strict=True)
    ])  # fmt: skip
    static = np.concatenate([np.full(len(text.accepted), trial.static_length)
                             for trial, text in tested])  # fmt: skip
    marks = [text.accepted for text in texts]
    return Evaluation(
        plain_s=costs.target_s,
        static_lengths=tuple(trial.static_length for trial in trials),
        static_s=_per_token(by_text["static"]),
        static_5_s=latency(texts, _static(texts, 5), costs),
        heuristic_s=_per_token(by_text["heuristic"]),
        disco_s=_per_token(by_text["disco"]),
        oracle_s=_per_token(by_text["oracle"]),
        static_f1=f1(depths <= static, accepted),
        disco_f1=f1(goes_on, accepted),
        always_f1=f1(np.ones(len(accepted), dtype=bool), accepted),
        oracle_length=float(iterations.mean()),
        oracle_deviation=float(iterations.std()),
        by_text=by_text,
        expected=(_expected(chances, marks), _expected(chances, [~mark for mark in marks])),
    )


def _by_policy(
    tested: Sequence[tuple[Trial, Text]], chances: Sequence[Floats], costs: Costs
) -> dict[str, list[tuple[float, float]]]:
    """Seconds and tokens of each text, by policy."""
    texts = [text for _, text in tested]
    lengths = {
        "plain": _static(texts, 0),
        "static": [np.full(len(text.accepted), trial.static_length) for trial, text in tested],
        "disco": [_lengths(chance, trial.classifier.threshold, trial.classifier.max_length)
                  for (trial, _), chance in zip(tested, chances, strict=True)],
        # The oracle drafts no wrong token: in figure 3 its 27 passes and 129 draft steps give one
        # token each, which add up to the text.
        "oracle": [_runs(text) for text in texts],
    }  # fmt: skip
    return {
        "heuristic": _heuristic(texts, costs),
        **{name: _drafted(texts, each, costs) for name, each in lengths.items()},
    }


def _expected(chances: Sequence[Floats], marks: Sequence[Bools]) -> list[tuple[float, float]]:
    """The sum of the probabilities of each text's marked tokens, and their number."""
    return [
        (float(chance[mark].sum()), float(mark.sum()))
        for chance, mark in zip(chances, marks, strict=True)
    ]


def latency(texts: Sequence[Text], lengths: Sequence[Ints], costs: Costs) -> float:
    """Seconds per token of decoding the texts with chains.

    Args:
        lengths: for each text (n,), the tokens to draft if an iteration begins at a position.
    """
    return _per_token(_drafted(texts, lengths, costs))


def heuristic_latency(texts: Sequence[Text], costs: Costs) -> float:
    """Seconds per token with chains of the dynamic heuristic's length (section 4, dynHeur SL).

    The length begins at five, grows by two after a chain that was accepted completely, shrinks by
    one otherwise, and is kept from text to text.
    Source: the schedule "heuristic" of transformers' GenerationConfig.
    """
    return _per_token(_heuristic(texts, costs))


def _per_token(by_text: Sequence[tuple[float, float]]) -> float:
    return sum(seconds for seconds, _ in by_text) / sum(tokens for _, tokens in by_text)


def _drafted(
    texts: Sequence[Text], lengths: Sequence[Ints], costs: Costs
) -> list[tuple[float, float]]:
    """Seconds and tokens of each text; see latency()."""
    return _counted(texts, lambda number, at: int(lengths[number][at]), costs)


def _heuristic(texts: Sequence[Text], costs: Costs) -> list[tuple[float, float]]:
    """Seconds and tokens of each text; see heuristic_latency()."""
    length = 5

    def told(whole: bool) -> None:
        nonlocal length
        length = length + 2 if whole else max(1, length - 1)

    return _counted(texts, lambda number, at: length, costs, told)


def _counted(
    texts: Sequence[Text],
    wanted: Callable[[int, int], int],
    costs: Costs,
    told: Callable[[bool], None] = lambda whole: None,
) -> list[tuple[float, float]]:
    """Seconds and tokens of each text, decoded with chains.

    Args:
        wanted: (number of the text, position) -> tokens to draft there.
        told: called after each iteration with whether all drafted tokens were accepted.
    """
    found = []
    for number, text in enumerate(texts):
        passes = steps = 0
        for drafted, right in iterations(text, partial(wanted, number)):
            passes, steps = passes + 1, steps + drafted
            if drafted:
                told(right == drafted)
        seconds = passes * costs.target_s + steps * costs.draft_s
        found.append((seconds, float(len(text.accepted))))
    return found


def iterations(text: Text, wanted: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Decodes a text with chains: yields drafted and accepted tokens of each iteration.

    Args:
        wanted: position -> tokens to draft there. Fewer are drafted near the end of the text: its
            last token is never drafted, because the pass gives it as bonus token.
    """
    runs, at = _runs(text), 0
    while at < len(runs):
        drafted = min(wanted(at), len(runs) - at - 1)
        right = min(drafted, int(runs[at]))
        yield drafted, right
        at += right + 1


def f1(predicted: Bools, true: Bools) -> float:
    """The F1 score of the positive class; 0 without a true positive."""
    hits = float((predicted & true).sum())
    return 2.0 * hits / max(float(predicted.sum() + true.sum()), 1.0)


def _runs(text: Text) -> Ints:
    """(n,) number of tokens, from each position on, that would be accepted in a row."""
    runs = np.zeros(len(text.accepted) + 1, dtype=np.int64)
    for at in range(len(text.accepted) - 1, -1, -1):
        runs[at] = runs[at + 1] + 1 if text.accepted[at] else 0
    return runs[:-1]


def _static(texts: Sequence[Text], length: int) -> list[Ints]:
    return [np.full(len(text.accepted), length, dtype=np.int64) for text in texts]


def oracle_lengths(text: Text) -> Ints:
    """(iterations,) accepted tokens of each iteration of an oracle (section 3, table 2, figure 5).

    Each iteration goes on to the first wrong token, which the target's own token replaces.
    """
    depths = _oracle_depths(text)
    ends = np.flatnonzero(~text.accepted)
    found = depths[ends] - 1
    if len(text.accepted) and text.accepted[-1]:  # the last iteration has no wrong token
        found = np.append(found, depths[-1])
    return np.asarray(found, dtype=np.int64)


def by_normalized_index(lengths: Sequence[Ints], width: float) -> tuple[list[float], list[float]]:
    """Mean oracle lengths over the normalized index of the iteration (appendix A, figures 4, 6).

    In a text with n iterations, iteration i (from 0) has the index i / (n - 1); a single iteration
    has index 0.

    Args:
        lengths: the oracle_lengths of each text.
        width: width of a bucket of indices.
    Returns:
        the beginning of each bucket that has lengths, and the mean of its lengths.
    """
    buckets: dict[int, list[int]] = {}
    for found in lengths:
        last = max(len(found) - 1, 1)
        for i, length in enumerate(found.tolist()):
            # index 1 belongs to the last bucket; the small number is against rounding errors
            bucket = min(int(i / last / width + 1e-9), round(1.0 / width) - 1)
            buckets.setdefault(bucket, []).append(length)
    ordered = sorted(buckets.items())
    return [at * width for at, _ in ordered], [sum(one) / len(one) for _, one in ordered]


def _oracle_depths(text: Text) -> Ints:
    """(n,) each token's place in its oracle iteration, from 1."""
    depths = np.zeros(len(text.accepted), dtype=np.int64)
    for at in range(len(depths)):
        depths[at] = depths[at - 1] + 1 if at and text.accepted[at - 1] else 1
    return depths


def _features(text: Text) -> Floats:
    """(n, FEATURES): the signals, and the token's position in the generation, from 1."""
    return np.column_stack([text.signals, np.arange(1.0, len(text.accepted) + 1)])


def _chances(classifier: Classifier, text: Text) -> Floats:
    """(n,) the classifier's probability that each token is accepted."""
    return classifier.probabilities(_features(text))


def _lengths(chances: Floats, threshold: float, longest: int) -> Ints:
    """(n,) tokens drafted from each position on, up to and including the first doubtful one."""
    lengths = np.zeros(len(chances), dtype=np.int64)
    to_doubt = 0  # tokens from here up to and including the next doubtful one
    for at in range(len(chances) - 1, -1, -1):
        to_doubt = 1 if chances[at] < threshold else to_doubt + 1
        lengths[at] = min(to_doubt, longest)
    return lengths
