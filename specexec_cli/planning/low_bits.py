"""A target's own low-bit copy, known before it exists: its config, its size, and where it is kept.

`draft='self'` drafts with the target's own layers in 4 bits (`self-3` and `self-2` in fewer), as
SubSpec does (arXiv:2509.18344). models/own_copy.py makes the copy; this room is torch-free.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specexec_cli.catalog.own_copies import copies_folder
from specexec_cli.config import SELF, SELF_DRAFTS
from specexec_cli.errors import ConfigError
from specexec_cli.kept import file_name
from specexec_cli.offload.checkpoint import Checkpoint

GROUP_SIZE = 64  # inputs that share a scale and a zero point

_FORMAT_VERSION = 3  # of what is kept: another one is never read


def own_bits(draft: str | None) -> int | None:
    """Bits of the copy that `draft` asks for; None where it is something else.

    Raises:
        ConfigError: bits that there are no copies of.
    """
    if draft is None or not re.fullmatch(rf"{SELF}(-\d+)?", draft):
        return None
    if draft not in SELF_DRAFTS:
        raise ConfigError(
            f"`draft='{draft}'`: the target's own copy has 4, 3 or 2 bits. Try `draft='{SELF}'`, "
            f"`draft='{SELF}-3'` or `draft='{SELF}-2'`"
        )
    return SELF_DRAFTS[draft]


def quantization_keys(bits: int, group_size: int) -> dict[str, Any]:
    """What config.json says of weights that are quantized here.

    `gptq_v2` stores zero points as they are; the older format loses those of 0.
    """
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False,
        "sym": False, "lm_head": False, "checkpoint_format": "gptq_v2", "pack_dtype": "int32",
    }  # fmt: skip


def own_config(target: Mapping[str, Any], bits: int) -> dict[str, Any]:
    """The copy's config.json, as far as sizes go.

    Args:
        target: the target's config.json, of weights that are not quantized.
    """
    return {**target, "quantization_config": quantization_keys(bits, GROUP_SIZE)}


def own_folder(target: Checkpoint, bits: int) -> Path:
    """Where the copy of these very files is kept, whether it is there or not.

    Files count as the same while path, size and time do; a file in the hub's cache is a link to one
    that is named by its content. A copy of other weights would cost speed and never change a token.
    """
    told = hashlib.sha256()
    for path in [target.config_path, *target.files]:
        real = path.resolve()
        status = real.stat()
        told.update(f"{path.name} {real} {status.st_size} {status.st_mtime_ns}\n".encode())
    name = file_name(_readable(target), told.hexdigest()[:16], f"{bits}bit-v{_FORMAT_VERSION}")
    return copies_folder() / name


def _readable(target: Checkpoint) -> str:
    """What a person calls it: in the hub's cache the repository, not the snapshot's hash."""
    folder = target.folder
    if folder.parent.name == "snapshots":
        return folder.parents[1].name.removeprefix("models--")
    return folder.name
