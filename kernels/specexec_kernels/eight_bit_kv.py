"""The form of keys and values in 8 bits: whole numbers, and a scale for each 32 of them.

As in llama.cpp's Q8_0, a scale is the largest absolute value of its numbers over 127, in float16. A
row is rounded by itself, so it has the same bits whatever pass it comes with.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specexec_kernels import cpu_eight_bit_kv
from specexec_kernels.cpu_eight_bit_kv import BLOCK, SCALE_BYTES

_LARGEST = 127


def packed(rows: Tensor) -> Tensor:
    """Rows of keys or values, (1, heads, n, size), as (1, heads, n, bytes) uint8.

    Each has its scales in front of its numbers.
    """
    size = rows.shape[-1]
    blocks = -(-size // BLOCK)
    wide = pad(rows.float(), (0, blocks * BLOCK - size)).view(*rows.shape[:3], blocks, BLOCK)
    scales = (wide.abs().amax(-1) / _LARGEST).clamp(max=torch.finfo(torch.float16).max).half()
    whole = wide / scales.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    codes = whole.round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8).flatten(-2)[..., :size]
    return torch.cat([scales.view(torch.uint8), codes.contiguous().view(torch.uint8)], dim=-1)


def unpacked_size(n_bytes: int) -> int:
    """The numbers of a row that takes so many bytes."""
    return n_bytes - SCALE_BYTES * -(-n_bytes // (BLOCK + SCALE_BYTES))


def unpack(rows: Tensor, out: Tensor) -> None:
    """Fills `out` with what `packed` rows stand for.

    Args:
        rows: (1, heads, n, bytes) uint8.
        out: (1, heads, n, size), in any floating dtype. In both, the rows of a head lie one behind
            the other.
    """
    if cpu_eight_bit_kv.supports(rows, out):
        cpu_eight_bit_kv.unpack(rows, out)
    else:
        unpack_ref(rows, out)


def unpack_ref(rows: Tensor, out: Tensor) -> None:
    """As `unpack`, by PyTorch."""
    size = out.shape[-1]
    at, whole = rows.shape[-1] - size, size // BLOCK * BLOCK
    scales = rows[..., :at].contiguous().view(torch.float16).float()
    codes = rows[..., at:].view(torch.int8)
    form = *out.shape[:3], whole // BLOCK, BLOCK
    torch.mul(
        codes[..., :whole].view(form), scales[..., : whole // BLOCK, None],
        out=out[..., :whole].view(form),
    )  # fmt: skip
    if whole < size:
        torch.mul(codes[..., whole:], scales[..., -1:], out=out[..., whole:])
