"""Help that fits a screen: what is common first, and nothing that --help-all lacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runner import run_cli
from typer.main import get_command

from specexec_cli.cli.main import app

# every command, with the lines its --help may take at 80 columns
COMMANDS = {
    "": 40, "generate": 45, "chat": 50, "serve": 52, "worker": 30, "train-policy": 45, "plan": 42,
    "pull": 30, "rm": 30, "cache": 24, "use": 22, "quantize": 38, "doctor": 20,
    "bench": 60, "bench coverage": 45,
    "bench report": 30, "bench paper": 50, "measure": 48,
    "models": 20, "models list": 25, "models recommend": 25, "models show": 20, "models add": 28,
    "models rm": 20, "simulate": 25,
    "simulate dsi": 40, "simulate hosts": 45, "simulate heatmap": 30, "simulate table": 20,
    "simulate offload": 40,
}  # fmt: skip
LONG = ("generate", "chat", "serve", "train-policy", "plan", "bench")


def test_all_commands_are_looked_at() -> None:
    def below(command: object, path: str) -> set[str]:
        found = {path}
        for name, child in getattr(command, "commands", {}).items():
            found |= below(child, f"{path} {name}".strip())
        return found

    assert below(get_command(app), "") == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_and_shows_or_names_every_option(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = get_command(app)
    for name in command.split():
        found = found.commands[name]
    flags = {param.opts[0] for param in found.params if param.opts[0].startswith("--")}
    for columns in (60, 80, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = run_cli(*command.split(), "--help").out
        assert flags <= set(re.findall(r"--[a-z-]+", shown))
        assert all(len(line) <= columns for line in shown.splitlines())
        if columns == 80:
            assert len(shown.splitlines()) <= COMMANDS[command]


@pytest.mark.parametrize("command", LONG)
def test_help_all_explains_what_help_names(command: str) -> None:
    brief, whole = run_cli(command, "--help").out, run_cli(command, "--help-all").out
    named = brief.partition("More options, which --help-all explains:")[2]
    assert "--offload" in named
    assert "Where layers stream from" not in brief
    assert "Where layers stream from" in whole
    assert "More options" not in whole


def test_help_names_each_panel_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("60", "80", "140"):
        monkeypatch.setenv("COLUMNS", columns)
        lines = run_cli("generate", "--help").out.splitlines()
        below = lines[lines.index(" More options, which --help-all explains:") + 1 :]
        begun = [line.partition(":")[0].strip() for line in below if ":" in line]
        assert begun == [
            "Sampling", "Draft tree", "Several texts", "Memory", "Advanced",
            "Several devices (--method dsi)",
        ]  # fmt: skip


def test_flags_are_not_shown_as_if_they_took_a_word() -> None:
    # typer from 0.29 on shows <bool>, others nothing: what it goes by is asked as well
    for name, found in get_command(app).commands.items():
        assert "bool" not in run_cli(name, "--help").out
        with found.make_context(name, [], resilient_parsing=True) as context:
            found.get_help(context)
            flags = [one for one in found.get_params(context) if getattr(one, "is_flag", False)]
            assert {flag.metavar for flag in flags} == {""}


def test_help_of_options_shows_what_a_revision_looks_like(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("60", "80", "140"):
        monkeypatch.setenv("COLUMNS", columns)
        assert "org/name@revision" in run_cli("generate", "--help").out


def test_paragraphs_wrap_at_the_screen_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = run_cli("chat", "--help").out
    assert any(
        "Replies go to stdout" in line and "the exit code is" in line for line in shown.splitlines()
    )


def test_a_screen_that_knows_ascii_alone_gets_question_marks_and_no_traceback(
    tmp_path: Path,
) -> None:
    entries = tmp_path / "own.toml"
    models = 'target = "demo-target"\ndraft = "demo-draft"\n'
    entries.write_text(f'[pairs.own]\n{models}source = "größer"\ntokens_per_pass = 3\n', "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "specexec_cli.cli.main", "plan", "own",
         "--models-file", str(entries), "--vram", "0", "--ram", "16"],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0",
             "XDG_CACHE_HOME": str(tmp_path)},  # without earlier runs of the pair
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"gr??er" in done.stdout
