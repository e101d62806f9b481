"""Errors name settings; the command line replaces them by its options."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from typer.main import get_command

import specexec_cli
from specexec_cli.cli.main import app
from specexec_cli.cli.mends import with_mend, with_options
from specexec_cli.errors import ConfigError

HOUSE = Path(specexec_cli.__file__).parent
# Written by a tool: what it quotes of transformers' errors names attributes.
QUOTED = HOUSE / "catalog" / "conforming.py"


def literals(path: Path) -> list[str]:
    """Strings of a file that are no docstrings; what is put into an f-string reads {}."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    seen = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = [each for each in node.values if isinstance(each, ast.Constant)]
            seen |= {id(each) for each in pieces}
            found.append(
                "".join(each.value if each in pieces else "{}" for each in node.values)  # type: ignore[attr-defined]
            )
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen
        ):
            found.append(node.value)
    return found


def every_option() -> set[str]:
    def of(command: object) -> set[str]:
        found = {flag for one in getattr(command, "params", ()) for flag in one.opts}
        for each in getattr(command, "commands", {}).values():
            found |= of(each)
        return found

    return of(get_command(app))


OPTIONS = every_option()  # once the commands are made, their options are known
COMMAND_LINES = ("cli", "commands")  # the program's own, and the lab's
ROOMS = sorted(path for path in HOUSE.rglob("*.py") if path.parent.name not in COMMAND_LINES)


def test_no_room_but_the_command_line_names_an_option() -> None:
    for path in ROOMS:
        for text in literals(path):
            if "specexec " in text or path.name in ("device.py", "environment.py"):
                continue  # a whole command to run; arguments of nvidia-smi and git
            assert not re.search(r"(^|[\s(\"'])--[a-z]", text), (path.name, text)


def test_every_setting_that_an_error_names_is_an_option() -> None:
    named: set[str] = set()
    for path in ROOMS:
        if path == QUOTED:
            continue
        for text in literals(path):
            named |= set(re.findall(r"`([a-z_]+)`", text)) | set(re.findall(r"`([a-z_]+)=", text))
    assert named >= {"budget", "max_depth", "offload", "draft"}
    for name in named:
        told = with_options(f"`{name}`")
        assert told in OPTIONS, f"`{name}` becomes {told}"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("lower `max_depth`, or `offload='ssd'`", "lower --depth, or --offload ssd"),
        ("with `draft='demo'`.", "with --draft demo."),
        ("`budget=64` and `sliding_window`", "--budget 64 and `sliding_window`"),
        ("`specexec models list` shows all", "`specexec models list` shows all"),
    ],
)
def test_settings_become_options(written: str, told: str) -> None:
    assert with_options(written) == told
    assert with_mend(ConfigError(written)) == told
