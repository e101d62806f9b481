"""The same bits under every offload mode where weights are stored in another dtype than computed.

A layer that stays is converted when it is loaded, and one that is streamed keeps the file's dtype:
both are multiplied by the same values. Norms are float32 either way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import architecture, chain_logits, random_tokens, save_checkpoint
from fake_cuda import CUDA, fake_cuda
from other_cpu import other_cpu
from test_experts import slot_bytes
from torch import Tensor

from specexec_cli.config import Tier
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.offload.store import read_checkpoint

# dense with biases, with the table of embeddings as head, with learned positions and LayerNorms;
# mixtures with shared experts, and with biases in matrices stored (inputs, outputs)
NAMES = ("llama-biases", "qwen3", "gpt-bigcode", "qwen2-moe", "gpt-oss")
OF_TWO_BYTES = [
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float16),
]


def logits_of(
    folder: Path,
    dtype: torch.dtype,
    tiers: Tier | list[Tier] | None,
    device: torch.device,
    expert_bytes: int = 0,
) -> Tensor:
    """Of one row by itself, and of many."""
    model = ModelSpec(device=device, dtype=dtype, tiers=tiers, expert_bytes=expert_bytes).open(
        read_checkpoint(folder)
    )
    try:
        tokens = random_tokens(23)
        return torch.cat([chain_logits(model, tokens[:1]), chain_logits(model, tokens)]).cpu()
    finally:
        model.close()


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize(("stored", "compute"), OF_TWO_BYTES)
@pytest.mark.parametrize("name", NAMES)
def test_a_text_does_not_depend_on_where_layers_wait(
    name: str, stored: torch.dtype, compute: torch.dtype, pairs: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the products of this CPU, and as on one without arithmetic in two bytes."""
    if not pairs:
        other_cpu(monkeypatch, matmul=False)
    save_checkpoint(tmp_path, architecture(name), dtype=stored)
    cpu = torch.device("cpu")
    expected = logits_of(tmp_path, compute, None, cpu)
    for tier in ("ram", "ssd"):
        assert torch.equal(logits_of(tmp_path, compute, tier, cpu), expected), tier
    if name in ("qwen2-moe", "gpt-oss"):
        one_by_one = 3 * slot_bytes(tmp_path)
        assert torch.equal(logits_of(tmp_path, compute, "ssd", cpu, one_by_one), expected)


@pytest.mark.parametrize(("stored", "compute"), OF_TWO_BYTES)
@pytest.mark.parametrize("name", NAMES)
def test_nor_does_it_beside_a_gpu(
    name: str, stored: torch.dtype, compute: torch.dtype, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, architecture(name), dtype=stored)
    with fake_cuda():
        expected = logits_of(tmp_path, compute, None, CUDA)
        found = logits_of(tmp_path, compute, ["resident", "ram", "ssd"], CUDA)
    assert torch.equal(found, expected)
