"""GPTQ: integers with a scale and a zero point for each output and group of inputs.

W[n, k] = scales[g, n] * (code[k, n] - zero[g, n]) with g = g_idx[k], or k // group. Rows of all
tensors are inputs or groups, and columns are outputs. Every run of 32 codes is one little-endian
stream of bits * 32 bits, down the inputs in `qweight` and along the outputs in `qzeros`. Zero
points are stored as they are (format v2) or minus one (format v1).

Source: Frantar et al., arXiv:2210.17323; the layout is that of AutoGPTQ and GPTQModel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from specexec_kernels.formats.base import PackedFormat, Part, TritonForm, fits_units
from specexec_kernels.packing import ones_of, unpack_rows, unpack_zeros

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes

LONGEST_BLOCK = 128  # inputs


@dataclass(frozen=True, slots=True)
class Gptq(PackedFormat):
    """Codes of 2, 3, 4 or 8 bits, packed down the inputs."""

    name: ClassVar[str] = "GPTQ"
    has_scale: ClassVar[bool] = True
    has_offset: ClassVar[bool] = True
    bits: int
    group: int  # inputs of a group; 0: all
    scale_dtype: str = "F16"
    stored_minus_one: bool = False  # whether zero points are those of format v1
    shuffled: bool = False  # whether `g_idx` gives the group of each input

    @property
    def unit(self) -> int:  # type: ignore[override]
        """The fewest codes that fill whole words."""
        return 32 if self.bits == 3 else 32 // self.bits

    @property
    def compiled(self) -> bool:  # type: ignore[override]
        """False where a unit neither divides a group nor is several whole groups."""
        return fits_units(self.group, self.unit)

    @property
    def block(self) -> int:
        return LONGEST_BLOCK if self.index else min(shared_run(self.group), LONGEST_BLOCK)

    @property
    def index(self) -> tuple[str | None, int] | None:
        if self.shuffled and self.group:
            return "g_idx", self.group
        return (None, self.group) if self.group % self.unit else None

    @property
    def parts(self) -> tuple[Part, ...]:
        parts = (
            Part("qweight", "I32", items=self.bits, inputs=32, down=True),
            Part("qzeros", "I32", row_items=self.bits, outputs=32, inputs=self.group, down=True),
            Part("scales", self.scale_dtype, inputs=self.group, down=True),
        )
        return (*parts, Part("g_idx", "I32", outputs=0)) if self.shuffled else parts

    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        codes = unpack_rows(tensors["qweight"], self.bits)
        zeros = unpack_zeros(tensors["qzeros"], self.bits, minus_one=self.stored_minus_one)
        if self.shuffled:
            group = tensors["g_idx"].long().reshape(-1)
        else:
            group = torch.arange(inputs, device=codes.device) // (self.group or inputs)
        return (tensors["scales"].float()[group] * (codes - zeros[group]).float()).T.contiguous()

    @property
    def order(self) -> tuple[int, ...]:
        half = self.unit // 2
        return tuple(code + upper for code in range(half) for upper in (0, half))

    def values(self, lanes: Lanes) -> Iterator[Any]:
        words = lanes.read_words("qweight")
        for code in self.order:
            yield lanes.less(self._field(lanes, words, code), 2 ** (self.bits - 1))

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        if self.bits == 8:
            values = self.values(lanes)
            for first in values:
                yield lanes.exact_pair(first, next(values))
            return
        middle = 2 ** (self.bits - 1)
        table = tuple(float(code % (2 * middle) - middle) for code in range(16))
        if self.bits == 3:
            for codes in self.integers(lanes):
                yield lanes.table_pair(table, codes, 0)
            return
        word = lanes.read_words("qweight")[0]
        for code in range(self.unit // 2):
            yield lanes.table_pair(table, word, code * self.bits)

    @property
    def code_bits(self) -> int:  # type: ignore[override]
        """See PackedFormat."""
        return self.bits

    @property
    def quad_step(self) -> int:  # type: ignore[override]
        """Codes of 4 bits that are a byte apart are joined by one masking."""
        return 2 if self.bits == 4 else 1

    @property
    def zero(self) -> int:  # type: ignore[override]
        """The code in the middle; the groups' zero points are in their offsets."""
        return int(2 ** (self.bits - 1))

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        words, half = lanes.read_words("qweight"), self.unit // 2
        for code in range(half):
            if self.bits == 3:
                low, high = (self._field(lanes, words, at) for at in (code, code + half))
                yield lanes.b.or_(low, lanes.b.shl(high, lanes.same(16)))
            else:  # the upper half of the word has the second half of the unit's codes
                yield lanes.both_bits(words[0], code * self.bits, self.bits)

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        scale, middle = lanes.item("scales", number), lanes.same(2 ** (self.bits - 1))
        zeros = self._zeros(lanes, lanes.column("qzeros", number))
        return scale, lanes.b.fmul(scale, lanes.to_float(lanes.b.sub(middle, zeros)))

    def _field(self, lanes: Lanes, words: list[Any], code: int) -> Any:
        """Emits code `code` of a unit, as int32 lanes."""
        word, shift = divmod(code * self.bits, 32)
        high = words[min(word + 1, len(words) - 1)]
        return lanes.field(self.bits, words[word], high, [shift] * lanes.lanes)

    def _zeros(self, lanes: Lanes, group: Any) -> Any:
        """Emits the zero points of a group, as int32 lanes."""
        if self.bits == 3:
            stored = lanes.codes_along("qzeros", group, 3)
            if not self.stored_minus_one:
                return stored
            return lanes.b.and_(lanes.b.add(stored, lanes.same(1)), lanes.same(7))
        # 1 is added to whole words, carry included, since that is how the writer subtracted it
        ones = ones_of(self.bits) if self.stored_minus_one else 0
        return lanes.codes_along("qzeros", group, self.bits, added=ones)

    def triton(self) -> TritonForm:
        from specexec_kernels import triton_tiles

        settings = self.bits, self.group, self.stored_minus_one, self.shuffled
        if self.shuffled or self.bits < 4:
            return TritonForm(triton_tiles.gptq, settings, rows=64)
        return TritonForm(triton_tiles.gptq, settings, step=128)


def shared_run(group: int) -> int:
    """The largest power of two that divides a group of inputs (0: all).

    Runs of this length, counted from the first input, never cross the end of a group.
    """
    return group & -group if group else 1 << 30
