"""Every value of a quantization_config replaced by nonsense: read, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from quantize_rows import RECIPES
from specexec_kernels.formats import METHODS
from specexec_kernels.formats.base import PackedFormat, Stored, described

from specexec_cli.catalog.row_bits import row_bits
from specexec_cli.errors import ConfigError

NONSENSE = (
    None, True, 0, -1, 3, 2**40, 1.5, float("inf"), float("nan"), "x", [], [None], ["x", 2], {},
    {"x": None}, [[]],
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside, the whole left out."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    if isinstance(value, dict | list):
        for key, inside in items:
            if isinstance(inside, dict | list):
                yield from places(inside, (*path, key))
            else:
                yield (*path, key)


# scales of one matrix of these may be for all of it, or the tensors say everything
READ_FROM_TENSORS = ("fp8", "fp8-e5m2", "nvfp4-modelopt", "nf4", "nf4-double", "fp4", "int8")


def refusal(act: Callable[..., object], *args: object) -> str:
    """What is said against something; empty where nothing is."""
    try:
        act(*args)
    except (ValueError, ConfigError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("recipe", RECIPES)
def test_nonsense_is_refused_in_one_line(recipe: str) -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    settings = RECIPES[recipe].settings
    method = METHODS[settings["quant_method"]]
    tensors = RECIPES[recipe].pack(weight)
    stored = Stored("linear", 32, 128, described(tensors), tensors.__getitem__)
    assert isinstance(method.read(stored, settings), PackedFormat)
    refused = 0
    for path in places(dict(settings)):
        for nonsense in NONSENSE:
            changed = deepcopy(dict(settings))
            inside: Any = changed
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = nonsense
            messages = [
                refusal(method.read, stored, changed),
                refusal(method.quantizes_rows, changed),
                refusal(row_bits, changed, 128),
            ]
            refused += bool(messages[0])
            assert not any("\n" in message for message in messages)
    assert refused > 0 or recipe in READ_FROM_TENSORS
