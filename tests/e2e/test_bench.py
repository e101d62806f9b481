"""`specexec bench` on the demo pair: rows that match their schema, resumed runs, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_rows import ENVIRONMENT
from typer.testing import CliRunner

from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench import environment as environment_module
from specexec_cli.lab.bench.cases import same_distribution
from specexec_cli.lab.bench.results import read_results
from specexec_cli.lab.bench.runner import Bench
from specexec_cli.lab.bench.schema import problems
from specexec_cli.lab.commands.bench import app

ALL = "specexec,specexec-paper,chain,chain-coupled,specinfer,beam,beam-pruned"
SMALL = ("--model", "demo", "--prompts", "3", "--max-tokens", "6", "--budget", "8", "--depth", "4",
         "--speculation-length", "3", "--warmup", "0", "--dtype", "float32", "-q")  # fmt: skip


@pytest.fixture(autouse=True)
def fixed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit in the middle of a test must not make its rows another's."""
    monkeypatch.setattr(environment_module, "environment", lambda: ENVIRONMENT)


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def run_json(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert isinstance(content, dict)
    return content


def test_every_method_on_the_demo_pair(tmp_path):
    results = tmp_path / "bench.jsonl"
    content = run_json(
        *SMALL, "--method", ALL, "--temperature", "0,0.8", "--offload", "ssd", "--results", results
    )
    rows = read_results(results)
    assert len(rows) == 3 * 2 * 8
    assert not any(problems(row) for row in rows)
    assert [len(row["tokens"]) <= 6 for row in rows] == [True] * len(rows)
    assert all(row["link"]["link_bytes_per_s"] > 0 for row in rows)
    assert all(row["metrics"]["bytes_per_pass"] > 1e6 for row in rows)
    cases = content["cases"]
    assert len(cases) == 16
    for case in cases:
        method, sampled = case["case"]["method"], case["case"]["temperature"] > 0
        assert case["runs"] == 3
        assert case["speedup"]["overall"] > 0
        assert case["metrics"]["generation_rate"]["mean"] >= 1.0
        if same_distribution(method) and sampled:
            assert case["same_text"] is None
        else:
            assert case["same_text"] == {"same": 3, "of": 3}, case["label"]
    by_label = {case["label"]: case for case in cases}
    assert by_label["chain 3"]["predicted_speedup"] > 0
    assert by_label["chain 3"]["metrics"]["acceptance_rate"]["mean"] <= 1.0
    assert by_label["specexec 8/4"]["metrics"]["generation_rate"]["mean"] > 1.3


def test_dsi_on_worker_processes_beside_chains(tmp_path):
    results = tmp_path / "bench.jsonl"
    content = run_json(
        *SMALL, "--method", "dsi,dsi-rejection,chain", "--temperature", "0.8", "--sp", "1",
        "--lookahead", "2", "--max-tokens", "12", "--prompts", "1", "--results", results,
    )  # fmt: skip
    assert not any(problems(row) for row in read_results(results))
    cases = {case["label"]: case for case in content["cases"]}
    assert list(cases) == ["autoregressive", "dsi 2 sp 1", "dsi-rejection 2 sp 1", "chain 3"]
    dsi, rejection, chain = list(cases.values())[1:]
    assert dsi["same_text"] == {"same": 1, "of": 1}
    assert rejection["same_text"] is None
    assert chain["same_text"] is None
    assert dsi["case"]["place"] == "cpu"
    assert all(case["speedup"]["overall"] > 0 for case in cases.values())


def test_dsi_that_would_not_pay_is_measured_where_it_is_said_how(tmp_path):
    with pytest.raises(ConfigError, match="how many target servers to measure it with, `sp`"):
        run(*SMALL, "--method", "dsi", "--device", "cpu", "--results", tmp_path / "bench.jsonl")


def test_policies_scorings_and_calibrations_beside_each_other(tmp_path):
    content = run_json(
        *SMALL, "--method", "specexec,chain-coupled", "--policy", "fixed,cost,oracle",
        "--draft-scoring", "noise,probs", "--calibration", "on,off", "--temperature", "0.8",
        "--max-tokens", "12", "--results", tmp_path / "bench.jsonl",
    )  # fmt: skip
    cases = {case["label"]: case for case in content["cases"]}
    # the oracle drafts chains alone, cost grows trees alone
    assert len(cases) == 1 + 4 * 2 + 4 * 2
    assert {"specexec cost 8/4", "chain-coupled oracle probs 3", "specexec uncalibrated 8/4"} <= {
        *cases
    }
    del cases["autoregressive"]
    for label, case in cases.items():
        assert case["same_text"] == {"same": 3, "of": 3}, label
        errors = case["calibration_errors"]
        assert min(errors) > 0.0, label
        if "uncalibrated" in label:
            assert errors[0] == errors[1]
    oracle, fixed = cases["chain-coupled oracle probs 3"], cases["chain-coupled probs 3"]
    # the same chains, but for what lies behind the first wrong token
    assert oracle["passes"]["target_passes"] == fixed["passes"]["target_passes"]
    assert oracle["metrics"]["tree_nodes"]["mean"] < fixed["metrics"]["tree_nodes"]["mean"]


def test_a_policy_that_sizes_no_method_s_trees_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="`policy='oracle'` needs the method chain-coupled"):
        run(*SMALL, "--policy", "oracle", "--results", tmp_path / "bench.jsonl")


def test_cases_take_turns(tmp_path):
    results = tmp_path / "bench.jsonl"
    run(*SMALL, "--method", "specexec", "--results", results)
    order = [(row["prompt"]["id"], row["case"]["method"]) for row in read_results(results)]
    methods = [method for _, method in order]
    first, second = "autoregressive", "specexec"
    assert methods == [first, second, second, first, first, second]
    assert len({prompt for prompt, _ in order}) == 3


def test_an_interrupted_bench_keeps_its_rows_and_goes_on(tmp_path, monkeypatch):
    results = tmp_path / "bench.jsonl"
    arguments = (*SMALL, "--method", "specexec", "--results", results)
    measure_one = Bench._row

    def until_the_third(self, one):
        if len(self._results.rows) == 2:
            raise KeyboardInterrupt
        return measure_one(self, one)

    monkeypatch.setattr(Bench, "_row", until_the_third)
    stopped = run(*arguments)
    assert stopped.exit_code == 130
    assert "2 of 6 runs" in stopped.stdout
    kept = results.read_text()
    assert kept.count("\n") == 2

    monkeypatch.setattr(Bench, "_row", measure_one)
    assert run(*arguments).exit_code == 0
    assert results.read_text().startswith(kept)
    assert len(read_results(results)) == 6

    def never(self, one):
        raise AssertionError("every run is finished")

    monkeypatch.setattr(Bench, "_row", never)
    assert "6 of 6 runs" in run(*arguments).stdout


def test_prompts_too_long_are_skipped_and_counted(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(["import os\n", "x = 1\n" * 4000]))
    arguments = (*SMALL, "--method", "autoregressive", "--dataset", path)
    notes = run_json(*arguments, "--results", tmp_path / "bench.jsonl")["notes"]
    assert "1 prompts" in notes[0]
    assert "1 too long for the context window, skipped" in notes[0]
    path.write_text(json.dumps(["x = 1\n" * 4000]))
    with pytest.raises(ConfigError, match=r"every prompt of .* is too long"):
        run(*arguments, "--results", tmp_path / "bench.jsonl")


def test_coverage_grows_with_k_and_is_kept(tmp_path):
    results = tmp_path / "bench.jsonl"
    row = run_json("coverage", "--prompts", "2", "--max-tokens", "8", "--top-k", "1,4,4096",
                   "--results", results, "-q")  # fmt: skip
    assert not problems(row)
    assert row["positions"] <= 16
    for masses in (row["draft_mass"], row["target_mass"]):
        assert masses == sorted(masses)
        assert masses[-1] == pytest.approx(1.0, abs=1e-4)
    assert row["draft_mass"][0] <= row["target_mass"][0]
    assert "99" in run("report", results).stdout or "100.0%" in run("report", results).stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--method", "specexce"), "Did you mean 'specexec'"),
        (("--dataset", "demmo"), "Did you mean 'demo'"),
        (("--budget", "8,x"), "--budget takes numbers separated by commas, not 'x'"),
        (("--temperature", "hot"), "--temperature takes numbers"),
        (("--method", ","), "--method is empty"),
        (("--repeats", "0"), "--repeats must be 1 or more"),
        (("-o", "yaml"), "--output 'yaml' is not one of"),
        (("coverage", "--top-k", "0"), "`top_k` takes numbers of 1 or more"),
        (("coverage", "--temperature", "0"), "greedy text has no distribution"),
        (("report", "absent.jsonl"), "cannot read results"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"[^\n]*") as caught:
        run(*arguments)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
