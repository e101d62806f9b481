"""Row-packed checkpoints through the engine: every format, and damaged ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import BYTE_VOCAB, chain_logits, edit_json, open_float32, save_byte_tokenizer
from gguf_toys import TOYS, save_toy
from quantize_rows import RECIPES
from quantized_checkpoints import edit_quantization, edit_tensors
from row_checkpoints import save_row_packed
from safetensors.torch import load_file, save_file
from test_quantized import TOKENS, put, remove

from specexec_cli.config import GenerationConfig, Method, SamplingConfig
from specexec_cli.errors import CheckpointError
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.session import Session

DEMO = Path(__file__).parents[2] / "specexec_cli" / "demo"
COMPARED: tuple[Method, ...] = ("autoregressive", "specexec")
Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_are_those_of_the_unpacked_weights(recipe: str, tmp_path: Path) -> None:
    plain, packed = save_row_packed(tmp_path, recipe)
    notices: list[str] = []
    found, expected = open_float32(packed, "ssd", notice=notices.append), open_float32(plain, None)
    try:
        linear = found.skeleton.layers[1].layer.get_submodule("self_attn.q_proj")
        assert isinstance(linear, QuantizedLinear)
        ours, theirs = chain_logits(found, TOKENS), chain_logits(expected, TOKENS)
        assert theirs.std() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    finally:
        found.close()
        expected.close()
    quantizes_rows = recipe in ("fp8", "fp8-e5m2", "nvfp4-modelopt", "int8")
    assert len(notices) == quantizes_rows, "of activations that are quantized as well"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_format_writes_the_autoregressive_text(
    recipe: str, temperature: float, tmp_path: Path
) -> None:
    """A small target packed, which its own plain weights draft for: most nodes are accepted."""
    plain, packed = save_row_packed(tmp_path, recipe, vocab_size=BYTE_VOCAB, std=0.12)
    for folder in (plain, packed):
        save_byte_tokenizer(folder)
    assert_same_text(packed, plain, temperature)


def assert_same_text(target: Path, draft: Path, temperature: float) -> None:
    """Both methods write the same behind one prompt, and drafting takes fewer passes."""
    written: dict[Method, list[int]] = {}
    passes: dict[Method, int] = {}
    with Session.open(
        model=str(target), draft=str(draft), dtype="float32", offload="ssd", context_tokens=64
    ) as session:
        for method in COMPARED:
            steps = list(
                session.generate(
                    "def f(x):", method=method,
                    sampling=SamplingConfig(temperature=temperature, seed=7),
                    generation=GenerationConfig(max_tokens=24),
                )
            )  # fmt: skip
            written[method] = [token for step in steps for token in step.tokens]
            passes[method] = len(steps)
    assert written["specexec"] == written["autoregressive"]
    assert len(written["specexec"]) > 4
    assert passes["specexec"] < passes["autoregressive"]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("recipe", ["fp8", "mxfp4", "nvfp4", "w4a16", "w8a8", "nf4"])
def test_specexec_writes_what_autoregressive_decoding_writes(recipe: str, tmp_path: Path) -> None:
    """The demo target packed, streamed from the disk, sampled in float32."""
    from pack_rows import write_packed

    packed = write_packed(DEMO / "target", tmp_path / "packed", recipe)
    generation = GenerationConfig(max_tokens=24)
    written: dict[Method, list[int]] = {}
    passes = {}
    with Session.open(
        model=str(packed), draft=str(DEMO / "draft"), dtype="float32", offload="ssd"
    ) as session:
        # the policy cost drafts nothing where a busy machine makes trees slow
        tree = replace(session.pair.tree, policy="fixed")
        for method in COMPARED:
            steps = list(
                session.generate(
                    "import os\n\n\ndef read_lines(path):\n",
                    sampling=SamplingConfig(temperature=0.8, seed=7),
                    generation=generation, method=method, tree=tree,
                )
            )  # fmt: skip
            written[method] = [token for step in steps for token in step.tokens]
            passes[method] = len(steps)
    assert written["specexec"] == written["autoregressive"]
    assert len(written["specexec"]) > 10
    assert passes["specexec"] < passes["autoregressive"]


@pytest.mark.parametrize(
    ("recipe", "change", "message"),
    [
        ("fp8", remove(f"{Q_PROJ}.weight_scale_inv"), "q_proj.weight_scale' is missing"),
        ("fp8", put(f"{Q_PROJ}.weight_scale_inv", torch.ones(3, 1)), r"shape \[3, 1\]"),
        ("fp8", put(f"{Q_PROJ}.weight", torch.zeros(9, 64).to(torch.float8_e4m3fn)), r"\[9, 64\]"),
        ("mxfp4", remove(f"{Q_PROJ}.weight_scale"), "weight_scale' is missing"),
        ("mxfp4", put(f"{Q_PROJ}.weight_scale", torch.zeros(64, 3).byte()), r"shape \[64, 3\]"),
        ("mxfp4", put(f"{Q_PROJ}.weight_scale", torch.zeros(64, 2).int()), "expected U8"),
        ("nvfp4", remove(f"{Q_PROJ}.weight_global_scale"), "weight_global_scale' is missing"),
        ("w4a16", put(f"{Q_PROJ}.weight_packed", torch.zeros(64, 8)), "expected I32"),
        ("w4a16", put(f"{Q_PROJ}.weight_g_idx", torch.full((64,), 2)), "groups that there are not"),
        ("nf4", remove(f"{Q_PROJ}.weight.absmax"), "absmax' is missing"),
        ("nf4", remove(f"{Q_PROJ}.weight.quant_map"), "quant_map' is missing"),
        ("nf4", put(f"{Q_PROJ}.weight.quant_map", torch.zeros(15)), "15 values"),
        (
            "nf4",
            put(f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4", torch.zeros(9).byte()),
            "quant_state cannot be read",
        ),
    ],
)
def test_damaged_tensors(recipe: str, change: object, message: str, tmp_path: Path) -> None:
    _, packed = save_row_packed(tmp_path, recipe)
    edit_tensors(packed, change)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=message) as error:
        open_float32(packed)
    assert "\n" not in str(error.value)
    assert "q_proj" in str(error.value)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-channels"])
@pytest.mark.parametrize("place", ["model.layers.1.self_attn", Q_PROJ])
def test_scales_of_what_is_not_quantized_here_change_nothing(
    recipe: str, place: str, tmp_path: Path
) -> None:
    """A float8 cache's, and one of activations beside a linear that is plain."""
    packed = save_row_packed(tmp_path, recipe)[1]

    def plain(tensors: dict[str, torch.Tensor]) -> None:
        for leaf in ("weight", "weight_scale", "weight_scale_inv"):
            tensors.pop(f"{Q_PROJ}.{leaf}", None)
        rng = torch.Generator().manual_seed(1)
        tensors[f"{Q_PROJ}.weight"] = torch.randn(64, 64, generator=rng)

    def scales(tensors: dict[str, torch.Tensor]) -> None:
        for leaf in ("q_scale", "k_scale", "v_scale"):
            tensors[f"{place}.{leaf}"] = torch.tensor(0.5)
        tensors[f"{Q_PROJ}.input_scale"] = torch.tensor(0.5)

    edit_tensors(packed, plain)
    before = open_float32(packed)
    expected = chain_logits(before, TOKENS)
    before.close()
    edit_tensors(packed, scales)
    after = open_float32(packed, "ssd")
    try:
        assert not isinstance(
            after.skeleton.layers[1].layer.get_submodule("self_attn.q_proj"), QuantizedLinear
        )
        assert torch.equal(chain_logits(after, TOKENS), expected)
    finally:
        after.close()


def test_scales_of_a_module_that_there_is_not(tmp_path: Path) -> None:
    packed = save_row_packed(tmp_path, "fp8")[1]
    edit_tensors(packed, put("model.layers.1.other.k_scale", torch.ones(1)))
    with pytest.raises(CheckpointError, match=r"other\.k_scale' belongs to nothing"):
        open_float32(packed)


def weights(recipe: str = "w4a16", **changes: object) -> dict[str, object]:
    settings = RECIPES[recipe].settings["config_groups"]["group_0"]
    return {"group_0": {**settings, "weights": {**settings["weights"], **changes}}}


def rotated(*locations: str) -> dict[str, object]:
    applied = [{"targets": ["Linear"], "location": each} for each in locations]
    return {"config_groups": {"u": {"type": "hadamard", "apply": applied}}}


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("fp8", {"weight_block_size": None}, "need a weight_block_size"),
        ("fp8", {"weight_block_size": [128, "x"]}, "need a weight_block_size"),
        ("fp8", {"weight_block_size": [0, 0]}, "need a weight_block_size"),
        ("fp8", {"quant_method": "fp9"}, "'fp9' is not supported"),
        ("w4a16", {"config_groups": None}, "no config_groups"),
        ("w4a16", {"config_groups": weights(num_bits="4")}, "must be a whole number"),
        ("w4a16", {"config_groups": weights(num_bits=9)}, "9 bits"),
        ("w4a16", {"config_groups": weights(group_size=48)}, "whole groups of 48"),
        ("w4a16", {"config_groups": weights(group_size=64)}, r"says? \["),
        ("w4a16", {"config_groups": weights(strategy="block")}, "'block' is not supported"),
        ("w4a16", {"config_groups": weights(symmetric=False)}, "weight_zero_point' is missing"),
        ("w8a8", {"config_groups": weights("w8a8", symmetric=False)}, "zero_point' is missing"),
        ("w8a8", {"config_groups": weights("w8a8", symmetric=0)}, "symmetric must be a bool"),
        ("mxfp4", {"config_groups": weights("mxfp4", symmetric=False)}, "floats that are not symm"),
        ("w4a16", {"transform_config": rotated("weight_input", "input")}, "at 'input' while"),
        ("w8a8", {"transform_config": rotated("output")}, "at 'output' while"),
        ("w8a8", {"transform_config": {"config_groups": {"u": []}}}, "makes no sense"),
        ("w4a16", {"ignore": ["re:("]}, "is no regex"),
        ("w4a16", {"ignore": ["re:.*q_proj"]}, "no group of quantization_config has it"),
    ],
)
def test_damaged_configs(
    recipe: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    _, packed = save_row_packed(tmp_path, recipe)
    edit_quantization(packed, **changes)
    with pytest.raises(CheckpointError, match=message) as error:
        open_float32(packed)
    assert "\n" not in str(error.value)


def test_rotations_that_weights_already_have_change_nothing(tmp_path: Path) -> None:
    packed = save_row_packed(tmp_path, "w8a8")[1]
    before = open_float32(packed)
    edit_quantization(packed, transform_config=rotated("weight_input", "weight_output"))
    after = open_float32(packed)
    try:
        assert torch.equal(chain_logits(after, TOKENS), chain_logits(before, TOKENS))
    finally:
        before.close()
        after.close()


def test_config_without_packed_weights(tmp_path: Path) -> None:
    plain, packed = save_row_packed(tmp_path, "fp8")
    (plain / "config.json").write_bytes((packed / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="no packed weights"):
        open_float32(plain)


def test_modelopts_own_file_says_how(tmp_path: Path) -> None:
    """hf_quant_config.json beside a config.json that says nothing; NVFP4 with a factor."""
    plain, packed = save_row_packed(tmp_path, "nvfp4")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            linear, _, leaf = name.rpartition(".")
            if leaf == "weight_packed":
                tensors[f"{linear}.weight"] = tensors.pop(name)
            elif leaf == "weight_global_scale":
                tensors[f"{linear}.weight_scale_2"] = (1 / tensors.pop(name)).reshape(())

    edit_tensors(packed, rename)
    (packed / "config.json").write_bytes((plain / "config.json").read_bytes())
    (packed / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    notices: list[str] = []
    found, expected = open_float32(packed, "ssd", notice=notices.append), open_float32(plain, None)
    try:
        ours, theirs = chain_logits(found, TOKENS), chain_logits(expected, TOKENS)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    finally:
        found.close()
        expected.close()
    assert len(notices) == 1
    (packed / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no 'quantization'"):
        open_float32(packed)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "phi3", "llama-biases"])
def test_architectures(name: str, tmp_path: Path) -> None:
    """Experts of Mixtral and Qwen3-MoE are packed one by one; Phi-3 has several linears in one."""
    plain, packed = save_row_packed(tmp_path, "w8a8", name)
    found, expected = open_float32(packed, "ssd"), open_float32(plain, None)
    try:
        ours, theirs = chain_logits(found, TOKENS), chain_logits(expected, TOKENS)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    finally:
        found.close()
        expected.close()


@pytest.mark.parametrize("recipe", ["fp8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_bits_are_its_own_wherever_weights_are(
    recipe: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Streamed, in RAM and resident, and whatever rows follow in the pass."""
    checkpoint = read_checkpoint(save_row_packed(tmp_path, recipe)[1])
    found = []
    for tier in ("ssd", "ram", None):
        model = ModelSpec(device=torch.device("cpu"), dtype=dtype, tiers=tier).open(checkpoint)
        found.append(chain_logits(model, TOKENS))
        assert torch.equal(chain_logits(model, TOKENS[:3]), found[0][:3])
        model.close()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_experts_beside_recurrent_layers(tmp_path: Path) -> None:
    """As Qwen's own FP8 files of its hybrid mixtures: what gates and decays stays plain."""
    packed = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
    for kind in ("packed", "plain"):
        folder = tmp_path / kind
        save_toy(TOYS["qwen3_5_moe"], folder)
        stored = load_file(folder / "model.safetensors")
        linears = [name for name in stored if name.endswith(packed)]
        assert any(".experts." in name for name in linears)
        assert any(".linear_attn." in name for name in linears)
        for name in linears:
            scale = stored[name].abs().max() / 448
            codes = (stored[name] / scale).to(torch.float8_e4m3fn)
            if kind == "packed":
                stored[name], stored[f"{name}_scale_inv"] = codes, scale.reshape(1, 1)
            else:
                stored[name] = codes.float() * scale
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    edit_json(tmp_path / "packed" / "config.json", quantization_config=settings)
    found, expected = (open_float32(tmp_path / kind) for kind in ("packed", "plain"))
    try:
        ours, theirs = chain_logits(found, TOKENS), chain_logits(expected, TOKENS)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4 * float(theirs.abs().max()))
    finally:
        found.close()
        expected.close()
