"""scripts/quality.py: perplexity and KL divergence beside full precision."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
DEMO_TARGET = SCRIPTS.parent / "specexec_cli" / "demo" / "target"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_a_copy_of_few_bits_is_further_from_the_reference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import quality

    quality.main([str(DEMO_TARGET), "--copies", "4,2", "--windows", "2", "--rows", "64"])
    whole, four, two = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert abs(whole["kl"]) < 1e-6
    assert whole["same_best"] == 1
    assert 1e-4 < four["kl"] < two["kl"]
    assert four["same_best"] > two["same_best"]


def test_each_row_is_judged_by_the_token_behind_it() -> None:
    """Of a window of four tokens, the last two rows are given, and one token follows them."""
    import quality

    found = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]).log()
    judged = quality.Window.of(found, other, [0, 0, 0, 1])
    assert judged.loss == pytest.approx(math.log(4))
    assert judged.divergence == pytest.approx((0.5 - 0.25) * math.log(2) / 2)
    assert judged.same_best == 0.5
