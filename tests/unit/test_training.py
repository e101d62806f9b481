"""The classifier of --policy disco: trained on labels that are known, and the same each time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specexec_cli.drafting.classifier import Classifier
from specexec_cli.lab.bench.policy_labels import conformities
from specexec_cli.lab.training import (
    Costs,
    Text,
    best_static,
    by_normalized_index,
    evaluate,
    examples,
    f1,
    heuristic_latency,
    latency,
    oracle_lengths,
    split,
    train,
    tune,
)


def text(accepted: list[int], sure: list[float] | None = None) -> Text:
    signals = np.zeros((len(accepted), 11))
    signals[:, 0] = accepted if sure is None else sure
    return Text(signals, np.array(accepted, dtype=bool), np.array(accepted, dtype=float))


def bursts(seed: int, count: int = 120) -> Text:
    """Long right stretches and wrong ones; the first signal tells which is which, nearly."""
    rng = np.random.default_rng(seed)
    accepted = rng.random(count) < np.repeat(rng.choice([0.97, 0.3], size=count // 10), 10)
    sure = np.clip(accepted * 0.7 + rng.normal(0.15, 0.15, size=count), 0.0, 1.0)
    return text(accepted.astype(int).tolist(), sure.tolist())


def test_each_token_is_one_example_at_its_position_in_the_generation() -> None:
    """Appendix D.1: one draft token per position, counted from the beginning of the generation."""
    features, conformity = examples([text([1, 1, 0, 1]), text([0, 1])])
    assert features[:, -1].tolist() == [1, 2, 3, 4, 1, 2]
    assert conformity.tolist() == [1, 1, 0, 1, 0, 1]


def test_the_conformity_is_one_less_the_total_variation() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]]).log()
    draft = torch.tensor([[0.2, 0.8], [0.5, 0.5]]).log()
    # TV = (.3 + .5 + .2) / 2 = .5, and (.5 + .5 + 1) / 2 = 1
    assert conformities(target, draft).tolist() == pytest.approx([0.5, 0.0])


def test_the_loss_is_least_where_the_classifier_says_the_conformity() -> None:
    """Section 4: half of these tokens conform by 0.9, the others by 0.2."""
    conformity = np.tile([0.9, 0.2], 100)
    signals = np.zeros((200, 11))
    signals[:, 0] = np.tile([1.0, 0.0], 100)
    sample = Text(signals, conformity > 0.5, conformity)
    said = Classifier(train(*examples([sample])), 0.5, 8).probabilities(examples([sample])[0])
    assert said[0::2].mean() == pytest.approx(0.9, abs=0.03)
    assert said[1::2].mean() == pytest.approx(0.2, abs=0.03)


def test_oracle_lengths_by_hand() -> None:
    """A text of 7 + 1, 3 + 1 and 2 tokens has oracle lengths 7, 3 and 2 (section 3)."""
    one = text([1] * 7 + [0] + [1] * 3 + [0] + [1] * 2)
    assert oracle_lengths(one).tolist() == [7, 3, 2]
    sure = Classifier(train(*examples([one])), threshold=0.0, max_length=2)
    found = evaluate(sure, 1, [one], Costs(target_s=1.0, draft_s=0.1))
    assert (found.oracle_length, found.oracle_deviation) == pytest.approx((4.0, 2.1602), abs=1e-4)
    # figure 3: passes and draft steps of the oracle add up to the tokens; the last pass gives one
    assert found.oracle_s == pytest.approx((3 * 1.0 + 11 * 0.1) / 14)
    # yes to all: 12 of 14 right. Static 1: yes to tokens 1, 9, 13. DISCO's two: and 2, 10, 14.
    assert found.always_f1 == pytest.approx(2 * 12 / (14 + 12))
    assert found.static_f1 == pytest.approx(2 * 3 / (3 + 12))
    assert found.disco_f1 == pytest.approx(2 * 6 / (6 + 12))
    assert found.gain == pytest.approx(1 - found.disco_s / found.static_s)


def test_latency_is_counted() -> None:
    costs, one = Costs(target_s=1.0, draft_s=0.1), text([1, 1, 0, 1, 1, 1])
    drafts = [np.full(6, 2)]
    # passes: 2 accepted + 1; then 2 accepted + 1
    assert latency([one], drafts, costs) == pytest.approx((2 * 1.0 + 4 * 0.1) / 6)
    # nothing drafted: the last token of a text is never drafted either
    assert latency([one], [np.zeros(6, dtype=int)], costs) == pytest.approx(1.0)


def test_the_heuristic_s_lengths_by_hand() -> None:
    """Footnote 2: longer where all were accepted, shorter where not; 5, +2, -1 in transformers.

    7 + 1, 3 + 1 and 2 tokens: of 5 all are right; of 7 one; of the 5 that remain of 6 three; of the
    one that remains of 5 one. The next text begins with 7, of which 2 remain and are right.
    """
    costs = Costs(target_s=1.0, draft_s=0.1)
    first, second = text([1] * 7 + [0] + [1] * 3 + [0] + [1] * 2), text([1] * 3)
    assert heuristic_latency([first], costs) == pytest.approx((4 + 18 * 0.1) / 14)
    assert heuristic_latency([first, second], costs) == pytest.approx((5 + 20 * 0.1) / 17)


def test_means_over_the_normalized_index_by_hand() -> None:
    """Appendix A: the lengths 7, 3, 13, 21, 8 have the indices 0, 0.25, 0.5, 0.75 and 1."""
    one, other = np.array([7, 3, 13, 21, 8]), np.array([5, 9])
    assert by_normalized_index([one], 0.0001) == (
        pytest.approx([0.0, 0.25, 0.5, 0.75, 0.9999]), [7.0, 3.0, 13.0, 21.0, 8.0]
    )  # fmt: skip
    starts, means = by_normalized_index([one, other], 0.25)
    assert starts == [0.0, 0.25, 0.5, 0.75]
    assert means == [6.0, 3.0, 13.0, pytest.approx((21 + 8 + 9) / 3)]


def test_parts_are_three_fifths_one_and_one_at_random() -> None:
    parts = split(list(range(12)), seed=0)
    assert [len(part) for part in parts] == [8, 2, 2]
    assert sorted(one for part in parts for one in part) == list(range(12))
    assert parts == split(list(range(12)), seed=0)
    assert parts != split(list(range(12)), seed=1)


def test_a_fixed_length_costs_what_its_own_decoding_would() -> None:
    """Against decoding step by step."""
    costs, one = Costs(target_s=1.0, draft_s=0.07), bursts(3)
    for length in (1, 3, 9):
        at = seconds = 0
        while at < len(one.accepted):
            drafted = min(length, len(one.accepted) - at - 1)
            right = 0
            while right < drafted and one.accepted[at + right]:
                right += 1
            seconds += 1.0 + 0.07 * drafted
            at += right + 1
        found = latency([one], [np.full(len(one.accepted), length)], costs)
        assert found == pytest.approx(seconds / len(one.accepted))


def test_training_gives_the_same_weights_each_time() -> None:
    features, labels = examples([bursts(1)])
    first, again = train(features, labels), train(features, labels)
    assert all(np.array_equal(first[name], again[name]) for name in first)


def test_where_signals_tell_the_classifier_beats_the_best_fixed_length() -> None:
    costs = Costs(target_s=1.0, draft_s=0.15)
    learn, validate = [bursts(n) for n in range(6)], [bursts(n) for n in range(6, 9)]
    classifier = tune(train(*examples(learn)), validate, costs)
    tested = [bursts(n) for n in range(9, 14)]
    found = evaluate(classifier, best_static(validate, costs), tested, costs)
    assert found.oracle_s < found.disco_s < found.static_s < found.plain_s
    assert found.disco_f1 > found.static_f1
    for policy, seconds in (("static", found.static_s), ("disco", found.disco_s)):
        whole, tokens = map(sum, zip(*found.by_text[policy], strict=True))
        assert len(found.by_text[policy]) == 5
        assert whole / tokens == pytest.approx(seconds)


def test_a_maximum_of_one_drafts_one_token() -> None:
    features, labels = examples([bursts(0)])
    sure = Classifier(train(features, labels), threshold=0.0, max_length=1)
    costs = Costs(target_s=1.0, draft_s=0.5)
    found = evaluate(sure, 1, [bursts(1)], costs)
    assert found.disco_s == pytest.approx(found.static_s)


def test_f1() -> None:
    yes, no = True, False
    assert f1(np.array([yes, yes, no]), np.array([yes, no, no])) == pytest.approx(2 / 3)
    assert f1(np.array([no, no]), np.array([no, no])) == 0.0
