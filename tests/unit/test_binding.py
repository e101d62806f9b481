"""Parameters of layers come and go: those in RAM stay bound, those of a ring leave nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import architecture, random_tokens, save_checkpoint
from torch import nn

from specexec_cli.config import Tier
from specexec_cli.models import expert_mlp
from specexec_cli.models.binding import Binding
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.offload.stream import LayerStream


def in_memory(model: StreamedModel, index: int) -> set[str]:
    """Which parameters of a layer are bound."""
    named = model.layers[index].layer.named_parameters()
    return {name for name, parameter in named if not parameter.is_meta}


def run(model: StreamedModel) -> torch.Tensor:
    rows = PassRows.chain(random_tokens(3), 0)
    return model.forward(rows, model.new_state(), [2])


def test_tensors_are_put_into_their_places_and_taken_out_again() -> None:
    norm = nn.BatchNorm1d(3)
    both = nn.ModuleDict({"norm": norm})
    weight, mean = norm.weight, norm.running_mean
    binding = Binding(both, {"norm.weight": "a", "norm.running_mean": "b"})
    binding.bind({"a": torch.full((3,), 2.0), "b": torch.full((3,), 5.0)})
    assert (float(norm.weight[0]), float(norm.running_mean[0])) == (2.0, 5.0)
    binding.release()
    assert norm.weight is weight
    assert norm.running_mean is mean


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-moe"])
def test_what_stays_in_ram_is_bound_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture(name))
    tiers: list[Tier] = ["ram", "ssd", "ram"]
    model = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers=tiers).open(
        read_checkpoint(tmp_path)
    )
    assert isinstance(model.source, LayerStream)
    first = run(model)
    of_linears = {each for each in in_memory(model, 0) if "norm" not in each}
    assert len(of_linears) >= 7
    assert not in_memory(model, 1)
    bound: list[Binding] = []
    bind = Binding.bind

    def noted(self: Binding, tensors: dict[str, torch.Tensor]) -> None:
        bound.append(self)
        bind(self, tensors)

    monkeypatch.setattr(Binding, "bind", noted)
    assert torch.equal(run(model), first)
    unchanging = [layer._unchanging for layer in model.layers]
    assert [each in bound for each in unchanging] == [False, True, False]
    model.close()
    assert not any(in_memory(model, index) for index in range(3))


def test_experts_that_stay_in_ram_are_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, architecture("qwen3-moe"))
    tiers: list[Tier] = ["ram", "ssd", "ram"]
    model = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers=tiers).open(
        read_checkpoint(tmp_path)
    )
    first = run(model)
    streamed = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers="ssd").open(
        read_checkpoint(tmp_path)
    )
    assert torch.equal(first, run(streamed))
    streamed.close()
    looked: list[int] = []
    look = expert_mlp.Group
    monkeypatch.setattr(expert_mlp, "Group", lambda of: (looked.append(1), look(of))[1])
    assert torch.equal(run(model), first)
    assert 0 < len(looked) <= 8, "those of the layer that is read again"
    model.close()
    mixtures = [part for layer in model.layers for part in layer._mixtures]
    assert len(mixtures) == 3
    assert not any(part._known for part in mixtures)


def test_a_pass_that_ends_in_an_error_leaves_nothing_bound(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama-biases"))
    model = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers="ssd").open(
        read_checkpoint(tmp_path)
    )

    def fails(*args: object) -> None:
        raise RuntimeError("stopped")

    handle = model.layers[1].layer.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="stopped"):
        run(model)
    assert not any(in_memory(model, index) for index in range(3))
    handle.remove()
    assert model.source is not None
    model.source.restart()
    assert run(model).isfinite().all()
    model.close()
