"""The demo pair on a CUDA device, from every tier; `pytest -m gpu`."""

from __future__ import annotations

import pytest

from specexec_cli.config import GenerationConfig, OffloadMode, SamplingConfig, TreeConfig
from specexec_cli.session import Session

pytestmark = pytest.mark.gpu

PROMPTS = ("def read_lines(path):\n", "import os\n\n\ndef walk(top):\n")
TREE = TreeConfig(budget=48, max_depth=12, batch=8)


def texts(session: Session, method: str, temperature: float) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        steps = session.generate(
            prompt, tree=TREE, sampling=SamplingConfig(temperature=temperature, seed=3),
            generation=GenerationConfig(max_tokens=40), method=method,  # type: ignore[arg-type]
        )  # fmt: skip
        found.append([token for step in steps for token in step.tokens])
    return found


@pytest.fixture(scope="module")
def on_the_cpu() -> dict[float, list[list[int]]]:
    with Session.open(pair="demo", device="cpu", dtype="float32") as session:
        return {t: texts(session, "autoregressive", t) for t in (0.0, 0.8)}


@pytest.mark.parametrize("offload", ["none", "ram", "ssd", "auto"])
def test_the_text_of_plain_decoding_from_every_tier(
    offload: OffloadMode, on_the_cpu: dict[float, list[list[int]]]
) -> None:
    """Also the CPU's: float32 sums differ in the last bits only, and no near-tie decides here."""
    with Session.open(pair="demo", device="cuda", dtype="float32", offload=offload) as session:
        for temperature, expected in on_the_cpu.items():
            assert texts(session, "autoregressive", temperature) == expected
            assert texts(session, "specexec", temperature) == expected
        assert session.stats.target_passes < len(expected[-1])
        assert session.stats.peak_vram_bytes > 0
