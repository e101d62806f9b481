"""What a format of packed weights states, and what everything else is derived from.

Most formats keep the inputs of one output side by side, as FP8, MXFP4, NVFP4, bitsandbytes and GGUF
do; in GPTQ's and AWQ's tensors the outputs of one input, or of eight, are side by side (Part.down).
A format is one frozen dataclass:
- `parts` are its tensors, each by how many outputs and inputs one item covers;
- `unpack` is its definition, in PyTorch and float32;
- `values` emits the few lines of LLVM IR that turn one unit of inputs into float32, for as many
  outputs at once as a register has lanes; `terms` and `pairs` are faster ways where there are some;
- `triton` names the few lines that read weights on a GPU.
Threads, tiles, the order of sums, both dtypes of compute, checks, streaming and sizes are shared:
cpu_unpack_lanes, cpu_matmul_ir, cpu_matmul, triton_rows, and specexec_cli.models.packing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes


_AT_ONCE = 1 << 22  # weights that `slabs` unpacks together


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a packed weight, as safetensors describe it.

    `row_items` x `items` items cover a tile of `outputs` x `inputs` weights; 0 stands for all.
    """

    leaf: str  # its name in the checkpoint behind the linear's: "weight_scale_inv"
    dtype: str  # safetensors' name
    items: int = 1
    outputs: int = 1
    inputs: int = 1
    row_items: int = 1  # more than 1 where codes are packed down the outputs
    run: int = 0  # weights of an item, where rows are taken as one long run; else 0
    # The tensor's rows go down the inputs, and its columns are outputs; codes are int32 then.
    down: bool = False

    def shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Rows and columns of the tensor of a weight (outputs, inputs); one of them may be left
        out of the file's shape where it is 1."""
        if self.run:
            return 1, -(-outputs * inputs // self.run)
        rows = -(-outputs * self.row_items // self.outputs) if self.outputs else 1
        columns = -(-inputs * self.items // self.inputs) if self.inputs else self.items
        return (columns, rows) if self.down else (rows, columns)

    def cut(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """What a tensor of this part has of some outputs, which begin and end with whole items."""
        first = start * self.row_items // self.outputs if self.outputs else 0
        count = -(-(stop - start) * self.row_items // self.outputs) if self.outputs else 1
        return tensor.narrow(int(self.down), first, count)


def block_of(group: int, unit: int) -> int:
    """Inputs of a block where every `group` inputs (0: all) share a scale: not too many for one
    sum, and all of one group."""
    if 0 < group <= 256:
        return group
    return max(unit, 128) if group % max(unit, 128) == 0 else unit


def fits_units(group: int, unit: int) -> bool:
    """Whether units are parts of a group of inputs (0: all), or several whole ones; of single
    inputs they are not, since two at a time are multiplied."""
    return group % unit == 0 or (group > 1 and unit % group == 0)


def has_halves(block: int) -> bool:
    """Whether a block's inputs are halves of halves down to one: a power of two."""
    return block & (block - 1) == 0


@dataclass(frozen=True, slots=True)
class TritonForm:
    """How Triton kernels read a format; see triton_formats."""

    read: Any  # the @triton.jit function
    settings: tuple[int | float | str, ...] = ()  # that it is compiled for
    table: tuple[float, ...] = ()  # given to it behind the parts, as float32


class PackedFormat(ABC):
    """A format of packed weights; a frozen dataclass, since kernels are kept by it."""

    name: ClassVar[str]  # for people
    has_scale: ClassVar[bool] = False  # whether `terms` gives a scale
    has_offset: ClassVar[bool] = False  # and an offset; blocks are then powers of two
    compiled: ClassVar[bool] = True  # whether there is IR, or `unpack` alone
    chained: ClassVar[bool] = False  # whether all inputs are one sum, in rising order
    unit: int  # inputs that `values` yields at once; the inputs of a weight are a multiple

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Its tensors."""

    @property
    def index(self) -> tuple[str | None, int] | None:
        """The leaf that names the group of each input, and the inputs of a group, where they are
        not neighbours, or without a leaf where a unit has several groups whose inputs are not
        yielded one behind the other. `terms` are asked for as ever, and each value gets those of
        its group."""
        return None

    @property
    def fetches_early(self) -> bool:
        """Whether codes are asked for while others are multiplied, not just before they are
        unpacked: where they take longer to arrive than to unpack."""
        return False

    def for_rows(self, rows: torch.dtype, *, pairs: bool) -> PackedFormat:
        """The format of the weights that rows of a dtype are multiplied with.

        Args:
            pairs: whether two inputs at a time, as bfloat16.
        """
        return self

    @property
    def goes_down(self) -> bool:
        """Whether codes go down the inputs: neighbours in memory are of neighbouring outputs."""
        return self.parts[0].down

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

    def triton(self) -> TritonForm | None:
        """How Triton kernels read it on a GPU; None where PyTorch unpacks it there.

        Only to be called where Triton is to run, since this imports it.
        """
        return None

    @classmethod
    def has_triton(cls) -> bool:
        """Whether Triton kernels read it; nothing is imported to tell."""
        return cls.triton is not PackedFormat.triton


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One linear's weight (outputs, inputs) in a packed format."""

    format: PackedFormat
    in_features: int
    out_features: int
    tensors: Mapping[str, Tensor]  # by leaf, as PackedFormat.parts says

    def unpack(self) -> Tensor:
        """(outputs, inputs) float32, by the format's definition."""
        return self.format.unpack(self.matrices(), self.out_features, self.in_features)

    def unpack_to(self, dtype: torch.dtype) -> Tensor:
        """As `unpack`, rounded to a dtype slab by slab."""
        device = next(iter(self.tensors.values())).device
        out = torch.empty(self.out_features, self.in_features, dtype=dtype, device=device)
        for start, slab in self.slabs():
            out[start : start + len(slab)] = slab.to(dtype)
        return out

    def slabs(self) -> Iterator[tuple[int, Tensor]]:
        """As `unpack`, some outputs at a time where tensors can be cut: the first output of each
        slab, and its weights.

        Definitions hold integers of 8 bytes for each weight, which of a whole matrix would be
        several times the result.
        """
        tall = math.lcm(*(part.outputs or 1 for part in self.format.parts))
        step = max(_AT_ONCE // self.in_features // tall, 1) * tall
        if step >= self.out_features or any(part.run for part in self.format.parts):
            yield 0, self.unpack()
            return
        matrices = self.matrices()
        for start in range(0, self.out_features, step):
            stop = min(start + step, self.out_features)
            cut = {
                part.leaf: part.cut(matrices[part.leaf], start, stop) for part in self.format.parts
            }
            yield start, self.format.unpack(cut, stop - start, self.in_features)

    def matrices(self) -> dict[str, Tensor]:
        """The tensors in the shapes that the format's parts have."""
        return {
            part.leaf: self.tensors[part.leaf].reshape(
                part.shape(self.out_features, self.in_features)
            )
            for part in self.format.parts
        }


@dataclass(frozen=True, slots=True)
class Stored:
    """A linear as it lies in a checkpoint.

    Attributes:
        tensors: safetensors' name of the dtype and the shape, by leaf.
        load: reads the tensor of a leaf, for the few that say how others are meant.
    """

    name: str
    outputs: int
    inputs: int
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    load: Callable[[str], Tensor]

    def dtype(self, leaf: str, *allowed: str) -> str:
        """Of a leaf.

        Args:
            allowed: what it may be; anything unless told.
        Raises:
            ValueError: there is none of this name, or it is of another dtype.
        """
        dtype = self._find(leaf)[0]
        if allowed and dtype not in allowed:
            raise ValueError(
                f"tensor '{self.name}.{leaf}' is {dtype}, expected {' or '.join(allowed)}"
            )
        return dtype

    def shape(self, leaf: str) -> tuple[int, ...]:
        """Of a leaf; likewise."""
        return self._find(leaf)[1]

    def unit_of(self, group: int, *smaller: int) -> int:
        """The first of 128, 64, 32 and some smaller units that divides the inputs, and that goes
        into groups of inputs (0: all) or is several whole ones; the last one if none does."""
        choices = (128, 64, 32, *smaller)
        return next(
            (unit for unit in choices
             if self.inputs % unit == 0 and (group % unit == 0 or unit % group == 0)),
            choices[-1],
        )  # fmt: skip

    def _find(self, leaf: str) -> tuple[str, tuple[int, ...]]:
        if leaf not in self.tensors:
            raise ValueError(f"tensor '{self.name}.{leaf}' is missing: download it again")
        return self.tensors[leaf]


# beside attention or its projections where a cache is to be of float8; here it never is
CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "kv_scale")
SCALES = ("F32", "F16", "BF16")  # dtypes of scales that are plain numbers

_NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensors in memory as Stored.tensors describes those of a checkpoint."""
    return {leaf: (_NAMES[tensor.dtype], tuple(tensor.shape)) for leaf, tensor in tensors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One `quant_method` of config.json whose weights are packed.

    `read` gives the format of a linear, None where it is plain, and raises ValueError where the
    config or the tensors make no sense; it is asked for every linear of which a leaf is there.
    """

    name: str
    leaves: tuple[str, ...]  # tensors that weights are made of, behind a linear's name
    unused: tuple[str, ...] = ()  # and those that products with unpacked weights do not need
    read: Callable[[Stored, Mapping[str, Any]], PackedFormat | None]
    quantizes_rows: Callable[[Mapping[str, Any]], bool] = lambda settings: False
