"""Attention on a CPU; a row has the same bits in every pass (see cpu_attention_ir)."""

from __future__ import annotations

import math
import struct
from array import array
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from specexec_kernels import cpu_jit, cpu_team
from specexec_kernels.cpu_attention_ir import PART, Arg, AttentionSpec, build
from specexec_kernels.cpu_ir_emit import ScaleType
from specexec_kernels.split_rows import BLOCK_SLOTS, FrontRows, SplitRows

_STORED: dict[torch.dtype, ScaleType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_TILES = (1, 4, 8)  # query rows of a tile
_NO_SINKS = torch.empty(0)
_NO_BLOCKS = array("q")
# of the keys' shared blocks -> the values', and where both lie
_TABLES: WeakKeyDictionary[FrontRows, tuple[ref[FrontRows], array[int]]] = WeakKeyDictionary()
_IN_FRONT_OF_PART = tuple(Arg)[: PART[0]]


def supports(keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel reads keys and values without a copy.

    Args:
        keys, values: (kv_heads, slots, dimensions of a head).
    """
    return values.dtype == keys.dtype and all(
        each.device.type == "cpu"
        and each.dtype in _STORED
        and each.stride(2) == 1
        and each.shape[2] % cpu_jit.lanes() == 0
        for each in (keys, values)
    )


def _in_whole_vectors(heads: Tensor) -> Tensor:
    """Pads the dimensions of (heads, rows or slots, dimensions) with zeros to whole vectors."""
    return torch.nn.functional.pad(heads, (0, -heads.shape[2] % cpu_jit.lanes()))


def attend(
    queries: Tensor,
    keys: Tensor | SplitRows,
    values: Tensor | SplitRows,
    mask: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention with float32 scores, weights and sums, rounded once.

    A row's bits depend only on the slots that it sees and on their order.

    Args:
        queries: (heads, rows, head_dim); consecutive heads share a key/value head.
        keys: (kv_heads, slots, head_dim), finite. Copied unless `supports` accepts them.
        values: (kv_heads, slots, value_dim), finite. Copied unless `supports` accepts them. Keys
            and values of which the first slots are shared are both SplitRows.
        mask: (rows, slots) bool, True = attend; every row must see a slot.
        scale: multiplies the scores; 1 / sqrt(head_dim) where not given.
        softcap: the scores become softcap * tanh(score / softcap).
        sinks: (heads,) logits that take part in the softmax alone, without a value.
    Returns:
        (rows, heads, value_dim) in the dtype of `queries`.
    """
    scale = 1 / math.sqrt(queries.shape[2]) if scale is None else scale
    dimensions = values.shape[-1]
    blocks = _NO_BLOCKS
    if isinstance(keys, SplitRows):
        assert isinstance(values, SplitRows), "both are or none"
        if supports(keys.own[0], values.own[0]):
            blocks = blocks_table(keys.front, values.front)
            keys, values = keys.own[0], values.own[0]
        else:
            keys, values = keys.whole[0], values.whole[0]
    assert isinstance(values, Tensor), "both are or none"
    if not supports(keys, values):
        dtype = torch.promote_types(keys.dtype, values.dtype)
        read = dtype if dtype in _STORED else torch.float32
        keys, values = (_in_whole_vectors(each.to(read)).contiguous() for each in (keys, values))
        queries = _in_whole_vectors(queries)
    attended = _attended(queries, keys, values, mask, scale, softcap, sinks, blocks)
    return attended[:, :, :dimensions].transpose(0, 1).to(queries.dtype)


def _attended(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    blocks: array[int],
) -> Tensor:
    """`attend` for keys and values that the kernel reads without a copy.

    Args:
        blocks: see blocks_table, of the slots in front of these keys and values.
    Returns:
        (heads, rows, value_dim) float32.
    """
    (heads, rows, head_dim), (kv_heads, own, value_dim) = queries.shape, values.shape
    block_count = len(blocks) // len(PART)
    front = block_count * BLOCK_SLOTS
    slots = front + own
    lanes, each = cpu_jit.lanes(), heads // kv_heads * rows
    size, count = tiles(each)
    spec = AttentionSpec(
        _STORED[keys.dtype], size, head_dim // lanes, value_dim // lanes, lanes,
        capped=softcap is not None, sinks=sinks is not None,
    )  # fmt: skip
    packed = queries.reshape(kv_heads, each, head_dim).float().contiguous()
    if count * size != each:
        packed = torch.nn.functional.pad(packed, (0, 0, 0, count * size - each))
    sunk = _NO_SINKS
    if sinks is not None:
        sunk = torch.zeros(kv_heads, count * size)
        lay_sinks(sunk, sinks, rows)
    padded = -(-slots // lanes) * lanes
    seen = mask.contiguous()
    if padded != slots:
        seen = torch.nn.functional.pad(seen, (0, padded - slots))
    out = torch.empty(kv_heads, count * size, value_dim)
    threads = max(1, min(torch.get_num_threads(), kv_heads * count))
    scores = torch.empty(threads, size, padded)
    values_of = {
        Arg.COUNTER: 0,
        Arg.THREADS: 0,
        Arg.QUERIES: packed.data_ptr(),
        Arg.MASK: seen.data_ptr(),
        Arg.SINKS: sunk.data_ptr(),
        Arg.OUT: out.data_ptr(),
        Arg.SCORES: scores.data_ptr(),
        Arg.KV_HEADS: kv_heads,
        Arg.TILES: count,
        Arg.PASS_ROWS: rows,
        Arg.MASK_STRIDE: padded,
        Arg.SCALE: _bits(scale if softcap is None else scale / softcap),
        Arg.SOFTCAP: _bits(softcap or 0.0),
        Arg.BLOCKS: blocks.buffer_info()[0],
        Arg.BLOCK_COUNT: block_count,
    }
    table = array("q", [values_of[arg] for arg in _IN_FRONT_OF_PART])
    table.extend(_part(keys, values, front, slots))
    cpu_team.run(_kernel(spec), table.buffer_info()[0], kv_heads * count)
    return out[:, :each].reshape(heads, rows, value_dim)


def _part(keys: Tensor, values: Tensor, first: int, stop: int) -> tuple[int, ...]:
    """What says where slots first..stop lie, in the order of PART."""
    (key_head, key_slot, _), (value_head, value_slot, _) = keys.stride(), values.stride()
    before = first * keys.itemsize
    return (
        keys.data_ptr() - before * key_slot, values.data_ptr() - before * value_slot,
        key_head, key_slot, value_head, value_slot, first, stop,
    )  # fmt: skip


def blocks_table(keys: FrontRows, values: FrontRows) -> array[int]:
    """Where shared blocks lie, as the kernel reads it: made once, as all passes read the same."""
    made = _TABLES.get(keys)
    if made is not None and made[0]() is values:
        return made[1]
    table = array("q")
    for number, (key, value) in enumerate(zip(keys.blocks, values.blocks, strict=True)):
        first = number * BLOCK_SLOTS
        table.extend(_part(key, value, first, first + BLOCK_SLOTS))
    _TABLES[keys] = ref(values), table
    return table


def lay_sinks(out: Tensor, sinks: Tensor, rows: int) -> None:
    """Lays out the heads' sinks as the kernel reads them.

    Args:
        out: float32 (kv_heads, query rows of all tiles).
        sinks: (heads,).
        rows: of the pass.
    """
    heads = len(out)
    out[:, : len(sinks) // heads * rows] = sinks.view(heads, -1).repeat_interleave(rows, dim=1)


def tiles(rows: int) -> tuple[int, int]:
    """The rows of a tile, and the number of tiles, for the query rows of a key/value head."""
    size = next((size for size in _TILES if size >= rows), _TILES[-1])
    return size, -(-rows // size)


def kernel(stored: torch.dtype, tile_rows: int, head_dim: int, *, capped: bool, sinks: bool) -> Any:
    """The kernel for keys and values of a dtype and of `head_dim` dimensions, whole vectors of
    them."""
    lanes = cpu_jit.lanes()
    vectors = head_dim // lanes
    spec = AttentionSpec(
        _STORED[stored], tile_rows, vectors, vectors, lanes, capped=capped, sinks=sinks
    )
    return _kernel(spec)


def _bits(number: float) -> int:
    """The bits of the float32 nearest to a number."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


@cache
def _kernel(spec: AttentionSpec) -> Any:
    return cpu_jit.compiled("attention", spec, partial(build, spec))
