"""Quantized copies as GPTQModel itself reads them; skipped where it is not installed.

It has no part in the project's requirements: an environment with both runs this file alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    byte_llama,
    chain_logits,
    open_float32,
    random_tokens,
    save_byte_tokenizer,
    save_checkpoint,
)
from safetensors.torch import load_file
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from torch import Tensor

from specexec_cli.models.quantize import plan_quantization, write_quantized
from specexec_cli.offload.store import read_checkpoint

gptqmodel: Any = pytest.importorskip("gptqmodel", reason="GPTQModel is not installed")

GROUP = 32  # of the group sizes that its kernel takes


@pytest.mark.filterwarnings("ignore")  # its own, of which there are many
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_it_reads_the_very_weights_and_computes_the_same_logits(tmp_path: Path, bits: int) -> None:
    """Weights bit for bit in its float16; logits with its layers in float32."""
    config = byte_llama(hidden_size=128, intermediate_size=192)
    save_checkpoint(tmp_path / "plain", config, std=0.1, dtype=torch.float16)
    save_byte_tokenizer(tmp_path / "plain")  # without one it loads nothing
    plan = plan_quantization(read_checkpoint(tmp_path / "plain"), bits, GROUP)
    write_quantized(plan, tmp_path / "packed")
    ours = _dequantized(tmp_path / "packed", bits)
    tokens = random_tokens(24)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        model = gptqmodel.GPTQModel.load(
            str(tmp_path / "packed"), device="cpu", dtype=torch.float16,
            backend=gptqmodel.BACKEND.GPTQ_TORCH,
        ).model  # fmt: skip
        layers = {name: module for name, module in model.named_modules()
                  if hasattr(module, "dequantize_weight")}  # fmt: skip
        assert layers.keys() == ours.keys()
        for name, layer in layers.items():
            assert torch.equal(layer.dequantize_weight(), ours[name].half()), name
        model.float()  # its kernel takes float16 and bfloat16, PyTorch's product float32 too
        for name, layer in layers.items():
            assert torch.equal(layer.dequantize_weight(), ours[name]), name
        expected = model(torch.tensor([tokens])).logits[0]
    packed = open_float32(tmp_path / "packed")

    torch.testing.assert_close(chain_logits(packed, tokens), expected, rtol=0, atol=1e-4)
    packed.close()


def _dequantized(folder: Path, bits: int) -> dict[str, Tensor]:
    """By linear, its weight (inputs, outputs) in float32, unpacked by the reference alone."""
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for name in [each for each in tensors if each.endswith(".qweight")]:
        linear = name.removesuffix(".qweight")
        packed = {
            leaf: tensors[f"{linear}.{leaf}"] for leaf in ("qweight", "qzeros", "scales", "g_idx")
        }
        fmt = Gptq(bits, GROUP, shuffled=True)
        inputs, outputs = len(packed["g_idx"]), packed["scales"].shape[1]
        weights[linear] = PackedWeight(fmt, inputs, outputs, packed).unpack().T
    return weights
