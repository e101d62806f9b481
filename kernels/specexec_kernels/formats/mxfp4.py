"""gpt-oss's MXFP4 experts (`quant_method` "mxfp4"), after each expert got tensors of its own.

Source: `convert_moe_packed_tensors` in transformers' integrations/mxfp4.py, which transposes the
matrices as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specexec_kernels.formats import register
from specexec_kernels.formats.base import Method, PackedFormat, Stored
from specexec_kernels.formats.fp4 import Fp4

_GROUP = 32


def _read(stored: Stored, settings: Mapping[str, Any]) -> PackedFormat | None:
    stored.shape("blocks")
    return Fp4(stored.unit_of(_GROUP), _GROUP, codes="blocks", scales="scales")


METHOD = Method(name="mxfp4", leaves=("blocks", "scales"), read=_read)
register(METHOD)
