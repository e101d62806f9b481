"""Texts that come and go in one batch: each is token for token what it would be alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import slot_toys
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_toys import SlotToy
from test_lossless import samplings, seeds, tokens_of, trees
from toys import NoisyCopy, ToyLM, ToyTarget, classifier

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import StepResult
from specexec_cli.decoding import batch
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.batch import Batch, BatchText, Seat
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.forest import Forest
from specexec_cli.drafting.learned import Learned
from specexec_cli.errors import ConfigError, NonFiniteLogitsError, SpecexecError, StreamError
from specexec_cli.planning.memory import nodes_of_a_text
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget

TREE = TreeConfig(budget=24, max_depth=6, batch=6)


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingConfig
    eos_ids: frozenset[int] = frozenset()
    comes: int = 0  # before which pass
    leaves: int = 10_000  # cancelled before so many of its own passes

    def alone(self, toy: ToyLM) -> list[int]:
        sampler = Sampler(self.sampling)
        target = ToyTarget(toy)
        return tokens_of(
            autoregressive(target, sampler, self.prompt, self.max_tokens, self.eos_ids)
        )


@dataclass
class Bench:
    """Seats over toys, and the texts on them, checked after every pass."""

    toy: ToyLM
    tree: TreeConfig | None = TREE
    noise: float = 0.3
    seats: int = 3
    target: SlotToy = field(init=False)
    draft: SlotToy = field(init=False)
    steps: list[list[StepResult]] = field(default_factory=list)  # of each pass

    def __post_init__(self) -> None:
        self.target = SlotToy(self.toy)
        self.draft = SlotToy(NoisyCopy(self.toy, 1, self.noise))
        learned = Learned(classifier)
        tree = self.tree or TREE
        self.all = [
            Seat(
                LocalTarget(self.target),  # type: ignore[arg-type]
                ModelDrafter(
                    self.draft,  # type: ignore[arg-type]
                    Sampler(SamplingConfig()), tree, self.toy.vocab_size, learned=learned,
                ) if self.tree else None,
            )
            for _ in range(self.seats)
        ]  # fmt: skip
        self.learned = learned
        forest = Forest(self.draft, tree, self.seats, learned) if self.tree else None  # type: ignore[arg-type]
        self.batch = Batch(forest, self.all)
        self.under_way: list[BatchText] = []

    def join(self, job: Job) -> BatchText:
        seat = self.batch.seat_for(job.prompt, [text.seat for text in self.under_way])
        sampler = Sampler(job.sampling)
        if seat.drafter is not None:
            assert self.tree is not None
            seat.drafter.configure(sampler, self.tree, self.learned)
        text = BatchText(seat, sampler, job.prompt, job.max_tokens, job.eos_ids)
        self.under_way.append(text)
        return text

    def step(self) -> dict[BatchText, StepResult | SpecexecError | None]:
        outcomes = dict(zip(self.under_way, self.batch.step(self.under_way), strict=True))
        found = [outcome for outcome in outcomes.values() if isinstance(outcome, StepResult)]
        self.steps.append(found)
        for text, outcome in outcomes.items():
            if not (text.plain or isinstance(outcome, SpecexecError)):  # the next pass drops rows
                self._check(text)
            if isinstance(outcome, SpecexecError) or (outcome and outcome.finish_reason):
                self.under_way.remove(text)
        if self.tree:
            assert sum(step.tree_nodes for step in found) <= self.tree.budget
            most = nodes_of_a_text(self.tree.budget, self.seats)
            assert all(step.tree_nodes <= most for step in found)
        return outcomes

    def _check(self, text: BatchText) -> None:
        """Between passes a cache holds committed tokens in order, and nothing else."""
        assert text.seat.target.tokens == text.context[: len(text.seat.target.tokens)]
        pairs = [(text.seat.target.tokens, text.seat.target.state)]
        if text.seat.drafter is not None:  # which may hold another text's still
            pairs.append((text.seat.drafter.rows.tokens, text.seat.drafter.rows.state))
        for tokens, cache in pairs:
            expected = [(token, at) for at, token in enumerate(tokens)]
            assert cache.slots == expected  # type: ignore[attr-defined]


def run(bench: Bench, jobs: list[Job]) -> list[list[int]]:
    """Every job's tokens; of a cancelled one those that came."""
    waiting = sorted(jobs, key=lambda job: job.comes)
    texts: dict[BatchText, Job] = {}
    order: dict[int, BatchText] = {}
    passes: dict[BatchText, int] = {}
    number = 0
    while waiting or bench.under_way:
        while waiting and waiting[0].comes <= number and len(bench.under_way) < bench.seats:
            job = waiting.pop(0)
            text = bench.join(job)
            texts[text] = job
            order[next(i for i, each in enumerate(jobs) if each is job)] = text
        for text in list(bench.under_way):
            if passes.get(text, 0) >= texts[text].leaves:
                bench.under_way.remove(text)
        number += 1
        if bench.under_way:
            for text in bench.under_way:
                passes[text] = passes.get(text, 0) + 1
            outcomes = bench.step()
            assert not any(isinstance(each, SpecexecError) for each in outcomes.values())
    return [order[at].context[len(job.prompt) :] for at, job in enumerate(jobs)]


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    beginnings = draw(st.lists(st.lists(st.integers(0, 7), max_size=40), min_size=1, max_size=2))
    return [
        Job(
            prompt=(
                *draw(st.sampled_from(beginnings)),
                *draw(st.lists(st.integers(0, 7), min_size=1, max_size=6)),
            ),
            max_tokens=draw(st.integers(1, 14)),
            sampling=draw(samplings),
            eos_ids=frozenset(draw(st.sets(st.integers(0, 7), max_size=1))),
            comes=draw(st.integers(0, 8)),
            leaves=draw(st.sampled_from([1, 3, 10_000, 10_000])),
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


@settings(max_examples=120, deadline=None)
@given(
    model=seeds, noise=st.sampled_from([0.0, 0.3, 10.0]), tree=st.none() | trees(),
    jobs=job_lists(), seats=st.sampled_from([1, 2, 3, 7]),
    prompt_rows=st.sampled_from([3, 16, 256]),
)  # fmt: skip
def test_each_text_is_what_it_is_alone(model, noise, tree, jobs, seats, prompt_rows):
    if tree is not None and tree.policy == "disco":
        tree = replace(tree, policy="cost")
    with pytest.MonkeyPatch.context() as patched:
        slot_toys.prompt_rows(patched, prompt_rows)
        patched.setattr(batch, "_WORTH_WAITING", 4)
        toy = ToyLM(model, order=64)
        found = run(Bench(toy, tree, noise, seats), jobs)
    for job, tokens in zip(jobs, found, strict=True):
        alone = job.alone(toy)
        assert tokens == (alone if job.leaves == 10_000 else alone[: len(tokens)])


def jobs_of(count: int, length: int = 5, **changes: object) -> list[Job]:
    rng = np.random.default_rng(length)
    return [
        replace(
            Job(tuple(rng.integers(0, 8, length).tolist()), 24, SamplingConfig(seed=at)), **changes
        )
        for at in range(count)
    ]


def test_several_texts_take_hardly_more_passes_than_the_longest_alone() -> None:
    alone = [Bench(ToyLM(3, order=64)) for _ in range(3)]
    for bench, job in zip(alone, jobs_of(3), strict=True):
        run(bench, [job])
    together = Bench(ToyLM(3, order=64), replace(TREE, budget=3 * TREE.budget))
    run(together, jobs_of(3))
    assert together.target.passes <= max(bench.target.passes for bench in alone) + 2
    draft_steps = sum(bench.draft.passes for bench in alone)
    assert together.draft.passes < 0.7 * draft_steps, "texts draft in the same steps"


def test_a_pass_of_several_texts_tells_the_policy_what_the_ssd_took(monkeypatch) -> None:
    bench, told = Bench(ToyLM(3, order=64)), []
    bench.target.read_s = 20.0
    together = bench.target.forward_together

    def read(texts):
        bench.target.read_s += 3.0
        return together(texts)

    monkeypatch.setattr(bench.target, "forward_together", read)
    monkeypatch.setattr(bench.batch._forest, "observe", lambda step: told.append(step.read_s))
    run(bench, jobs_of(2))
    assert told
    assert set(told) <= {3.0, 0.0}, "0 where one text is left"
    assert told[0] == 3.0


def test_nodes_go_where_they_are_likely_to_be_accepted() -> None:
    """A text whose draft is sure gets deeper trees than one whose draft is not."""

    class Sure(ToyLM):
        def logits(self, context):
            found = super().logits(context)
            return found * (4.0 if context[0] == 1 else 0.2)

    bench = Bench(Sure(5, order=64), noise=0.0)
    bench.join(Job((1, 2, 3), 40, SamplingConfig()))
    bench.join(Job((0, 2, 3), 40, SamplingConfig()))
    for _ in range(3):
        sure, unsure = bench.step().values()
        assert sure.tree_depth > unsure.tree_depth


def test_a_long_prompt_comes_in_chunks_while_others_go_on(monkeypatch) -> None:
    monkeypatch.setattr(batch, "_ROWS", 64)
    bench = Bench(ToyLM(1, order=8))
    first = bench.join(jobs_of(1)[0])
    bench.step()
    long = bench.join(jobs_of(1, 150, max_tokens=4)[0])
    for rows in (64, 64, 22):
        before = len(long.seat.target.tokens)
        outcomes = bench.step()
        assert isinstance(outcomes[first], StepResult), "the other text goes on"
        nodes = sum(step.drafted.count(True) for step in [outcomes[long]] if step)
        assert len(long.seat.target.tokens) - before - max(nodes - 1, 0) in (rows, rows + 1)
    assert outcomes[long] is not None, "the last chunk brings the first tokens"


def test_a_prompt_alone_is_one_pass_and_a_newcomer_needs_no_more() -> None:
    bench = Bench(ToyLM(1, order=8))
    assert run(bench, jobs_of(1, 600, max_tokens=1))[0]
    assert bench.target.passes == 1


def test_a_common_beginning_is_computed_once() -> None:
    system = tuple(np.random.default_rng(0).integers(0, 8, 90).tolist())
    jobs = [replace(job, prompt=(*system, *job.prompt)) for job in jobs_of(3)]
    toy = ToyLM(2, order=128)
    bench = Bench(toy)
    rows = 0
    forward = bench.target.forward

    def counted(part, cache, wanted):
        nonlocal rows
        rows += part.pending
        return forward(part, cache, wanted)

    bench.target.forward = counted  # type: ignore[method-assign]
    assert run(bench, jobs) == [job.alone(toy) for job in jobs]
    generated = sum(len(each) for each in bench.steps)
    assert rows <= len(system) + 3 * 6 + generated


def test_logits_that_are_no_numbers_end_one_text_alone() -> None:
    class Spoilt(ToyLM):
        def logits(self, context):
            found = super().logits(context)
            return np.full_like(found, np.nan) if len(context) > 8 and context[0] == 7 else found

    bench = Bench(Spoilt(1, order=64))
    good, bad = Job((1, 2), 20, SamplingConfig()), Job((7, 2, 3), 20, SamplingConfig())
    texts = [bench.join(job) for job in (good, bad)]
    failed = None
    while bench.under_way:
        outcome = bench.step().get(texts[1])
        failed = outcome if isinstance(outcome, SpecexecError) else failed
    assert isinstance(failed, NonFiniteLogitsError)
    assert texts[0].context[2:] == good.alone(bench.toy)
    expected = ToyLM(1, order=64)
    assert texts[1].context[3:] == bad.alone(expected)[: len(texts[1].context) - 3]
    assert len(texts[1].context) == 9, "as far as it goes alone"


def test_a_wrong_draft_that_spoils_its_pass_costs_that_pass_alone() -> None:
    """Not a number behind any draft: the text goes on without one, as plain decoding would."""
    toy = ToyLM(1, order=64)
    bench = Bench(toy)
    forward = bench.target.forward

    def spoilt(part, cache, wanted):
        logits = forward(part, cache, wanted)
        if len(part.tokens) > part.pending and part.tokens[0] % 2:
            logits[:] = torch.nan
        return logits

    bench.target.forward = spoilt  # type: ignore[method-assign]
    jobs = jobs_of(3)
    assert run(bench, jobs) == [job.alone(toy) for job in jobs]


def test_a_failed_pass_leaves_every_text_as_it_was() -> None:
    toy = ToyLM(4, order=64)
    bench = Bench(toy)
    jobs = jobs_of(3)
    texts = [bench.join(job) for job in jobs]
    bench.step()
    forward, count = bench.target.forward, 0

    def failing(part, cache, wanted):
        nonlocal count
        count += 1
        if count == 2:
            cache.slots += [(0, 0)] * 3
            raise StreamError("the disk is gone")
        return forward(part, cache, wanted)

    bench.target.forward = failing  # type: ignore[method-assign]
    with pytest.raises(StreamError):
        bench.step()
    while bench.under_way:
        bench.step()
    assert [text.context[5:] for text in texts] == [job.alone(toy) for job in jobs]


def test_policies_that_look_at_one_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="fixed or heuristic or cost"):
        Bench(ToyLM(0), replace(TREE, policy="disco"))
