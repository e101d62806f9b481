"""What scripts/conformance claims: a few types are tried here, and its table is the docs' one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from checkpoints import architecture, open_float32, save_checkpoint
from safetensors.torch import load_file, save_file
from specexec_kernels import dispatch

from specexec_cli.errors import CheckpointError
from specexec_cli.models import attention, decoder_layer, streamed
from specexec_cli.planning.architectures import ARCHITECTURES
from specexec_cli.planning.conforming import EXPERTS, REFUSED, RUNS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import conformance_check  # noqa: E402
import conformance_report  # noqa: E402
from conformance_check import NotConforming, check  # noqa: E402

# each has what the others have not: sinks and windows, chunks and layers without rotary positions,
# shared keys and pictures, compressed keys, an older way to call layers, experts in one tensor,
# queries that the model scales by position for its layers
_TRIED = ("gpt_oss", "llama4", "gemma4", "deepseek_v3", "falcon", "granitemoe", "beam")


@pytest.mark.parametrize("model_type", _TRIED)
def test_a_few_types_conform(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma4", "deepseek_v3"])
def test_the_kernels_of_a_gpu_conform(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter: sinks, windows, shared and compressed keys, and no dense mask."""
    monkeypatch.setattr(dispatch, "uses_triton", lambda device: True)
    monkeypatch.delattr(attention, "_dense_attention")
    monkeypatch.delattr(attention, "_grouped")
    monkeypatch.delattr(attention, "_split")
    own = conformance_check._save(model_type, tmp_path, noise=0.0)
    with conformance_check._small_chunks():
        conformance_check._check_passes(own, tmp_path)


def test_the_table_is_the_docs_one() -> None:
    assert conformance_report.DOCS.read_text() == conformance_report.docs(RUNS, REFUSED, EXPERTS)
    assert set(ARCHITECTURES) == set(RUNS), "what is registered by hand conforms too"
    assert not RUNS.keys() & REFUSED.keys()
    assert len(RUNS) >= 60


def test_every_refusal_has_its_reason() -> None:
    """A sentence from the cause, no exception as it was raised."""
    raw = [why for why in REFUSED.values() if "when it is tried" in why or "Error" in why]
    assert raw == []


@pytest.mark.parametrize("model_type", ["gpt_oss", "glm4_moe", "deepseek_v3", "dbrx", "llama"])
def test_the_table_says_how_experts_move(model_type: str) -> None:
    assert conformance_report.how_experts_move(model_type) == EXPERTS.get(model_type)


def test_a_window_that_is_forgotten_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "visible_span", lambda config, index: None)
    with pytest.raises(NotConforming, match="logits prompt and tree differ"):
        check("gpt_oss", tmp_path)


def test_a_sink_that_is_forgotten_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = decoder_layer.DecoderLayer.stage

    def without(layer: decoder_layer.DecoderLayer, *given: object) -> dict[str, torch.Tensor]:
        weights = stage(layer, *given)  # type: ignore[arg-type]
        return {
            name: torch.full_like(weight, -1e4) if name.endswith("sinks") else weight
            for name, weight in weights.items()
        }

    monkeypatch.setattr(decoder_layer.DecoderLayer, "stage", without)
    with pytest.raises(NotConforming, match="logits prompt and tree differ"):
        check("gpt_oss", tmp_path)


def test_positions_that_are_slots_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 scales queries by position; in a tree siblings have one, and two slots."""
    monkeypatch.setattr(
        decoder_layer.DecoderLayer, "_scale_queries_by_position", lambda layer: None
    )
    with pytest.raises(NotConforming, match=r"logits .* differ"):
        check("llama4", tmp_path)


def test_a_tensor_that_belongs_to_nothing_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"model.layers.1.mlp.fourth_proj.weight": torch.zeros(3, 3)}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.fourth_proj.weight' belongs"):
        open_float32(tmp_path)


def test_what_older_versions_saved_is_let_be(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    path = tmp_path / "model.safetensors"
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(load_file(path) | {name: torch.zeros(4)}, path, metadata={"format": "pt"})
    model = open_float32(tmp_path)
    assert set(model.skeleton.unused) == {name}
    model.close()


def test_a_model_that_sees_says_that_pictures_are_not_read(tmp_path: Path) -> None:
    conformance_check._save("gemma3", tmp_path, noise=0.0)
    told: list[str] = []
    model = open_float32(tmp_path, notice=told.append)
    model.close()
    assert [text for text in told if "pictures are not read" in text] == told
    assert len(told) == 1
    assert any("vision_tower" in name for name in model.skeleton.unused)


def test_every_tensor_is_used_or_unused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("mixtral"))
    model = open_float32(tmp_path)
    used = {each.name for layer in model.skeleton.layer_tensors for each in layer.values()}
    used |= {each.name for each in model.skeleton.resident_tensors.values()}
    stored = set(load_file(tmp_path / "model.safetensors"))
    assert used | set(model.skeleton.unused) == stored
    assert not used & set(model.skeleton.unused)
    model.close()
