"""SiLU, GELU and the sigmoid on a CPU, with the same operations for every element.

PyTorch computes the elements that do not fill a vector, at the end of each thread's share, with
other operations than the rest. So an element could round differently with another number of rows or
threads.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cache
from typing import Any, Literal

import torch
from llvmlite import ir
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_ir_emit import I64, Emitter, ScaleType, build_module

Activation = Literal["silu", "gelu_tanh", "sigmoid"]
_BLOCK = 4096  # elements of one claim
_SHARED_BLOCKS = 4  # up to this many blocks one thread is faster than waking others
_STORED: dict[torch.dtype, ScaleType] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Arg(IntEnum):
    """Positions in the int64 argument array of a kernel."""

    COUNTER = 0  # next block to claim; set to 0 before a call
    X = auto()  # address of (SIZE,) elements
    OUT = auto()  # address of (SIZE,) elements
    SIZE = auto()  # elements, whole vectors of them
    BLOCKS = auto()  # blocks of _BLOCK elements


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """What an activation kernel is compiled for."""

    activation: Activation
    stored: ScaleType  # dtype of the elements, in and out
    lanes: int


class Kernel(Emitter):
    """Emits an activation kernel."""

    def __init__(self, spec: ActivationSpec, function: ir.Function) -> None:
        super().__init__(ir.IRBuilder(function.append_basic_block("entry")), spec.lanes)
        self.spec = spec
        self.base = self.b.ptrtoint(function.args[0], I64)
        self.arg = {arg: self.load(self.base, I64(arg), I64, 8) for arg in Arg}

    def emit(self) -> None:
        """Emits the kernel: claims blocks until none is left."""

        def work(block: Any, _: Any) -> None:
            first = self.b.mul(block, I64(_BLOCK))
            full = self.b.add(first, I64(_BLOCK))
            ends = self.b.icmp_signed("<", self.arg[Arg.SIZE], full)
            last = self.b.select(ends, self.arg[Arg.SIZE], full)
            self.loop(first, last, self.lanes, [], self.element)

        counter = self.ptr(self.base, I64(Arg.COUNTER), 8)
        self.claim_strips(counter, I64(0), self.arg[Arg.BLOCKS], I64(1), work)

    def element(self, at: Any, _: list[Any]) -> list[Any]:
        """Emits the activation of elements at..at + lanes."""
        x = self.load_scales(self.spec.stored, self.arg[Arg.X], at, self.lanes)
        found = self.activated(self.spec.activation, x)
        self.store_as(self.spec.stored, found, self.arg[Arg.OUT], at)
        return []


def supports(x: Tensor) -> bool:
    """Whether there is a kernel for this tensor."""
    return x.device.type == "cpu" and x.dtype in _STORED


def apply(activation: Activation, x: Tensor) -> Tensor:
    """Applies an activation to every element, in float32 and rounded once.

    Args:
        activation: its name.
        x: of any shape; `supports` must accept it.
    Returns:
        a tensor of x's shape and dtype.
    Source: SiLU, arXiv:1702.03118; GELU and its tanh form, arXiv:1606.08415, section 2.
    """
    lanes, count = cpu_jit.lanes(), x.numel()
    size, blocks = -(-count // lanes) * lanes, -(-count // _BLOCK)
    x = x.contiguous()
    padded = x if size == count else torch.nn.functional.pad(x.view(-1), (0, size - count))
    out = torch.empty_like(padded)
    spec = ActivationSpec(activation, _STORED[x.dtype], lanes)
    values = {
        Arg.COUNTER: 0,
        Arg.X: padded.data_ptr(),
        Arg.OUT: out.data_ptr(),
        Arg.SIZE: size,
        Arg.BLOCKS: blocks,
    }
    table = array("q", [values[arg] for arg in Arg])
    tiles = blocks if blocks > _SHARED_BLOCKS else 1
    cpu_team.run(_kernel(spec), table.buffer_info()[0], tiles)
    return out if size == count else out[:count].view(x.shape)


@cache
def _kernel(spec: ActivationSpec) -> Any:
    return cpu_jit.compiled(
        "activation", spec,
        lambda name: build_module(name, lambda function: Kernel(spec, function).emit()),
    )  # fmt: skip
