"""Products on Arm, run by QEMU: bit by bit those of this CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from arm import Arm, needs_arm
from random_weights import FORMATS, any_weight
from specexec_kernels import cpu_jit
from specexec_kernels.cpu_matmul import matmul, takes_plain
from specexec_kernels.cpu_matmul_plan import rounds_rows
from specexec_kernels.formats.base import PackedFormat
from specexec_kernels.formats.gguf import GGUF_FORMATS
from specexec_kernels.formats.plain import plain_weight

ALL: dict[str, PackedFormat] = {**FORMATS, **GGUF_FORMATS}
pytestmark = needs_arm


@pytest.mark.parametrize(
    "name",
    ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "gptq-4", "gptq-8", "awq", "int8-group", "int8-zeros"],
)
@pytest.mark.parametrize("quads", ["sdot", "smmla"])
def test_rows_in_8_bits(
    name: str, quads: Literal["sdot", "smmla"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = replace(any_weight(name, 48, 512), eight_bit_rows=True)
    x = torch.randn(19, 512, generator=torch.Generator().manual_seed(1))
    counts = (1, 4, 19)
    here = [matmul(x[:count], weight) for count in counts]
    arm = Arm(tmp_path, monkeypatch, quads)
    assert rounds_rows(ALL[name])
    for count, expected in zip(counts, here, strict=True):
        assert torch.equal(arm.matmul(x[:count], weight), expected)
    # units of four inputs have nothing that smmla could take two of
    assert ("smmla" in arm.instructions) == (quads == "smmla" and weight.format.unit % 8 == 0)


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "gptq-4", "awq", "nf4", "fp8-block", "mxfp4"])
def test_rows_of_float32(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = any_weight(name, 48, 512)
    x = torch.randn(19, 512, generator=torch.Generator().manual_seed(1))
    counts = (1, 19)
    here = [matmul(x[:count], weight) for count in counts]
    arm = Arm(tmp_path, monkeypatch)
    for count, expected in zip(counts, here, strict=True):
        assert torch.equal(arm.matmul(x[:count], weight), expected)


def test_a_row_of_bfloat16_has_its_own_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With instructions for bfloat16 too, with which PyTorch rounds by the number of rows."""
    weight = plain_weight(torch.randn(48, 256).bfloat16())
    x = torch.randn(19, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = matmul(x.float(), weight)
    arm = Arm(tmp_path, monkeypatch)
    monkeypatch.setattr(cpu_jit, "has_matmul", lambda dtype: True)
    assert takes_plain(torch.bfloat16)
    for count in (1, 19):
        assert torch.equal(arm.matmul(x[:count], weight), expected[:count])


def test_plain_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = plain_weight(torch.randn(48, 256).to(dtype))
        expected = matmul(x, weight)
        with monkeypatch.context() as patch:
            assert torch.equal(Arm(tmp_path, patch).matmul(x, weight), expected)
