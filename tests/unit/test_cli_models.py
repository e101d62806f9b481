"""`specexec models`: readable at 80 columns, plain in a pipe, exact as JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from specexec_cli.catalog import registry as registry_module
from specexec_cli.catalog.registry import load_registry
from specexec_cli.cli import models as cli
from specexec_cli.errors import ConfigError, UnknownModelError


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No user's models.toml, and an empty hub cache, which is returned."""
    absent = tmp_path / "config" / "models.toml"
    monkeypatch.setattr(registry_module, "user_models_file", lambda: absent)
    monkeypatch.setattr(cli, "user_models_file", lambda: absent)
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


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


def test_a_pipe_gets_one_plain_line_per_entry() -> None:
    output = run("list")
    assert "\x1b" not in output
    lines = output.splitlines()
    registry = load_registry()
    for pair in registry.pairs.values():
        found = [
            line for line in lines if re.match(rf"{re.escape(pair.name)} .*{pair.source}", line)
        ]
        assert len(found) == 1, pair.name
        assert pair.target in found[0]
        assert pair.draft in found[0]
    assert re.search(r"^llama2-70b-chat-gptq +69\.0B +gptq 4-bit +35\.3 +4096 +no$", output, re.M)
    assert "models.toml (not there yet)" in lines[-1]


def test_a_terminal_of_80_columns_shows_every_name_whole(tmp_path: Path) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-c", "from specexec_cli.cli.models import app; app()", "list"],
        dimensions=(40, 80),
        env={"PATH": os.environ["PATH"], "TERM": "xterm", "HOME": str(tmp_path)},
        encoding="utf-8",
        timeout=60,
    )
    lines = re.sub(r"\x1b\[[0-9;]*m", "", child.read()).splitlines()
    child.close()
    assert child.exitstatus == 0
    assert all(len(line.rstrip()) <= 80 for line in lines[:-1])  # the last one holds a path
    starts = {line.split()[0] for line in lines if line.strip()}
    registry = load_registry()
    assert {*registry.pairs, *registry.models} <= starts
    row = next(line for line in lines if line.startswith("llama2-70b-chat-gptq "))
    assert row.split() == ["llama2-70b-chat-gptq", "llama2-7b-chat", "128", "32", "SpecExec"]


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
        "name", "target", "draft", "budget", "depth", "batch", "source", "note", "task",
        "tokens_per_pass",
    }  # fmt: skip


def test_show_a_pair_with_both_its_models() -> None:
    content = run_json("show", "mixtral-8x7b-instruct-gptq")
    assert content["pair"]["budget"] == 256
    assert content["target"]["repo"] == "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ"
    assert content["draft"]["name"] == "mistral-7b-instruct-gptq"
    text = run("show", "mixtral-8x7b-instruct-gptq")
    assert re.search(r"^pair mixtral-8x7b-instruct-gptq\n  target +mixtral", text)
    assert re.search(r"^  size +23\.8 GB$", text, re.M)
    assert re.search(r"^  source +SpecExec, arXiv:2406\.02532, table 1$", text, re.M)
    assert re.search(r"^  group_size +-1$", text, re.M)


def test_show_a_model_with_the_drafts_of_its_tokenizer() -> None:
    content = run_json("show", "llama3.2-1b-instruct")
    assert content["model"]["gated"] is True
    assert content["drafts"] == []
    text = run("show", "qwen3-4b")
    assert text.startswith("model qwen3-4b\n  repo          Qwen/Qwen3-4B\n")
    assert "draft models of this tokenizer: qwen3-0.6b, qwen3-1.7b\n" in text


def test_what_is_already_here(own_places: Path, tmp_path: Path) -> None:
    snapshot = own_places / "models--Qwen--Qwen3-4B" / "snapshots" / "main"
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
    assert models["folder"] == ("folder", 1000)
    assert models["empty"] == ("no", None)
    assert models["plain"] == models["bitless"] == ("no", None)
    assert re.search(r"^plain +- +- +- +- +no$", run("list", "--models-file", str(mine)), re.M)


def test_mistakes_are_errors_of_ours(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"no model or pair 'qwen3-33b'.*'qwen3-32b'"):
        run("show", "qwen3-33b")
    with pytest.raises(ConfigError, match="cannot read the models file"):
        run("list", "--models-file", str(tmp_path / "gone.toml"))
