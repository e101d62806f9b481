"""Threads that wait for one another give up their core soon, unless somebody has set how."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# What libgomp takes, it says when it is loaded, which torch does.
SHOWN = "from specexec_cli.cli import main; main.wait_briefly(); import torch"


@pytest.mark.parametrize(
    ("given", "rounds"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)],
)
def test_the_program_bounds_the_wait_and_leaves_what_is_set(
    given: dict[str, str], rounds: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    environment = {**os.environ, **given, "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], env=environment, capture_output=True, text=True, check=True
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch is not linked with libgomp here")
    if rounds is None:
        assert "GOMP_SPINCOUNT = '10000'" not in done.stderr
        assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
    else:
        assert f"GOMP_SPINCOUNT = '{rounds}'" in done.stderr
