"""Round-to-nearest quantization into packed formats, for rigs, benchmarks and tests.

A recipe makes the tensors of a weight, and has the quantization_config that describes them. There
is no error correction, as in quantize_gptq, which does the same for GPTQ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from specexec_kernels.formats.fp4 import E2M1
from specexec_kernels.packing import pack_rows, unpack_rows
from torch import Tensor

_E4M3_MAX = 448.0
_NESTED_RUN = 256  # absmax codes of bitsandbytes that share a nested absmax
_STATE_BYTES = 192  # bytes of the JSON in quant_state, padded to one length for all numbers
# quantiles of a normal distribution, scaled so that the largest is 1 (QLoRA, arXiv:2305.14314,
# appendix E)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
# the table of create_fp4_map in bitsandbytes' functional.py, divided by its largest value, 12
FP4 = tuple(sign * value / 12.0 for sign in (1, -1) for value in (0.0, 0.0625, 8, 12, 4, 6, 2, 3))


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to quantize.

    Attributes:
        settings: its quantization_config.
        pack: makes the tensors, by leaf, of a weight (outputs, inputs) float32.
    """

    settings: Mapping[str, Any]
    pack: Callable[[Tensor], dict[str, Tensor]]


def fp8_blocks(
    weight: Tensor, size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> dict[str, Tensor]:
    """float8 with a float32 scale for each size x size tile, as DeepSeek-V3 does in E4M3."""
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // size), -(-inputs // size)
    padded = torch.zeros(rows * size, columns * size)
    padded[:outputs, :inputs] = weight
    tiles = padded.view(rows, size, columns, size)
    scales = _positive(tiles.abs().amax((1, 3)) / torch.finfo(dtype).max)
    codes = (tiles / scales[:, None, :, None]).view(padded.shape)[:outputs, :inputs]
    return {"weight": codes.to(dtype), "weight_scale_inv": scales}


def fp8_channels(weight: Tensor) -> dict[str, Tensor]:
    """E4M3 with a scale for each output."""
    scales = _positive(weight.abs().amax(1, keepdim=True) / _E4M3_MAX)
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def fp8_tensor(weight: Tensor) -> dict[str, Tensor]:
    """E4M3 with one scale for the whole weight."""
    scale = _positive(weight.abs().amax().reshape(1) / _E4M3_MAX)
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def mxfp4(weight: Tensor) -> dict[str, Tensor]:
    """E2M1 with a power-of-two scale for each 32 inputs, chosen as OCP's specification says."""
    groups = weight.view(weight.shape[0], -1, 32)
    # 2 is the exponent of E2M1's largest value, 6
    exponents = torch.floor(torch.log2(_positive(groups.abs().amax(2)))) - 2
    stored = (exponents + 127).clamp(0, 254)
    codes = _nearest(groups / torch.exp2(stored - 127)[..., None], E2M1)
    return {"weight_packed": _nibbles(codes.view(weight.shape)), "weight_scale": stored.byte()}


def nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """E2M1 with an E4M3 scale for each 16 inputs, and a factor that divides the scales."""
    groups = weight.view(weight.shape[0], -1, 16)
    factor = _E4M3_MAX * 6.0 / _positive(weight.abs().amax().reshape(1))
    scales = (groups.abs().amax(2) / 6.0 * factor).clamp(2.0**-9, _E4M3_MAX)
    stored = scales.to(torch.float8_e4m3fn)
    codes = _nearest(groups / (stored.float() / factor)[..., None], E2M1)
    return {
        "weight_packed": _nibbles(codes.view(weight.shape)), "weight_scale": stored,
        "weight_global_scale": factor,
    }  # fmt: skip


def nvfp4_modelopt(weight: Tensor) -> dict[str, Tensor]:
    """`nvfp4` by modelopt's names, with a factor that multiplies the scales."""
    packed = nvfp4(weight)
    return {
        "weight": packed["weight_packed"], "weight_scale": packed["weight_scale"],
        "weight_scale_2": (1.0 / packed["weight_global_scale"]).reshape(()),
    }  # fmt: skip


def packed_integers(weight: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """Symmetric codes packed in words, with a bfloat16 scale for each group of inputs."""
    groups = weight.view(weight.shape[0], -1, group)
    middle = 2 ** (bits - 1)
    scales = _positive(groups.abs().amax(2) / (middle - 0.5)).bfloat16()
    codes = torch.round(groups / scales.float()[..., None]).clamp(-middle, middle - 1) + middle
    return {
        "weight_packed": pack_rows(codes.view(weight.shape).int().T, bits).T.contiguous(),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def packed_with_zeros(weight: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """Asymmetric codes packed in words, with a bfloat16 scale and a zero point for each group of
    inputs; zero points are packed along the outputs."""
    groups = weight.view(weight.shape[0], -1, group)
    low, high = groups.amin(2).clamp(max=0.0), groups.amax(2).clamp(min=0.0)
    most = 2**bits - 1
    scales = _positive((high - low) / most).bfloat16()
    zeros = torch.round(-low / scales.float()).clamp(0, most)
    codes = torch.round(groups / scales.float()[..., None]) + zeros[..., None]
    return {
        "weight_packed": pack_rows(
            codes.clamp(0, most).view(weight.shape).int().T, bits
        ).T.contiguous(),
        "weight_scale": scales,
        "weight_zero_point": pack_rows(zeros.int(), bits),
        "weight_shape": torch.tensor(weight.shape),
    }


def packed_by_activation(weight: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """`packed_integers` in activation order: `weight_g_idx` names each input's group. The order is
    random; a real one sorts the inputs by the size of their activations."""
    order = activation_order(weight.shape[1])
    packed = packed_integers(weight[:, order], bits, group)
    codes = unpack_rows(packed["weight_packed"].T, bits)  # (inputs, outputs), sorted by groups
    places = torch.argsort(order)
    packed["weight_packed"] = pack_rows(codes[places], bits).T.contiguous()
    packed["weight_g_idx"] = (places // group).int()
    return packed


def activation_order(inputs: int) -> Tensor:
    """A random order of inputs in place of a calibration's, the same in each call."""
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))


def int8_vectors(weight: Tensor) -> dict[str, Tensor]:
    """int8 as LLM.int8() stores it (arXiv:2208.07339): SCB is 127 times each output's scale."""
    stats = _positive(weight.abs().amax(1))
    codes = torch.round(weight * (127.0 / stats[:, None])).to(torch.int8)
    return {"weight": codes, "SCB": stats, "weight_format": torch.zeros((), dtype=torch.uint8)}


def int8_channels(weight: Tensor) -> dict[str, Tensor]:
    """int8 with a scale for each output."""
    scales = _positive(weight.abs().amax(1, keepdim=True) / 127)
    return {"weight": torch.round(weight / scales).to(torch.int8), "weight_scale": scales}


def table4(weight: Tensor, kind: str, nested: bool = False) -> dict[str, Tensor]:
    """bitsandbytes' 4-bit codes with an absmax for each 64 inputs (32 where 64 does not divide the
    inputs).

    Args:
        weight: (outputs, inputs) float32.
        kind: "nf4" or "fp4".
        nested: whether absmax are quantized to 8 bits in turn ("double quantization").
    """
    run, table = 32 if weight.shape[1] % 64 else 64, {"nf4": NF4, "fp4": FP4}[kind]
    groups = weight.reshape(-1, run)
    scales = _positive(groups.abs().amax(1))
    codes = _nearest(groups / scales[:, None], table).view(-1, 2)
    state = {"quant_type": kind, "blocksize": run, "dtype": "bfloat16",
             "shape": list(weight.shape)}  # fmt: skip
    absmax = {"weight.absmax": scales}
    if nested:
        absmax, offset = _nested(scales)
        state |= {"nested_blocksize": _NESTED_RUN, "nested_offset": offset,
                  "nested_dtype": "float32"}  # fmt: skip
    return {
        "weight": ((codes[:, 0] << 4) | codes[:, 1]).byte()[:, None],
        **absmax,
        "weight.quant_map": torch.tensor(table),
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
            list(json.dumps(state).ljust(_STATE_BYTES).encode()), dtype=torch.uint8
        ),
    }


def _nested(absmax: Tensor) -> tuple[dict[str, Tensor], float]:
    """Quantizes absmax to 8 bits: the tensors by leaf, and the offset.

    Codes stand for evenly spaced values, which the file lists; bitsandbytes itself has more values
    near 0. They are multiplied by a float32 for each run of _NESTED_RUN.
    """
    offset = float(absmax.mean())
    padded = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % _NESTED_RUN))
    runs = padded.view(-1, _NESTED_RUN)
    outer = _positive(runs.abs().amax(1))
    values = torch.linspace(-1.0, 1.0, 256)
    codes = torch.round((runs / outer[:, None] + 1.0) * 127.5).byte().view(-1)
    return {
        "weight.absmax": codes[: len(absmax)], "weight.nested_absmax": outer,
        "weight.nested_quant_map": values,
    }, offset  # fmt: skip


def _bitsandbytes(kind: str, nested: bool = False) -> Recipe:
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
                "bnb_4bit_use_double_quant": nested}  # fmt: skip
    return Recipe(settings, lambda weight: table4(weight, kind, nested))


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors for all linears but the output head."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {"quant_method": "compressed-tensors", "format": layout,
            "config_groups": {"group_0": group}, "ignore": ["lm_head"]}  # fmt: skip


RECIPES: dict[str, Recipe] = {
    "fp8": Recipe(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        fp8_blocks,
    ),
    "fp8-e5m2": Recipe(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
         "fmt": "e5m2"}, lambda weight: fp8_blocks(weight, dtype=torch.float8_e5m2),
    ),
    "fp8-channels": Recipe(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_channels
    ),
    "fp8-tensor": Recipe(
        _compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), fp8_tensor
    ),
    "mxfp4": Recipe(
        _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group",
                    group_size=32), mxfp4,
    ),
    "nvfp4": Recipe(
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group",
                    group_size=16), nvfp4,
    ),
    "nvfp4-modelopt": Recipe({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_modelopt),
    "w4a16": Recipe(
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        lambda weight: packed_integers(weight, 4, 32),
    ),
    "w4a16-channels": Recipe(
        _compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
        lambda weight: packed_integers(weight, 4, weight.shape[1]),
    ),
    "w4a16-zeros": Recipe(
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32,
                    symmetric=False),
        lambda weight: packed_with_zeros(weight, 4, 32),
    ),
    "w4a16-act-order": Recipe(
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32,
                    actorder="group"),
        lambda weight: packed_by_activation(weight, 4, 32),
    ),
    "w8a16": Recipe(
        _compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=32),
        lambda weight: packed_integers(weight, 8, 32),
    ),
    "w8a8": Recipe(
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8_channels
    ),
    "nf4": _bitsandbytes("nf4"),
    "nf4-double": _bitsandbytes("nf4", nested=True),
    "fp4": _bitsandbytes("fp4"),
    "int8": Recipe({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_vectors),
}  # fmt: skip


def _positive(scales: Tensor) -> Tensor:
    """Replaces scales of 0 by 1: any scale will do for a group of zeros."""
    return torch.where(scales > 0, scales, 1.0)


def _nearest(values: Tensor, table: tuple[float, ...]) -> Tensor:
    """For each value, the index of the nearest one in a table, uint8."""
    order = sorted(range(len(table)), key=lambda i: table[i])
    rising = torch.tensor([table[i] for i in order])
    between = (rising[1:] + rising[:-1]) / 2
    places = torch.bucketize(values.contiguous(), between)
    return torch.tensor(order, dtype=torch.uint8)[places]


def _nibbles(codes: Tensor) -> Tensor:
    """Packs two 4-bit codes to a byte, the earlier one in its lower half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)
