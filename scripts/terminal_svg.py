"""Draws docs/terminal.svg: the first commands of an evening, as a terminal shows them.

The commands run as they are shown, on a machine that is described by options, so that the picture
is the same wherever it is drawn. `--check` fails where the output has changed since.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PATH = Path(__file__).parents[1] / "docs" / "terminal.svg"
COLUMNS = 80
COMMANDS = (
    "specexec models recommend --vram 24 --ram 64",
    "specexec plan --pair qwen2.5-72b-instruct-gptq --vram 24 --ram 64",
    "specexec generate --chat 'What does os.path.join do?'",
)


def output(command: str) -> str:
    """What the command prints, with nothing of this machine's in it."""
    with tempfile.TemporaryDirectory() as empty:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment = {
            **clean, "COLUMNS": str(COLUMNS), "HF_HOME": f"{empty}/hf", "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": f"{empty}/cache", "XDG_CONFIG_HOME": f"{empty}/config",
        }  # fmt: skip
        words = shlex.split(command)
        done = subprocess.run(
            [sys.executable, "-m", "specexec_cli.cli.main", *words[1:]],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
    return done.stdout


def drawn() -> str:
    """The picture as SVG."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    for command in COMMANDS:
        console.print(Text(f"$ {command}", "bold green"))
        console.print(Text(output(command).rstrip() + "\n"))
    return console.export_svg(title="specexec", theme=MONOKAI, unique_id="specexec")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the picture is out of date")
    arguments = parser.parse_args()
    wanted = drawn()
    if not arguments.check:
        PATH.write_text(wanted, encoding="utf-8")
    elif not PATH.is_file() or PATH.read_text(encoding="utf-8") != wanted:
        sys.exit(f"{PATH.name} is out of date: python scripts/terminal_svg.py")


if __name__ == "__main__":
    main()
