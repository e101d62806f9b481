"""The small mixture that train_demo_pair.py trains is the Mixtral that transformers reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import MixtralForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from demo_model import Llama, Mixture, Shape
from train_demo_pair import export, training_loss

TOKENIZER = Path(__file__).parents[2] / "specexec_cli" / "demo" / "target" / "tokenizer.json"
SHAPE = Shape(hidden=64, layers=2, heads=2, kv_heads=1, inner=48, vocab=300, experts=5, chosen=2)


def model_of(seed: int) -> Llama:
    model = Llama(SHAPE, seed=seed)
    for weight in model.parameters():  # as large as trained ones, and as exact as they are stored
        weight.data = (8 * weight.data if weight.ndim == 2 else weight.data).bfloat16().float()
    return model


def test_its_logits_are_transformers_own(tmp_path: Path) -> None:
    model, ids = model_of(3), torch.randint(0, 300, (2, 40), generator=torch.Generator())
    export(model, TOKENIZER, tmp_path)
    theirs = MixtralForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        ours, expected = model(ids), theirs(ids).logits
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_every_expert_learns_and_even_choices_cost_least() -> None:
    model, ids = model_of(4), torch.randint(0, 300, (2, 8), generator=torch.Generator())
    loss = training_loss(model, ids)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    mixture, balance = Mixture(SHAPE), []
    mixture.gate.weight.data.zero_()
    mixture.gate.weight.data[0] = 1.0  # all rows like expert 0
    with torch.no_grad():
        mixture(torch.ones(1, 6, SHAPE.hidden), balance)
    assert float(balance[0]) == pytest.approx(SHAPE.experts / SHAPE.chosen, rel=1e-3)
