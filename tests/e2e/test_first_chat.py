"""A bare `specexec chat` where only the demo is here: one offer, and then never again."""

from __future__ import annotations

import sys
from pathlib import Path

from terminal import CTRL_D, Terminal

SPECEXEC = [sys.executable, "-m", "specexec_cli.cli.main", "chat"]


def start(tmp_path: Path, *argv: str) -> Terminal:
    places = {
        "HF_HOME": str(tmp_path / "hf"), "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return Terminal([*SPECEXEC, *argv], environment=places, columns=80)


def test_the_offer_is_made_once_and_no_is_the_demo(tmp_path: Path) -> None:
    named = start(tmp_path, "demo")
    assert "Only the demo" not in named.prompt()
    named.type(CTRL_D)
    named.end()
    chat = start(tmp_path)
    offer = chat.wait("Use that one? [y/N]")
    assert "Only the demo pair is on this machine" in offer
    assert "tok/s" in offer
    assert "to fetch" in offer
    chat.type("n\r")
    chat.prompt()
    chat.type(CTRL_D)
    assert chat.end() == 0
    again = start(tmp_path)
    assert "Only the demo" not in again.prompt()
    again.type(CTRL_D)
    again.end()
