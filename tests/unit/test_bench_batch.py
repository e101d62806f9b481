"""bench_batch.py on the demo pair: what it counts adds up, and is told as it goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_batch
from offload_setup import DEMO


@pytest.fixture(scope="module")
def ran() -> tuple[dict[str, Any], list[str]]:
    """The report, and the lines that were told meanwhile."""
    with pytest.MonkeyPatch.context() as patched:
        told: list[str] = []
        for module in ("batch_passes", "batch_measure"):
            patched.setattr(f"{module}.tell", told.append)
        options = ["--rig", str(DEMO / "target"), "--cap", "none", "--texts", "2,3", "--alone", "2"]
        options += ["--max-tokens", "14", "--prompt-tokens", "12", "--context", "80"]
        return bench_batch.run(
            bench_batch.parse([*options, "--policy", "fixed", "--budget", "8", "--depth", "3"])
        ), told


def test_tokens_and_passes_add_up(ran: tuple[dict[str, Any], list[str]]) -> None:
    report, _ = ran
    alone = report["alone"]
    for each in report["batches"]:
        passes = each["each_pass"]
        assert each["passes"] == len(passes) == max(each["passes_of_texts"])
        assert each["passes_while_all"] == min(each["passes_of_texts"])
        assert each["pending_rows"] == sum(one["pending_rows"] for one in passes)
        # in its first pass a text's whole prompt, then its last token
        texts_in_passes = sum(one["texts"] for one in passes)
        assert each["pending_rows"] == texts_in_passes + 11 * each["texts"]
        assert 0 < each["tokens_while_all"] <= each["tokens"]
        assert each["tokens"] > sum(text["tokens"] for text in alone[: each["texts"] - 1])
        assert len(each["each_over_alone"]) == 2
        assert each["first_token_passes"] == 2, "the one that it came in, and its own"


def test_every_pass_and_text_is_told_as_it_ends(ran: tuple[dict[str, Any], list[str]]) -> None:
    report, told = ran
    starts = [at for at, line in enumerate(told) if line.startswith("text 1/2 alone, behind 12")]
    assert len(starts) == 1
    before = [line for line in told[: starts[0]] if line.startswith("  pass of 1 texts, 12 + ")]
    assert len(before) == 2, "to warm up, and the text's own"
    passes = sum(line.startswith("  pass of ") for line in told)
    counted = sum(text["passes"] for text in [*report["alone"], *report["batches"]])
    assert passes > counted, "those to warm up, and until a newcomer's first token, too"
    assert any(line.startswith("3 texts at once: ") for line in told)


def test_the_last_line_is_the_report(
    ran: tuple[dict[str, Any], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report, _ = ran
    monkeypatch.setattr(bench_batch, "run", lambda config: report)
    assert bench_batch.main(["--rig", "anywhere", "--cap", "none"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1]) == json.loads(json.dumps(report))
    assert "until one ends" in shown.err


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_batch.main(["--rig", ".", "--cap", "4 apples"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
