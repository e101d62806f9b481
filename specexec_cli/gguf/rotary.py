"""The rotary frequencies of a GGUF file, in the form of transformers' config."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.container import GgufFile, GgufTensor, shown
from specexec_cli.gguf.metadata import Metadata

# Llama 3.1 and later: a frequency that turns 4 times or more in 8,192 tokens stays as it is, one
# that turns once or less is divided by the factor
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_FACTOR_ERROR = 1e-4  # relative error of float32 in a list of Llama 3's factors

Config = dict[str, Any]


def rotary_parameters(file: GgufFile, metadata: Metadata, config: Mapping[str, Any]) -> Config:
    """The rotary frequencies: plain, or scaled as metadata or tensors of factors say."""
    theta = metadata.number("rope.freq_base", 10000.0)
    if theta <= 0:
        raise metadata.refusal(f"a rotary base of {theta} gives no frequencies")
    if "rope_freqs.weight" in file.tensors:
        return factored(short_list(file.tensors["rope_freqs.weight"]), theta, config)
    long, short = (file.tensors.get(f"rope_factors_{each}.weight") for each in ("long", "short"))
    if long is not None or short is not None:
        if long is None or short is None:
            raise metadata.refusal("of its rotary factors for long and short texts it has but one")
        if long.shape != short.shape:
            raise metadata.refusal("its rotary factors for long and short texts are not as many")
        rope = {
            "rope_type": "longrope",
            "long_factor": short_list(long),
            "short_factor": short_list(short),
            "original_max_position_embeddings": metadata.whole(
                "rope.scaling.original_context_length"
            ),
            "rope_theta": theta,
        }
        if metadata.value("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = metadata.number("rope.scaling.attn_factor")
        return rope
    kind = metadata.value("rope.scaling.type") or "none"
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = metadata.number("rope.scaling.factor")
    rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "linear":
        return rope
    if kind != "yarn":
        raise metadata.refusal(f"rotary frequencies scaled by {shown(kind)} are not supported")
    rope["original_max_position_embeddings"] = metadata.whole(
        "rope.scaling.original_context_length"
    )
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if metadata.value(f"rope.scaling.{key}") is not None:
            rope[name] = metadata.number(f"rope.scaling.{key}")
    if metadata.value("rope.scaling.yarn_attn_factor") is not None:
        # the config's attention_factor, which replaces YaRN's own factor; llama.cpp overwrites it
        rope["attention_factor"] = metadata.number("rope.scaling.yarn_attn_factor")
    if metadata.value("rope.scaling.attn_factor") is not None:
        # llama.cpp multiplies YaRN's own factor by it (src/llama-context.cpp)
        own = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        rope["attention_factor"] = own * metadata.number("rope.scaling.attn_factor")
    return rope


def factored(factors: list[float], theta: float, config: Mapping[str, Any]) -> Config:
    """Parameters under which transformers divides each frequency by its factor.

    llama.cpp's converter writes Llama 3's rule as the list of factors that the rule gives.
    """
    factor = max(factors)
    expected = [
        _llama3_factor(theta, index / len(factors), factor) for index in range(len(factors))
    ]
    if all(
        abs(one - other) <= _FACTOR_ERROR * other
        for one, other in zip(factors, expected, strict=True)
    ):
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}
    # longrope is transformers' one form that takes any list of factors
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _llama3_factor(theta: float, share: float, factor: float) -> float:
    """Llama 3's divisor of a frequency. Source: Llama 3.1's reference code, `apply_scaling`."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta**share)
    if turns >= high:
        return 1.0
    if turns <= low:
        return factor
    smooth = (turns - low) / (high - low)
    return float(1 / ((1 - smooth) / factor + smooth))


def short_list(tensor: GgufTensor) -> list[float]:
    """The numbers in a short tensor in float32, all above 0.

    Raises:
        CheckpointError: the tensor is too long, of another type, or has values not above 0.
    """
    count = (tensor.stop - tensor.start) // 4
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or count > 4096:
        raise CheckpointError(
            f"{tensor.path}: tensor '{tensor.name}' is no short list of float32: "
            "the file is damaged, download it again"
        )
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            factors = list(struct.unpack(f"<{count}f", file.read(4 * count)))
    except (OSError, struct.error) as error:
        raise CheckpointError(f"cannot read {tensor.path}: {error}") from None
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise CheckpointError(
            f"{tensor.path}: tensor '{tensor.name}' has factors that are not above 0: "
            "the file is damaged, download it again"
        )
    return factors
