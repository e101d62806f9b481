"""The Triton kernels compile for a GPU and fit into it, without one at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_kernels.py"


def test_kernels_fit_into_a_consumer_gpu(tmp_path: Path) -> None:
    """In a process of its own: this one's Triton interprets."""
    pytest.importorskip("triton", reason="Triton is not made for this platform")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--gpus", "rtx-30", "--quick"],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, "a kernel's launch must not print warnings at people"
    kernels = json.loads(done.stdout.splitlines()[-1])["kernels"]
    assert len(kernels) == 61
    for kernel in kernels:
        assert 0 < kernel["registers"] <= 255
        assert kernel["shared_bytes"] <= kernel["shared_limit_bytes"] == 99 * 1024
        assert not kernel["spilled_bytes"], kernel["case"]
        assert kernel["blocks"] >= 1
