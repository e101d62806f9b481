"""Several texts in one pass: each text's logits and rows have the bits of a pass by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import (
    ARCHITECTURES,
    architecture,
    open_float32,
    random_tokens,
    random_tree,
    save_checkpoint,
)
from torch import Tensor

from specexec_cli.core import DraftTree
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.verify.verifier import LocalTarget, verify_together

# tokens before the pass, pending tokens and nodes of each text
TEXTS = ((0, 23, 9), (11, 1, 17), (30, 4, 0), (5, 1, 0))


def texts_of(model: StreamedModel) -> list[tuple[LocalTarget, list[int], DraftTree]]:
    found = []
    for seed, (before, pending, nodes) in enumerate(TEXTS):
        target = LocalTarget(model)
        if before:
            target.verify(random_tokens(before, seed), DraftTree.empty())
            target.commit([])
        found.append((target, random_tokens(pending, 10 + seed), random_tree(nodes, seed)))
    return found


def rows_of(target: LocalTarget) -> list[Tensor]:
    return [
        part[:, :, : layer.length].clone()
        for layer in target.state.layers
        if layer.is_initialized
        for part in (layer.keys, layer.values)
    ]


def assert_same(model: StreamedModel) -> None:
    together, alone = texts_of(model), texts_of(model)
    found = verify_together(together)
    for logits, (target, *_), (single, pending, tree) in zip(found, together, alone, strict=True):
        assert torch.equal(logits, single.verify(pending, tree))
        assert all(map(torch.equal, rows_of(target), rows_of(single)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, architecture(name))
    model = open_float32(tmp_path)
    try:
        assert_same(model)
        model.context.chunk_rows = 7  # borders within texts and between them
        assert_same(model)
    finally:
        model.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, architecture("llama"))
    return folder


@pytest.fixture
def model(folder: Path) -> Iterator[StreamedModel]:
    opened = open_float32(folder)
    yield opened
    opened.close()


def test_bfloat16(folder: Path) -> None:
    model = ModelSpec(device=torch.device("cpu"), dtype=torch.bfloat16, tiers="ssd").open(
        read_checkpoint(folder)
    )
    try:
        assert_same(model)
    finally:
        model.close()


def test_rows_of_all_texts_go_through_a_product_together(
    model: StreamedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    texts = texts_of(model)
    mlp = model.skeleton.layers[0].layer.mlp
    mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    verify_together(texts)
    assert seen == [sum(pending + nodes for _, pending, nodes in TEXTS)]


def test_a_layer_that_computes_with_cached_keys_lets_texts_take_turns(
    model: StreamedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some architectures do; found out in the first pass of several texts, and not again."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface

    def touching(name: str, default: object) -> object:
        attend = plain(name, default)
        return lambda module, query, key, value, *args, **kwargs: attend(
            module, query, key.repeat(1, 1, 1, 1), value, *args, **kwargs
        )

    monkeypatch.setattr(modeling_llama.ALL_ATTENTION_FUNCTIONS, "get_interface", touching)
    passes: list[int] = []
    model.on_layer = passes.append
    assert not model._turns
    assert_same(model)
    assert model._turns
    streamed = model.bytes_streamed
    verify_together(texts_of(model)[:1])
    assert_same(model)
    assert model.bytes_streamed > streamed


def test_a_failed_pass_leaves_every_text_as_it_was(model: StreamedModel) -> None:
    texts, alone = texts_of(model), texts_of(model)
    before = [rows_of(target) for target, *_ in texts]

    def fail(index: int) -> None:
        if index == 1:
            raise KeyboardInterrupt

    model.on_layer = fail
    with pytest.raises(KeyboardInterrupt):
        verify_together(texts)
    model.on_layer = lambda index: None
    for (target, *_), rows in zip(texts, before, strict=True):
        now = rows_of(target)
        assert all(map(torch.equal, now[: len(rows)], rows))
        assert not any(part.numel() for part in now[len(rows) :])
    found = verify_together(texts)
    for logits, (single, pending, tree) in zip(found, alone, strict=True):
        assert torch.equal(logits, single.verify(pending, tree))


def test_copied_rows_are_those_of_a_pass(model: StreamedModel) -> None:
    tokens = random_tokens(40)
    first, second, fresh = (LocalTarget(model) for _ in range(3))
    first.verify(tokens, DraftTree.empty())
    first.commit([])
    second.verify(random_tokens(3, 9), DraftTree.empty())
    second.commit([])
    second.copy_rows(first, 25)
    fresh.verify(tokens[:25], DraftTree.empty())
    fresh.commit([])
    assert second.tokens == fresh.tokens
    assert all(map(torch.equal, rows_of(second), rows_of(fresh)))
    rest, tree = tokens[25:], random_tree(9, 1)
    assert torch.equal(second.verify(rest, tree), fresh.verify(rest, tree))
    assert first.tokens == tokens
