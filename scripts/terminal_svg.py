"""Draws docs/terminal.svg: the first commands of an evening, as a terminal shows them.

The commands run as they are shown, on a machine that is described by options, so that the picture
is the same wherever it is drawn. For `pull` the machine and the hub are stand-ins, which tell the
same sizes as models.toml; what it says of them is its own. `--check` fails where the output has
changed since.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from specexec_cli.catalog.registry import load_registry

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from fake_hub import FakeHub, running  # noqa: E402

PATH = ROOT / "docs" / "terminal.svg"
COLUMNS = 80
PAIR = "qwen3.8-27b-gptq"
QUESTIONS = ("What does dict.get do?", "And list.append?")
COMMANDS = (
    "specexec models recommend --gpu 4090 --ram 64",
    f"specexec plan {PAIR} --gpu 4090 --ram 64",
    f"specexec pull {PAIR}",
    "specexec generate 'What does os.path.join do?'",
    "specexec chat",
)
# An RTX 4090, 64 GB of RAM and a disk of which 812 GB are free, at a terminal.
_STAND_IN = """
from specexec_cli.cli import fetching, main
from specexec_cli.planning import chosen_models as room, machine as site
from specexec_cli.planning.machine_rates import card_named
machine = site.described_site(ram_bytes=64 * 10**9, card=card_named("4090"))
fetching.described_site = lambda **_: machine
room.free_disk_bytes = lambda: 812 * 10**9
fetching.someone_is_there = lambda: True
main.main()
"""


class _Declared(bytes):
    """A file of the hub's that is as long as it says, and is never sent."""

    declared = 0

    def __len__(self) -> int:
        return self.declared


def _hub() -> FakeHub:
    """A hub that knows the pair's two models by name and size."""
    registry = load_registry()
    pair = registry.pairs[PAIR]
    repos = {}
    for name in (pair.target, pair.draft):
        entry = registry.models[name]
        weights = _Declared()
        weights.declared = entry.size_bytes or 0
        repos[entry.repo] = {"model.safetensors": weights}
    return FakeHub(repos=repos)


def output(command: str) -> str:
    """What the command shows, with nothing of this machine's in it."""
    words = shlex.split(command)[1:]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with ExitStack() as stack:
        empty = stack.enter_context(tempfile.TemporaryDirectory())
        environment = {
            **clean, "COLUMNS": str(COLUMNS), "HF_HOME": f"{empty}/hf", "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": f"{empty}/cache", "XDG_CONFIG_HOME": f"{empty}/config",
            "XDG_STATE_HOME": f"{empty}/state",
        }  # fmt: skip
        program, typed = ["-m", "specexec_cli.cli.main"], ""
        if words[0] == "pull":
            hub = stack.enter_context(running(_hub()))
            environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
            program, typed = ["-c", _STAND_IN], "n\n"
        if words[0] == "chat":
            typed = "\n".join(QUESTIONS) + "\n"
        done = subprocess.run(
            [sys.executable, *program, *words], input=typed,
            env=environment, capture_output=True, text=True, check=words[0] != "pull",
        )  # fmt: skip
    if words[0] == "pull":  # the key that was typed, which a terminal shows
        return done.stderr.replace("[y/N] ", "[y/N] n\n")
    return done.stdout


def drawn() -> str:
    """The picture as SVG."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    for command in COMMANDS:
        console.print(Text(f"$ {command}", "bold green"))
        shown = output(command).rstrip()
        if command == "specexec chat":
            shown = "\n".join(_turns(shown))
        console.print(Text(shown + "\n"))
    return console.export_svg(title="specexec", theme=MONOKAI, unique_id="specexec")


def _turns(replies: str) -> list[str]:
    """The questions before their replies, as a terminal shows a chat; a reply takes two lines."""
    lines = replies.splitlines()
    return [
        line
        for index, question in enumerate(QUESTIONS)
        for line in (f"> {question}", *lines[2 * index : 2 * index + 2], "")
    ]


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
