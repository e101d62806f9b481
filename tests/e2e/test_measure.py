"""`specexec measure` on the demo pair, and what DSI's simulation makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runner import run_cli

from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench.datasets import Dataset
from specexec_cli.lab.bench.measure import ModelTimes, acceptance_rate, mean_matches

COMMAND = ("measure", "demo", "--prompts", "2", "--timed-tokens", "4",
           "--match-tokens", "12", "--dtype", "float32", "--quiet")  # fmt: skip


def words(text: str) -> tuple[int, ...]:
    return tuple(sum(map(ord, word)) for word in text.split())


def test_the_papers_own_example():
    """DSI, section 4: eight words match, the ninth differs; a second prompt matches in none."""
    target = "We can only see a short distance ahead, but we can see plenty there"
    draft = "We can only see a short distance ahead, we done."
    times = [ModelTimes(0.0, 0.0, {"1": words(text)}) for text in (target, draft)]
    assert mean_matches(*times) == 8
    assert acceptance_rate(8) == pytest.approx(8 / 9)
    times = [
        ModelTimes(0.0, 0.0, {"1": words(text), "2": words(other), name: (1,)})
        for text, other, name in ((target, "no", "of the target alone"), (draft, "yes", "3"))
    ]
    assert mean_matches(*times) == 4, "of the prompts that both were given"
    assert acceptance_rate(0) == 0.0
    with pytest.raises(ConfigError, match="no prompt fits the context windows of both models"):
        mean_matches(ModelTimes(0.0, 0.0, {"1": (1,)}), ModelTimes(0.0, 0.0, {}))


def test_what_is_measured_is_simulated(tmp_path: Path) -> None:
    ran = run_cli(*COMMAND, "--json")
    assert (ran.code, ran.err) == (0, "")
    measured = json.loads(ran.out)
    assert measured["prompts"] == 2
    matches = measured["acceptance"]["mean_matches"]
    assert 0 < matches <= 12
    assert measured["acceptance"]["rate"] == pytest.approx(matches / (1 + matches))
    names = [measured[model]["name"] for model in ("target", "draft")]
    assert names == ["demo-target", "demo-draft"]
    file = tmp_path / "measured.json"
    file.write_text(ran.out)
    ran = run_cli("simulate", "dsi", "--measured", file, "--repeats", "2", "--json")
    assert ran.code == 0
    config = json.loads(ran.out)["config"]
    assert config["target_ms"] == measured["target"]["tpot_ms"]
    assert config["draft_ms"] == measured["draft"]["tpot_ms"]
    assert config["acceptance"] == measured["acceptance"]["rate"]


def test_prompts_are_drawn_at_random_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DSI, section 4: 50 prompts of a dataset, uniformly at random."""
    asked: list[dict[str, Any]] = []

    def load(name: str, **arguments: Any) -> Dataset:
        asked.append(arguments)
        raise ConfigError("enough")

    monkeypatch.setattr("specexec_cli.lab.bench.datasets.load_dataset", load)
    for options in ((), ("--seed", "7")):
        assert run_cli("measure", "demo", *options).error == "enough"
    assert [(each["count"], each["seed"]) for each in asked] == [(50, 0), (50, 7)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompts", "0"), "--prompts must be 1 or more, not 0"),
        (("--timed-tokens", "1"), "--timed-tokens must be between 2 and --match-tokens"),
        (("--draft", "suffix"), "measure compares a target with a draft model of its own"),
    ],
)
def test_bad_options_are_one_line(options: tuple[str, ...], message: str) -> None:
    ran = run_cli(*COMMAND, *options)
    assert ran.code == 2
    assert message in ran.error
