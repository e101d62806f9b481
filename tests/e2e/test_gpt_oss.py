"""gpt-oss's own checkpoints, whose experts are MXFP4 in one tensor a layer, through the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import (
    BYTE_VOCAB,
    chain_logits,
    edit_json,
    open_float32,
    random_tokens,
    save_byte_tokenizer,
    save_checkpoint,
)
from cli_runner import run_cli
from gpt_oss_checkpoints import gpt_oss_config, save_mxfp4
from quantized_checkpoints import edit_tensors
from specexec_kernels.formats import METHODS
from specexec_kernels.formats.base import PackedWeight, Stored, described
from test_experts import slot_bytes
from test_gguf import assert_lossless
from test_quantized import put, remove
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specexec_cli.errors import CheckpointError
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import architecture_bytes, checkpoint_bytes

TOKENS = random_tokens(24)
STEM = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_mxfp4(tmp_path_factory.mktemp("gpt-oss"))


def test_unpacked_values_are_bit_equal_to_transformers_own() -> None:
    """Every code under every exponent, the smallest of which make denormal numbers."""
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(2).view(1, 510, 1)
    codes = torch.cat([torch.arange(16), torch.arange(15, -1, -1)]).to(torch.uint8)
    blocks = (codes | (codes.flip(0) << 4)).view(2, 16).repeat(255, 1).view(1, 510, 1, 16)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    tensors = {"blocks": blocks.view(510, 16), "scales": scales.view(510, 1)}
    stored = Stored("x", 510, 32, described(tensors), tensors.__getitem__)
    fmt = METHODS["mxfp4"].read(stored, {})
    assert fmt is not None
    found = PackedWeight(fmt, 32, 510, tensors).unpack()
    assert torch.equal(found.view(torch.int32), expected.contiguous().view(torch.int32))


def test_logits_are_those_of_transformers_on_the_dequantized_model(
    saved: tuple[Path, Path],
) -> None:
    plain, packed = saved
    own = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = own(torch.tensor([TOKENS])).logits[0]
    whole = open_float32(packed)
    experts = whole.skeleton.layers[1].layer.get_submodule("mlp.experts.experts.3")
    assert all(
        isinstance(experts.get_submodule(name), QuantizedLinear) for name in ("gate_up", "down")
    )
    found = chain_logits(whole, TOKENS)
    whole.close()
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("slots", [1, 3])
def test_experts_one_by_one_give_the_same_bits(saved: tuple[Path, Path], slots: int) -> None:
    """In one slot, in a few, and loaded to stay; a row's bits are its own."""
    packed = saved[1]
    whole = open_float32(packed, None)
    expected = chain_logits(whole, TOKENS)
    sizes = checkpoint_bytes(read_checkpoint(packed)).experts
    assert sizes is not None
    streamed = open_float32(packed, "ssd", expert_bytes=slots * slot_bytes(packed))
    assert streamed.experts is not None
    assert torch.equal(chain_logits(streamed, TOKENS), expected)
    assert torch.equal(chain_logits(streamed, TOKENS[:3]), expected[:3])
    read = streamed.experts.bytes_read
    streamed.close()
    whole.close()
    assert 0 < read < 40 * sum(sizes.layers)


def test_plan_knows_the_bytes(saved: tuple[Path, Path]) -> None:
    checkpoint = read_checkpoint(saved[1])
    counted = architecture_bytes({**checkpoint.config, "dtype": "float32"})
    stored = checkpoint_bytes(checkpoint)
    assert counted == stored
    assert stored.packed
    assert stored.experts is not None
    assert stored.experts.largest == (2 * 96 * 64 + 64 * 96) * 17 // 32 + 4 * (2 * 96 + 64)
    ran = run_cli("plan", str(saved[1]), "--method", "autoregressive", "--json")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("offload", ["ssd", "none"])
def test_specexec_writes_what_autoregressive_decoding_writes(tmp_path: Path, offload: str) -> None:
    config = gpt_oss_config(vocab_size=BYTE_VOCAB)
    plain, packed = save_mxfp4(tmp_path, config, std=0.12)
    save_checkpoint(
        tmp_path / "draft", config, noise=0.02,
        noise_of=transformers.AutoModelForCausalLM.from_pretrained(plain),
    )  # fmt: skip
    for folder in (packed, tmp_path / "draft"):
        save_byte_tokenizer(folder)
    assert_lossless(packed, tmp_path / "draft", offload)


def _too_few(tensors: dict[str, Tensor]) -> None:
    for leaf in ("blocks", "scales", "bias"):
        tensors[f"{STEM}_{leaf}"] = tensors[f"{STEM}_{leaf}"][:2].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(f"{STEM}_scales"), r"gate_up_proj_scales' is missing"),
        (remove(f"{STEM}_blocks"), r"gate_up_proj_blocks' is missing"),
        (remove(f"{STEM}_bias"), r"bias' is missing"),
        (put(f"{STEM}_scales", torch.zeros(4, 192, 3).byte()), r"shape \[4, 192, 3\]"),
        (put(f"{STEM}_bias", torch.zeros(4, 96)), r"shape \[4, 96\]"),
        (put(f"{STEM}_blocks", torch.zeros(4, 192, 2, 8).byte()), r"expected U8 of \[experts"),
        (put(f"{STEM}_blocks", torch.zeros(4, 192, 2, 16)), r"is F32 of shape"),
        (put(f"{STEM}_blocks", torch.zeros(2**40, 0, 2, 16).byte()), r"expected U8 of \[experts"),
        (_too_few, "are not the 4 that the config asks for"),
    ],
)
def test_damaged_tensors(
    saved: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], None],
    message: str,
) -> None:
    packed = tmp_path / "packed"
    packed.mkdir()
    for name in ("config.json", "model.safetensors"):
        (packed / name).write_bytes((saved[1] / name).read_bytes())
    edit_tensors(packed, change)
    with pytest.raises(CheckpointError, match=message) as error:
        open_float32(packed)
    assert "\n" not in str(error.value)


def test_matrices_that_are_no_whole_groups(saved: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((saved[1] / name).read_bytes())
    edit_json(tmp_path / "config.json", intermediate_size=80)
    with pytest.raises(CheckpointError, match="Are all files of the same model"):
        open_float32(tmp_path)
