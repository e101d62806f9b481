"""The real target, drafter, masks and caches over toys: the same tokens, the right slots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_toys import SlotToy, slot_drafter, slot_target
from test_lossless import samplings, seeds, tokens_of, trees
from toys import NoisyCopy, ToyLM, ToyTarget

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.lab.baselines.searches import grow_chain
from specexec_cli.sampling import Sampler
from specexec_cli.verify import masks
from specexec_cli.verify.verifier import LocalTarget

prompts = st.lists(st.integers(0, 7), min_size=1, max_size=12)


def check_slots(target: LocalTarget, drafter: ModelDrafter, context: list[int]) -> None:
    """Between iterations a cache holds committed tokens in order, and nothing else: the draft
    model's those of its window, whose positions begin with it."""
    for tokens, first, cache in (
        (target.tokens, 0, target.state),
        (drafter.rows.tokens, drafter.rows.without_row, drafter.rows.state),
    ):
        assert tokens == context[: len(tokens)]
        slots = cache.slots  # type: ignore[attr-defined]
        assert slots == [(token, at) for at, token in enumerate(tokens[first:])]
        assert len(tokens) < len(context), "the last token is run with the next tree"


def watched(
    steps: Iterator[StepResult], target: LocalTarget, drafter: ModelDrafter, context: list[int]
) -> list[int]:
    tokens: list[int] = []
    for step in steps:
        tokens += step.tokens
        check_slots(target, drafter, context + tokens)
    return tokens


@settings(max_examples=120, deadline=None)
@given(
    model=seeds, noise=st.sampled_from([0.0, 0.3, 1.0, 10.0]), sampling=samplings, tree=trees(),
    prompts=st.lists(prompts, min_size=1, max_size=3), max_tokens=st.integers(1, 16),
    eos_ids=st.sets(st.integers(0, 7), max_size=1), chunk_rows=st.sampled_from([1, 3, 512]),
    draft_context=st.sampled_from([10, 4096]),
)  # fmt: skip
def test_several_prompts_through_the_same_caches(
    model, noise, sampling, tree, prompts, max_tokens, eos_ids, chunk_rows, draft_context
):
    toy = ToyLM(model, order=64)  # logits depend on the whole context
    target = slot_target(toy, chunk_rows)
    drafter = slot_drafter(NoisyCopy(toy, 1, noise), sampling, tree, chunk_rows, draft_context)
    for prompt in prompts:
        target.crop(shared_prefix(target.tokens, prompt))
        sampler = Sampler(sampling)
        drafter.configure(sampler, tree)
        steps = specexec(target, drafter, sampler, prompt, max_tokens, eos_ids)
        oracle = autoregressive(ToyTarget(toy), sampler, prompt, max_tokens, eos_ids)
        assert watched(steps, target, drafter, prompt) == tokens_of(oracle)


@pytest.mark.parametrize(
    ("policy", "temperature"), [("fixed", 1.0), ("heuristic", 0.0), ("disco", 1.0), ("cost", 0.0)]
)
def test_a_long_text_keeps_its_slots(policy: str, temperature: float) -> None:
    """Hundreds of rows, so that a slot that is off by one now and then has come along."""
    toy = ToyLM(7, order=64)
    sampling = SamplingConfig(temperature=temperature, seed=7)
    tree = TreeConfig(budget=20, max_depth=6, batch=4, policy=policy)
    target, drafter = slot_target(toy, 7), slot_drafter(NoisyCopy(toy, 1, 0.3), sampling, tree, 7)
    steps = specexec(target, drafter, Sampler(sampling), [1, 2, 3], 120, ())
    oracle = autoregressive(ToyTarget(toy), Sampler(sampling), [1, 2, 3], 120, ())
    assert watched(steps, target, drafter, [1, 2, 3]) == tokens_of(oracle)


def shared_prefix(cached: list[int], prompt: list[int]) -> int:
    count = 0
    while count < min(len(cached), len(prompt) - 1) and cached[count] == prompt[count]:
        count += 1
    return count


@settings(max_examples=80, deadline=None)
@given(
    model=seeds, sampling=samplings, tree=trees(), prompt=prompts,
    fail_at=st.integers(0, 12), in_target=st.booleans(), rows_left=st.integers(0, 5),
)  # fmt: skip
def test_an_interrupted_generation_leaves_usable_caches(
    model, sampling, tree, prompt, fail_at, in_target, rows_left
):
    """Whatever pass fails, and however many of its rows reached the cache: go on, same text."""
    toy = ToyLM(model, order=64)
    target = slot_target(toy)
    drafter = slot_drafter(NoisyCopy(toy, 1, 0.5), sampling, tree)
    failing: SlotToy = target.model if in_target else drafter.rows.model  # type: ignore[assignment]
    forward, count = failing.forward, 0

    def interrupted(rows, cache, logit_rows):
        nonlocal count
        count += 1
        if count == fail_at + 1:
            cache.slots += [(0, 0)] * rows_left
            raise KeyboardInterrupt
        return forward(rows, cache, logit_rows)

    failing.forward = interrupted  # type: ignore[method-assign]
    sampler, context = Sampler(sampling), list(prompt)
    with contextlib.suppress(KeyboardInterrupt):
        for step in specexec(target, drafter, sampler, prompt, 12, ()):
            context += step.tokens
    left = len(prompt) + 12 - len(context)
    if left:
        context += watched(
            specexec(target, drafter, sampler, context, left, ()),
            target,
            drafter,
            context,
        )
    oracle = autoregressive(ToyTarget(toy), sampler, prompt, 12, ())
    assert context[len(prompt) :] == tokens_of(oracle)


def test_the_slot_toy_notices_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above must be able to fail: a node that sees its sibling is caught."""
    target = slot_target(ToyLM(0))
    tree = slot_drafter(ToyLM(0), SamplingConfig(), TreeConfig(budget=4, max_depth=1)).grow([1], 1)
    assert len(tree) == 4
    monkeypatch.setattr(masks, "ancestor_matrix", lambda parents: np.ones((4, 4), dtype=bool))
    with pytest.raises(AssertionError, match="a path, from 0 on"):
        target.verify([1], tree)


def test_the_first_pass_carries_prompt_and_tree() -> None:
    """No pass of its own for the prompt: the first tokens come after one."""
    toy = ToyLM(0, order=64)
    target = slot_target(toy)
    drafter = slot_drafter(toy, SamplingConfig(), TreeConfig(budget=16, max_depth=4, batch=4))
    step = next(specexec(target, drafter, Sampler(SamplingConfig()), [1] * 40, 20, ()))
    assert step.pending_rows == 40
    assert step.tree_nodes == 16
    assert len(step.tokens) > 1
    assert target.model.passes == 1  # type: ignore[attr-defined]


def test_an_empty_tree_is_a_plain_pass() -> None:
    target = slot_target(ToyLM(0))
    assert target.verify([1, 2, 3], DraftTree.empty()).shape == (1, 8)
    target.commit([])
    assert target.tokens == [1, 2, 3]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(temperature=1.0, seed=3),
        SamplingConfig(temperature=0.7, repetition_penalty=1.8, seed=4),
        SamplingConfig(repetition_penalty=1.8),
    ],
)
def test_a_draft_that_is_the_target_drafts_its_next_token(sampling: SamplingConfig) -> None:
    """Under the noise of the very position, and penalised for the very text."""
    toy = ToyLM(2, order=64)
    tree = TreeConfig(budget=1, max_depth=1)
    target, drafter = slot_target(toy), slot_drafter(toy, sampling, tree)
    steps = list(specexec(target, drafter, Sampler(sampling), [1, 2, 2, 5], 41, ()))
    assert [step.drafted for step in steps] == [(True, False)] * 20 + [(False,)]
    predicted = np.array(drafter.calibration.reliability.bins)[1, :, 0].sum()
    assert predicted == 20 * toy.vocab_size, "children of the root teach as any others do"


def test_a_path_of_a_draft_that_is_the_target_is_its_text() -> None:
    """Deeper nodes have the noise of their own positions."""
    toy, sampling = ToyLM(2, order=64), SamplingConfig(temperature=1.0, seed=3)
    tree = TreeConfig(budget=6, max_depth=6, batch=1)
    target = slot_target(toy)
    drafter = slot_drafter(toy, sampling, tree)
    drafter._search = grow_chain
    steps = list(specexec(target, drafter, Sampler(sampling), [1, 2], 70, ()))
    assert [len(step.tokens) for step in steps] == [7] * 10


@pytest.mark.parametrize(("target_vocab", "draft_vocab"), [(12, 8), (8, 12)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_target_and_draft_model_of_different_vocabulary(
    target_vocab: int, draft_vocab: int, temperature: float
) -> None:
    """Ids that the draft model does not know are text all the same; others are never drafted."""
    sampling = SamplingConfig(temperature=temperature, repetition_penalty=1.2, seed=1)
    toy = ToyLM(5, vocab_size=target_vocab, order=64)
    drafting = SlotToy(ToyLM(6, vocab_size=draft_vocab, order=64))
    tree = TreeConfig(budget=10, max_depth=3, batch=4)
    drafter = ModelDrafter(drafting, Sampler(sampling), tree, target_vocab)  # type: ignore[arg-type]
    drafted: set[int] = set()
    grow = drafter.grow

    def watched_grow(context: list[int], max_depth: int, pending: int = 1) -> DraftTree:
        grown = grow(context, max_depth, pending)
        drafted.update(grown.tokens.tolist())
        return grown

    drafter.grow = watched_grow  # type: ignore[method-assign]
    target, prompt = slot_target(toy), [1, target_vocab - 1, 3]
    steps = specexec(target, drafter, Sampler(sampling), prompt, 40, ())
    oracle = tokens_of(autoregressive(ToyTarget(toy), Sampler(sampling), prompt, 40, ()))
    assert tokens_of(steps) == oracle
    assert max(oracle) == target_vocab - 1
    assert drafted <= set(range(8))


@pytest.mark.parametrize(("length", "depth"), [(1, 6), (5, 5), (9, 5), (10, 5), (12, 5)])
def test_drafts_end_with_the_draft_model_s_window(length: int, depth: int) -> None:
    """It moves on where it has little room left, and half of it is full then."""
    tree = TreeConfig(budget=60, max_depth=6, batch=9)
    drafter = slot_drafter(ToyLM(1), SamplingConfig(), tree, context_length=10)
    grown = drafter.grow([1] * length, 6)
    assert grown.depths.max(initial=0) == depth


def test_rows_of_a_pass_that_was_never_committed_are_dropped() -> None:
    """As of a caller that was interrupted between a pass and its commit."""
    target = slot_target(ToyLM(0, order=64))
    target.verify([1, 2], DraftTree.chain([3]))
    target.commit([])
    expected = target.verify([4, 5], DraftTree.chain([6, 7]))
    target.verify([4], DraftTree.chain([1, 1, 1]))
    assert torch.equal(target.verify([4, 5], DraftTree.chain([6, 7])), expected)
    target.commit([0])
    assert target.tokens == [1, 2, 4, 5, 6]


def test_reliability_is_the_last_generation_s_and_calibration_stays() -> None:
    toy, sampling, tree = ToyLM(2), SamplingConfig(), TreeConfig(budget=4, max_depth=2)
    drafter = slot_drafter(NoisyCopy(toy, 1, 0.3), sampling, tree)
    list(specexec(slot_target(toy), drafter, Sampler(sampling), [1, 2], 20, ()))
    weights = drafter.calibration.state()
    assert np.any(drafter.calibration.reliability.bins)
    drafter.configure(Sampler(sampling), tree)
    assert not np.any(drafter.calibration.reliability.bins)
    assert drafter.calibration.state() == weights
