"""What Triton lacks on this machine, and the mend. Told from files alone: nothing is imported.

Triton compiles a small C module when it starts, for which it needs a C compiler and Python's
headers; see runtime/build.py of Triton 3.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple


class Lack(NamedTuple):
    """What is missing, and the command that mends it."""

    what: str
    mend: str


def triton_lack() -> Lack | None:
    """The first thing that Triton lacks to start; None if nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return Lack("it is not installed", "pip install triton")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return Lack("it needs a C compiler", "apt install gcc")
    if not (Path(sysconfig.get_paths("posix_prefix")["include"]) / "Python.h").is_file():
        return Lack("it needs Python's headers", "apt install python3-dev")
    return None


def without_triton(obstacle: str, cost: str = "") -> str:
    """A sentence for the user of a GPU without Triton's kernels.

    Args:
        obstacle: why they do not run; shown if nothing that can be installed is missing.
        cost: what it costs, as in "16.4 s of a pass"; may be empty.
    """
    lack = triton_lack()
    mend = f"; mend: {lack.mend}" if lack else ""
    return (
        f"Triton is missing: {lack.what if lack else obstacle}. PyTorch unpacks packed weights "
        f"before every product{cost and f', {cost}'}{mend}."
    )
