"""README's picture of a terminal shows what the commands print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_picture_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "terminal_svg.py"), "--check"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_readme_shows_it() -> None:
    assert "(docs/terminal.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")
