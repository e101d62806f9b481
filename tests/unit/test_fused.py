"""Norms and rotary positions that a GPU computes in one launch each, and which these are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import (
    architecture,
    chain_logits,
    open_float32,
    random_tokens,
    save_checkpoint,
)
from fake_cuda import CUDA, Counts, counted, fake_cuda
from torch import Tensor

from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.offload.store import read_checkpoint

LAYERS = 3


def on_a_gpu(folder: Path, dtype: torch.dtype, rows: int) -> tuple[Tensor, Counts]:
    """Logits of a pass, and what it starts, behind one that warms up."""
    with fake_cuda(triton=True):
        spec = ModelSpec(device=CUDA, dtype=dtype, tiers="resident")
        model = spec.open(read_checkpoint(folder))
        chain_logits(model, [3])
        with counted() as counts:
            logits = chain_logits(model, random_tokens(rows)).cpu()
        model.close()
    return logits, counts


# Norms and turns of a layer that are one launch: Gemma's weights are stored less one, Qwen3 has
# norms of queries and keys, GPT-OSS' angles have half a head's width.
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "gpt-oss", "phi3"])
def test_logits_are_those_of_the_modelling_code(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture(name))
    model = open_float32(tmp_path)
    expected = chain_logits(model, random_tokens(5))
    model.close()
    found, _ = on_a_gpu(tmp_path, torch.float32, 5)
    assert torch.allclose(found, expected, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("name", "norms", "turns"),
    [("llama", 2, 1), ("qwen3", 4, 1), ("gemma2", 4, 1), ("gemma3", 6, 1), ("gpt-oss", 2, 0),
     ("phi3", 2, 1), ("starcoder2", 0, 1)],
)  # fmt: skip
def test_what_is_one_launch(
    name: str, norms: int, turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specexec_kernels import triton_norm, triton_rotary

    started = {"rms_norm": 0, "rotary": 0}
    for module, function in ((triton_norm, "rms_norm"), (triton_rotary, "rotary")):
        own = getattr(module, function)

        def counting(
            *args: Tensor, own: object = own, name: str = function, **more: object
        ) -> object:
            started[name] += 1
            return own(*args, **more)  # type: ignore[operator]

        monkeypatch.setattr(module, function, counting)
    save_checkpoint(tmp_path, architecture(name))
    on_a_gpu(tmp_path, torch.float16, 1)
    passes = 2
    assert started == {"rms_norm": passes * LAYERS * norms, "rotary": passes * LAYERS * turns}


def test_a_norm_that_does_something_else_stays_as_it_is(tmp_path: Path) -> None:
    """One that is called like those that are known and forgets what is added to the mean square."""
    from transformers.models.llama import modeling_llama

    class LlamaRMSNorm(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            hidden = hidden_states.float()
            return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True)))

    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(modeling_llama, "LlamaRMSNorm", LlamaRMSNorm)
        save_checkpoint(tmp_path, architecture("llama"))
        _, own = on_a_gpu(tmp_path, torch.float16, 1)
    _, usual = on_a_gpu(tmp_path, torch.float16, 1)
    assert own.kernels == usual.kernels - 2 * LAYERS


def test_rows_have_their_own_bits(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("qwen3"))
    with fake_cuda(triton=True):
        model = ModelSpec(device=CUDA, dtype=torch.float16, tiers="resident").open(
            read_checkpoint(tmp_path)
        )
        tokens = random_tokens(9)
        together = chain_logits(model, tokens).cpu()
        state = model.new_state()
        single = [model.forward(PassRows.chain([t], at), state, [0]).cpu()
                  for at, t in enumerate(tokens)]  # fmt: skip
        model.close()
    assert torch.equal(torch.cat(single), together)
