"""`specexec models`: readable at 80 columns, plain in a pipe, exact as JSON."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
from cli_runner import run_cli
from computer import Computer
from typer.testing import CliRunner

import specexec_cli
from specexec_cli.catalog.models_file import TASKS
from specexec_cli.catalog.registry import load_registry
from specexec_cli.cli import models as cli
from specexec_cli.cli.machine import DescribedMachine
from specexec_cli.errors import ConfigError, UnknownModelError
from specexec_cli.planning.alternatives import PATIENT_TOKENS_PER_S


@pytest.fixture(autouse=True)
def own_places(computer: Computer) -> Path:
    """No user's models.toml, a CPU with bfloat16, and an empty hub cache, which is returned."""
    computer.has_cpu("A CPU", "avx2", "avx512f", "avx512bw", "avx512_bf16")
    return computer.hub


def run(*arguments: str) -> str:
    """stdout of a call that succeeds; our errors pass through to the test."""
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def run_json(*arguments: str) -> dict[str, Any]:
    content = json.loads(run(*arguments, "--json"))
    assert isinstance(content, dict)
    assert content["schema"] == 1
    return content


@pytest.mark.parametrize("columns", [None, 60, 80, 140, 220])
def test_a_pipe_gets_one_plain_line_per_entry(
    columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wide as a terminal of 80 columns, or of as many as COLUMNS says."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    output = run("list", "--all")
    assert "\x1b" not in output
    lines = output.splitlines()
    assert all(len(line) <= (columns or 80) for line in lines[:-1])
    registry = load_registry()
    for pair in registry.pairs.values():
        found = [line for line in lines if line.startswith(f"{pair.name} ")]
        assert len(found) == (2 if pair.name in registry.models else 1), pair.name
        models = found[0].split()[1:]
        assert (pair.target in models and pair.draft in models) == ((columns or 80) >= 140)
        assert found[0].endswith(f" {pair.source}") == (columns == 220)
    shape = r" +69\.0B +gptq 4-bit" if columns != 60 else ""
    context = " +4096" if columns != 60 else ""
    assert re.search(rf"^llama2-70b-chat-gptq{shape} +35\.3{context} +no$", output, re.M)
    assert "models.toml (not there yet)" in lines[-1]


@pytest.mark.parametrize("machine", [(), ("--vram", "8", "--ram", "32"), ("--vram=0", "--ram=4")])
def test_the_list_is_a_screen_and_recommends_first(
    machine: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("list", *machine).splitlines()
    assert len(lines) <= 23, "24 with the prompt"
    assert all(len(line) <= 80 for line in lines)
    head = lines.index("") + 1
    assert lines[head].split() == ["model", "tok/s", "llama.cpp", "fetch", "GB", "verdict"]
    if machine != ("--vram=0", "--ram=4"):
        best = run_json("recommend", *machine)["pairs"][0]
        assert lines[head + 1].split()[0] == best["name"]
        assert lines[head + 1].endswith(best["verdict"])
    assert "demo" not in " ".join(lines), "the toys are in --all"
    assert re.search(r"^\d+ more: .*--all lists all\.$", lines[-1])


def test_a_word_filters_every_kind_of_name() -> None:
    names = {pair["name"] for pair in run_json("list", "CODER")["pairs"]}
    assert {"qwen2.5-coder-32b-instruct-gptq", "deepseek-coder-v2-lite-instruct"} <= names
    registry = load_registry()
    assert all("coder" in f"{name} {registry.pairs[name].target}" for name in names)
    assert {model["name"] for model in run_json("list", "demo-t")["models"]} == {
        "demo-target", "demo-target-gptq",
    }  # fmt: skip
    assert re.search(r"^demo-gptq +\d+ .* here ", run("list", "demo"), re.M)
    small = run("list", "smollm2-360", "--ram", "4")
    row = re.search(r"^smollm2-360m-instruct +([\d.]+) +([\d.]+) +0\.724 +reads like", small, re.M)
    assert row is not None, "no pair's, but it has a prediction"
    plan = run_cli("plan", "smollm2-360m-instruct", "--draft", "suffix", "--ram", "4")
    told = " ".join(plan.out.split())
    assert f"about {row[1]} tok/s" in told
    assert f"llama.cpp about {row[2]} tok/s" in told
    assert "smollm2" not in run("list", "smollm3"), "of a pair there is one row"
    with pytest.raises(UnknownModelError, match=r"no model's name has 'qwen3-33b' in it\. Did"):
        run("list", "qwen3-33b")


@pytest.mark.parametrize("vram", [0, 8, 24])
@pytest.mark.parametrize("ram", [16, 64])
def test_nothing_recommended_is_slower_and_smaller_than_another(vram: int, ram: int) -> None:
    machine = ("--vram", str(vram), "--ram", str(ram))
    registry = load_registry()

    def worth(pair: dict[str, Any]) -> tuple[float, int]:
        target = registry.resolve(registry.pairs[pair["name"]].target)
        return pair["prediction"]["typical"], target.dense_params

    able = [
        pair for pair in run_json("list", *machine)["pairs"]
        if pair["prediction"] and not pair["gated"] and "package:" not in registry.resolve(
            pair["target"]
        ).repo and not registry.resolve(pair["target"]).superseded
    ]  # fmt: skip
    for task in TASKS:
        others = [worth(pair) for pair in able if task in pair["tasks"]]
        for pair in run_json("recommend", "--task", task, *machine)["pairs"]:
            speed, size = worth(pair)
            assert not any(each[0] > speed and each[1] > size for each in others), pair["name"]


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_a_terminal_shows_every_name_whole(tmp_path: Path, columns: int) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-c", "from specexec_cli.cli.models import app; app()", "list", "--all"],
        dimensions=(40, columns),
        env={"PATH": os.environ["PATH"], "TERM": "xterm", "HOME": str(tmp_path)},
        encoding="utf-8",
        timeout=60,
    )
    lines = re.sub(r"\x1b\[[0-9;]*m", "", child.read()).splitlines()
    child.close()
    assert child.exitstatus == 0
    assert all(len(line.rstrip()) <= columns for line in lines[:-1])  # the last one holds a path
    starts = {line.split()[0] for line in lines if line.strip()}
    registry = load_registry()
    assert {*registry.pairs, *registry.models} <= starts
    row = next(line for line in lines if line.startswith("llama2-70b-chat-gptq "))
    assert len(row.split()) == (6 if columns == 140 else 4)  # its models, where there is room


def test_json_holds_everything_with_sizes_in_bytes() -> None:
    content = run_json("list")
    registry = load_registry()
    assert [pair["name"] for pair in content["pairs"]] == list(registry.pairs)
    assert [model["name"] for model in content["models"]] == list(registry.models)
    gptq = next(model for model in content["models"] if model["name"] == "llama2-70b-chat-gptq")
    assert gptq["size_bytes"] == pytest.approx(35.33e9, rel=0.01)
    assert gptq["shape"]["num_key_value_heads"] == 8
    assert (gptq["bits"], gptq["group_size"], gptq["here"]) == (4, -1, "no")
    pair = next(pair for pair in content["pairs"] if pair["name"] == "demo")
    assert set(pair) == {
        "name", "target", "draft", "budget", "depth", "batch", "source", "note", "tasks",
        "tokens_per_pass", "place", "prediction", "fetch_bytes", "gated", "verdict",
        "llama_cpp_tokens_per_s",
    }  # fmt: skip


def test_show_a_pair_with_both_its_models() -> None:
    content = run_json("show", "mixtral-8x7b-instruct-gptq")
    assert content["pair"]["budget"] == 256
    assert content["target"]["repo"] == "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ"
    assert content["draft"]["name"] == "mistral-7b-instruct-gptq"
    text = run("show", "mixtral-8x7b-instruct-gptq")
    assert re.search(r"^pair mixtral-8x7b-instruct-gptq\n  target +mixtral", text)
    assert re.search(r"^  size +23\.8 GB$", text, re.M)
    assert re.search(r"^  source +budget: SpecExec, arXiv:2406\.02532, table 1; tree", text, re.M)
    assert re.search(r"^  group_size +-1$", text, re.M)


def test_show_a_model_with_the_drafts_of_its_tokenizer() -> None:
    content = run_json("show", "llama3.2-1b-instruct")
    assert content["model"]["gated"] is True
    assert content["drafts"] == []
    text = run("show", "qwen3-4b")
    assert text.startswith("model qwen3-4b\n  repo          Qwen/Qwen3-4B\n")
    assert "draft models of this tokenizer: qwen3-0.6b, qwen3-0.6b-gptq, qwen3-1.7b\n" in text


def test_show_what_a_name_of_the_users_own_stands_for(own_places: Path) -> None:
    folder = Path(specexec_cli.__file__).parent / "demo" / "target-gptq"
    run("add", "mine", str(folder))
    content = run_json("show", "mine")
    assert content["model"]["repo"] == str(folder)
    assert content["model"]["size_bytes"] > 0
    assert run("show", "mine").startswith("model mine\n")


def test_what_is_already_here(own_places: Path, tmp_path: Path) -> None:
    for name in ("Qwen3-4B", "Qwen3-14B-AWQ"):
        snapshot = own_places / f"models--Qwen--{name}" / "snapshots" / "main"
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").touch()
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(bytes(1000))
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '[models.folder]\nrepo = "./weights"\n[models.empty]\nrepo = "./gone"\n'
        '[models.plain]\nrepo = "a/b"\n[models.bitless]\nrepo = "a/c"\nparams = 5\n'
    )
    models = {
        model["name"]: (model["here"], model["size_bytes"])
        for model in run_json("list", "--models-file", str(mine))["models"]
    }
    assert models["qwen3-4b"][0] == "cached"
    assert models["qwen3-32b"][0] == "no"
    rows = run("list", "qwen3-14b-awq", "--ram", "32").splitlines()
    found = [row for row in rows if row.startswith("qwen3-14b-awq ")]
    assert [" here " in row for row in found] == [True, False], "alone, and in its pair"
    assert models["folder"] == ("folder", 1000)
    assert models["empty"] == ("no", None)
    assert models["plain"] == models["bitless"] == ("no", None)
    assert re.search(
        r"^plain +- +- +- +- +no$", run("list", "--all", "--models-file", str(mine)), re.M
    )


def test_mistakes_are_errors_of_ours(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"no model, pair or head 'qwen3-33b'.*'qwen3-32b'"):
        run("show", "qwen3-33b")
    with pytest.raises(ConfigError, match="cannot read the models file"):
        run("list", "--models-file", str(tmp_path / "gone.toml"))


def test_a_trained_head_is_shown_with_its_target() -> None:
    head = run_json("show", "gemma4-31b-it-assistant")["head"]
    assert head["target"] == load_registry().heads["gemma4-31b-it-assistant"].target
    assert head["here"] == "no"
    assert "head gemma4-31b-it-assistant" in run("show", "gemma4-31b-it-assistant")


def test_what_a_head_s_makers_do_not_state_is_said() -> None:
    text = run("show", "llama3.3-70b-instruct-eagle3-authors")
    assert "params        not stated" in text
    assert "license       not stated" in text


# --- On a machine ---


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    refused = run_cli("models", "list")
    assert refused.code == 2
    assert "no home folder: set HOME" in refused.error


def test_every_pair_says_where_it_runs_how_fast_and_what_is_to_be_fetched() -> None:
    pairs = {
        pair["name"]: pair for pair in run_json("list", "--vram", "24", "--ram", "64")["pairs"]
    }
    assert pairs["llama2-70b-chat"]["place"] == "no"
    assert pairs["llama2-70b-chat"]["prediction"] is None
    assert pairs["llama2-70b-chat-gptq"]["place"] == "RAM"
    assert pairs["llama2-70b-chat-gptq"]["gated"] is True
    assert pairs["llama2-70b-chat-gptq"]["fetch_bytes"] == pytest.approx(48.8e9, rel=0.01)
    assert pairs["qwen2.5-14b-instruct-gptq"]["place"] == "VRAM"
    assert (pairs["demo"]["fetch_bytes"], pairs["demo"]["gated"]) == (0, False)
    small = run_json("list", "--vram", "0", "--ram", "16")["pairs"]
    assert {pair["place"] for pair in small} == {"RAM", "SSD", "no"}
    for pair in pairs.values():
        if pair["prediction"]:
            told = pair["prediction"]
            assert told["low"] <= told["typical"] <= told["high"]


@pytest.mark.parametrize("ram", [32, 64])
@pytest.mark.parametrize("vram", [8, 12, 16, 24])
@pytest.mark.parametrize("task", ["chat", "code"])
def test_every_card_has_a_pair_that_writes_as_fast_as_one_reads(
    task: str, vram: int, ram: int
) -> None:
    argv = ("recommend", "--task", task, "--vram", str(vram), "--ram", f"{ram}GB")
    best = run_json(*argv)["pairs"][0]
    registry = load_registry()
    pair = registry.pairs[best["name"]]
    assert task in pair.tasks
    assert best["prediction"]["typical"] >= 4
    assert registry.resolve(pair.target).quantization not in (None, "none")
    assert f"specexec chat {pair.name}" in run(*argv)


@pytest.mark.parametrize("ram", [16, 64, 128])
@pytest.mark.parametrize("vram", [0, 8, 16, 24])
def test_what_is_recommended_is_the_best_that_the_list_predicts(vram: int, ram: int) -> None:
    """Of the largest targets of 4 tokens per second, or the fastest; what is superseded last."""
    machine = ("--vram", str(vram), "--ram", str(ram), "--ssd", "2GB/s", "--link", "20GB/s")
    listed, registry = run_json("list", *machine)["pairs"], load_registry()
    for task in TASKS:
        named = run_json("recommend", "--task", task, *machine)["pairs"]
        able = [pair for pair in listed if task in pair["tasks"] and pair["prediction"]]
        models = {pair["name"]: registry.resolve(pair["target"]) for pair in able}
        able = [pair for pair in able if not models[pair["name"]].superseded] or able
        fluent = [pair for pair in able if pair["prediction"]["typical"] >= 4]
        largest = max((models[pair["name"]].dense_params for pair in fluent), default=None)
        equals = [pair for pair in fluent if models[pair["name"]].dense_params == largest] or able
        if fluent:
            equals = [pair for pair in equals if not pair["gated"]] or equals
        best = max(equals, key=lambda pair: pair["prediction"]["typical"])
        assert named[0]["name"] == best["name"], task
        assert named[0]["prediction"] == best["prediction"]


def test_the_rule_stands_in_what_is_printed() -> None:
    told = run("recommend", "--vram", "24", "--ram", "64")
    assert "qwen3.8-27b-gptq reads like chat: about " in told
    assert "Of all that write at least 4 tok/s and that newer ones have not replaced, it" in told
    assert "None writes 4 tok/s, as fast as one reads" in run("recommend", "--ram", "2", "--vram=0")
    base = run("recommend", "--task", "text", "--vram", "24", "--ram", "64")
    assert re.search(r"^ +specexec generate -m llama2-70b-gptq-sheared ", base, re.M)


def test_the_least_memory_that_a_note_names_is_enough() -> None:
    found = 0
    smaller = {12: 8, 16: 12}  # GB; a pair does not fit into the next smaller card
    places = {
        card: {
            one["name"]: one["place"]
            for one in run_json("list", "--vram", str(card), "--ram", "32")["pairs"]
        }
        for card in (8, 12, 16, 24)
    }
    for pair in load_registry().pairs.values():
        least = re.search(r"from (\d+) GB of GPU memory", pair.note)
        if least:
            found += 1
            card = int(least[1])
            assert places[card][pair.name] != "no", pair.name
            if card in smaller:
                assert places[smaller[card]][pair.name] == "no", pair.name
    assert found >= 7


@pytest.mark.parametrize("vram", [8, 12, 16, 24])
def test_every_family_has_a_pair_for_a_card(vram: int) -> None:
    """As `plan NAME --vram N --ram 32` says; a family is what one tokenizer serves."""
    registry = load_registry()
    listed = run_json("list", "--vram", str(vram), "--ram", "32")["pairs"]
    family = {
        pair.name: registry.resolve(pair.target).tokenizer for pair in registry.pairs.values()
    }
    fitting = {family[one["name"]] for one in listed if one["place"] != "no"}
    # layers of Llama 4 move whole, 4.4 GB each, and a GPU holds two of them
    absent = {"llama-4"} if vram < 16 else set()
    assert set(family.values()) - absent == fitting


def test_a_larger_and_a_faster_pair_are_named_beside_the_best() -> None:
    pairs = run_json("recommend", "--vram", "12", "--ram", "64")["pairs"]
    registry = load_registry()
    sizes = [registry.resolve(registry.pairs[pair["name"]].target).dense_params for pair in pairs]
    speeds = [pair["prediction"]["typical"] for pair in pairs]
    assert sizes[1] > sizes[0] > sizes[2]
    assert speeds[1] < speeds[0] < speeds[2]
    text = run("recommend", "--vram", "12", "--ram", "64")
    assert "Larger: " in text
    assert "Faster: " in text


def test_no_larger_pair_is_named_that_nobody_would_wait_for() -> None:
    """qwen3-235b fits a machine with 20 GB of RAM, and would write a token a minute there."""
    machine = ("--vram", "0", "--ram", "20", "--ssd", "2GB/s")
    named = [pair["name"] for pair in run_json("recommend", *machine)["pairs"]]
    speeds = {
        pair["name"]: pair["prediction"]["typical"]
        for pair in run_json("list", *machine)["pairs"]
        if pair["prediction"]
    }
    assert speeds["qwen3-235b-a22b"] < PATIENT_TOKENS_PER_S
    assert len(named) >= 2
    assert all(speeds[name] >= PATIENT_TOKENS_PER_S for name in named)


def test_what_the_disk_has_no_room_for_is_not_recommended(
    computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this machine, here one of 24 and 192 GB; a described one has a disk of its own."""
    described = DescribedMachine(ram="192", vram="24", ssd="2GB/s", link="20GB/s").site()
    able = cli.fits(described, None)
    monkeypatch.setattr(DescribedMachine, "site", lambda options: described)
    monkeypatch.setattr(cli, "fits", lambda *options: able)
    fetched = {fit.pair.name: fit.verdict.fetch_bytes or 0 for fit in able}
    wanted = [pair["name"] for pair in run_json("recommend", "--ram", "192")["pairs"]]
    room = max(fetched[name] for name in wanted) - 1
    computer.has_free_disk(room)
    named = [pair["name"] for pair in run_json("recommend")["pairs"]]
    assert named
    assert all(fetched[name] <= room for name in named)
    left = [name for name in wanted if fetched[name] > room]
    line = re.search(r"^Left out, since .* free on this disk: .*(\n  .*)*", run("recommend"), re.M)
    assert line is not None
    assert all(name in line[0] for name in left)
    monkeypatch.setattr(
        cli, "fits", lambda *options: [fit for fit in able if fit.verdict.fetch_bytes]
    )
    computer.has_free_disk(10**8)
    with pytest.raises(UnknownModelError, match=r"RAM and the 100 MB free on this disk"):
        run("recommend")


def test_nothing_to_recommend_is_an_error_of_ours() -> None:
    with pytest.raises(UnknownModelError, match=r"no pair for code fits 1\.0 GB of GPU memory and"):
        run("recommend", "--task", "code", "--vram", "1", "--ram", "64")
    with pytest.raises(ConfigError, match="--task 'prose' is not one of chat, code, text"):
        run("recommend", "--task", "prose")


def test_readmes_table_of_cards_is_what_recommend_says() -> None:
    scripts = Path(__file__).parents[2] / "scripts"
    done = subprocess.run(
        [sys.executable, str(scripts / "cards_table.py"), "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_card_is_planned_for_by_its_name() -> None:
    named = run_json("recommend", "--gpu", "rtx 4090", "--ram", "64")["pairs"]
    given = run_json("recommend", "--vram", "24", "--ram", "64")["pairs"]
    assert named[0]["prediction"]["typical"] > given[0]["prediction"]["typical"]
    assert "(RTX 4090's datasheet: 85% of its bandwidth, 60% of its tensor rate)" in " ".join(
        run("recommend", "--gpu", "4090", "--ram", "64").split()
    )
    with pytest.raises(ConfigError, match="--gpu 'RTX 4091' is none of the cards whose rates are"):
        run("recommend", "--gpu", "RTX 4091")
