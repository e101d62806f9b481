"""What a format of row-packed weights states, and what everything else is derived from.

A row-packed weight keeps the inputs of one output side by side, as FP8, MXFP4, NVFP4, bitsandbytes
and GGUF do. A format is one frozen dataclass:
- `parts` are its tensors, each by how many outputs and inputs one item covers;
- `unpack` is its definition, in PyTorch and float32;
- `values` emits the few lines of LLVM IR that turn one unit of inputs into float32, for as many
  outputs at once as a register has lanes; `terms` and `pairs` are faster ways where there are some.
Threads, tiles, the order of sums, both dtypes of compute, checks, streaming and sizes are shared
(cpu_rows_ir, cpu_rows, and specexec_cli.models.quant_checkpoint).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

if TYPE_CHECKING:
    from specexec_kernels.cpu_rows_ir import Lanes


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a packed weight, as safetensors describe it.

    Every `items` items cover a tile of `outputs` x `inputs` weights; 0 stands for all of them.
    """

    leaf: str  # its name in the checkpoint behind the linear's: "weight_scale_inv"
    dtype: str  # safetensors' name
    items: int = 1
    outputs: int = 1
    inputs: int = 1

    def shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Rows and columns of the tensor of a weight (outputs, inputs); one of them may be left
        out of the file's shape where it is 1."""
        rows = -(-outputs // self.outputs) if self.outputs else 1
        columns = -(-inputs // self.inputs) if self.inputs else 1
        return rows, columns * self.items


class RowFormat(ABC):
    """A format of row-packed weights; a frozen dataclass, since kernels are kept by it."""

    name: ClassVar[str]  # for people
    has_scale: ClassVar[bool] = False  # whether `terms` gives a scale
    has_offset: ClassVar[bool] = False  # and an offset; blocks are then powers of two
    compiled: ClassVar[bool] = True  # whether there is IR, or `unpack` alone
    unit: int  # inputs that `values` yields at once; the inputs of a weight are a multiple

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Its tensors."""

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """The weight that the tensors mean.

        Args:
            tensors: by leaf, each (rows, columns) as its part says.
        Returns:
            (outputs, inputs) float32.
        """

    @property
    def order(self) -> tuple[int, ...]:
        """The inputs of a unit in the order in which `values` yields them."""
        return tuple(range(self.unit))

    @property
    def block(self) -> int:
        """Inputs that share `terms`: a multiple of the unit, or a part of it. New sums begin there,
        so that no sum is longer than this."""
        return self.unit * max(128 // self.unit, 1)

    def values(self, lanes: Lanes) -> Iterator[Any]:
        """Emits one vector of float32 for each input of a unit, one lane for each output.

        Args:
            lanes: reads the bytes of this unit; see Lanes.
        """
        raise NotImplementedError(f"{self.name} has no kernel")

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        """As `values`, two at a time as bfloat16: a vector of 32-bit words, the first value in the
        lower halves. Rounds to nearest unless a format knows a shorter way."""
        values = self.values(lanes)
        for first in values:
            yield lanes.pair(first, next(values))

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        """(scale, offset) vectors of a block: weight = value * scale + offset.

        None stands for 1 and 0. The sums of a block are multiplied by the scale, so that values may
        stay small numbers that bfloat16 holds exactly.

        Args:
            lanes: at the block's first unit.
            number: of the block within its unit, where blocks are smaller than units.
        """
        return None, None


@dataclass(frozen=True, slots=True)
class RowWeight:
    """One linear's weight (outputs, inputs) in a row-packed format."""

    format: RowFormat
    in_features: int
    out_features: int
    tensors: Mapping[str, Tensor]  # by leaf, as RowFormat.parts says

    def unpack(self) -> Tensor:
        """(outputs, inputs) float32, by the format's definition."""
        shaped = {
            part.leaf: self.tensors[part.leaf].reshape(
                part.shape(self.out_features, self.in_features)
            )
            for part in self.format.parts
        }
        return self.format.unpack(shaped, self.out_features, self.in_features)
