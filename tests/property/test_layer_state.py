"""A layer that keeps a state of its own: a running sum that follows ancestors, in a real model.

Keys and values can be put in any order and dropped one by one. A sum cannot: a node's is that of
its parent plus its own row, and no row can be taken out again. So whoever treats a state as rows,
or a row's parent as the row before it, writes another text here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import architecture, open_float32, random_tokens, random_tree, save_checkpoint
from test_search import paths_of
from torch import Tensor
from transformers.models.llama import modeling_llama

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree, common_prefix
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.dsi.engine import ModelTarget
from specexec_cli.models import layer_states
from specexec_cli.models.layer_state import Ints, LayerState
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget, verify_together

_KIND = "linear_attention"
_LAYER = 1  # of the toy's three, the one that keeps a sum


class RunningSum(LayerState):
    """The sum of the rows on the path from the text's begin to each row.

    Kept are the sum behind the last committed row, and the rows of what is undecided, of which
    commit adds up the accepted path again.
    """

    row_dim = 1

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.release()

    def release(self) -> None:
        self.committed, self.sum = 0, torch.zeros(())
        self.rows: list[Tensor] = []
        self.parents: list[int] = []
        self.length = 0

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> Tensor:
        assert len(parents) == rows[0].shape[1], "every row of a pass has a parent"
        self.device = rows[0].device
        first = self.length
        self.rows += rows[0][0].unbind()
        self.parents += parents.tolist()
        self.length += len(parents)
        return torch.stack([self._sum_at(slot) for slot in range(first, self.length)])[None]

    def _sum_at(self, slot: int) -> Tensor:
        path = []
        while slot >= self.committed:
            path.append(slot)
            slot = self.parents[slot - self.committed]
        assert slot == self.committed - 1, "every path begins behind the committed rows"
        total = self.sum
        for slot in reversed(path):
            total = total + self.rows[slot - self.committed]
        return total

    def commit(self, prefix_len: int, slots: Tensor) -> None:
        path = [*range(self.committed, prefix_len), *slots.tolist()]
        self.sum = self._sum_at(path[-1] if path else self.committed - 1)
        self.committed = self.length = prefix_len + len(slots)
        self.rows, self.parents = [], []

    def reachable(self, length: int) -> int:
        return min(length, self.length) if length >= self.committed else 0

    def crop(self, length: int) -> None:
        if length < self.committed:
            assert length == 0, "a sum knows no way back"
            self.release()
        del self.rows[length - self.committed :], self.parents[length - self.committed :]
        self.length = length

    def copy(self, other: RunningSum, length: int) -> None:
        self.release()
        if length:
            self.sum, self.committed, self.length = other._sum_at(length - 1), length, length
            self.device = other.device

    @property
    def nbytes(self) -> int:
        return sum(row.numel() * row.element_size() for row in (self.sum, *self.rows))


@pytest.fixture
def summing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of a Llama sums in place of attending."""
    attend = modeling_llama.LlamaAttention.forward

    def forward(self: Any, hidden_states: Tensor, **told: Any) -> tuple[Tensor, None]:
        if self.layer_idx != _LAYER:
            return attend(self, hidden_states, **told)
        sums = told["past_key_values"].layers[_LAYER].run(self.q_proj(hidden_states))
        return self.o_proj(torch.tanh(sums)), None

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    monkeypatch.setitem(layer_states.LAYER_STATES, _KIND, RunningSum)


@pytest.fixture
def models(summing: None, tmp_path: Path) -> Iterator[tuple[StreamedModel, StreamedModel]]:
    """A streamed target and a draft model near it."""
    config = architecture("llama")
    config.layer_types = ["full_attention", _KIND, "full_attention"]
    own = save_checkpoint(tmp_path / "target", config, std=0.6)  # sure of itself: deep trees
    save_checkpoint(tmp_path / "draft", config, noise_of=own, noise=0.02)
    target, draft = open_float32(tmp_path / "target"), open_float32(tmp_path / "draft", None)
    yield target, draft
    target.close()
    draft.close()


def one_by_one(model: StreamedModel, tokens: list[int]) -> Tensor:
    """The logits behind the last token, from passes of one row."""
    target = LocalTarget(model)
    for token in tokens:
        logits = target.verify([token], DraftTree.empty())
        target.commit([])
    return logits[-1]


def test_a_node_has_the_logits_of_its_path_alone(
    models: tuple[StreamedModel, StreamedModel],
) -> None:
    models[0].context.chunk_rows = 5  # a pass comes to a layer in several chunks
    target, tokens, tree = LocalTarget(models[0]), random_tokens(9), random_tree(12, seed=1)
    target.verify(tokens[:4], DraftTree.empty())
    target.commit([])
    logits = target.verify(tokens[4:], tree)
    for node, path in enumerate([(), *paths_of(tree)]):
        assert torch.equal(logits[node], one_by_one(models[0], [*tokens, *path]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(
    models: tuple[StreamedModel, StreamedModel], temperature: float
) -> None:
    """Turns of a chat, and an edit that goes back."""
    sampling = SamplingConfig(temperature=temperature, seed=3)
    tree = TreeConfig(budget=12, max_depth=6, batch=4, policy="fixed")
    target = LocalTarget(models[0])
    drafter = ModelDrafter(models[1], Sampler(sampling), tree, models[0].vocab_size)
    first = random_tokens(7)
    longest, context = 0, first
    for edit in (0, 0, 9):
        context = [*context[: len(context) - edit], 5, 6]
        target.crop(common_prefix(target.tokens, context[:-1]))
        steps = specexec(target, drafter, Sampler(sampling), context, 12, ())
        tokens = []
        for step in steps:
            tokens += step.tokens
            longest = max(longest, sum(step.drafted))
        oracle = autoregressive(LocalTarget(models[0]), Sampler(sampling), context, 12, ())
        assert tokens == [token for step in oracle for token in step.tokens]
        context = context + tokens
    assert longest >= 3, "paths of several nodes were committed"


def test_texts_in_one_pass_and_copied_beginnings_are_those_alone(
    models: tuple[StreamedModel, StreamedModel],
) -> None:
    model, tokens, tree = models[0], random_tokens(9), random_tree(8, seed=2)
    first, second, third = LocalTarget(model), LocalTarget(model), LocalTarget(model)
    verify_together([(first, tokens, DraftTree.empty()), (second, tokens[:5], DraftTree.empty())])
    first.commit([])
    second.commit([])
    third.copy_rows(second, 4)
    assert third.tokens == [], "the sum behind four tokens is not kept where five are committed"
    third.copy_rows(second, 5)
    assert third.tokens == tokens[:5]
    texts = [(target, tokens[5:], tree) for target in (second, third)]
    together = verify_together([(first, [1], tree), *texts])
    assert torch.equal(together[0][0], one_by_one(model, [*tokens, 1]))
    for logits in together[1:]:
        assert torch.equal(logits[0], one_by_one(model, tokens))
    assert torch.equal(together[1], together[2])


def test_a_dsi_server_draws_the_plain_text_whatever_it_was_asked_before(
    models: tuple[StreamedModel, StreamedModel],
) -> None:
    """Prefixes that differ, and positions that it has rows of already."""
    context, server = random_tokens(6), ModelTarget(models[0])
    steps = autoregressive(LocalTarget(models[0]), Sampler(SamplingConfig()), context, 10, ())
    text = [*context, *(token for step in steps for token in step.tokens)]
    server.verify([*context, 5, 6, 7], len(context), lambda: False)
    for first in (6, 10, 8, 12):
        assert server.verify(text[:-1], first, lambda: False) == tuple(text[first:])


def test_a_crop_says_what_is_left(models: tuple[StreamedModel, StreamedModel]) -> None:
    target = LocalTarget(models[0])
    target.verify(random_tokens(6), DraftTree.empty())
    target.crop(0)  # interrupted before commit
    assert target.tokens == []
    target.verify(random_tokens(6), random_tree(5, seed=1))
    target.commit([])
    target.crop(6)
    assert target.tokens == random_tokens(6)
    target.crop(4)
    assert (target.tokens, target.state.length) == ([], 0)
