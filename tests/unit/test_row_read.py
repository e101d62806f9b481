"""What tensors and quantization_config say of one linear: read, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from quantize_rows import RECIPES, int8_channels
from specexec_kernels.formats import METHODS
from specexec_kernels.formats.base import PackedFormat, Stored, described
from specexec_kernels.formats.integers import PackedIntegers
from torch import Tensor

WEIGHT = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
STATE = "weight.quant_state.bitsandbytes__nf4"


def read(
    tensors: dict[str, Tensor], settings: dict[str, Any], name: str = "linear"
) -> PackedFormat | None:
    stored = Stored(name, *WEIGHT.shape, described(tensors), tensors.__getitem__)
    return METHODS[settings["quant_method"]].read(stored, settings)


def bitsandbytes_int8() -> dict[str, Tensor]:
    packed = int8_channels(WEIGHT)
    return {"weight": packed["weight"], "SCB": packed["weight_scale"].view(-1) * 127}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_int8_in_another_order_than_rows_is_refused(number: int) -> None:
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tensors = bitsandbytes_int8()
    assert read(tensors, settings) is not None
    assert read({**tensors, "weight_format": torch.tensor(0).byte()}, settings) is not None
    with pytest.raises(ValueError, match=rf"weight_format is \[{number}\]"):
        read({**tensors, "weight_format": torch.tensor(number).byte()}, settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("blocksize", float("inf")), ("blocksize", True), ("blocksize", 64.5), ("blocksize", "64"),
        ("nested_blocksize", True), ("nested_blocksize", float("nan")),
        ("nested_offset", float("nan")), ("nested_offset", float("inf")), ("nested_offset", True),
        pytest.param("nested_offset", 10**400, id="huge"), ("nested_offset", "1"),
    ],
)  # fmt: skip
def test_states_of_numbers_that_are_none(key: str, value: object) -> None:
    settings = dict(RECIPES["nf4"].settings)
    tensors = RECIPES["nf4"].pack(WEIGHT)
    assert read(tensors, settings) is not None
    state = {**json.loads(bytes(tensors[STATE].tolist())), key: value}
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match="quant_state cannot be read"):
        read(tensors, settings)


def test_plain_int8_in_activation_order_is_refused() -> None:
    """compressed-tensors up to 0.14 wrote such; their groups are not those of the columns."""
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    tensors = {"weight": int8_channels(WEIGHT)["weight"], "weight_scale": torch.ones(32, 4),
               "weight_g_idx": torch.arange(128) // 32}  # fmt: skip
    assert read(tensors, settings) is not None
    with pytest.raises(ValueError, match="activation order are read from pack-quantized"):
        read({**tensors, "weight_g_idx": tensors["weight_g_idx"].flip(0)}, settings)


NAME = "model.layers.0.mlp.down_proj"
TARGETS = {"class": "Linear", "regex": "re:.*down_proj", "name": NAME}


@pytest.mark.parametrize(
    ("first", "second", "wins"),
    [
        ("class", "name", "name"), ("class", "regex", "regex"), ("regex", "name", "name"),
        ("name", "class", "name"), ("regex", "class", "regex"), ("name", "regex", "name"),
    ],
)  # fmt: skip
def test_what_names_a_linear_most_exactly_wins(first: str, second: str, wins: str) -> None:
    groups = {}
    for kind, size in ((first, 32), (second, 64)):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
        groups[kind] = {"targets": [TARGETS[kind]], "weights": weights}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    found = read(RECIPES["w4a16"].pack(WEIGHT), settings, NAME)
    assert isinstance(found, PackedIntegers)
    assert found.group == groups[wins]["weights"]["group_size"]  # type: ignore[index]
