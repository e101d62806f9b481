"""What scripts/conformance claims: a few types are tried here, and its table is the docs' one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import architecture, chain_logits, open_float32, save_checkpoint
from interpreter import only_kernels_attend
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

from specexec_cli.catalog.architectures import ARCHITECTURES
from specexec_cli.catalog.conforming import EXPERTS, PICKED, REFUSED, RUNS
from specexec_cli.errors import CheckpointError
from specexec_cli.models import attention, decoder_layer, streamed, tensor_finder
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.built_sizes import text_model_class
from specexec_cli.planning.sizes import architecture_bytes, checkpoint_bytes

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import conformance_check  # noqa: E402
import conformance_report  # noqa: E402
from conformance_bits import check_bits  # noqa: E402
from conformance_check import check, check_passes, check_unused, check_variant  # noqa: E402
from conformance_configs import VARIANTS, tiny_config  # noqa: E402
from conformance_logits import NotConforming  # noqa: E402
from conformance_reasons import by_error, kind_among  # noqa: E402

# each has what the others have not: sinks and windows, chunks and layers without rotary positions,
# shared keys and pictures, compressed keys and experts in groups, an older way to call layers,
# experts in one tensor, queries that the model scales by position for its layers, a head of several
# layers, a recurrence by the delta rule, layers without a state, one beside attention,
# convolutions, channels that keep states, layers that share weights, an index over tokens that
# layers share
_TRIED = (
    "gpt_oss",
    "llama4",
    "gemma4",
    "deepseek_v3",
    "falcon",
    "granitemoe",
    "beam",
    "modernbert-decoder",
    "qwen3_5_text",
    "nemotron_h",
    "falcon_h1",
    "lfm2",
    "falcon_mamba",
    "zamba2",
    "glm_moe_dsa",
)


def _built(config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = text_model_class(config)._from_config(config)
    return model


@pytest.mark.parametrize("model_type", _TRIED)
def test_a_few_types_conform(model_type: str, tmp_path: Path) -> None:
    check(model_type, tmp_path)


@pytest.mark.parametrize("model_type", ["afmoe", "jetmoe"])
def test_heads_of_a_real_size_conform(model_type: str, tmp_path: Path) -> None:
    """Heads of 64, which kernels take: those of the smallest models are no whole vectors."""
    own = conformance_check.save(model_type, tmp_path, noise=0.0, widen=8)
    with conformance_check.small_chunks():
        conformance_check.check_passes(own, tmp_path)


_RECURRENT = ("qwen3_next", "kimi_linear", "bamba", "jamba")


# attention by operators, by an interface that a wrapper loses, by other names; linears and experts
# of their own; activations of few columns and by other functions; recurrent layers
@pytest.mark.parametrize(
    "model_type",
    [
        *["falcon", "gpt2", "deepseek_vl", "gptj", "dbrx", "phimoe", "kolibri1", "laguna", "afmoe"],
        *_RECURRENT,
    ],
)
def test_a_rows_bits_are_its_own(model_type: str, tmp_path: Path) -> None:
    conformance_check.save(model_type, tmp_path, noise=0.0, widen=8)
    check_bits(tmp_path, conformance_check.WORDS, [torch.float32])


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma4", "deepseek_v3", "qwen3_5_text"])
def test_the_kernels_of_a_gpu_conform(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter: sinks, windows, shared and compressed keys, states; no dense mask"""
    only_kernels_attend(monkeypatch, attention)
    own = conformance_check.save(model_type, tmp_path, noise=0.0)
    with conformance_check.small_chunks():
        conformance_check.check_passes(own, tmp_path)


@pytest.mark.parametrize(
    "model_type", ["cohere", "glm4_moe", "gpt_neox", "phi", "stablelm", "zamba2"]
)
def test_options_of_published_models_conform(model_type: str, tmp_path: Path) -> None:
    for number, options in enumerate(VARIANTS[model_type]):
        check_variant(model_type, tmp_path / str(number), options)


def test_a_variant_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotConforming, match=r"with alibi=True: .*ALiBi"):
        check_variant("falcon", tmp_path, {"alibi": True})


@pytest.mark.parametrize("model_type", sorted(VARIANTS))
def test_every_option_is_one_of_its_type(model_type: str) -> None:
    """And sets what the small defaults leave alone, so that a variant tries something."""
    defaults = tiny_config(model_type).to_dict()
    for options in VARIANTS[model_type]:
        assert {name: defaults[name] for name in options} != dict(options)
    with pytest.raises(KeyError, match="has no option 'no_such'"):
        tiny_config(model_type, {"no_such": 1})


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("deepseek_v3", {}), ("glm4_moe", {}), ("deepseek_v2", VARIANTS["deepseek_v2"][0])],
)
def test_the_tiny_models_route_within_groups(model_type: str, options: dict[str, object]) -> None:
    """Some rows would go to other experts if there were one group."""
    chosen = []
    for groups in ({}, {"n_group": 1, "topk_group": 1}):
        torch.manual_seed(0)
        model = _built(tiny_config(model_type, {**options, **groups}))
        router = next(part for part in model.modules() if type(part).__name__.endswith("Router"))
        with torch.no_grad():
            for parameter in router.parameters():
                parameter.normal_()
        hidden = torch.randn(64, model.config.hidden_size)
        *_, experts = router(hidden)
        chosen.append(experts.sort(dim=-1).values)
    assert not torch.equal(*chosen)


def test_the_table_is_the_docs_one() -> None:
    assert conformance_report.DOCS.read_text() == conformance_report.docs(RUNS, REFUSED, EXPERTS)
    assert set(ARCHITECTURES) == set(RUNS), "what is registered by hand conforms too"
    assert not RUNS.keys() & REFUSED.keys()
    assert len(RUNS) >= 60
    picked = [conformance_report.picked(name) for name in RUNS]
    assert {name: count for each in picked for name, count in each.items()} == PICKED


def test_every_refusal_has_its_reason() -> None:
    """A sentence from the cause, no exception as it was raised."""
    raw = [why for why in REFUSED.values() if "when it is tried" in why or "Error" in why]
    assert raw == []


def test_a_kind_of_layer_that_the_tiny_model_has_not_is_the_reason() -> None:
    found = kind_among(["Lfm2ShortConv"])
    assert found is not None
    assert by_error(found) == found
    assert by_error("CheckpointError: x").startswith("fails when it is tried")


@pytest.mark.parametrize(
    "model_type", ["gpt_oss", "glm4_moe", "deepseek_v3", "dbrx", "llama4", "llama"]
)
def test_the_table_says_how_experts_move(model_type: str) -> None:
    assert conformance_report.how_experts_move(model_type) == EXPERTS.get(model_type)


def test_a_window_that_is_forgotten_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "visible_span", lambda config, index: None)
    with pytest.raises(NotConforming, match="logits prompt and tree differ"):
        check("gpt_oss", tmp_path)


def test_a_sink_that_is_forgotten_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = decoder_layer.DecoderLayer._changed

    def without(layer: decoder_layer.DecoderLayer, *given: object) -> dict[str, torch.Tensor]:
        weights = changed(layer, *given)  # type: ignore[arg-type]
        return {
            name: torch.full_like(weight, -1e4) if name.endswith("sinks") else weight
            for name, weight in weights.items()
        }

    monkeypatch.setattr(decoder_layer.DecoderLayer, "_changed", without)
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
    conformance_check.save("gemma3", tmp_path, noise=0.0)
    told: list[str] = []
    model = open_float32(tmp_path, notice=told.append)
    model.close()
    assert [text for text in told if "pictures are not read" in text] == told
    assert len(told) == 1
    assert any("vision_tower" in name for name in model.skeleton.unused)


def test_a_head_inside_the_part_for_text_is_found(tmp_path: Path) -> None:
    """transformers names no head of the whole model, whose forward is its part's."""
    own = conformance_check.save("nemotron_h_omni", tmp_path, noise=0.0)
    assert own.get_output_embeddings() is None
    check_passes(own, tmp_path)


def test_a_tied_tensor_that_is_stored_too_is_unused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama-tied"))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    table = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": table}, path, metadata={"format": "pt"})
    model = open_float32(tmp_path)
    assert model.skeleton.unused == {"lm_head.weight": "tied to model.embed_tokens.weight"}
    check_unused(model)
    model.close()


def test_a_part_that_is_not_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text-only model nothing but tied tensors may be left over."""
    save_checkpoint(tmp_path, architecture("mixtral"))
    tensors = tensor_finder.text_tensors
    monkeypatch.setattr(
        tensor_finder, "text_tensors",
        lambda model: [each for each in tensors(model) if each[0] != "model.norm.weight"],
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"tensor 'model.norm.weight' is 'model.norm.weight'"):
        open_float32(tmp_path)


def test_two_tensors_for_one_place_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("mixtral"))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    expert = next(name for name in tensors if ".experts.2." in name)
    for name in ("model.norm.weight", expert):
        short = name.removeprefix("model.")
        twice = tensors | {short: tensors[name].clone()}
        save_file(twice, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"tensors '.*{re.escape(short)}' and '.* both"):
            open_float32(tmp_path)


def test_what_nothing_needs_shows_in_a_conformance_run(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    path = tmp_path / "model.safetensors"
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(load_file(path) | {name: torch.zeros(4)}, path, metadata={"format": "pt"})
    model = open_float32(tmp_path)
    with pytest.raises(NotConforming, match="inv_freq' is unused: computed, not loaded"):
        check_unused(model)
    model.close()


def test_a_name_of_a_maker_is_that_of_transformers(tmp_path: Path) -> None:
    """Kimi-K2 says kimi_k2, and has the layers and the tensors of deepseek_v3."""
    conformance_check.save("deepseek_v3", tmp_path, noise=0.0)
    sizes = checkpoint_bytes(read_checkpoint(tmp_path))
    logits = []
    for model_type in ("deepseek_v3", "kimi_k2"):
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        assert checkpoint_bytes(read_checkpoint(tmp_path)) == sizes
        assert architecture_bytes(read_checkpoint(tmp_path).config).layers == sizes.layers
        model = open_float32(tmp_path)
        logits.append(chain_logits(model, [3, 5, 9, 4, 30, 33]))
        model.close()
    assert torch.equal(*logits)


def test_omni_files_as_nvidia_publishes_them_are_read(tmp_path: Path) -> None:
    """Their config.json has names of its own, and transformers' class no place for some tensors.

    Names: NVIDIA-NeMo/Automodel and PrimeIntellect-ai/prime-rl, which read these files.
    """
    conformance_check.save("nemotron_h_omni", tmp_path, noise=0.0)
    model = open_float32(tmp_path)
    expected = chain_logits(model, [3, 5, 9, 4, 30, 33])
    model.close()
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    config = json.loads(path.read_text())
    text, sizes = config["text_config"], architecture_bytes(config).layers
    kinds = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    text["hybrid_override_pattern"] = "".join(map(kinds.get, text.pop("layers_block_type")))
    omni = {
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3", "llm_config": text,
        "vision_config": config["vision_config"], "vit_hidden_size": config["vision_hidden_size"],
        "sound_config": {"model_type": "parakeet", "hidden_size": 32, "num_hidden_layers": 1,
                         "projection_hidden_size": 32, "projection_bias": False},
        "img_context_token_id": 60, "sound_context_token_id": 60, "video_temporal_patch_size": 2,
        "projector_hidden_size": config["projector_hidden_size"], "downsample_ratio": 0.5,
    }  # fmt: skip
    path.write_text(json.dumps(omni))
    beside = (
        "vision_model.radio_model.input_conditioner.norm_mean",
        "sound_encoder.encoder.feature_extractor.featurizer.fb", "sound_projection.norm.weight",
    )  # fmt: skip
    save_file(load_file(file) | {name: torch.ones(3) for name in beside}, file)
    checkpoint = read_checkpoint(tmp_path)
    assert architecture_bytes(checkpoint.config).layers == sizes
    assert checkpoint_bytes(checkpoint).layers == sizes
    model = open_float32(tmp_path)
    assert torch.equal(chain_logits(model, [3, 5, 9, 4, 30, 33]), expected)
    assert set(beside) <= set(model.skeleton.unused)
    model.close()
    unknown = {"language_model.model.layers.0.nothing.weight": torch.ones(3)}
    save_file(load_file(file) | unknown, file)
    with pytest.raises(CheckpointError, match=r"layers\.0\.nothing\.weight' belongs to nothing"):
        open_float32(tmp_path)
