"""Quantized checkpoints through the engine: real ones, every format, damaged ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import architecture, chain_logits, open_float32, save_checkpoint
from quantized_checkpoints import (
    GROUP,
    V1,
    edit_quantization,
    edit_tensors,
    mixed_bits,
    save_quantized,
)
from safetensors.torch import load_file
from specexec_kernels.formats.awq import Awq
from specexec_kernels.formats.gptq import Gptq
from torch import Tensor
from transformers import LlamaConfig

from specexec_cli.errors import CheckpointError, ConfigError
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.models.streamed import StreamedModel

INTEROP = (
    "gptqmodel-4bit-g128", "gptqmodel-8bit-g128", "autogptq-4bit-g128",
    "autogptq-4bit-g64-desc_act",
)  # fmt: skip
TOKENS = [1, 5, 9, 3, 60, 33, 2, 17]
Q_PROJ = "model.layers.1.self_attn.q_proj"


def linear(model: StreamedModel, name: str) -> QuantizedLinear:
    """A packed linear of a resident model by its checkpoint name."""
    index, _, path = name.removeprefix("model.layers.").partition(".")
    found = model.skeleton.layers[int(index)].layer.get_submodule(path)
    assert isinstance(found, QuantizedLinear)
    return found


@pytest.mark.parametrize("name", INTEROP)
def test_real_checkpoints(name: str, shared: Path) -> None:
    folder = shared / "interop" / "gptq" / name
    reference = load_file(folder / "reference.safetensors")
    logits = {}
    for tier in ("ssd", None):
        model = open_float32(folder / "model", tier)
        logits[tier] = chain_logits(model, reference["input_ids"][0].tolist())
        if tier is None:
            for key in (k for k in reference if k.endswith(".weight")):
                packed = linear(model, key.removesuffix(".weight")).packed_weight()
                assert torch.equal(packed.unpack(), reference[key])
        model.close()
    assert torch.equal(logits["ssd"], logits[None])
    assert (logits[None] - reference["logits"][0]).abs().max() < 1e-4  # the tools' float32


def assert_same_function(plain: Path, packed: Path, notices: list[str] | None = None) -> None:
    told: list[str] = [] if notices is None else notices
    expected = open_float32(plain, None)
    found = open_float32(packed, "ssd", notice=told.append)
    try:
        ours, theirs = chain_logits(found, TOKENS), chain_logits(expected, TOKENS)
        assert theirs.std() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    finally:
        found.close()
        expected.close()
    assert notices is not None or not told


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_bits_and_versions(bits: int, version: str, tmp_path: Path) -> None:
    """v2 with any zero points; v1 symmetric, from a tool that says nothing of itself."""
    fmt = Gptq(bits, GROUP, stored_minus_one=version == "v1")
    assert_same_function(*save_quantized(tmp_path, choose=lambda n: fmt, sym=version == "v1"))


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "phi3", "llama-biases"])
def test_architectures(name: str, tmp_path: Path) -> None:
    """Mixtral and Qwen3-MoE have a packed weight per expert."""
    assert_same_function(*save_quantized(tmp_path, name))


def test_awq(tmp_path: Path) -> None:
    fmt = Awq(GROUP)
    assert_same_function(*save_quantized(tmp_path, choose=lambda n: fmt, sym=False))


@pytest.mark.parametrize("in_order", [True, False])
def test_awq_beside_an_index_of_groups(in_order: bool, tmp_path: Path) -> None:
    """Which its layout does not have: one in order says nothing, another is refused."""
    plain, packed = save_quantized(tmp_path, choose=lambda n: Awq(GROUP), sym=False)
    index = torch.arange(64, dtype=torch.int32) // GROUP
    stored = index if in_order else index.flip(0)
    edit_tensors(packed, lambda tensors: tensors.update({f"{Q_PROJ}.g_idx": stored}))
    if in_order:
        assert_same_function(plain, packed)
        return
    with pytest.raises(CheckpointError, match="which AWQ's layout does not have"):
        open_float32(packed)


@pytest.mark.parametrize(
    ("packing", "fmt", "sym"),
    [
        ("auto_round:auto_gptq", V1, True),
        ("auto_round", Gptq(4, GROUP), False),
        ("auto_round:gptqmodel", Gptq(4, GROUP), False),
        ("auto_round:auto_awq", Awq(GROUP), False),
    ],
)
def test_autoround(packing: str, fmt: Gptq | Awq, sym: bool, tmp_path: Path) -> None:
    """Linears of layer 1 may be of other bits, where the layout has others."""
    other = isinstance(fmt, Gptq)
    wide = replace(fmt, bits=8) if isinstance(fmt, Gptq) else fmt
    extra = {
        "quant_method": "auto-round", "packing_format": packing, "data_type": "int",
        "extra_config": {
            "lm_head": {"bits": 16},
            **({r"model\.layers\.1\..*": {"bits": 8, "data_type": "int"}} if other else {}),
        },
    }  # fmt: skip

    def choose(name: str) -> Gptq | Awq:
        return wide if "layers.1." in name else fmt

    assert_same_function(*save_quantized(tmp_path, choose=choose, sym=sym, extra=extra))


def test_shuffled_groups_in_shards_with_packed_head(tmp_path: Path) -> None:
    assert_same_function(*save_quantized(tmp_path, desc_act=True, shard=True, lm_head=True))


def test_dynamic_rules_and_plain_layers(tmp_path: Path) -> None:
    def choose(name: str) -> Gptq | None:
        if "layers.1" in name:
            return mixed_bits(8)
        return None if name.endswith("k_proj") else V1

    rules = {r"+:.*layers\.1\..*": {"bits": 8}, r"-:.*k_proj": {}}
    assert_same_function(*save_quantized(tmp_path, choose=choose, extra={"dynamic": rules}))


def test_asymmetric_v1_of_a_tool_that_keeps_zero_points_of_0(tmp_path: Path) -> None:
    plain, packed = save_quantized(tmp_path, sym=False)
    edit_quantization(packed, meta={"quantizer": ["gptqmodel:7.7.0"]})
    assert_same_function(plain, packed)


def test_asymmetric_v1_of_another_tool_is_refused(tmp_path: Path) -> None:
    _, packed = save_quantized(tmp_path, sym=False)
    with pytest.raises(CheckpointError, match="lost zero points of 0"):
        open_float32(packed)


@pytest.mark.parametrize("truth", ["v1", "v2"])
def test_wrong_version_label_is_told_and_the_zero_points_believed(
    truth: str, tmp_path: Path
) -> None:
    fmt = Gptq(4, GROUP, stored_minus_one=truth == "v1")
    plain, packed = save_quantized(tmp_path, choose=lambda n: fmt)
    edit_quantization(packed, checkpoint_format="gptq_v2" if truth == "v1" else "gptq")
    notices: list[str] = []
    assert_same_function(plain, packed, notices)
    assert len(notices) == 1
    assert f"read as {truth}" in notices[0]


def test_symmetric_label_on_asymmetric_zero_points(tmp_path: Path) -> None:
    fmt = Gptq(4, GROUP)
    plain, packed = save_quantized(tmp_path, choose=lambda n: fmt, sym=False)
    edit_quantization(packed, sym=True)
    notices: list[str] = []
    assert_same_function(plain, packed, notices)
    assert len(notices) == 1
    assert "asymmetric" in notices[0]


def remove(name: str) -> object:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: Tensor) -> object:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(f"{Q_PROJ}.qzeros"), "qzeros' is missing"),
        (remove(f"{Q_PROJ}.scales"), "scales' is missing"),
        (put(f"{Q_PROJ}.qweight", torch.zeros(4, 64, dtype=torch.int32)), r"shape \[4, 64\]"),
        (put(f"{Q_PROJ}.qzeros", torch.zeros(1, 8, dtype=torch.int32)), r"shape \[1, 8\]"),
        (put(f"{Q_PROJ}.scales", torch.zeros(4, 32).half()), r"shape \[4, 32\]"),
        (put(f"{Q_PROJ}.qweight", torch.zeros(8, 64)), "is F32, expected I32"),
        (put(f"{Q_PROJ}.scales", torch.zeros(4, 64, dtype=torch.int32)), "is I32, expected F16"),
        (put(f"{Q_PROJ}.g_idx", torch.full((64,), 4, dtype=torch.int32)), "groups 4 to 4"),
        (put(f"{Q_PROJ}.g_idx", torch.full((64,), -1, dtype=torch.int32)), "groups -1 to -1"),
    ],
)
def test_damaged_tensors(change: object, message: str, tmp_path: Path) -> None:
    _, packed = save_quantized(tmp_path)
    edit_tensors(packed, change)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=message):
        open_float32(packed)


def test_packed_weights_without_a_config(tmp_path: Path) -> None:
    _, packed = save_quantized(tmp_path)
    config = packed / "config.json"
    config.write_text(config.read_text().replace("quantization_config", "other"))
    with pytest.raises(CheckpointError, match="no config says"):
        open_float32(packed)


def test_config_without_packed_weights(tmp_path: Path) -> None:
    plain, packed = save_quantized(tmp_path)
    (plain / "config.json").write_bytes((packed / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="no packed"):
        open_float32(plain)


def test_group_size_that_does_not_fit_the_tensors(tmp_path: Path) -> None:
    _, packed = save_quantized(tmp_path)
    edit_quantization(packed, group_size=32)
    with pytest.raises(CheckpointError, match="groups"):
        open_float32(packed)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("bits", [3, 4])
def test_quantized_rig_computes_the_quantized_source(bits: int, tmp_path: Path) -> None:
    """With extra heads, an extra layer, and two rig groups in one group of the source."""
    import make_rig
    from quantize_rtn import write_quantized

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    save_checkpoint(tmp_path / "plain", config, dtype=torch.bfloat16)
    write_quantized(tmp_path / "plain", tmp_path / "source", bits=bits)
    shape = "hidden=256,layers=3,heads=8,kv_heads=8,head_dim=64,intermediate=192"
    rig = make_rig.write_rig(tmp_path / "plain", shape, tmp_path / "rig", bits=bits)
    assert_same_function(tmp_path / "source", rig)


@pytest.mark.usefixtures("scripts")
def test_quantized_copy_is_close_to_the_original(tmp_path: Path) -> None:
    from quantize_rtn import write_quantized

    save_checkpoint(tmp_path / "plain", architecture("llama"), dtype=torch.bfloat16)
    write_quantized(tmp_path / "plain", tmp_path / "packed", bits=8, group_size=16)
    logits = []
    for folder in ("plain", "packed"):
        model = open_float32(tmp_path / folder)
        logits.append(chain_logits(model, TOKENS))
        model.close()
    error = (logits[1] - logits[0]).std() / logits[0].std()
    assert 0 < error < 0.05
    with pytest.raises(ConfigError, match="exists"):
        write_quantized(tmp_path / "plain", tmp_path / "packed")
