"""Which dtype a session computes in where `dtype='auto'` leaves it to us, and why. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, fsum, log
from platform import machine
from typing import Any, cast

from specexec_cli.catalog.architectures import text_config
from specexec_cli.catalog.packed_formats import PACKED_KINDS
from specexec_cli.config import DtypeName
from specexec_cli.device import cpu_flags
from specexec_cli.gguf.types import INTEGER_TYPES
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint
from specexec_cli.planning.machine import Site
from specexec_cli.planning.machine_rates import FlopsByRows, arithmetic_name
from specexec_cli.planning.sizes import SizedModel

# Below this a model computes in float32 on a CPU.
SMALL_MODEL_BYTES = 1_000_000_000
# What /proc/cpuinfo calls instructions that multiply in a dtype; PyTorch widens it elsewhere.
_ARITHMETIC = {
    "bfloat16": {"avx512_bf16", "amx_bf16"},
    "float16": {"avx512_fp16", "amx_fp16"},
}


@dataclass(frozen=True, slots=True)
class ChosenDtype:
    """The dtype to compute in; `reason` says why where speed alone decided it."""

    name: DtypeName
    reason: str = ""


def choose_dtype(name: DtypeName, site: Site, target: SizedModel) -> ChosenDtype:
    """The dtype for a target on a machine.

    A CPU without instructions for bfloat16 may multiply rows of bfloat16 by packed integers as
    int16 (specexec_kernels.cpu_arrange_int16). That is faster than float32 on every CPU that it was
    measured on, so large models take float32 only where kept rates of this machine say otherwise.
    Small ones take it everywhere: they are fast, and so a text is the same on any CPU.

    Args:
        name: what the user asks for.
        site: its kept rates are compared; nothing is measured, so that a plan and the session that
            follows it choose alike.
    """
    sizes = target.sizes
    unpacked_bytes = max(sizes.total, 2 * sizes.layer_params)
    usual = compute_dtype(name, site.device, target.stored_dtype, unpacked_bytes)
    decided = name != "auto" or site.device != "cpu" or usual != "float32"
    small = unpacked_bytes < SMALL_MODEL_BYTES
    if decided or small or not multiplies_int16() or not has_integer_codes(target):
        return ChosenDtype(usual)
    ours = "products of bfloat16 rows with packed integers are int16 on this CPU"
    times = _times_as_fast(
        site.flops, *(arithmetic_name(each, sizes.packed_bits) for each in ("bfloat16", "float32"))
    )
    if times is None:
        return ChosenDtype("bfloat16", f"{ours}; `specexec doctor` measures how fast they are")
    chosen: DtypeName = "bfloat16" if times > 1.0 else "float32"
    return ChosenDtype(chosen, f"{ours}, measured {times:.2f} times as fast as float32")


def compute_dtype(
    name: DtypeName, device: str, stored: str | None, unpacked_bytes: int
) -> DtypeName:
    """The dtype by instructions and sizes alone.

    Where it is left to us: the checkpoint's own dtype on a GPU; on a CPU bfloat16 where there are
    instructions for it, float32 elsewhere and for small models.

    Args:
        device: cpu, or a GPU.
        stored: the dtype that config.json names.
        unpacked_bytes: of the checkpoint, its packed weights counted as two bytes each: what they
            are multiplied by costs the same however small they are stored.
    """
    if name != "auto":
        return name
    if device != "cpu":
        return cast(DtypeName, stored) if stored in ("float16", "bfloat16") else "float32"
    large = unpacked_bytes >= SMALL_MODEL_BYTES
    return "bfloat16" if large and has_arithmetic("bfloat16") else "float32"


def has_arithmetic(dtype: str) -> bool:
    """Whether this CPU has instructions that multiply in a dtype of two bytes."""
    return bool(_ARITHMETIC[dtype] & set(cpu_flags()))


def multiplies_int16() -> bool:
    """Whether this CPU multiplies pairs of int16 in its widest registers, and no bfloat16."""
    flags = set(cpu_flags())
    widest = "avx512bw" if "avx512f" in flags else "avx2"
    return widest in flags and not has_arithmetic("bfloat16")


def multiplies_bytes() -> bool:
    """Whether this CPU multiplies rows in 8 bits (specexec_kernels.cpu_arrange_int8)."""
    flags = set(cpu_flags())
    widest = "avx512bw" if "avx512f" in flags else "avx2"
    # macOS names no flags, and all of Apple's CPUs have dot products
    return machine() == "arm64" or bool({widest, "asimddp"} & flags)


def has_integer_codes(model: SizedModel) -> bool:
    """Whether most of a model's packed weights are integers times a scale of their block.

    Codes of levels that lie unevenly, and groups in another order than their inputs, are not.
    """
    if isinstance(model.checkpoint, GgufCheckpoint):
        stored: Counter[bool] = Counter()
        for name, kind in model.checkpoint.blocks.items():
            stored[kind in INTEGER_TYPES] += model.checkpoint[name].n_bytes
        return stored[True] > stored[False]
    settings = text_config(model.config).get("quantization_config")
    return isinstance(settings, Mapping) and model.sizes.packed and _are_integers(settings)


def _are_integers(settings: Mapping[str, Any]) -> bool:
    """Whether a quantization_config describes integers; whatever is odd in it is refused later."""
    method = settings.get("quant_method")
    if method == "bitsandbytes":
        return settings.get("load_in_8bit") is True
    if method == "compressed-tensors":
        groups = settings.get("config_groups")
        weights = [
            group.get("weights")
            for group in (groups.values() if isinstance(groups, Mapping) else ())
            if isinstance(group, Mapping)
        ]
        return bool(weights) and all(
            isinstance(each, Mapping)
            and each.get("type") == "int"
            and each.get("num_bits") in (4, 8)  # others straddle words
            and each.get("actorder") in (None, False, "weight", "static")
            for each in weights
        )
    packed = method in {kind.name for kind in PACKED_KINDS.values()}
    return packed and settings.get("desc_act") is not True


def calibrated_for(site: Site, target: SizedModel) -> Site:
    """The site with each arithmetic known that a session on another machine may ask of it.

    Where no earlier run did, this measures up to three kinds, for some seconds each: `doctor`'s of
    this target's weights. Small models spend their time between the products.
    """
    if target.sizes.total < SMALL_MODEL_BYTES:
        return site
    bits = target.sizes.packed_bits
    for dtype in ("float32", "bfloat16"):
        site = site.calibrated(dtype, bits)
    if multiplies_bytes() and has_integer_codes(target):
        site = site.calibrated("float32", bits, eight_bit_rows=True)
    return site


def eight_bit_gain(site: Site, dtype: str, target: SizedModel) -> str:
    """What rows in 8 bits would bring a target on a CPU, in a few words; none where nothing."""
    if site.device != "cpu" or not has_integer_codes(target):
        return ""
    bits = target.sizes.packed_bits
    names = arithmetic_name(dtype, bits, eight_bit_rows=True), arithmetic_name(dtype, bits)
    times = _times_as_fast(site.flops, *names)
    return f"{times:.2f} times as fast here" if times else "faster; `specexec doctor` measures it"


def _times_as_fast(flops: Mapping[str, FlopsByRows], ours: str, others: str) -> float | None:
    """How many times as fast products of one arithmetic_name are as those of another.

    Returns:
        the geometric mean over the numbers of rows that both were measured at; None if none is.
    """
    found, wide = (dict(flops.get(name, ())) for name in (ours, others))
    both = found.keys() & wide.keys()
    return exp(fsum(log(found[n] / wide[n]) for n in both) / len(both)) if both else None
