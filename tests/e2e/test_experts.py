"""Experts that come one by one: the same logits as whole layers, whatever fits into memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
from gpt_oss_checkpoints import save_mxfp4
from quantized_checkpoints import save_quantized
from safetensors.torch import load_file, save_file
from specexec_kernels.cpu_grouped import Group
from specexec_kernels.formats.base import PackedWeight
from torch import Tensor

from specexec_cli.errors import CheckpointError
from specexec_cli.models import expert_mlp, pass_context
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import checkpoint_bytes
from specexec_cli.verify.masks import verification_rows

MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "qwen3-moe-mixed"]


def logits_of_a_text(model: StreamedModel) -> list[Tensor]:
    """Of a prompt, of single tokens behind it, and of a tree."""
    cache, tokens, tree = model.new_state(), random_tokens(40), random_tree(9, seed=2)
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


def experts_in_all(folder: Path) -> int:
    """Experts of all layers."""
    model = open_float32(folder, expert_bytes=1 << 24)
    assert model.experts is not None
    count = len(model.experts.files)
    model.close()
    return count


def assert_same_under_caps(folder: Path, dtype: torch.dtype, slots: list[int]) -> None:
    def opened(tier: str, cap_bytes: int) -> StreamedModel:
        return ModelSpec(
            device=torch.device("cpu"), dtype=dtype, tiers=tier, expert_bytes=cap_bytes
        ).open(read_checkpoint(folder))

    whole = opened("ssd", 0)
    expected = logits_of_a_text(whole)
    whole.close()
    each = slot_bytes(folder)
    # what a cap changes does not ask where the dense parts are: the ends tell whether both agree
    for tier, counts in (("ssd", slots), ("ram", [slots[0], slots[-1]])):
        for count in counts:
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
    every = list(range(1, experts_in_all(tmp_path) + 1))
    assert_same_under_caps(tmp_path, torch.float32, every)
    monkeypatch.setattr(pass_context, "CHUNK_ROWS", 7)
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


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_one_tensor_give_the_logits_of_separate_ones(name: str, tmp_path: Path) -> None:
    """transformers can save all experts of a layer as one tensor, and names as its own modules."""
    own = save_checkpoint(tmp_path / "apart", architecture(name))
    own.save_pretrained(tmp_path / "fused", save_original_format=False)
    stored = read_checkpoint(tmp_path / "fused")
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in stored)
    sizes = [checkpoint_bytes(read_checkpoint(tmp_path / each)) for each in ("apart", "fused")]
    assert sizes[0] == sizes[1]
    assert_same_under_caps(tmp_path / "fused", torch.float32, [1, 3])
    both = [open_float32(tmp_path / each, expert_bytes=1 << 20) for each in ("apart", "fused")]
    separate, fused = map(logits_of_a_text, both)
    for model in both:
        model.close()
    assert all(torch.equal(left, right) for left, right in zip(separate, fused, strict=True))
    model = open_float32(tmp_path / "fused", None)  # loaded to stay
    torch.testing.assert_close(logits_of_a_text(model)[0], separate[0], rtol=0, atol=1e-4)
    model.close()


def test_a_tensor_of_all_experts_of_another_shape_is_refused(tmp_path: Path) -> None:
    own = save_checkpoint(tmp_path / "apart", architecture("mixtral"))
    own.save_pretrained(tmp_path / "fused", save_original_format=False)
    path = tmp_path / "fused" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"gate_up_proj' has shape .* config.json asks for"):
        open_float32(tmp_path / "fused")


def test_chunks_of_a_prompt_read_an_expert_once_where_a_layer_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer runs all chunks before the next one: what it used stays until it is done."""
    save_checkpoint(tmp_path, architecture("qwen3-moe"))
    monkeypatch.setattr(pass_context, "CHUNK_ROWS", 7)
    slots = architecture("qwen3-moe").num_experts
    model = open_float32(tmp_path, expert_bytes=slots * slot_bytes(tmp_path))
    store = model.experts
    assert store is not None
    once = sum(store.files.n_bytes(key) for key in range(len(store.files)))
    model.forward(PassRows.chain(random_tokens(70), 0), model.new_state(), [0])
    assert store.touched > 5 * len(store.files), "every chunk asks anew"
    assert store.bytes_read <= once
    # later passes read ahead, and what is expected of a later layer may have to give way once
    before = store.bytes_read
    model.forward(PassRows.chain(random_tokens(70), 0), model.new_state(), [0])
    assert store.bytes_read - before <= 1.5 * once
    model.close()


def test_in_bfloat16_too(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("qwen3-moe"), dtype=torch.bfloat16)
    assert_same_under_caps(tmp_path, torch.bfloat16, [1, 4])


@pytest.mark.parametrize("desc_act", [False, True])
def test_packed_experts(desc_act: bool, tmp_path: Path) -> None:
    _, packed = save_quantized(tmp_path, "mixtral", desc_act=desc_act)
    assert_same_under_caps(packed, torch.float32, [1, 4])


def test_a_pass_that_needs_everything_reads_each_layer_at_once(tmp_path: Path) -> None:
    """One read in place of one for each of its four experts, and no block twice."""
    save_checkpoint(tmp_path, architecture("qwen3-moe"))
    model = open_float32(tmp_path, expert_bytes=1 << 24)
    store = model.experts
    assert store is not None
    experts = architecture("qwen3-moe").num_experts
    n_bytes = 0
    for layer in range(3):
        keys = store.files.in_order(range(layer * experts, (layer + 1) * experts))
        first, last = (store.files.pieces(key, 0) for key in (keys[0], keys[-1]))
        file_bytes = last[-1].extent.path.stat().st_size
        n_bytes += min(last[-1].extent.stop, file_bytes) - first[0].extent.start
    model.forward(PassRows.chain(random_tokens(70), 0), model.new_state(), [0])
    assert (store.touched, store.reads, store.bytes_read) == (3 * experts, 3, n_bytes)
    assert n_bytes < sum(map(store.files.n_bytes, range(3 * experts)))
    model.close()


@pytest.mark.parametrize("kind", ["columns", "rows"])
def test_packed_weights_are_looked_at_once_while_they_stay(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that one launch takes together, and MXFP4, which is multiplied one after another."""
    save = save_mxfp4 if kind == "rows" else partial(save_quantized, name="mixtral")
    _, packed = save(tmp_path)
    looked: list[object] = []

    class Counted(Group):
        def __init__(self, weights: Sequence[PackedWeight]) -> None:
            looked.append(weights)
            super().__init__(weights)

    monkeypatch.setattr(expert_mlp, "Group", Counted)
    model = open_float32(packed, expert_bytes=1 << 24)
    assert model.experts is not None
    cache, tokens = model.new_state(), random_tokens(30)
    model.forward(PassRows.chain(tokens, 0), cache, [0])
    assert len(looked) == len(model.experts.scores.counts[model.experts.scores.counts > 0])
    before = len(looked)
    cache.crop(0)
    model.forward(PassRows.chain(tokens, 0), cache, [0])
    model.close()
    assert len(looked) == before


def test_a_row_does_not_depend_on_what_others_choose(tmp_path: Path) -> None:
    """The sum over a row's experts has one order, whichever arrives first."""
    save_checkpoint(tmp_path, architecture("qwen3-moe"))
    model = open_float32(tmp_path, expert_bytes=2 * slot_bytes(tmp_path))
    cache = model.new_state()
    alone = model.forward(PassRows.chain([5], 0), cache, [0])
    for last in range(6, 20):
        cache.crop(0)
        both = model.forward(PassRows.chain([5, last], 0), cache, [0])
        assert torch.equal(both, alone)
    model.close()
