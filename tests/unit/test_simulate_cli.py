"""`specexec simulate`: output, JSON schema, errors; and nothing heavy is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from specexec_cli.errors import ConfigError, OutOfMemoryError
from specexec_cli.lab.commands.simulate import app

ISSUE = [
    "dsi", "--target-ms", "37.7", "--draft-ms", "2.5", "--acceptance", "0.63",
    "--lookahead", "1,5,10", "--sp", "7", "--tokens", "50", "--repeats", "20",
]  # fmt: skip


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_dsi_prints_every_method_and_its_costs():
    data = json.loads(invoke(*ISSUE, "--json"))
    assert data["schema"] == 1
    assert [(m["method"], m["lookahead"]) for m in data["methods"]] == [
        ("non-SI", None), ("SI", 5), ("DSI", 1), ("DSI", 5), ("DSI", 10),
    ]  # fmt: skip
    plain, si, *dsi = data["methods"]
    assert plain["ms_per_token"] == pytest.approx(37.7)
    assert plain["target_forwards"] == 50
    assert plain["gpu_s"] == pytest.approx(50 * 0.0377)
    assert all(m["ms_per_token"] < si["ms_per_token"] for m in dsi[:2])
    assert all(1 < m["servers_used"] <= 7 for m in dsi)
    lines = invoke(*ISSUE).splitlines()
    assert lines[0].split() == [
        "method", "lookahead", "ms/token", "over", "SI", "over", "non-SI", "target", "forwards",
        "servers", "used", "GPU-s",
    ]  # fmt: skip
    assert len(lines) == 8


def test_proposition_1_for_a_finite_text():
    """t1 p (N - 1) + t2 ((1 - p)(N - 1) + 1) of 2, 10, 0.75 and 5: 2 * 3 + 10 * (1 + 1) = 26."""
    args = ["dsi", "--target-ms", "10", "--draft-ms", "2", "--acceptance", "0.75", "--tokens", "5",
            "--sp", "99", "--lookahead", "1"]  # fmt: skip
    data = json.loads(invoke(*args, "--repeats", "4000", "--json"))
    assert data["proposition_1"] == {"ms_per_token": pytest.approx(26 / 5), "tokens": 5}
    assert data["methods"][-1]["ms_per_token"] == pytest.approx(26 / 5, rel=0.02)
    assert "Proposition 1: 5.20 ms/token" in invoke(*args, "--repeats", "1")


def test_measured_numbers_are_taken_and_overridden(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(
        json.dumps({"target": {"ttft_ms": 90.0, "tpot_ms": 37.7}, "draft": {"tpot_ms": 2.5},
                    "acceptance": {"rate": 0.63}})
    )  # fmt: skip
    rest = ISSUE[7:]
    assert json.loads(invoke("dsi", "--measured", str(path), *rest, "--json")) == json.loads(
        invoke(*ISSUE, "--json")
    )
    changed = json.loads(
        invoke("dsi", "--measured", str(path), "--acceptance", "0.9", *rest, "--json")
    )
    assert changed["config"]["acceptance"] == 0.9
    assert changed["config"]["target_ms"] == 37.7


def test_rows_that_cost_time_make_long_lookaheads_dearer():
    def slowest(*more: str) -> float:
        methods = json.loads(invoke(*ISSUE, "--json", *more))["methods"]
        return methods[-1]["ms_per_token"]

    assert slowest("--row-ms", "2") > 1.2 * slowest()


def test_table_prints_ten_rows_and_says_why_the_columns_differ():
    data = json.loads(invoke("table", "--repeats", "2", "--json"))
    assert len(data["rows"]) == 10
    columns = {"paper", "exact", "accounting", "restarts"}
    assert set(data["geometric_mean"]) == set(data["spearman"]) == columns
    assert data["spearman"]["paper"] == pytest.approx(1.0)
    assert data["within_10_percent"]["paper"] == 10
    assert {"target", "drafter", "dataset", "target_ms", "draft_ms", "acceptance"} | columns == set(
        data["rows"][0]
    )
    text = invoke("table", "--repeats", "2")
    assert "geometric mean" in text
    assert "a target pass that verifies nothing" in text


def test_heatmap_json_needs_no_plotting_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    data = json.loads(invoke("heatmap", "--points", "5", "--json"))
    assert len(data["speedups"]["DSI / SI"]) == len(data["acceptances"]) == 6
    assert data["maximum"]["DSI / better of both"] > 1.3


def test_offload_ends_with_a_verdict():
    args = ["offload", "--target-gb", "35", "--link-gb-s", "25", "--draft-ms", "12",
            "--acceptance", "0.7", "--budgets", "16,64", "--tokens", "16"]  # fmt: skip
    assert "one streamed target wins" in invoke(*args).splitlines()[-1]
    data = json.loads(invoke(*args, "--devices", "4", "--json"))
    assert "wins" in data["verdict"]
    assert data["estimates"][0]["tokens_per_pass"] == 1.0


PCS = ["--ram", "96GB", "--vram", "0", "--ssd", "5GB/s", "--memory", "70GB/s", "--tflops", "1.5"]


def three_pcs(folder, **changes):
    told = {"ram_gb": 96, "memory_gb_s": 70, "tflops": 1.5, **changes}
    entries = [
        "\n".join(["[[host]]", f'name = "{name}"', *(f"{key} = {told[key]}" for key in told)])
        for name in ("attic", "cellar")
    ]
    path = folder / "hosts.toml"
    path.write_text("\n".join(entries))
    return ["hosts", "command-a", "--hosts", str(path), *PCS]


def test_a_model_of_120b_over_three_machines_that_are_not_there(tmp_path, computer):
    """222 GB of weights stream from one machine's SSD, and lie in the RAM of three."""
    computer.has_cpu("A CPU", "avx2", "avx512f", "avx512bw", "avx512_bf16")
    data = json.loads(
        invoke(*three_pcs(tmp_path), "--budgets", "16", "--gbit-s", "0.3,10", "--json")
    )
    assert data["schema"] == 1
    alone, slow, fast = (data["ways"][at : at + 2] for at in (0, 2, 4))
    assert [way["nodes"] for way in data["ways"]] == [0, 16] * 3
    assert all(way["machines"] == "one machine" and way["ssd_bytes"] for way in alone)
    assert all("attic" in way["machines"] and not way["ssd_bytes"] for way in slow + fast)
    assert [way["gbit_s"] for way in (slow[0], fast[0])] == pytest.approx([0.3, 10])
    assert slow[1]["away_s"] > 10 * fast[1]["away_s"]
    # a token a pass is as fast as memory allows, and a tree's rows travel together
    assert alone[0]["pass_s"] > 8 * fast[0]["pass_s"] > 8 * 222e9 / 70e9
    assert fast[1]["tokens_per_s"] > 2 * fast[0]["tokens_per_s"]
    assert {each["program"] for each in data["published"]} == {"prima.cpp", "llama.cpp RPC"}
    passes = {(each["gbit_s"], each["rows"]): each for each in data["many_rows"]}
    assert [each["waves"] for each in data["many_rows"][:3]] == [1, 1, 1]  # one machine
    slow_link, fast_link = sorted({gbit_s for gbit_s, _ in passes if gbit_s is not None})
    prompt = passes[fast_link, 2048]
    assert prompt["waves"] == 12
    assert prompt["pass_s"] < 0.5 * prompt["one_wave_s"]  # of 36 turns 14 are left
    assert prompt["pass_s"] < passes[slow_link, 2048]["pass_s"]
    text = invoke(*three_pcs(tmp_path), "--budgets", "16", "--rows", "17,512")
    assert "in one wave" in text
    assert "times one machine's best" in text
    assert "published: prima.cpp 1.5 tokens/s" in text


def test_machines_that_get_no_layers_are_said_not_to_pay(tmp_path):
    """Rather than that one machine's ways stand there again as those of all."""
    args = [*three_pcs(tmp_path, ram_gb=2), "--budgets", "16", "--gbit-s", "0.3,10"]
    data = json.loads(invoke(*args, "--ram", "400GB", "--json"))
    assert [(way["machines"], way["nodes"]) for way in data["ways"]] == [
        ("one machine", 0), ("one machine", 16),
    ]  # fmt: skip
    assert "the other machines do not pay" in data["verdict"]


def test_a_machine_without_arithmetic_is_a_usual_one_also_where_it_is_alone(tmp_path):
    """So that it is not compared without products to several with them."""
    path = tmp_path / "hosts.toml"
    path.write_text('[[host]]\nname = "attic"\nram_gb = 16\n')
    args = ["hosts", "command-a", "--hosts", str(path), "--ram", "240GB", "--vram", "0",
            "--memory", "70GB/s", "--budgets", "1,16", "--rows", "4x17,512"]  # fmt: skip
    unknown, told = (
        json.loads(invoke(*args, *more, "--json")) for more in ((), ("--tflops", "0.5"))
    )
    assert unknown == told
    assert unknown["ways"][0]["machines"] == "one machine"
    assert [(each["texts"], each["rows"]) for each in told["many_rows"][:2]] == [(4, 68), (1, 512)]


@pytest.mark.parametrize("rows", ["x", "4x", "0x17", "4x0", "1,,2", "-3"])
def test_rows_of_passes_that_are_none_are_one_clear_error(rows, tmp_path):
    with pytest.raises(ConfigError, match="--rows takes rows of a prompt"):
        invoke(*three_pcs(tmp_path), f"--rows={rows}")


def test_machines_without_room_for_a_model_are_one_line(tmp_path):
    alone = ["--ram", "6GB", *PCS[2:]]
    args = [*three_pcs(tmp_path, ram_gb=2, layers=30)[: -len(PCS)], *alone, "--budgets", "16"]
    with pytest.raises(OutOfMemoryError, match="needs"):
        invoke(*args)


def test_a_rate_of_links_that_is_none_is_one_clear_error(tmp_path):
    for rate in ("0", "nan", "fast"):
        with pytest.raises(ConfigError, match="--gbit-s takes rates above 0"):
            invoke(*three_pcs(tmp_path), "--gbit-s", rate)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["hosts", "command-a"], "give --hosts FILE"),
        (["hosts", "command-a", "--hosts", "x", "--tflops", "0"], "--tflops must be above 0"),
        ([*ISSUE, "--lookahead", "a,b"], r"--lookahead takes whole numbers .* not 'a,b'"),
        ([*ISSUE, "--lookahead", "0"], "--lookahead takes"),
        ([*ISSUE, "--sp", "0"], "--sp must be 1 or more"),
        ([*ISSUE, "--acceptance", "2"], "`acceptance` must be between 0 and 1"),
        (["heatmap", "--points", "1"], "`points` must be 2 or more"),
        (["table", "--ttft", "0.5"], "--ttft must be between 1 and 1000, not 0.5"),
        (["dsi", "--target-ms", "5"], "give --draft-ms, --acceptance, or --measured FILE"),
        (["dsi", "--measured", "no-such-file"], "cannot read no-such-file"),
        (["dsi", "--measured", __file__], "is not what `specexec measure --json` prints"),
    ],
)
def test_bad_options_are_one_clear_error(args, message):
    with pytest.raises(ConfigError, match=message):
        invoke(*args)


def test_simulating_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from typer.testing import CliRunner;"
        "from specexec_cli.lab.commands.simulate import app;"
        f"assert CliRunner().invoke(app, {ISSUE!r}).exit_code == 0;"
        "print([m for m in ('torch', 'transformers', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
