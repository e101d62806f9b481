"""Unpacked weights are, bit for bit, those of the tools that define the formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from row_checkpoints import unpacked
from safetensors import safe_open
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.fp4 import Fp4
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "data" / "formats"
CASES = [
    (path.stem, case)
    for path in sorted(FOLDER.glob("*.safetensors"))
    for case in sorted(safe_open(path, "pt").metadata())
    if case != "tool"
]


@pytest.mark.parametrize(("tool", "case"), CASES)
def test_tools_weights(tool: str, case: str) -> None:
    tensors: dict[str, Tensor] = {}
    with safe_open(FOLDER / f"{tool}.safetensors", "pt") as file:
        settings = json.loads(file.metadata()[case])
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            if name.startswith(f"{case}."):
                tensors[name.removeprefix(f"{case}.")] = file.get_tensor(name)
    reference = tensors.pop("reference")
    found = unpacked(tensors, tuple(reference.shape), settings)
    assert reference.float().std() > 0.01
    # some tools round to two bytes in the end
    assert torch.equal(found.to(reference.dtype), reference)


def test_mxfp4_is_that_of_transformers() -> None:
    """gpt-oss's own: blocks of 16 bytes, the experts' matrices transposed."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (1, 24, 4, 16), generator=rng).to(torch.uint8)
    scales = torch.randint(100, 140, (1, 24, 4), generator=rng).to(torch.uint8)
    reference = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    weight = PackedWeight(
        Fp4(32, 32), 128, 24, {"weight_packed": blocks[0], "weight_scale": scales[0]}
    )
    assert torch.equal(weight.unpack(), reference)


def test_fp8_blocks_are_deepseeks_definition() -> None:
    """Each weight times the scale of its 128 x 128 tile, tiles at the edges cut off."""
    rng = torch.Generator().manual_seed(2)
    codes = torch.randn(200, 192, generator=rng).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, generator=rng)
    expected = torch.empty(200, 192)
    for n in range(200):
        for k in range(192):
            expected[n, k] = codes[n, k].float() * scales[n // 128, k // 128]
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = unpacked({"weight": codes, "weight_scale_inv": scales}, (200, 192), settings)
    assert torch.equal(found, expected)
