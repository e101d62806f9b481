"""Round-to-nearest quantization into the layouts of AWQ and of GPTQ with activation order.

For rigs, benchmarks and tests, as quantize_rows, which has the layouts that go along the inputs.
Plain GPTQ is in quantize_gptq.
"""

from __future__ import annotations

import torch
from quantize_gptq import round_to_nearest
from quantize_rows import RECIPES, Recipe, activation_order
from specexec_kernels.formats.awq import Awq
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import pack_awq, pack_rows, store_zeros
from torch import Tensor

GROUP_SIZE = 128
_BITS = 4


def awq(weight: Tensor) -> dict[str, Tensor]:
    """4-bit codes with a scale and a zero point for each group, in the layout of AutoAWQ's GEMM
    kernels."""
    outputs, inputs = weight.shape
    group = min(GROUP_SIZE, inputs)
    padded = torch.zeros(outputs, -(-inputs // group) * group)
    padded[:, :inputs] = weight
    groups, most = padded.view(outputs, -1, group), 2**_BITS - 1
    low, high = groups.amin(2).clamp(max=0.0), groups.amax(2).clamp(min=0.0)
    scales = ((high - low) / most).half()
    scales[scales == 0] = 1.0  # any scale will do for a group of zeros
    zeros = torch.round(-low / scales.float()).clamp(0, most)
    codes = torch.round(groups / scales.float()[..., None]) + zeros[..., None]
    codes = codes.clamp(0, most).int().view(outputs, -1)[:, :inputs]
    return {
        "qweight": pack_awq(codes.T), "qzeros": pack_awq(zeros.T.int()),
        "scales": scales.T.contiguous(),
    }  # fmt: skip


def gptq_by_activation(weight: Tensor) -> dict[str, Tensor]:
    """4-bit GPTQ codes in activation order (desc_act): `g_idx` names each input's group."""
    outputs, inputs = weight.shape
    group = min(GROUP_SIZE, inputs)
    order = activation_order(inputs)
    codes, scales = round_to_nearest(weight[:, order], _BITS, group)
    places = torch.argsort(order)
    zeros = torch.full((scales.shape[1], outputs), 2 ** (_BITS - 1))
    return {
        "qweight": pack_rows(codes[:, places].T, _BITS),
        "qzeros": store_zeros(zeros, _BITS, minus_one=True),
        "scales": scales.T.contiguous(), "g_idx": (places // group).int(),
    }  # fmt: skip


COLUMN_RECIPES: dict[str, Recipe] = {
    "awq": Recipe(
        {"quant_method": "awq", "bits": _BITS, "group_size": GROUP_SIZE, "version": "gemm",
         "zero_point": True}, awq,
    ),
    "gptq-act-order": Recipe(
        {"quant_method": "gptq", "bits": _BITS, "group_size": GROUP_SIZE, "desc_act": True,
         "sym": True, "checkpoint_format": "gptq"}, gptq_by_activation,
    ),
}  # fmt: skip
PACKERS = {**RECIPES, **COLUMN_RECIPES}  # all recipes that rigs are made with


def packed_weight(name: str, weight: Tensor) -> PackedWeight:
    """A weight (outputs, inputs) packed by one of COLUMN_RECIPES."""
    outputs, inputs = weight.shape
    group = min(GROUP_SIZE, inputs)
    fmt = Awq(group) if name == "awq" else Gptq(_BITS, group, stored_minus_one=True, shuffled=True)
    return PackedWeight(fmt, inputs, outputs, COLUMN_RECIPES[name].pack(weight))
