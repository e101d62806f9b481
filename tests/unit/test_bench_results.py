"""Cases, metrics, summaries, the results file and its schema, from numbers that are known."""

from __future__ import annotations

import csv
import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from bench_rows import case, row, stats_of, step

from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.errors import ConfigError
from specexec_cli.lab.baselines import SOURCES
from specexec_cli.lab.bench.cases import BASELINE, DISTRIBUTED, Grid, methods
from specexec_cli.lab.bench.metrics import (
    improvement_factor,
    paired_difference,
    quantile,
    ratio_and_error,
    run_metrics,
    spread,
)
from specexec_cli.lab.bench.results import ResultsFile, read_results, row_config, row_key
from specexec_cli.lab.bench.schema import problems
from specexec_cli.lab.bench.summary import summarize
from specexec_cli.lab.bench.tables import aligned, render
from specexec_cli.lab.papers.lab import rate

GREEDY = SamplingConfig()


def test_two_files_of_one_repository_have_rows_of_their_own() -> None:
    def key(target: str | None, draft: str | None) -> str:
        entries = (ModelEntry(name="x", repo="org/x-GGUF", file=file) for file in (target, draft))
        pair = SimpleNamespace(name="x", **dict(zip(("target", "draft"), entries, strict=True)))
        session = SimpleNamespace(pair=pair, settings={"dtype": "float32"})
        return row_key(row_config(session, SimpleNamespace(name="mtbench", sha256="0")))

    files = (None, "x-Q4_K_M.gguf", "x-Q8_0.gguf")
    assert len({key(target, draft) for target in files for draft in files}) == 9


def grid(**given):
    settings = {"methods": ["specexec"], "budgets": [], "depths": [], "lengths": [4],
                "sampling": [GREEDY], "max_tokens": 8, "baseline_tokens": 8}  # fmt: skip
    return Grid(**{**settings, **given})


def test_the_grid_is_a_cross_product_with_one_baseline_per_temperature():
    warm = SamplingConfig(temperature=0.6)
    cases = grid(
        methods=["specexec", "chain", "specexec"], budgets=[16, 64], depths=[4, 8],
        lengths=[2, 6], sampling=[GREEDY, warm],
    ).cases(TreeConfig())  # fmt: skip
    labels = [c.label for c in cases if c.sampling == warm]
    assert labels == ["autoregressive", "specexec 16/4", "specexec 16/8", "specexec 64/4",
                      "specexec 64/8", "chain 2", "chain 6"]  # fmt: skip
    assert len(cases) == 14


def test_the_baseline_is_always_there_and_a_depth_yields_to_a_small_budget():
    cases = grid(methods=["beam"], budgets=[4], baseline_tokens=3).cases(TreeConfig(max_depth=32))
    assert [c.label for c in cases] == [BASELINE, "beam 4/4"]
    assert [c.max_tokens for c in cases] == [3, 8]


def test_a_grid_without_methods_measures_the_usual_one():
    for usual in ("specexec", "suffix"):
        cases = grid(methods=[], budgets=[4]).cases(TreeConfig(), usual_method=usual)
        assert [c.label for c in cases] == [BASELINE, f"{usual} 4/4"]


def test_bad_grids():
    with pytest.raises(ConfigError, match=r"'specinfre' is not one of.*Did you mean 'specinfer'"):
        grid(methods=["specinfre"])
    with pytest.raises(ConfigError, match="speculation_length"):
        grid(lengths=[0])
    with pytest.raises(ConfigError, match="baseline_tokens"):
        grid(baseline_tokens=0)
    with pytest.raises(ConfigError, match=r"`max_depth` \(8\) cannot exceed `budget` \(4\)"):
        grid(budgets=[4], depths=[8]).cases(TreeConfig())


def test_every_method_has_an_implementation():
    assert methods() == (BASELINE, "specexec", "specexec-paper", "chain", "chain-coupled",
                         "specinfer", "beam", "beam-pruned", "suffix", "dsi",
                         "dsi-rejection")  # fmt: skip
    assert set(methods()) == {BASELINE, *SOURCES, *DISTRIBUTED}


def test_run_metrics_by_hand():
    steps = [step(3, 4, draft_s=0.5), step(5, 4, draft_s=0.5), step(1, 4, draft_s=0.5)]
    found = run_metrics(steps, stats_of(steps, 6.0), link_bytes_per_s=2000.0, is_chain=True)
    assert found["tokens_per_s"] == pytest.approx(9 / 6)
    assert found["generation_rate"] == 3.0
    assert found["tpot_s"] == pytest.approx((6.0 - 1.0) / 6)
    assert found["acceptance_rate"] == pytest.approx(6 / 12)
    assert found["token_acceptance_rate"] == pytest.approx(6 / 8)  # two rejections
    assert found["bytes_per_pass"] == 1000
    assert found["stream_bytes_per_s"] == pytest.approx(1000)
    assert found["link_share"] == pytest.approx(0.5)
    assert found["roofline_share"] == pytest.approx(1.5 / (3.0 * 2000 / 1000))
    assert (found["tree_nodes"], found["tree_depth"]) == (4, 4)


def test_numbers_that_a_run_does_not_have_are_none():
    steps = [step(1, 0)]
    found = run_metrics(steps, stats_of(steps, 1.0), link_bytes_per_s=None, is_chain=False)
    missing = {name for name, value in found.items() if value is None}
    assert missing == {"tpot_s", "acceptance_rate", "token_acceptance_rate", "link_share",
                       "roofline_share", "experts_per_token", "experts_held_share"}  # fmt: skip


def test_experts_of_a_run_by_hand():
    steps = [step(3, 4), step(5, 4)]
    stats = stats_of(steps, 6.0)
    stats.experts_asked, stats.experts_held = 40, 10
    found = run_metrics(steps, stats, link_bytes_per_s=None, is_chain=False)
    assert found["experts_per_token"] == 5.0
    assert found["experts_held_share"] == 0.25
    assert found["bytes_per_token"] == pytest.approx(stats.bytes_streamed / 8)


def test_a_draft_token_behind_an_eos_was_not_tested():
    from dataclasses import replace

    ended = replace(step(3, 8), drafted=(True, True, True))  # the EOS itself was drafted
    found = run_metrics([ended], stats_of([ended], 1.0), link_bytes_per_s=None, is_chain=True)
    assert found["token_acceptance_rate"] == 1.0


def test_spread_and_quantiles():
    found = spread([4.0, 1.0, 3.0, 2.0])
    assert (found["mean"], found["p50"]) == (2.5, 2.5)
    assert found["sd"] == pytest.approx(1.2909944)
    assert found["samples"] == [4.0, 1.0, 3.0, 2.0]
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.2) == 2.0
    assert spread([7.0]) == {"mean": 7.0, "sd": 0.0, "p20": 7.0, "p50": 7.0, "p80": 7.0,
                             "samples": [7.0]}  # fmt: skip


def test_a_ratio_of_sums_and_its_error_by_hand():
    """10 and 14 tokens in 4 passes each: residuals of -2 and 2 behind a ratio of 3."""
    assert ratio_and_error([10, 14], [4, 4]) == pytest.approx((3.0, (2 / 1 * 8) ** 0.5 / 8))
    assert ratio_and_error([6], [2]) == (3.0, np.inf)


def test_what_two_methods_have_in_common_is_no_error_of_their_difference():
    """Ratios of 3 and 1.5, each with residuals of half a token a pass on either prompt."""
    one, other = [(10, 4), (14, 4)], [(4, 4), (8, 4)]
    assert paired_difference(one, other) == pytest.approx((1.5, 0.0))
    # the prompt that is hard for one is easy for the other: rests differ by -1 and 1
    assert paired_difference(one, other[::-1]) == pytest.approx((1.5, (2 / (2 * 1)) ** 0.5))
    # weights: rests of 2 (10 - 2.4 * 4) / 10 and 2 (14 - 2.4 * 6) / 10, 0.08 and -0.08
    assert paired_difference([(10, 4), (14, 6)], [(2, 2), (2, 2)]) == pytest.approx((1.4, 0.08))
    longer = [*one, (100, 1)]
    assert paired_difference(longer, other) == paired_difference(one, other)
    assert paired_difference(one, [(4, 4)]) == (1.5, np.inf)


def test_the_improvement_factor_at_points_known_from_the_formula():
    assert improvement_factor(0.8, 5, 0.0) == pytest.approx((1 - 0.8**6) / 0.2)
    assert improvement_factor(1.0, 4, 0.25) == pytest.approx(5 / 2)
    assert improvement_factor(0.0, 4, 0.25) == pytest.approx(1 / 2)


def some_rows():
    plain = [step(1, 0)] * 4
    fast = [step(2, 8, draft_s=0.1)] * 2
    chain = [step(3, 4, draft_s=0.4)] * 2
    return [
        row(case("autoregressive"), plain, 4.0, prompt="a", tokens=[1, 2, 3, 4]),
        row(case("specexec", 8, 4), fast, 2.0, prompt="a", tokens=[1, 2, 3, 4]),
        row(case("chain", 4, 4), chain, 2.8, prompt="a", tokens=[1, 2, 3, 9]),
        row(case("autoregressive"), plain, 8.0, prompt="b", tokens=[1, 2, 3, 4]),
        row(case("specexec", 8, 4), fast, 2.0, prompt="b", tokens=[1, 2, 3, 5]),
    ]


def test_summaries_set_each_case_against_the_baseline_of_its_prompts():
    plain, ours, chain = summarize(some_rows())
    assert plain["speedup"]["overall"] == 1.0
    assert ours["speedup"]["samples"] == [2.0, 4.0]
    assert ours["speedup"]["overall"] == pytest.approx((8 / 4.0) / (8 / 12.0))
    assert ours["same_text"] == {"same": 1, "of": 2}
    assert ours["metrics"]["tokens_per_s"]["samples"] == [2.0, 2.0]
    assert ours["predicted_speedup"] is None
    # two of three tested tokens kept, a draft pass costs a tenth of a target pass
    assert chain["predicted_speedup"] == pytest.approx(improvement_factor(2 / 3, 4, 0.1))
    assert chain["same_text"] == {"same": 0, "of": 1}  # greedy: it should have been the same


def test_sampled_text_of_a_distribution_method_is_not_compared():
    warm = [row(case("autoregressive", temperature=0.5), [step(1, 0)], 1.0),
            row(case("specinfer", 4, 2, temperature=0.5), [step(2, 4)], 1.0)]  # fmt: skip
    assert summarize(warm)[1]["same_text"] is None


def test_a_case_without_a_baseline_has_no_speedup():
    assert summarize([row(case("specexec", 8, 4), [step(2, 8)], 1.0)])[0]["speedup"] is None


def test_rows_match_the_schema_and_the_schema_sees_mistakes():
    good = some_rows()[0]
    assert problems(good) == []
    assert problems({**good, "kind": "walk"}) == ["'kind' is not one of run, coverage"]
    assert problems({**good, "seed": "0"}) == ["'seed' is str"]
    assert problems({**good, "seed": True}) == ["'seed' is bool"]
    without = {**good, "metrics": {**good["metrics"]}}
    del without["metrics"]["ttft_s"]
    assert problems(without) == ["'metrics.ttft_s' is missing"]
    assert "another version" in problems({**good, "schema": 99})[0]
    assert problems([good])


def test_the_results_file_keeps_what_is_there(tmp_path):
    path = tmp_path / "deep" / "bench.jsonl"
    first, second = some_rows()[:2]
    ResultsFile(path).append(first)
    again = ResultsFile(path)
    assert list(again.rows) == [first["key"]]
    again.append(second)
    assert read_results(path) == [first, second]


def test_a_torn_last_line_is_dropped_and_written_over(tmp_path):
    path = tmp_path / "bench.jsonl"
    first, second = some_rows()[:2]
    path.write_text(json.dumps(first) + "\n" + json.dumps(second)[:100])
    assert read_results(path) == [first]
    ResultsFile(path).append(second)
    assert read_results(path) == [first, second]


def test_a_whole_last_line_without_a_newline_is_kept(tmp_path):
    path = tmp_path / "bench.jsonl"
    first, second = some_rows()[:2]
    path.write_text(json.dumps(first))
    ResultsFile(path).append(second)
    assert read_results(path) == [first, second]


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "bench.jsonl"
    good = json.dumps(some_rows()[0])
    path.write_text(f"{good}\nnot json\n{good}\n")
    with pytest.raises(ConfigError, match=r"bench\.jsonl, line 2: not JSON"):
        read_results(path)
    path.write_text(f'{good}\n{{"kind": "run"}}\n')
    with pytest.raises(ConfigError, match=r"line 2: not a bench result: 'schema' is missing"):
        ResultsFile(path)


@pytest.mark.parametrize("form", ["table", "md"])
def test_tables_show_each_case_and_what_the_times_hold(form):
    text = render(summarize(some_rows()), form, ["a note"])
    assert "specexec 8/4" in text
    assert "3.00x" in text
    assert "1/2" in text
    assert "a note" in text
    assert "prefill and first pass included" in text
    assert "VRAM" not in text.split("\n")[0], "no column without a number in it"
    if form == "md":
        assert text.split("\n")[1].startswith("| --- | ---: |")


def test_json_and_csv_hold_every_metric():
    summaries = summarize(some_rows())
    content = json.loads(render(summaries, "json", ["a note"]))
    assert content["schema"] == 1
    assert content["notes"] == ["a note"]
    assert "excluded" in content["timing"]
    assert content["cases"][1]["metrics"]["tokens_per_s"]["samples"] == [2.0, 2.0]
    lines = list(csv.DictReader(io.StringIO(render(summaries, "csv", []))))
    assert [line["label"] for line in lines] == ["autoregressive", "specexec 8/4", "chain 4"]
    assert float(lines[1]["tokens_per_s_mean"]) == 2.0
    assert float(lines[1]["speedup"]) == pytest.approx(3.0)


def test_a_rate_of_several_runs_is_named_by_how_it_was_averaged():
    """Three tokens in one pass, five in five: 8 in 6 together, and 2 on average."""
    runs = [
        row(case("specexec", 8, 4), [step(3, 8)], 1.0, prompt="a"),
        row(case("specexec", 8, 4), [step(1, 8)] * 5, 5.0, prompt="b"),
    ]
    (summary,) = summarize(runs)
    assert summary["generation_rate"] == {"micro": pytest.approx(8 / 6), "macro": 2.0}
    header, line = render([summary], "table", []).split("\n")[:2]
    for column, shown in (
        ("tok/s micro", "1.33 ±1.41"), ("tok/s macro", "2.00"),
        ("tok/pass micro", "1.33"), ("tok/pass macro", "2.00"),
    ):  # fmt: skip
        end = header.index(column) + len(column)
        assert line[:end].endswith(f" {shown}"), column
    (cells,) = csv.DictReader(io.StringIO(render([summary], "csv", [])))
    assert float(cells["generation_rate_micro"]) == pytest.approx(8 / 6)
    assert float(cells["generation_rate_macro"]) == 2.0
    assert str(rate(runs)) == "1.33 ±0.56 micro, 2.00 ±1.00 macro"
    assert str(rate(runs)).startswith("1.33 ±")


def test_the_table_divides_the_numbers_that_it_shows():
    """Fast and slow prompts: the mean of rates is not the rate of all."""
    plain = [row(case("autoregressive"), [step(1, 0)] * 8, seconds, prompt=f"{n}")
             for n, seconds in enumerate((1.0, 8.0))]  # fmt: skip
    ours = [row(case("specexec", 8, 4), [step(2, 8)] * 4, seconds, prompt=f"{n}")
            for n, seconds in enumerate((0.1, 8.0))]  # fmt: skip
    lines = render(summarize([*plain, *ours]), "table", []).splitlines()
    header = re.split(r"  +", lines[0])
    cells = [dict(zip(header, re.split(r"  +", line), strict=True)) for line in lines[1:3]]
    shown = [float(cell["tok/s micro"].split()[0]) for cell in cells]
    assert float(cells[1]["speedup"].rstrip("x")) == pytest.approx(shown[1] / shown[0], abs=0.01)


def test_a_table_wider_than_the_terminal_is_several_below_each_other() -> None:
    header, rows = ["method", "tok/s", "speedup", "runs"], [["chain", "7.36", "1.00x", "1"]]
    assert aligned(header, rows) == ["method  tok/s  speedup  runs", "chain    7.36    1.00x     1"]
    assert aligned(header, rows, 28) == aligned(header, rows)
    assert aligned(header, rows, 27) == [
        "method  tok/s  speedup", "chain    7.36    1.00x", "", "method  runs", "chain      1",
    ]  # fmt: skip
    assert len(aligned(header, rows, 1)) == 8, "a column is never cut"
