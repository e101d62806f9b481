"""Generating from quantized targets: the demo in 4 bits, and checkpoints of the real tools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specexec_cli.config import GenerationConfig, Method, SamplingConfig
from specexec_cli.session import Session

DEMO = Path(__file__).parents[2] / "specexec_cli" / "demo"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))


@pytest.mark.usefixtures("scripts")
def test_the_demo_in_4_bits_is_the_demo() -> None:
    """After training: python scripts/quantize_rtn.py <demo/target> <demo/target-gptq>."""
    from quantize_rtn import quantize_tensors

    (stored,), (original,) = (
        list((DEMO / name).glob("*.safetensors")) for name in ("target-gptq", "target")
    )
    expected, found = quantize_tensors(load_file(original), 4, 128), load_file(stored)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_specexec_writes_what_autoregressive_decoding_writes(temperature: float) -> None:
    sampling = SamplingConfig(temperature=temperature, seed=7)
    generation = GenerationConfig(max_tokens=40)
    prompt = "import os\n\n\ndef read_lines(path):\n"
    written: dict[Method, list[int]] = {}
    passes = {}
    with Session.open(model="demo-gptq", dtype="float32", offload="ssd") as session:
        for method in ("autoregressive", "specexec"):
            steps = list(
                session.generate(prompt, sampling=sampling, generation=generation, method=method)
            )
            written[method] = [token for step in steps for token in step.tokens]
            passes[method] = len(steps)
    assert written["specexec"] == written["autoregressive"]
    assert len(written["specexec"]) > 10
    assert passes["specexec"] < passes["autoregressive"]


@pytest.mark.parametrize("name", ["gptqmodel-8bit-g128", "autogptq-4bit-g64-desc_act"])
def test_real_checkpoints_generate(name: str, shared: Path) -> None:
    """AutoGPTQ's folders hold no tokenizer: the base model's is supplied."""
    root = shared / "interop" / "gptq"
    with Session.open(
        model=str(root / name / "model"), tokenizer=root / "base", method="autoregressive",
        offload="ssd", dtype="float32",
    ) as session:  # fmt: skip
        steps = list(session.generate([5, 9, 30], generation=GenerationConfig(max_tokens=5)))
    assert sum(len(step.tokens) for step in steps) == 5
    assert "t" in "".join(step.text for step in steps)
