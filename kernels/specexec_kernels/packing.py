"""Packs codes into words as GPTQ and AWQ do, and unpacks them, in plain PyTorch.

GPTQ: every run of 32 codes is one little-endian stream of bits * 32 bits, in which code k begins at
bit k * bits. formats/gptq.py and formats/awq.py say how weights are computed from the codes, and
name the sources of the layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word, the lowest nibble first
BITS = (2, 3, 4, 8)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Packs codes down dimension 0.

    Args:
        codes: (n, columns) integers in [0, 2**bits), n a multiple of 32 (of 32 / bits for
            bits other than 3).
    Returns:
        (n * bits / 32, columns) int32.
    """
    n, columns = codes.shape
    if bits != 3:  # codes do not straddle words
        runs = codes.int().reshape(-1, 32 // bits, columns)
        packed = runs[:, 0].clone()
        for j in range(1, 32 // bits):
            packed |= runs[:, j] << (j * bits)
        return packed.contiguous()
    wide = codes.long().reshape(n // 32, 32, columns)
    words = torch.zeros(n // 32, 4, columns, dtype=torch.int64, device=codes.device)
    for j in range(32):
        word, shift = divmod(j * bits, 32)
        value = wide[:, j] << shift
        words[:, word] |= value & 0xFFFFFFFF
        words[:, word + 1] |= value >> 32
    return _as_int32(words[:, :-1].reshape(-1, columns))


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_rows`: (words, columns) int32 to (words * 32 / bits, columns) int32."""
    n = words.shape[0] * 32 // bits
    unsigned = words.long() & 0xFFFFFFFF
    bit = torch.arange(n, device=words.device) * bits
    low = unsigned[bit // 32]
    high = unsigned[(bit // 32 + 1).clamp(max=words.shape[0] - 1)]
    codes = (low | (high << 32)) >> (bit % 32)[:, None]
    return (codes & (2**bits - 1)).int()


def pack_awq(codes: Tensor) -> Tensor:
    """Packs 4-bit codes (rows, columns) in AWQ's order, to (rows, columns / 8) int32."""
    nibbles = codes.long().reshape(codes.shape[0], -1, 8)
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int64, device=codes.device)
    for i, column in enumerate(AWQ_ORDER):
        words |= nibbles[..., column] << (4 * i)
    return _as_int32(words)


def unpack_awq(words: Tensor) -> Tensor:
    """The inverse of `pack_awq`: (rows, words) int32 to (rows, words * 8) int32."""
    shifts = [4 * AWQ_ORDER.index(column) for column in range(8)]
    codes = words.unsqueeze(-1) >> torch.tensor(shifts, dtype=torch.int32, device=words.device)
    return (codes & 15).reshape(words.shape[0], -1)


def awq_to_rows(words: Tensor) -> Tensor:
    """pack_rows(unpack_awq(words), 4) with little memory: (rows, words) int32, rows a multiple of
    8, to (rows / 8, words * 8) int32."""
    eights = words.view(words.shape[0] // 8, 8, -1)
    ups = 4 * torch.arange(8, dtype=torch.int32, device=words.device)[:, None]
    packed = torch.empty(len(eights), eights.shape[2], 8, dtype=torch.int32, device=words.device)
    for nibble, column in enumerate(AWQ_ORDER):
        codes = ((eights >> (4 * nibble)) & 15) << ups
        packed[..., column] = codes.sum(dim=1, dtype=torch.int32)  # no two have a bit in common
    return packed.view(len(eights), -1)


def unpack_zeros(qzeros: Tensor, bits: int, *, minus_one: bool = False) -> Tensor:
    """Unpacks GPTQ's zero points: (groups, words) int32 to (groups, outputs) int32.

    Args:
        minus_one: whether they are stored minus one (format v1). 1 is then added to whole words,
            carry included, since that is how it was subtracted: a zero point of 0 borrowed from the
            next field. Zero points of 3 bits are the exception: they wrap around one by one.
    """
    if not minus_one:
        return unpack_rows(qzeros.T, bits).T
    if bits == 3:
        return (unpack_rows(qzeros.T, 3).T + 1) & 7
    return unpack_rows(_as_int32(qzeros.long() + ones_of(bits)).T, bits).T


def ones_of(bits: int) -> int:
    """A word with the number 1 in each of its fields of `bits` bits."""
    return sum(1 << (i * bits) for i in range(32 // bits))


def store_zeros(zeros: Tensor, bits: int, *, minus_one: bool = False) -> Tensor:
    """The inverse of `unpack_zeros`, for zero points in [0, 2**bits)."""
    if not minus_one:
        return pack_rows(zeros.T, bits).T.contiguous()
    if bits == 3:
        return pack_rows((zeros.T - 1) & 7, 3).T.contiguous()
    return _as_int32(pack_rows(zeros.T, bits).T.long() - ones_of(bits)).contiguous()


def _as_int32(words: Tensor) -> Tensor:
    """The low 32 bits of int64 words, as signed int32."""
    low = words & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).int()
