"""bitsandbytes: 4-bit codes of a table (NF4 and FP4) and int8.

4 bits (QLoRA, arXiv:2305.14314): W = table[code] * absmax, with one absmax for each run of weights;
the higher nibble of a byte is the earlier weight. With double quantization, absmax = table2[code2]
* nested_absmax + offset, with one float32 nested_absmax for a run (usually 256) of them.
int8 (LLM.int8(), arXiv:2208.07339): W = code * SCB / 127.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specexec_kernels.formats import register
from specexec_kernels.formats.base import (
    SCALES,
    Method,
    PackedFormat,
    Part,
    Stored,
    TritonForm,
    block_of,
)
from specexec_kernels.formats.integers import Int8

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_ROWS = 0  # weight_format of codes in rows; bitsandbytes' functional.py has the others (col32 ...)
_PER_CODE = 1 / 127  # factor of the int8 scales


@dataclass(frozen=True, slots=True)
class Table4(PackedFormat):
    """4-bit codes of a table, with one absmax for each run of weights."""

    name: ClassVar[str] = "4-bit table"
    has_scale: ClassVar[bool] = True
    unit: int
    table: tuple[float, ...]  # 16 values
    run: int  # weights of one absmax; divides the inputs
    nested_run: int = 0  # absmax codes of one nested absmax; 0: absmax are plain float32
    offset: float = 0.0  # added to each absmax of double quantization

    @property
    def parts(self) -> tuple[Part, ...]:
        codes = Part("weight", "U8", inputs=2)
        if not self.nested_run:
            return codes, Part("weight.absmax", "F32", inputs=self.run)
        return (
            codes,
            Part("weight.absmax", "U8", inputs=self.run),
            Part("weight.nested_absmax", "F32", run=self.run * self.nested_run),
            Part("weight.nested_quant_map", "F32", items=256, inputs=0, outputs=0),
        )

    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        packed = tensors["weight"]
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).view(outputs, inputs)
        scales = tensors["weight.absmax"]
        if self.nested_run:
            nested = tensors["weight.nested_absmax"].view(-1).repeat_interleave(self.nested_run)
            found = tensors["weight.nested_quant_map"].view(-1)[scales.long()]
            scales = found * nested[: scales.numel()].view(scales.shape) + self.offset
        table = torch.tensor(self.table, device=packed.device)
        return table[codes.long()] * scales.repeat_interleave(self.run, 1)

    @property
    def block(self) -> int:
        return block_of(self.run, self.unit)

    @property
    def order(self) -> tuple[int, ...]:
        # nibbles i and i + 4 of a word are a pair, the same bits of its two halves; the earlier
        # weight of a byte is its higher nibble
        return tuple(8 * word + ((i + half) ^ 1) for word in range(self.unit // 8)
                     for i in range(4) for half in (0, 4))  # fmt: skip

    def values(self, lanes: Lanes) -> Iterator[Any]:
        for word in lanes.read_words("weight"):
            for i in range(4):
                for number in (i, i + 4):
                    yield lanes.table(self.table, lanes.nibble(word, number))

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        for word in lanes.read_words("weight"):
            for i in range(4):
                yield lanes.table_pair(self.table, word, 4 * i)

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        if not self.nested_run:
            return lanes.item("weight.absmax", number), None
        found = lanes.lookup("weight.nested_quant_map", "weight.absmax", number)
        product = lanes.b.fmul(found, lanes.run_item("weight.nested_absmax", number * self.run))
        return lanes.b.fadd(product, lanes.constant(self.offset)), None

    def triton(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        settings = self.run, self.nested_run, self.offset
        return TritonForm(triton_tiles.table4, settings, self.table)


def _read(stored: Stored, settings: Mapping[str, Any]) -> PackedFormat | None:
    if "SCB" in stored.tensors:
        _check_rows(stored)
        return Int8(
            stored.unit_of(0, 16, 4), "SCB", stored.dtype("SCB", *SCALES), (1, 0), _PER_CODE
        )
    leaf = next((state for state in _STATES if state in stored.tensors), None)
    if leaf is None:
        return None
    try:
        # each value is checked below; the guarded reader is in specexec_cli, out of reach here
        state = json.loads(bytes(stored.load(leaf).tolist()))  # noqa: TID251
        run, shape = _whole(state["blocksize"]), list(state["shape"])
        nested = _whole(state.get("nested_blocksize", 0))
        offset = _finite(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"its quant_state cannot be read ({error}): download it again") from None
    if shape != [stored.outputs, stored.inputs]:
        raise ValueError(f"its quant_state says {shape}: are all files of the same model?")
    if run < 8 or run & (run - 1) or nested < 0:
        raise ValueError(f"its quant_state says {run} weights to a scale, which is no power of two")
    if stored.inputs % run:
        raise ValueError(f"{stored.inputs} inputs are not whole runs of {run} weights")
    stored.shape("weight.quant_map")
    table = tuple(stored.load("weight.quant_map").float().view(-1).tolist())
    if len(table) != 16:
        raise ValueError(f"its quant_map has {len(table)} values in place of 16")
    return Table4(stored.unit_of(run), table, run, nested, offset)


def _check_rows(stored: Stored) -> None:
    """
    Raises:
        ValueError: `weight_format` names an order of int8 codes other than rows.
    """
    if "weight_format" not in stored.tensors:
        return
    number = stored.load("weight_format").reshape(-1).tolist()
    if number != [_ROWS]:
        raise ValueError(
            f"its weight_format is {number}, and only [{_ROWS}], rows, is supported: save the "
            "model again with a newer bitsandbytes"
        )


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _finite(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


METHOD = Method(
    name="bitsandbytes",
    leaves=("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
            "weight.nested_quant_map", *_STATES, "SCB"),
    unused=("weight_format",),
    read=_read,
    quantizes_rows=lambda settings: bool(settings.get("load_in_8bit")),
)  # fmt: skip
register(METHOD)
