"""Noise-aware scores: what they rank first, and how they learn how far to trust the draft model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specexec_cli.config import SamplingConfig
from specexec_cli.drafting.scoring import DraftScorer, Trust, signals
from specexec_cli.sampling import Sampler

VOCAB = 50


def scorer(scoring="noise", **settings) -> DraftScorer:
    return DraftScorer(Sampler(SamplingConfig(**settings)), scoring)


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.8}])
def test_a_perfect_draft_ranks_the_targets_own_token_first(settings):
    sampler = Sampler(SamplingConfig(seed=5, **settings))
    drafts = DraftScorer(sampler, "noise")
    for position in range(3, 40):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(position)) * 2
        context = list(range(position))
        utilities = drafts.utilities(logits[None], [position], context)
        assert int(utilities.argmax()) == sampler.token(logits, context)


def test_rows_of_one_batch_use_the_noise_of_their_own_positions():
    drafts = scorer(temperature=1.0, seed=1)
    logits = torch.zeros(2, VOCAB)
    together = drafts.utilities(logits, [7, 9], [0])
    assert torch.equal(together[1], drafts.utilities(logits[:1], [9], [0])[0])
    assert not torch.equal(together[0], together[1])


def test_without_noise_scores_are_the_tempered_filtered_probabilities():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    plain = scorer("probs", temperature=0.5).utilities(logits, [4], [0])
    torch.testing.assert_close(plain, (logits / 0.5).log_softmax(-1))
    torch.testing.assert_close(scorer("noise").utilities(logits, [4], [0]), logits.log_softmax(-1))


@pytest.mark.parametrize(("disagreement", "expected"), [(0.0, "sharper"), (6.0, "flatter")])
def test_sharpness_follows_how_often_the_draft_was_right(disagreement, expected):
    drafts = scorer(temperature=1.0)
    start = drafts.sharpness
    generator = torch.Generator().manual_seed(0)
    for position in range(200):
        logits = torch.randn(VOCAB, generator=generator) * 2
        noise = disagreement * torch.randn(VOCAB, generator=generator)
        utilities = drafts.utilities(logits[None], [position], [0])[0]
        drafts.observe([(utilities, 1, int((utilities + noise).argmax()))])
    assert (drafts.sharpness < start) == (expected == "sharper")
    assert drafts.sharpness != start


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}])
def test_what_the_draft_excludes_is_ranked_as_often_as_it_was_the_targets(filters):
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]]).log()
    chances = {}
    for outside in (0, 2):  # of ten tokens of the target
        drafts = scorer("probs", temperature=1.0, **filters)
        utilities = drafts.utilities(logits, [0], [0])
        for position in range(300):
            token = 2 if position % 10 < outside else 0
            drafts.observe([(utilities[0], 1, token)])
        log_probs, tokens = drafts.best(utilities, 5, np.ones(1))
        chances[outside] = dict(zip(tokens[0].tolist(), np.exp(log_probs[0]).tolist(), strict=True))
    assert chances[0][2] < 0.005 < 0.04 < chances[2][2] < 0.3


def test_a_penalty_is_learned_only_where_tokens_are_excluded():
    drafts = scorer(temperature=1.0)
    for position in range(100):
        utilities = drafts.utilities(torch.randn(1, VOCAB), [position], [0])[0]
        before = drafts.trust.penalty
        drafts.observe([(utilities, 1, int(utilities.argmin()))])
        assert drafts.trust.penalty == before


def test_no_temperature_is_too_low_to_tell_excluded_tokens_from_kept_ones():
    logits = torch.tensor([[30.0, 20.0, 0.0, -30.0]])
    drafts = scorer("probs", temperature=0.05, top_k=3)
    _, tokens = drafts.best(drafts.utilities(logits, [0], [0]), 2, np.ones(1))
    assert tokens[0].tolist() == [0, 1]


def test_what_one_generation_taught_the_next_one_starts_with():
    taught = scorer(temperature=1.0)
    for position in range(100):
        utilities = taught.utilities(torch.randn(1, VOCAB), [position], [0])[0]
        taught.observe([(utilities, 1, int(utilities.argmax()))])
    sampler = Sampler(SamplingConfig(temperature=0.6, seed=3))
    later = DraftScorer(sampler, "noise", trust=Trust.restored(taught.trust.state()))
    assert later.sharpness == taught.sharpness < 1.25


def test_what_is_learned_is_kept_apart_by_what_can_be_wrong():
    warm, cold = Sampler(SamplingConfig(temperature=0.5)), Sampler(SamplingConfig())
    kinds = [DraftScorer.kind(sampler, s) for sampler in (warm, cold) for s in ("noise", "probs")]
    assert kinds == ["noise", "probs", "greedy", "greedy"]


def test_signals_are_the_highest_probabilities_and_the_entropy():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    found = signals(torch.cat([logits, torch.full((1, 4), -torch.inf)], dim=1))
    expected = [0.5, 0.25, 0.125, 0.125, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.75 * np.log(2)]
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
