"""What a format of packed weights has to state: everything else is derived from it.

A format is one frozen dataclass:
- `parts`: its tensors, and how many outputs and inputs one item of each covers;
- `unpack`: its definition, in PyTorch and float32;
- `values`: the lines of LLVM IR that turn one unit of inputs into float32, for as many outputs at
  once as a register has lanes. `terms` and `pairs` are faster ways, where a format has them;
- `triton`: the lines that read weights on a GPU.
Most formats store the inputs of one output side by side: FP8, MXFP4, NVFP4, bitsandbytes and GGUF.
In GPTQ's and AWQ's tensors the outputs of one input (or of a few) are side by side (Part.down).

Threads, tiles, the order of sums, the two dtypes of arithmetic, checks, streaming and sizes are the
same for all formats: see cpu_matmul_ir, cpu_unpack_lanes, cpu_matmul, triton_rows, and
specexec_cli.models.packing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specexec_kernels.cpu_unpack_lanes import Lanes


_AT_ONCE = 1 << 22  # weights that `slabs` unpacks at a time


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a packed weight.

    `row_items` x `items` of its items cover a tile of `outputs` x `inputs` weights; 0 stands for
    all outputs or all inputs.

    Attributes:
        leaf: its name in the checkpoint after the linear's name, as in "weight_scale_inv".
        dtype: safetensors' name of its dtype.
        row_items: more than 1 where codes are packed along the outputs.
        run: where the weight is cut into runs that may cross its rows, the weights of one item;
            else 0.
        down: whether rows of the tensor are inputs and its columns outputs; its codes are int32.
    """

    leaf: str
    dtype: str
    items: int = 1
    outputs: int = 1
    inputs: int = 1
    row_items: int = 1
    run: int = 0
    down: bool = False

    def shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Rows and columns of the tensor, for a weight (outputs, inputs).

        A dimension of 1 may be missing in the file's shape.
        """
        if self.run:
            return 1, -(-outputs * inputs // self.run)
        rows = -(-outputs * self.row_items // self.outputs) if self.outputs else 1
        columns = -(-inputs * self.items // self.inputs) if self.inputs else self.items
        return (columns, rows) if self.down else (rows, columns)

    def cut(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """The slice of the tensor for outputs start..stop, which must be whole items."""
        first = start * self.row_items // self.outputs if self.outputs else 0
        count = -(-(stop - start) * self.row_items // self.outputs) if self.outputs else 1
        return tensor.narrow(int(self.down), first, count)


def block_of(group: int, unit: int) -> int:
    """Inputs of a block, where every `group` inputs (0: all) share a scale.

    All of a block's inputs are of one group, and there are not too many for one float32 sum.
    """
    if 0 < group <= 256:
        return group
    return max(unit, 128) if group % max(unit, 128) == 0 else unit


def fits_units(group: int, unit: int) -> bool:
    """Whether units divide a group of inputs (0: all), or are several whole groups.

    Units of several groups of one input are not accepted, since two inputs are multiplied at a
    time.
    """
    return group % unit == 0 or (group > 1 and unit % group == 0)


def has_halves(block: int) -> bool:
    """Whether a block can be halved down to single inputs, so is a power of two: row sums are
    added half by half (cpu_arrange_ir)."""
    return block & (block - 1) == 0


def byte_order(unit: int) -> tuple[int, ...]:
    """The bytes of a unit's words in the order of pairs of int16, each of the same bits of a word's
    two halves: bytes 0 and 2 of a word, then bytes 1 and 3."""
    return tuple(word + byte for word in range(0, unit, 4) for byte in (0, 2, 1, 3))


@dataclass(frozen=True, slots=True)
class TritonForm:
    """How Triton kernels read a format; see triton_tiles."""

    read: Any  # the @triton.jit function of triton_tiles
    settings: tuple[int | float | str, ...] = ()  # constants that it is compiled with
    table: tuple[float, ...] = ()  # a float32 table, given to it after the parts
    # Most rows that a product unpacks weights for, in registers. 0: weights are unpacked into
    # memory first, since the function loads more than words of codes and their scales.
    rows: int = 128
    step: int = 64  # inputs of a tile of weights, where a product has few rows


class PackedFormat(ABC):
    """A format of packed weights. Subclasses are frozen dataclasses, as the keys of compiled
    kernels.

    Attributes:
        name: shown to people.
        has_scale: whether `terms` gives a scale.
        has_offset: whether `terms` gives an offset; `block` must then be a power of two.
        compiled: whether it has LLVM IR, not `unpack` alone.
        chained: whether all inputs are summed as one sum, in rising order, not block by block.
        zero: the integer that stands for a value of 0 in `integers`; None where values are not
            integers less a fixed number.
        code_bits: bits of the codes that `quads` yields.
        quad_step: how many pairs of `integers` lie from one pair of a quad to the other.
        unit: inputs that `values` yields; a weight's inputs must be a multiple.
    """

    name: ClassVar[str]
    has_scale: ClassVar[bool] = False
    has_offset: ClassVar[bool] = False
    compiled: ClassVar[bool] = True
    chained: ClassVar[bool] = False
    zero: ClassVar[int | None] = None
    code_bits: ClassVar[int] = 8
    quad_step: ClassVar[int] = 1
    unit: int

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The tensors of a weight, that of the codes first."""

    @property
    def index(self) -> tuple[str | None, int] | None:
        """(leaf, inputs of a group) of a format whose groups are not runs of a unit's values.

        The tensor `leaf` names the group of each input. Without a leaf, groups are neighbouring
        inputs, but a unit has several of them and does not yield one group after the other. Each
        value is then multiplied by the `terms` of its own group, not each block's sum.
        """
        return None

    @property
    def fetches_early(self) -> bool:
        """Whether codes are prefetched while the tile before is multiplied, not just before they
        are unpacked. Pays where they take longer to arrive than to unpack."""
        return False

    def for_rows(self, rows: torch.dtype, *, pairs: bool) -> PackedFormat:
        """This format as rows of a dtype need it: plain weights are rounded to that dtype.

        Args:
            rows: dtype of the rows.
            pairs: whether two inputs at a time are multiplied, as bfloat16.
        """
        return self

    @property
    def goes_down(self) -> bool:
        """Whether codes go down the inputs, so that neighbours in memory belong to neighbouring
        outputs."""
        return self.parts[0].down

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """The weight that the tensors stand for.

        Args:
            tensors: by leaf, each (rows, columns) as Part.shape says.
        Returns:
            (outputs, inputs) float32.
        """

    @property
    def order(self) -> tuple[int, ...]:
        """The inputs of a unit in the order in which `values` yields them."""
        return tuple(range(self.unit))

    @property
    def block(self) -> int:
        """Inputs that share `terms`: a multiple of the unit, or a divisor of it. Each block has a
        sum of its own, so no sum is longer than this."""
        return self.unit * max(128 // self.unit, 1)

    def values(self, lanes: Lanes) -> Iterator[Any]:
        """Emits one vector of float32 for each input of a unit, one lane for each output.

        Args:
            lanes: reads the bytes of the unit, and builds the IR.
        """
        raise NotImplementedError(f"{self.name} has no kernel")

    def pairs(self, lanes: Lanes) -> Iterator[Any]:
        """Emits the `values` two at a time, as bfloat16: vectors of 32-bit words, the first value
        in the lower halves.

        Rounds to nearest. A format may override this with a faster way to the same bits.
        """
        values = self.values(lanes)
        for first in values:
            yield lanes.pair(first, next(values))

    @property
    def integer_order(self) -> tuple[int, ...]:
        """The inputs of a unit in the order in which `integers` yields them."""
        return self.order

    def integers(self, lanes: Lanes) -> Iterator[Any]:
        """Emits value + zero for each input of a unit, two at a time: vectors of 32-bit words, each
        a pair of int16 from -128 to 255. Only where `zero` is a number.

        A block has at most 256 inputs, so the int32 sum of its products with int16 is exact.
        """
        raise NotImplementedError(f"{self.name} has no integers")

    @property
    def quad_order(self) -> tuple[int, ...]:
        """The inputs of a unit in the order in which `quads` yields them."""
        order, step = self.integer_order, 2 * self.quad_step
        return tuple(
            order[first + at + apart]
            for start in range(0, self.unit, 2 * step)
            for first in range(start, start + step, 2)
            for at in (0, 1)
            for apart in (0, step)
        )

    @property
    def quad_zero(self) -> int:
        """The code that stands for a value of 0 in `quads`."""
        assert self.zero is not None, f"{self.name} has no integers"
        return self.zero

    def quads(self, lanes: Lanes) -> Iterator[Any]:
        """Emits the codes of a unit four at a time: vectors of 32-bit words, each four unsigned
        bytes. Only where `zero` is a number.

        Joins the pairs of `integers`, which must then be codes from 0 on. LLVM makes one masking
        of two pairs whose bits lie in the same word.
        """
        pairs, step = self.integers(lanes), self.quad_step
        while some := list(islice(pairs, 2 * step)):
            for low, high in zip(some[:step], some[step:], strict=True):
                yield lanes.b.or_(low, lanes.b.shl(high, lanes.same(8)))

    def terms(self, lanes: Lanes, number: int) -> tuple[Any, Any]:
        """Emits the (scale, offset) vectors of a block: weight = value * scale + offset.

        None stands for a scale of 1 or an offset of 0. The scale multiplies the block's sum, so
        that values may stay small numbers that bfloat16 holds exactly.

        Args:
            lanes: at the block's first unit.
            number: the block's number within its unit, where a unit has several.
        """
        return None, None

    def triton(self) -> TritonForm | None:
        """How Triton kernels read the format; None where PyTorch unpacks it on a GPU.

        Imports Triton, so call it only where Triton will run.
        """
        return None

    def staying(self, inputs: int) -> PackedFormat | None:
        """The format in which a GPU reads a weight faster, where it stays there: the same numbers
        in the same leaves, of as many bytes in another order. None: as it is stored.

        Args:
            inputs: of the weight.
        """
        return None

    def rearrange(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a weight as its `staying` format has them.

        Args:
            tensors: by leaf, in the shapes that Part.shape says.
        """
        raise NotImplementedError(f"{self.name} stays as it is")

    @classmethod
    def has_triton(cls) -> bool:
        """Whether Triton kernels read the format. Does not import Triton."""
        return cls.triton is not PackedFormat.triton


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One linear's weight (outputs, inputs) in a packed format."""

    format: PackedFormat
    in_features: int
    out_features: int
    tensors: Mapping[str, Tensor]  # by leaf, as PackedFormat.parts says
    # Whether a CPU rounds the rows that it multiplies by this weight to 8 bits (cpu_arrange_int8).
    eight_bit_rows: bool = False

    def unpack(self) -> Tensor:
        """The weight by the format's definition, (outputs, inputs) float32."""
        return self.format.unpack(self.matrices(), self.out_features, self.in_features)

    def unpack_to(self, dtype: torch.dtype) -> Tensor:
        """The weight by the format's definition, rounded to a dtype; needs little memory more than
        the result."""
        device = next(iter(self.tensors.values())).device
        out = torch.empty(self.out_features, self.in_features, dtype=dtype, device=device)
        for start, slab in self.slabs():
            out[start : start + len(slab)] = slab.to(dtype)
        return out

    def slabs(self) -> Iterator[tuple[int, Tensor]]:
        """Unpacks some outputs at a time: yields (first output, weights of the slab).

        `unpack` holds integers of 8 bytes for each weight; for a whole matrix those would be
        several times the result. A weight with a tensor of runs (Part.run) is one slab.
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
        """The tensors by leaf, in the shapes that Part.shape says."""
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
        name: its name in the checkpoint.
        tensors: by leaf, safetensors' name of the dtype, and the shape.
        load: reads the tensor of a leaf. Needed for the few that say how to read the others.
    """

    name: str
    outputs: int
    inputs: int
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    load: Callable[[str], Tensor]

    def dtype(self, leaf: str, *allowed: str) -> str:
        """The dtype of a leaf, by safetensors' name.

        Args:
            leaf: name of the tensor after the linear's name.
            allowed: the dtypes that are accepted; any where none is given.
        Raises:
            ValueError: there is no such tensor, or its dtype is not accepted.
        """
        dtype = self._find(leaf)[0]
        if allowed and dtype not in allowed:
            raise ValueError(
                f"tensor '{self.name}.{leaf}' is {dtype}, expected {' or '.join(allowed)}"
            )
        return dtype

    def shape(self, leaf: str) -> tuple[int, ...]:
        """The shape of a leaf.

        Raises:
            ValueError: there is no such tensor.
        """
        return self._find(leaf)[1]

    def unit_of(self, group: int, *smaller: int) -> int:
        """The first of the units 128, 64, 32 and `smaller` that divides the inputs, and that
        divides a group of inputs (0: all) or is several whole groups; the last one if none does."""
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


# Tensors of attention layers for a cache of float8, which this program does not have.
CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "kv_scale")
SCALES = ("F32", "F16", "BF16")  # dtypes of scales that are plain floats

_NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Describes tensors in memory as Stored.tensors describes those of a checkpoint."""
    return {leaf: (_NAMES[tensor.dtype], tuple(tensor.shape)) for leaf, tensor in tensors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One `quant_method` of config.json that packs weights.

    Attributes:
        name: of the method in config.json.
        leaves: the tensors that weights consist of, by their names after the linear's name.
        unused: further tensors in the files that are not needed to multiply.
        read: gives the format of a linear from its tensors and the quantization_config; None where
            it is plain. Raises ValueError where they make no sense. Called for every linear that
            has one of `leaves`.
        quantizes_rows: whether the method would quantize activations too, by the
            quantization_config; here they stay as they are.
    """

    name: str
    leaves: tuple[str, ...]
    unused: tuple[str, ...] = ()
    read: Callable[[Stored, Mapping[str, Any]], PackedFormat | None]
    quantizes_rows: Callable[[Mapping[str, Any]], bool] = lambda settings: False
