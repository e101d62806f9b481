"""Experts that come one by one: the same logits as whole layers, whatever fits into memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import (
    architecture,
    chain_logits,
    open_float32,
    random_tokens,
    random_tree,
    save_checkpoint,
)
from quantized_checkpoints import save_quantized
from torch import Tensor

from specexec_cli.models import decoder_layer
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.verify.masks import verification_rows

MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "qwen3-moe-mixed"]


def logits_of_a_text(model: StreamedModel) -> list[Tensor]:
    """Of a prompt, of single tokens behind it, and of a tree."""
    cache, tokens, tree = model.new_cache(), random_tokens(40), random_tree(9, seed=2)
    logits = [model.forward(PassRows.chain(tokens[:20], 0), cache, range(20))]
    for place in range(20, 30):
        logits.append(model.forward(PassRows.chain([tokens[place]], place), cache, [0]))
    rows = verification_rows(tokens[30:], tree, 30)
    logits.append(model.forward(rows, cache, range(9, len(rows.tokens))))
    return logits


def slot_bytes(folder: Path) -> int:
    """Of the store that a model opens with a cap."""
    model = open_float32(folder, expert_bytes=1 << 24)
    assert model.experts is not None
    size = model.experts.slot_bytes
    model.close()
    return size


def assert_same_under_caps(folder: Path, dtype: torch.dtype, slots: list[int]) -> None:
    def opened(tier: str, cap_bytes: int) -> StreamedModel:
        return StreamedModel.open(
            read_checkpoint(folder), device=torch.device("cpu"), dtype=dtype,
            tiers=tier, expert_bytes=cap_bytes,
        )  # fmt: skip

    whole = opened("ssd", 0)
    expected = logits_of_a_text(whole)
    whole.close()
    each = slot_bytes(folder)
    for tier in ("ssd", "ram"):
        for count in slots:
            model = opened(tier, count * each)
            assert model.experts is not None
            assert model.experts.slots == count
            for _ in range(2):  # with empty slots, and with what the first text left in them
                for ours, theirs in zip(logits_of_a_text(model), expected, strict=True):
                    assert torch.equal(ours, theirs)
            model.close()


@pytest.mark.parametrize("name", MIXTURES)
def test_any_cap_gives_the_logits_of_whole_layers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture(name), shard_bytes=20_000)
    assert_same_under_caps(tmp_path, torch.float32, [1, 2, 3, 8])
    monkeypatch.setattr(decoder_layer, "CHUNK_ROWS", 7)
    assert_same_under_caps(tmp_path, torch.float32, [1, 5])


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_transformers_own(name: str, tmp_path: Path) -> None:
    own = save_checkpoint(tmp_path, architecture(name))
    tokens = random_tokens(31)
    model = open_float32(tmp_path, expert_bytes=3 * slot_bytes(tmp_path))
    with torch.no_grad():
        expected = own(torch.tensor([tokens])).logits[0]
    scale = float(expected.abs().max())
    assert scale > 0.1
    ours = chain_logits(model, tokens)
    model.close()
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5 * max(1.0, scale))


def test_in_bfloat16_too(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("qwen3-moe"), dtype=torch.bfloat16)
    assert_same_under_caps(tmp_path, torch.bfloat16, [1, 4])


@pytest.mark.parametrize("desc_act", [False, True])
def test_packed_experts(desc_act: bool, tmp_path: Path) -> None:
    _, packed = save_quantized(tmp_path, "mixtral", desc_act=desc_act)
    assert_same_under_caps(packed, torch.float32, [1, 4])


def test_a_row_does_not_depend_on_what_others_choose(tmp_path: Path) -> None:
    """The sum over a row's experts has one order, whichever arrives first."""
    save_checkpoint(tmp_path, architecture("qwen3-moe"))
    model = open_float32(tmp_path, expert_bytes=2 * slot_bytes(tmp_path))
    cache = model.new_cache()
    alone = model.forward(PassRows.chain([5], 0), cache, [0])
    for last in range(6, 20):
        cache.crop(0)
        both = model.forward(PassRows.chain([5, last], 0), cache, [0])
        assert torch.equal(both, alone)
    model.close()
