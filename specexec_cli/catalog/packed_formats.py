"""What tools call weights packed as GPTQ or AWQ pack them: one table for loading and sizes.

An entry says how a config file names the method, which tensors a packed linear has, and which of
the two layouts they have; `models/packing.py` makes linears of them. What the layouts mean
is in specexec_kernels.formats, `gptq` and `awq`. Torch-free, because `plan` reads it before
anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedKind:
    """One `quant_method` of config.json, as far as it differs from GPTQ."""

    method: str  # as the config names it, unless `config_name` does
    config_name: str = ""  # of a method that several kinds have; their variants tell which
    bits: tuple[int, ...] = (2, 3, 4, 8)  # of a code, that can be read
    # Variants that can be read; the first is meant where the config names none.
    variants: tuple[str, ...] = ("gptq", "gptq_v2")
    variant_keys: tuple[str, ...] = ()  # of the config, that name it besides checkpoint_format
    # How a config that names no method shows that it is of this one, if it does.
    own_file: str | None = None
    own_key: str | None = None
    # Codes lie down the inputs as GPTQ packs them, or along the outputs in AWQ's order.
    layout: Literal["gptq", "awq"] = "gptq"
    # Zero points are stored minus one, save in some variants.
    zeros_minus_one: bool = True
    plain_zeros: tuple[str, ...] = ("gptq_v2",)
    tensors: tuple[str, ...] = (
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
    )  # of a linear; g_idx may miss

    @property
    def name(self) -> str:
        """What the config calls the method."""
        return self.config_name or self.method


_table: dict[str, PackedKind] = {}
PACKED_KINDS: Mapping[str, PackedKind] = MappingProxyType(_table)


def register(kind: PackedKind) -> None:
    """Adds a format.

    Raises:
        ValueError: there is one of this method.
    """
    if kind.method in _table:
        raise ValueError(f"packed weights of '{kind.method}' are registered twice")
    _table[kind.method] = kind


# GPTQ (Frantar et al., arXiv:2210.17323), as AutoGPTQ and GPTQModel write it
register(PackedKind(method="gptq"))
# AWQ (Lin et al., arXiv:2306.00978), as AutoAWQ writes it for its GEMM kernels
register(
    PackedKind(
        method="awq", bits=(4,), variants=("gemm",), variant_keys=("version",),
        own_file="quant_config.json", own_key="version", layout="awq", zeros_minus_one=False,
        tensors=("qweight", "qzeros", "scales"),
    )
)  # fmt: skip
# AutoRound (Cheng et al., arXiv:2309.05516), which packs as GPTQ or AWQ do; `packing_format` says
# which (GPTQ_FORMAT and AWQ_FORMAT in auto_round/inference/backend.py)
register(
    PackedKind(
        method="auto-round", variant_keys=("packing_format",),
        variants=("auto_round:auto_gptq", "auto_round", "auto_round:gptqmodel"),
        plain_zeros=("auto_round", "auto_round:gptqmodel"),
    )
)  # fmt: skip
register(
    PackedKind(
        method="auto-round in AWQ's layout", config_name="auto-round", bits=(4,), layout="awq",
        variants=("auto_round:auto_awq",), variant_keys=("packing_format",),
        zeros_minus_one=False, tensors=("qweight", "qzeros", "scales"),
    )
)  # fmt: skip
