"""Packed weights that stay on a GPU lie there as its kernels read them fastest: in every bit the
products of those that are streamed as they are stored.

On the stand-in, with the kernels in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import architecture, random_tokens, save_checkpoint
from fake_cuda import CUDA, fake_cuda
from gguf import GGMLQuantizationType as Kind
from gguf_files import all_of, write_gguf
from quantized_checkpoints import GROUP, save_quantized
from specexec_kernels.formats.awq import Awq
from specexec_kernels.formats.base import PackedFormat
from specexec_kernels.formats.ggml import Apart
from specexec_kernels.formats.gguf import GGUF_FORMATS
from specexec_kernels.formats.gptq import Gptq
from torch import Tensor

from specexec_cli.config import Tier
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint

TOKENS = random_tokens(5)


def awq(folder: Path) -> Path:
    return save_quantized(folder, choose=lambda linear: Awq(GROUP), sym=False)[1]


def gguf(folder: Path, kind: Kind, name: str = "llama") -> Path:
    """A model whose rows of codes begin at whole 16 bytes, its head included."""
    config = architecture(name)
    config.hidden_size = config.intermediate_size = 256
    config.num_hidden_layers = 2
    if name == "mixtral":
        config.num_local_experts = 2
    model = save_checkpoint(folder / "plain", config)
    return write_gguf(model, folder / "m.gguf", all_of(kind))


def opened(path: Path, tiers: list[Tier] | None) -> StreamedModel:
    spec = ModelSpec(device=CUDA, dtype=torch.float16, tiers=tiers)
    return spec.open(read_checkpoint(path))


def logits(model: StreamedModel) -> Tensor:
    found = [model.forward(PassRows.chain(TOKENS, 0), model.new_state(), [0, 4]) for _ in range(2)]
    assert torch.equal(*found), "the second pass reads what the first one left"
    return found[0].cpu()


def formats(model: StreamedModel, index: int) -> set[type[PackedFormat]]:
    layer = model.layers[index].layer
    return {type(part.format) for part in layer.modules() if isinstance(part, QuantizedLinear)}


@pytest.mark.parametrize("name", ["awq", "Q8_0", "Q4_0", "mixture"])
def test_every_tier_has_the_same_bits(name: str, tmp_path: Path) -> None:
    if name == "mixture":
        path = gguf(tmp_path, Kind.Q8_0, "mixtral")
    else:
        path = awq(tmp_path) if name == "awq" else gguf(tmp_path, Kind[name])
    wanted = Gptq if name == "awq" else Apart
    with fake_cuda(triton=True):
        count = 3 if name == "awq" else 2
        streamed = opened(path, ["ram"] * count)
        expected = logits(streamed)
        assert wanted not in formats(streamed, 0)
        streamed.close()
        for tiers in (["resident", *["ram"] * (count - 1)], ["resident"] * count, None):
            model = opened(path, tiers)  # type: ignore[arg-type]
            assert wanted in formats(model, 0)
            assert torch.equal(logits(model), expected), tiers
            model.close()
    with fake_cuda(triton=False):  # which reads everything as it is stored, the head too
        plain = opened(path, None)
        torch.testing.assert_close(
            logits(plain), expected, rtol=0, atol=2e-2 * expected.std().item()
        )
        plain.close()


def test_without_triton_weights_stay_as_they_are_stored(tmp_path: Path) -> None:
    path = awq(tmp_path)
    with fake_cuda(triton=False):
        for tiers in (["resident"] * 3, None):
            model = opened(path, tiers)  # type: ignore[arg-type]
            assert formats(model, 0) == {Awq}
            model.close()


def test_rows_that_begin_within_16_bytes_stay_as_they_are_stored() -> None:
    assert GGUF_FORMATS["Q8_0"].staying(256) is not None
    assert GGUF_FORMATS["Q8_0"].staying(96) is None
    assert GGUF_FORMATS["Q6_K"].staying(2048) is not None
    assert GGUF_FORMATS["Q6_K"].staying(5120) is None
    assert GGUF_FORMATS["Q4_K"].staying(4096) is None
    assert Awq(12).staying(96) is None
