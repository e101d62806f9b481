"""transformers imports an optional package named `kernels`; our folder of that name is not it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cli_runner import ROOT

PROBE = """
import importlib.util, sys
spec = importlib.util.find_spec("kernels")
from transformers.utils.import_utils import is_kernels_available
regular = spec is not None and spec.origin is not None
from transformers.integrations import hub_kernels
print("available", is_kernels_available(), "regular", regular)
import specexec_kernels
print("ours", specexec_kernels.__name__)
"""


def probe(cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROBE], cwd=cwd, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_transformers_is_not_fooled_from_the_repository_s_root(tmp_path: Path) -> None:
    here, elsewhere = probe(ROOT), probe(tmp_path)
    (out, err), (expected, expected_err) = here.communicate(), elsewhere.communicate()
    assert here.returncode == elsewhere.returncode == 0, err + expected_err
    assert out == expected
    assert "ours specexec_kernels" in out


def test_the_folder_is_no_package() -> None:
    """kernels/__init__.py would make it one, and transformers would import it."""
    assert (ROOT / "kernels" / "specexec_kernels" / "__init__.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()
