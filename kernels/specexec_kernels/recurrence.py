"""Linear recurrences over the rows of a tree: gated delta rule, Mamba, decaying linear attention.

cpu_recurrence_ir.py has the equations and the kernel for CPUs, triton_recurrence.py that for GPUs.
On other devices PyTorch computes the same, one row after another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from specexec_kernels import cpu_jit, cpu_team, dispatch
from specexec_kernels.cpu_recurrence_ir import UNROLL, Arg, RecurrenceSpec, build

_MOST_VECTORS = {16: 4, 8: 4, 4: 4}  # of a block, by the lanes of a vector


@dataclass(frozen=True, slots=True)
class Order:
    """Rows depth first, with the places in which states are kept meanwhile.

    Args:
        steps: (steps, 3) int64: a row, the place of its parent's state, and the place of its own.
            Place 0 holds the state that the rows come behind; a later step may overwrite a place.
        places: number of places.
    """

    steps: NDArray[np.int64]
    places: int
    _copies: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def steps_on(self, device: torch.device) -> Tensor:
        """The steps on a device, copied there once: all layers of a pass take the same."""
        if device not in self._copies:
            self._copies[device] = torch.from_numpy(self.steps).to(device)
        return self._copies[device]

    @classmethod
    def chain(cls, rows: int) -> Order:
        """Each row behind the one before it, all in one place."""
        steps = np.zeros((rows, 3), dtype=np.int64)
        steps[:, 0] = np.arange(rows)
        return cls(steps, 1)

    @classmethod
    def depth_first(cls, parents: Sequence[int], wanted: Sequence[int]) -> Order:
        """The wanted rows of a tree, and all ancestors of them.

        A row's last child takes the row's place, so that a chain needs one place.

        Args:
            parents: each row's parent, a row before it; -1 for the state that all come behind.
            wanted: the rows whose outputs are asked for.
        """
        needed = set()
        for row in wanted:
            while row >= 0 and row not in needed:
                needed.add(row)
                row = parents[row]
        children: dict[int, list[int]] = {}
        for row in sorted(needed):
            children.setdefault(parents[row], []).append(row)
        steps: list[tuple[int, int, int]] = []
        free, places = list[int](), 1
        # (row, its parent's place, whether it is the last child)
        waiting = [(row, 0, False) for row in reversed(children.get(-1, ()))]
        if waiting:
            waiting[0] = (waiting[0][0], 0, True)
        while waiting:
            row, parent, last = waiting.pop()
            own = parent
            if not last:
                if not free:
                    free.append(places)
                    places += 1
                own = free.pop()
            steps.append((row, parent, own))
            below = children.get(row, ())
            waiting += [(child, own, at == 0) for at, child in enumerate(reversed(below))]
            if not below:
                free.append(own)
        return cls(np.array(steps, dtype=np.int64).reshape(-1, 3), places)


def recurrence(
    state: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    order: Order,
    *,
    corrects: bool,
) -> tuple[Tensor, Tensor]:
    """Runs rows through a recurrence; all tensors are float32.

    Args:
        state: (heads, key_dim, value_dim), behind which the rows come; value_dim fills whole
            vectors (`padded_dim`).
        queries, keys: (rows, key_heads, key_dim); consecutive heads share a key head.
        values: (rows, heads, value_dim).
        decays: (rows, heads), (rows, heads, key_dim) or (rows, heads, key_dim, value_dim); factors
            of the state, not logarithms.
        betas: (rows, heads).
        corrects: whether a row writes only what the state does not yet answer to its key (the delta
            rule), or its whole value.
    Returns:
        (rows, heads, value_dim) outputs, defined for the rows of `order`, and the state behind the
        last row of `order`. A row's bits depend on its ancestors alone.
    Raises:
        ValueError: the heads are no multiple of the key heads, or a key's dimensions are odd.
    """
    if state.shape[0] % keys.shape[1]:
        raise ValueError(f"{state.shape[0]} heads cannot share {keys.shape[1]} key heads")
    if dispatch.uses_triton(state.device):
        from specexec_kernels import triton_recurrence

        return triton_recurrence.recurrence(
            state, queries, keys, values, decays, betas, order, corrects=corrects
        )
    if state.device.type != "cpu":
        return by_rows(state, queries, keys, values, decays, betas, order, corrects=corrects)
    return _by_kernel(state, queries, keys, values, decays, betas, order, corrects=corrects)


def _by_kernel(
    state: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    order: Order,
    *,
    corrects: bool,
) -> tuple[Tensor, Tensor]:
    """As `recurrence`, on a CPU."""
    heads, key_dim, value_dim = state.shape
    lanes = cpu_jit.lanes()
    assert value_dim % lanes == 0, "values fill whole vectors"
    if key_dim % UNROLL:
        raise ValueError(f"keys of {key_dim} dimensions are not read {UNROLL} at a time")
    vectors = value_dim // lanes
    each = max(count for count in range(1, _MOST_VECTORS[lanes] + 1) if vectors % count == 0)
    spec = RecurrenceSpec(vectors // each, each, lanes, corrects, decays.ndim - 2)
    state, queries, keys, values, decays, betas = (
        tensor.contiguous() for tensor in (state, queries, keys, values, decays, betas)
    )
    out, last = torch.empty_like(values), torch.empty_like(state)
    units = heads * spec.blocks
    threads = max(1, min(torch.get_num_threads(), units))
    scratch = torch.empty(threads, order.places, key_dim, spec.block)
    values_of = {
        Arg.COUNTER: 0,
        Arg.THREADS: 0,
        Arg.QUERIES: queries.data_ptr(),
        Arg.KEYS: keys.data_ptr(),
        Arg.VALUES: values.data_ptr(),
        Arg.DECAYS: decays.data_ptr(),
        Arg.BETAS: betas.data_ptr(),
        Arg.STATE: state.data_ptr(),
        Arg.LAST: last.data_ptr(),
        Arg.OUT: out.data_ptr(),
        Arg.ORDER: order.steps.ctypes.data,
        Arg.SCRATCH: scratch.data_ptr(),
        Arg.HEADS: heads,
        Arg.KEY_HEADS: keys.shape[1],
        Arg.KEY_DIM: key_dim,
        Arg.STEPS: len(order.steps),
        Arg.PLACES: order.places,
    }
    table = array("q", [values_of[arg] for arg in Arg])
    cpu_team.run(_kernel(spec), table.buffer_info()[0], units)
    return out, last


def padded_dim(value_dim: int) -> int:
    """The value dimensions of a head with those that fill its last vector."""
    return -(-value_dim // cpu_jit.lanes()) * cpu_jit.lanes()


def by_rows(
    state: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    betas: Tensor,
    order: Order,
    *,
    corrects: bool,
) -> tuple[Tensor, Tensor]:
    """As `recurrence`, by PyTorch, one row after another; on any device."""
    heads, out = state.shape[0], torch.zeros_like(values)
    group = heads // keys.shape[1]
    places = {0: state}
    place = 0
    for row, parent, place in order.steps.tolist():
        key, query = (
            each[row].repeat_interleave(group, dim=0)[:, :, None] for each in (keys, queries)
        )
        decay = decays[row]
        decay = decay if decay.ndim == 3 else decay.view(heads, -1, 1)
        kept = places[parent] * decay
        value = values[row]
        if corrects:
            value = value - (kept * key).sum(dim=1)
        kept = kept + key * (value * betas[row][:, None])[:, None]
        out[row] = (kept * query).sum(dim=1)
        places[place] = kept
    return out, places[place]


def unit_length(rows: Tensor) -> Tensor:
    """Rows over their lengths, as the delta rule takes queries and keys, in float32.

    Args:
        rows: (..., dimensions).
    Returns:
        the same shape. A row's bits depend on the row alone: the squares are added in halves.
    """
    wide = rows.float()
    squares = wide * wide
    dimensions = squares.shape[-1]
    whole = 1 << (dimensions - 1).bit_length()
    squares = functional.pad(squares, (0, whole - dimensions))
    while whole > 1:
        whole //= 2
        squares = squares[..., :whole] + squares[..., whole:]
    return wide * torch.rsqrt(squares + 1e-6)


@cache
def _kernel(spec: RecurrenceSpec) -> Any:
    return cpu_jit.compiled("recurrence", spec, partial(build, spec))
