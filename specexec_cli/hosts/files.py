"""Whether two machines have the same model: a hash over their files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from specexec_cli.errors import CheckpointError
from specexec_cli.offload.checkpoint import Checkpoint

_SAMPLE_BYTES = 4096  # of each tensor


def digest_of(checkpoint: Checkpoint) -> str:
    """A hash of the config, of every tensor's name, dtype and shape, and of bytes in its middle.

    Whole files are not read: that takes as long as to load them. Another model, revision, fine-tune
    or packing differs in most of its tensors.

    Raises:
        CheckpointError: a file cannot be read.
    """
    told = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    by_file: dict[Path, list[str]] = {}
    for name in sorted(checkpoint):
        by_file.setdefault(checkpoint[name].path, []).append(name)
    found = {}
    for path, names in by_file.items():
        try:
            with path.open("rb") as file:
                for name in names:
                    tensor = checkpoint[name]
                    start = tensor.start + max(0, tensor.n_bytes - _SAMPLE_BYTES) // 2
                    file.seek(start)
                    sample = file.read(min(_SAMPLE_BYTES, tensor.n_bytes))
                    found[name] = [tensor.dtype, list(tensor.shape), sample.hex()]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    told.update(json.dumps(sorted(found.items())).encode())
    return told.hexdigest()
