"""Attention on a CPU, a row of which has the same bits in every pass (see cpu_attention_ir)."""

from __future__ import annotations

import itertools
import math
import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specexec_kernels import cpu_jit
from specexec_kernels.cpu_attention_ir import Arg, AttentionSpec, build
from specexec_kernels.cpu_ir_emit import ScaleType

_STORED: dict[torch.dtype, ScaleType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_TILES = (1, 4, 8)  # query rows of a tile
_MOST_VECTORS = 32  # of a head: 256 dimensions in registers of 8
_names = itertools.count()


def supports(keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel reads keys and values (kv_heads, slots, head_dim)."""
    lanes, head_dim = cpu_jit.lanes(), keys.shape[-1]
    return (
        keys.device.type == "cpu"
        and keys.dtype in _STORED
        and values.dtype == keys.dtype
        and values.shape == keys.shape
        and values.stride() == keys.stride()
        and keys.stride(2) == 1
        and head_dim % lanes == 0
        and head_dim // lanes <= _MOST_VECTORS
    )


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Softmax attention with float32 scores, weights and sums, rounded once.

    Args:
        queries: (heads, rows, head_dim); consecutive heads share a key/value head.
        keys, values: (kv_heads, slots, head_dim) that `supports` accepts, finite.
        mask: (rows, slots) bool, True = attend; every row sees a slot.
        scale: of the scores; 1 / sqrt(head_dim) unless told.
    Returns:
        (rows, heads, head_dim) in the dtype of `queries`. A row's bits depend on the slots that it
        sees, in their order, alone.
    """
    (heads, rows, head_dim), (kv_heads, slots) = queries.shape, keys.shape[:2]
    lanes, each = cpu_jit.lanes(), heads // kv_heads * rows
    size = next((size for size in _TILES if size >= each), _TILES[-1])
    tiles = -(-each // size)
    spec = AttentionSpec(_STORED[keys.dtype], size, head_dim // lanes, lanes)
    packed = queries.new_zeros(kv_heads, tiles * size, head_dim, dtype=torch.float32)
    packed[:, :each] = queries.reshape(kv_heads, each, head_dim)
    padded = -(-slots // lanes) * lanes
    seen = torch.nn.functional.pad(mask, (0, padded - slots)).contiguous()
    out = torch.empty_like(packed)
    threads = max(1, min(torch.get_num_threads(), kv_heads * tiles))
    scores = torch.empty(threads, size, padded)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    values_of = {
        Arg.COUNTER: 0,
        Arg.THREADS: 0,
        Arg.QUERIES: packed.data_ptr(),
        Arg.KEYS: keys.data_ptr(),
        Arg.VALUES: values.data_ptr(),
        Arg.MASK: seen.data_ptr(),
        Arg.OUT: out.data_ptr(),
        Arg.SCORES: scores.data_ptr(),
        Arg.KV_HEADS: kv_heads,
        Arg.TILES: tiles,
        Arg.PASS_ROWS: rows,
        Arg.SLOTS: slots,
        Arg.MASK_STRIDE: padded,
        Arg.HEAD_STRIDE: keys.stride(0),
        Arg.SLOT_STRIDE: keys.stride(1),
        Arg.SCALE: struct.unpack("<I", struct.pack("<f", scale))[0],
    }
    args = torch.tensor([values_of[arg] for arg in Arg], dtype=torch.int64)
    cpu_jit.run(_kernel(spec), args.data_ptr(), kv_heads * tiles)
    attended = out[:, :each].reshape(heads, rows, head_dim)
    return attended.transpose(0, 1).to(queries.dtype)


@cache
def _kernel(spec: AttentionSpec) -> Any:
    name = f"specexec_attention_{next(_names)}"
    return cpu_jit.compile_ir(build(spec, name), name)
