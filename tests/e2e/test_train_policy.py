"""`specexec train-policy` on the demo pair, and decoding with what it trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_runner import run_cli

from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench import policy_labels
from specexec_cli.lab.bench.policy_labels import LabelsFile
from specexec_cli.lab.training import Text

COMMAND = (
    "train-policy", "--prompts", "5", "--max-tokens", "24", "--target-ms", "30", "--draft-ms", "2",
    "--quiet",
)  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_classifier_is_trained_reported_and_used(cache: Path) -> None:
    ran = run_cli(*COMMAND, "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert report["costs"] == {"target_s": 0.03, "draft_s": 0.002}
    found = report["evaluations"]["demo"]
    assert 0.0 < found["oracle_s"] <= min(found["static_s"], found["disco_s"]) < found["plain_s"]
    folder = Path(report["folder"])
    assert folder.is_relative_to(cache)
    weights = (folder / "disco.safetensors").read_bytes()

    again = run_cli(*COMMAND)
    assert again.code == 0
    assert "F1 disco" in again.out
    assert (folder / "disco.safetensors").read_bytes() == weights, "training is deterministic"

    prompt = ("generate", "--raw", "def add(a, b):", "--max-tokens", "16", "--json")
    plain = json.loads(run_cli(*prompt, "--method", "autoregressive").out)
    disco = json.loads(run_cli(*prompt, "--policy", "disco").out)
    assert disco["config"]["policy"] == "disco"
    assert disco["tokens"] == plain["tokens"]
    # as in the paper: chains, and rejection sampling at temperature 0
    ran = run_cli("bench", "--method", "chain", "--policy", "fixed,disco", "--prompts", "2",
                  "--speculation-length", "12", "--max-tokens", "16", "--warmup", "0", "-o", "json",
                  "--results", cache / "rows.jsonl", "-q")  # fmt: skip
    cases = {case["label"]: case for case in json.loads(ran.out)["cases"]}
    assert cases["chain disco 12"]["same_text"] == {"same": 2, "of": 2}
    nodes = [
        cases[name]["metrics"]["tree_nodes"]["mean"] for name in ("chain disco 12", "chain 12")
    ]
    assert nodes[0] < nodes[1]


def test_without_a_classifier_disco_says_how_to_train_one(cache: Path) -> None:
    ran = run_cli("generate", "x", "--policy", "disco")
    assert (ran.code, ran.out) == (5, "")
    assert "specexec train-policy" in ran.err


def test_an_interrupt_keeps_the_texts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collected = policy_labels._text
    calls = []

    def interrupted(*args: object) -> object:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return collected(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(policy_labels, "_text", interrupted)
    assert run_cli(*COMMAND).code == 130
    assert run_cli(*COMMAND).code == 0
    assert len(calls) == 3 + 3  # two texts were kept


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--prompts", "4"), "--prompts must be 5 or more"),
        (("--splits", "5,1"), "--splits takes three numbers"),
        (("--splits", "500,80,80"), "prompts left for its part"),
        (("--target-ms", "0"), "--target-ms must be above 0"),
        (("--dataset", "nothing"), "nothing"),
        (("--output", "xml"), "--output 'xml'"),
    ],
)
def test_mistakes_get_one_line(cache: Path, argv: tuple[str, ...], words: str) -> None:
    ran = run_cli("train-policy", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert ran.err.count("\n") == 1


def test_a_line_torn_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    text = Text(np.zeros((1, 11)), np.ones(1, dtype=bool), np.ones(1))
    LabelsFile(path).add("first", text)
    with path.open("a") as file:
        file.write('{"key": "torn", "sig')
    labels = LabelsFile(path)
    assert "first" in labels
    assert "torn" not in labels
    labels.add("second", text)
    assert "second" in LabelsFile(path)


def test_a_damaged_label_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text('{"key": "a", "signals": [], "accepted": [], "conformity": []}\nnot json\n')
    with pytest.raises(ConfigError, match=r"labels.jsonl, line 2: not a label"):
        LabelsFile(path)
