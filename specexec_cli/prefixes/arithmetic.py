"""All that the bits of a machine's rows depend on, besides the weights and the dtype."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import torch
from specexec_kernels import dispatch, kernel_files

import specexec_cli
from specexec_cli import __version__


def arithmetic_of(device: torch.device) -> str:
    """A hash of how a device rounds, of the versions of what computes, and of the code."""
    versions = [__version__, *(version(name) for name in ("torch", "transformers"))]
    told = [dispatch.rounding(device), versions, kernel_files.code_digest(), _code()]
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()


def _code() -> str:
    """A digest of the package's code, the kernels' left out."""
    told = hashlib.sha256()
    for path in sorted(Path(specexec_cli.__file__).parent.rglob("*.py")):
        told.update(path.read_bytes())
    return told.hexdigest()
