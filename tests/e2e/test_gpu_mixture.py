"""A mixture's layer with all experts on a GPU: few launches, no wait for the router's choices.

Held on a stand-in for a GPU, with our kernels in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import architecture, open_float32, random_tokens, save_checkpoint
from fake_cuda import CUDA, Counts, counted, fake_cuda
from gpt_oss_checkpoints import save_mxfp4
from quantized_checkpoints import save_quantized
from torch import Tensor

from specexec_cli.config import Tier
from specexec_cli.models.expert_mlp import PerExpert, Routing
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint


def opened(folder: Path, tiers: list[Tier] | None, dtype: torch.dtype) -> StreamedModel:
    return ModelSpec(device=CUDA, dtype=dtype, tiers=tiers).open(read_checkpoint(folder))


def saved(kind: str, folder: Path) -> Path:
    if kind == "gpt-oss":
        return save_mxfp4(folder)[1]
    if kind == "plain":
        save_checkpoint(folder, architecture("qwen3-moe"))
        return folder
    return save_quantized(folder, "qwen3-moe")[1]


# gpt-oss' gate is transformers' own code
@pytest.mark.parametrize(("kind", "most"), [("packed", 6), ("plain", 6), ("gpt-oss", 13)])
@pytest.mark.parametrize("rows", [1, 40])
def test_few_launches_and_no_waits(
    kind: str, most: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the experts of a layer; the first pass uploads one table a launch, others nothing."""
    forward, found = PerExpert.forward, list[Counts]()

    def of_experts(*args: Tensor) -> Tensor:
        with counted() as counts:
            found.append(counts)
            return forward(*args)

    with fake_cuda(triton=True):
        model = opened(saved(kind, tmp_path), ["resident"] * 3, torch.float16)
        state = model.new_state()
        model.forward(PassRows.chain([3], 0), state, [0])
        monkeypatch.setattr(PerExpert, "forward", of_experts)
        monkeypatch.delattr(Routing, "__init__")  # which tells the host of the choices
        model.forward(PassRows.chain(random_tokens(rows), 1), state, [0])
        layers = len(model.layers)
        model.close()
    assert [each.waits for each in found] == [0] * layers
    assert [each.kernels for each in found] == [4] * layers  # sorted, gate and up, down, summed
    assert max(each.operations for each in found) <= most - 4


def test_tables_of_streamed_experts_are_sent_once_for_each_buffer_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers come into two buffers, so that each layer is in either by its second pass."""
    folder, found, forward = saved("packed", tmp_path), list[Counts](), PerExpert.forward

    def of_experts(*args: Tensor) -> Tensor:
        with counted() as counts:
            found.append(counts)
            return forward(*args)

    def passes(tiers: list[Tier]) -> Tensor:
        spec = ModelSpec(device=CUDA, dtype=torch.float16, tiers=tiers, device_buffers=2)
        model = spec.open(read_checkpoint(folder))
        state = model.new_state()
        logits = [model.forward(PassRows.chain([7], at), state, [0]).cpu() for at in range(3)]
        model.close()
        return torch.cat(logits)

    with fake_cuda(triton=True, pins_bytes=1 << 62):
        expected = passes(["resident"] * 3)
        monkeypatch.setattr(PerExpert, "forward", of_experts)
        assert torch.equal(passes(["ram"] * 3), expected)
    assert [each.waits for each in found] == [0] * 9
    operations = [each.operations for each in found]
    assert operations[6:] == [operations[-1]] * 3
    assert operations[:6] == [operations[-1] + 1] * 6  # both tables of a layer in one copy


@pytest.mark.parametrize("tiers", [["resident", "ram", "ssd"], None])
@pytest.mark.parametrize("kind", ["packed", "plain", "gpt-oss"])
def test_the_same_logits_as_on_the_cpu(
    kind: str, tiers: list[Tier] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that stay, and experts that come with their layers into buffers."""
    folder = saved(kind, tmp_path)

    def passes(model: StreamedModel) -> Tensor:
        tokens, state = random_tokens(12), model.new_state()
        found = [model.forward(PassRows.chain(tokens[:11], 0), state, range(11))]
        found.append(model.forward(PassRows.chain(tokens[11:], 11), state, [0]))
        model.close()
        return torch.cat(found).cpu()

    expected = passes(open_float32(folder))
    with fake_cuda(triton=True):
        monkeypatch.delattr(Routing, "__init__")
        found = passes(opened(folder, tiers, torch.float32))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_row_has_the_same_bits_in_every_pass(tmp_path: Path) -> None:
    folder, tokens = saved("packed", tmp_path), random_tokens(30)

    def logits(model: StreamedModel, sizes: list[int]) -> Tensor:
        state, found, first = model.new_state(), [], 0
        for size in sizes:
            rows = PassRows.chain(tokens[first : first + size], first)
            found.append(model.forward(rows, state, range(size)).cpu())
            first += size
        return torch.cat(found)

    with fake_cuda(triton=True):
        model = opened(folder, ["resident"] * 3, torch.float16)
        expected = logits(model, [30])
        assert torch.equal(logits(model, [1, 9, 20]), expected)
        model.close()
