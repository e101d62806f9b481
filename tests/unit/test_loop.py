"""What an iteration hands from drafter to target and back, and what it reports."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import byte_llama, open_float32, save_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import ToyLM, ToyTarget

from specexec_cli.config import SamplingConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.decoding import autoregressive as autoregressive_module
from specexec_cli.decoding import loop as loop_module
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.loop import specexec
from specexec_cli.errors import NonFiniteLogitsError
from specexec_cli.sampling import Sampler
from specexec_cli.verify.accept import Accepted
from specexec_cli.verify.verifier import LocalTarget

GREEDY = Sampler(SamplingConfig())
# two children of the root, one of which has a child
TREE = DraftTree(np.array([3, 4, 5]), np.array([-1, -1, 0]), np.array([1, 1, 2]), np.zeros(3))


@dataclass
class Clock:
    """Seconds that pass only where somebody says so."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (loop_module, autoregressive_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


@dataclass
class SlowTarget(ToyTarget):
    """A pass takes four seconds, three of them reading, and streams a thousand bytes per row."""

    clock: Clock = field(default_factory=Clock)

    def verify(self, pending: Sequence[int], tree: DraftTree) -> Tensor:
        self.clock.now += 4.0
        self.bytes_streamed += 1000 * (len(pending) + len(tree))
        self.read_s += 3.0
        return super().verify(pending, tree)


@dataclass
class Told:
    """A drafter that always grows TREE, in half a second, and writes down what it is told."""

    clock: Clock
    grown: list[tuple[list[int], int, int]] = field(default_factory=list)
    committed: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    observed: list[StepResult] = field(default_factory=list)

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        self.clock.now += 0.5
        self.grown.append((list(context), max_depth, pending))
        return TREE if max_depth >= 2 else DraftTree.empty()

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        self.committed.append((tuple(nodes), tuple(tokens)))

    def observe(self, step: StepResult) -> None:
        self.observed.append(step)


def everything(
    tree: DraftTree,
    logits: Tensor,
    sampler: Sampler,
    context: Sequence[int],
    limit: int,
    eos_ids: Collection[int],
) -> Accepted:
    """A walk that takes nodes 0 and 2 and a bonus token, or as much of it as there is room for."""
    assert logits.shape == (1 + len(tree), 8)
    assert sampler is GREEDY
    assert torch.equal(logits[0], torch.from_numpy(ToyLM(0).logits(context)))
    if len(tree) == 0:
        return Accepted((), (7,), (False,))
    return Accepted((0, 2)[: limit - 1], (3, 5, 6)[:limit], (True, True, False)[:limit])


def test_the_drafter_is_told_of_text_room_and_rows(clock: Clock) -> None:
    target, drafter = SlowTarget(ToyLM(0), clock=clock), Told(clock)
    target.tokens = [1, 2]  # of an earlier generation
    steps = []
    for step in specexec(target, drafter, GREEDY, (1, 2, 1, 1), 8, (), everything):
        steps.append(step)
        assert drafter.observed == steps, "before anybody sees the step"
    first, second = [1, 2, 1, 1], [1, 2, 1, 1, 3, 5, 6]
    # eight tokens, then five, then two: the last of them is the bonus token
    assert drafter.grown == [
        (first, 7, 2),
        (second, 4, 1),
        ([*second, 3, 5, 6], 1, 1),
        ([*second, 3, 5, 6, 7], 0, 1),
    ]
    assert drafter.committed == [((0, 2), (3, 5, 6))] * 2 + [((), (7,))] * 2
    assert target.tokens == [*second, 3, 5, 6, 7]


def test_an_iteration_reports_what_it_did_and_cost(clock: Clock) -> None:
    target, drafter = SlowTarget(ToyLM(0), clock=clock), Told(clock)
    clock.now, target.bytes_streamed, target.read_s = 50.0, 10**6, 20.0
    steps = list(specexec(target, drafter, GREEDY, (1, 2), 4, (), everything))
    assert steps == [
        StepResult(
            tokens=(3, 5, 6), drafted=(True, True, False), tree_nodes=3, tree_depth=2, draft_s=0.5,
            verify_s=4.0, bytes_streamed=5000, pending_rows=2, read_s=3.0,
        ),
        StepResult(
            tokens=(7,), drafted=(False,), tree_nodes=0, tree_depth=0, draft_s=0.5, verify_s=4.0,
            bytes_streamed=1000, pending_rows=1, finish_reason="length", read_s=3.0,
        ),
    ]  # fmt: skip


def test_a_plain_pass_reports_what_it_did_and_cost(clock: Clock) -> None:
    target = SlowTarget(ToyLM(0), clock=clock, bytes_streamed=10**6)
    steps = list(autoregressive(target, GREEDY, (1, 2, 3), 2, ()))
    assert [
        (step.verify_s, step.draft_s, step.bytes_streamed, step.pending_rows, step.finish_reason)
        for step in steps
    ] == [(4.0, 0.0, 3000, 3, None), (4.0, 0.0, 1000, 1, "length")]
    assert all((step.tree_nodes, step.tree_depth, step.drafted) == (0, 0, (False,))
               for step in steps)  # fmt: skip


@pytest.mark.parametrize("eos_ids", [(), {6}, {5, 6}])
def test_an_eos_as_the_last_token_there_is_room_for_ends_the_text_as_one(eos_ids, clock) -> None:
    drafter = Told(clock)
    steps = list(specexec(SlowTarget(ToyLM(0)), drafter, GREEDY, (1,), 3, eos_ids, everything))
    assert [step.finish_reason for step in steps] == ["eos" if eos_ids else "length"]
    plain = ToyTarget(ToyLM(0))
    end = GREEDY.token(torch.from_numpy(ToyLM(0).logits([1])), [1])
    found = list(autoregressive(plain, GREEDY, (1,), 1, {end} if eos_ids else ()))
    assert [step.finish_reason for step in found] == ["eos" if eos_ids else "length"]


@dataclass
class SpoiltTarget(ToyTarget):
    """A row of a poisonous token, or behind one, spoils its whole pass: 0 times NaN is NaN."""

    poison: int = 0

    def verify(self, pending: Sequence[int], tree: DraftTree) -> Tensor:
        logits = super().verify(pending, tree)
        rows = [*self.tokens, *pending, *tree.tokens.tolist()]
        return torch.full_like(logits, torch.nan) if self.poison in rows else logits


@dataclass
class Poisoner(Told):
    """Drafts the right token, or the poisonous one, in turns."""

    model: ToyLM = field(default_factory=lambda: ToyLM(0))
    poison: int = 0

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        if max_depth < 1:
            return DraftTree.empty()
        right = GREEDY.token(torch.from_numpy(self.model.logits(context)), context)
        return DraftTree.chain([right if len(context) % 2 else self.poison])


def test_a_wrong_draft_that_spoils_its_pass_costs_a_pass_and_no_token(clock: Clock) -> None:
    model, prompt = ToyLM(0), (1, 2)
    text = [t for step in autoregressive(ToyTarget(model), GREEDY, prompt, 12, ())
            for t in step.tokens]  # fmt: skip
    poison = next(token for token in range(8) if token not in (*prompt, *text))
    target, drafter = SpoiltTarget(model, poison=poison), Poisoner(clock, poison=poison)
    steps = list(specexec(target, drafter, GREEDY, prompt, 12, ()))
    assert [token for step in steps for token in step.tokens] == text
    spoilt = [step for step in steps if step.tree_nodes == 0 and step.finish_reason is None]
    assert spoilt, "some drafts were poisonous"
    assert any(len(step.tokens) == 2 for step in steps), "and others right"
    assert target.passes == len(steps) + len(spoilt)
    assert all(step.drafted == (False,) and step.tree_depth == 0 for step in spoilt)
    assert [step.bytes_streamed for step in steps] == [0] * len(steps)


@dataclass
class ForgetfulTarget(SpoiltTarget):
    """A target that has lost its rows where a pass is spoilt, as with a machine that is lost."""

    def verify(self, pending: Sequence[int], tree: DraftTree) -> Tensor:
        logits = super().verify(pending, tree)
        if not torch.isfinite(logits).all():
            self.tokens = []
        return logits


def test_a_pass_is_repeated_from_where_the_target_is_by_then(clock: Clock) -> None:
    model, prompt = ToyLM(0), (1, 2)
    text = [t for step in autoregressive(ToyTarget(model), GREEDY, prompt, 12, ())
            for t in step.tokens]  # fmt: skip
    poison = next(token for token in range(8) if token not in (*prompt, *text))
    target, drafter = ForgetfulTarget(model, poison=poison), Poisoner(clock, poison=poison)
    target.tokens = [1]  # of an earlier generation
    steps = list(specexec(target, drafter, GREEDY, prompt, 12, ()))
    assert [token for step in steps for token in step.tokens] == text
    assert target.tokens == [*prompt, *text[:-1]]


def test_what_spoils_plain_decoding_ends_the_text(clock: Clock) -> None:
    model, tokens = ToyLM(0), []
    plain = autoregressive(ToyTarget(model), GREEDY, (1, 2), 12, ())
    text = [token for step in plain for token in step.tokens]
    poison = text[5]
    target, drafter = SpoiltTarget(model, poison=poison), Poisoner(clock, poison=poison)
    steps = specexec(target, drafter, GREEDY, (1, 2), 12, ())
    with pytest.raises(NonFiniteLogitsError):
        tokens.extend(token for step in steps for token in step.tokens)
    assert tokens == text[: text.index(poison) + 1], "it is drawn, and nothing behind it"
    with pytest.raises(NonFiniteLogitsError):
        list(autoregressive(SpoiltTarget(model, poison=poison), GREEDY, (1, 2), 12, ()))


def test_values_that_are_not_finite_in_a_wrong_draft_spoil_no_text(tmp_path: Path) -> None:
    """With a real model: its keys and values reach every row of a pass by 0 times NaN."""
    save_checkpoint(tmp_path, byte_llama(num_hidden_layers=2))
    prompt = [20, 21, 22]
    with closing(open_float32(tmp_path)) as model:
        plain = [t for step in autoregressive(LocalTarget(model), GREEDY, prompt, 8, ())
                 for t in step.tokens]  # fmt: skip
    poison = next(token for token in range(99) if token not in (*prompt, *plain))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][poison] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with closing(open_float32(tmp_path)) as model:
        target = LocalTarget(model)
        drafter = Poisoner(Clock(), model=ToyLM(0, vocab_size=3), poison=poison)
        steps = list(specexec(target, drafter, GREEDY, prompt, 8, ()))
        assert [token for step in steps for token in step.tokens] == plain
        logits = target.verify([plain[0]], DraftTree.chain([poison]))
        assert not torch.isfinite(logits[0]).all(), "the row in front of the draft is spoilt"
