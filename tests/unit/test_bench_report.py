"""The report: figures where matplotlib is, the papers' rows for their pair, coverage."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from bench_rows import ENVIRONMENT, case, row, step

from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench.coverage import covered
from specexec_cli.lab.bench.report import make_report


def coverage_row():
    return {
        "schema": 1, "kind": "coverage", "key": "c", "positions": 10,
        "config": {"pair": "demo", "target": "t", "draft": "d", "offload": "none",
                   "device": "cpu", "dtype": "float32", "dataset": "demo", "prompts_sha256": "0"},
        "case": {"temperature": 1.0, "max_tokens": 8, "seed": 0},
        "top_k": [1, 2, 4], "draft_mass": [0.5, 0.7, 0.9], "target_mass": [0.8, 0.9, 1.0],
        "environment": ENVIRONMENT,
    }  # fmt: skip


@pytest.fixture
def results(tmp_path):
    rows = [row(case("autoregressive"), [step(1, 0)] * 4, 4.0), coverage_row()]
    for budget in (4, 8, 16):
        for method in ("specexec", "beam"):
            rows.append(row(case(method, budget, 4), [step(3, budget, draft_s=0.2)] * 2, 2.5))
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


@pytest.mark.parametrize("form", ["png", "svg"])
def test_every_figure_is_drawn(results, tmp_path, form):
    pytest.importorskip("matplotlib")
    _, drawn = make_report([results], "table", tmp_path / "figures", form)
    names = {re.sub(r"-\d-demo.*", "", path.name) for path in drawn}
    assert names == {"tokens-per-pass", "tokens-per-s", "time-split", f"coverage.{form}"}
    magic = b"\x89PNG" if form == "png" else b"<?xml"
    assert all(path.read_bytes().startswith(magic) for path in drawn)


def test_without_matplotlib_the_extra_is_named(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match="pip install matplotlib, or leave"):
        make_report([results], "table", tmp_path, "png")


def test_the_text_holds_cases_coverage_and_origin(results):
    text, drawn = make_report([results], "md", None, "png")
    assert drawn == []
    assert "| specexec 16/4 |" in text
    assert "| demo | 1 | 4 | 90.0% | 100.0% |" in text
    assert "commit 000000000000" in text
    assert "published" not in text


def test_json_holds_the_coverage_too(results):
    content = json.loads(make_report([results], "json", None, "png")[0])
    assert len(content["cases"]) == 7
    assert content["coverage"][0]["draft_mass"] == [0.5, 0.7, 0.9]


def test_the_papers_rows_stand_beside_their_own_pair(tmp_path):
    path = tmp_path / "bench.jsonl"
    target, draft = "TheBloke/Llama-2-70B-Chat-GPTQ", "TheBloke/Llama-2-7B-Chat-GPTQ"
    measured = row(case("specexec", 8, 4), [step(3, 8)], 2.0, target=target)
    measured["config"]["draft"] = draft
    measured["environment"] = {
        **measured["environment"],
        "hardware": {**measured["environment"]["hardware"], "gpus": ["NVIDIA GeForce RTX 4060"]},
    }
    path.write_text(json.dumps(measured))
    text, _ = make_report([path], "table", None, "png")
    assert f"{target} with {draft}: published and measured" in text
    published = [line for line in text.split("\n") if line.startswith("SpecExec, table")]
    assert len(published) == 5, "table 1 twice, table 3 three times; not the 2080 Ti's Sheared"
    assert "RTX 4060" in published[0], "the same hardware first"
    # the authors' program prints macro averages: no micro ones stand beside them
    assert published[0].split()[-8:] == ["oasst", "0.6", "128", "9.70", "-", "3.28", "-", "4.6x"]
    assert "here, NVIDIA GeForce RTX 4060" in text


def test_results_without_a_row(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no result in"):
        make_report([tmp_path / "empty.jsonl"], "table", None, "png")
    with pytest.raises(ConfigError, match=r"cannot read results from .*: No such file[a-z ]*$"):
        make_report([tmp_path / "absent.jsonl"], "table", None, "png")
    (tmp_path / "packed.jsonl").write_bytes(b"\x1f\x8b\xff")
    with pytest.raises(ConfigError, match=r"packed\.jsonl: it is not UTF-8 text$"):
        make_report([tmp_path / "packed.jsonl"], "table", None, "png")


def test_covered_mass_by_hand():
    target = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    draft = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    found = covered(target, draft, [1, 2, 8])
    assert torch.allclose(found, torch.tensor([[0.5, 0.7, 1.0], [0.8, 0.9, 1.0]]))
