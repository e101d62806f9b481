"""How long a pass's arithmetic takes, and how many rows hide behind its stream. Plain numbers."""

from __future__ import annotations

from itertools import accumulate, pairwise

MAX_KNEE_ROWS = 4096

FlopsByRows = tuple[tuple[int, float], ...]  # (rows, FLOP/s) by rising rows; () is not known
PACKED_BITS = (4, 8)  # of quantized weights, whose products are measured


def arithmetic_name(dtype: str, packed_bits: int = 0) -> str:
    """Under which name the rates of rows of `dtype` are kept; 0 bits are weights of two bytes."""
    return f"{dtype}, {packed_bits} bits" if packed_bits else dtype


def compute_seconds(weights: int, rows: int, flops: FlopsByRows) -> float:
    """Arithmetic of `rows` rows through `weights` weights; the rate interpolated between points.

    More rows never take less time than fewer, whatever the noise in the measured rates.
    """
    if not flops or not rows:
        return 0.0
    seconds = accumulate((2.0 * weights * point / rate for point, rate in flops), max)
    times = [(point, point_s) for (point, _), point_s in zip(flops, seconds, strict=True)]
    for (low, low_s), (high, high_s) in pairwise(times):
        if low <= rows <= high:
            return low_s + (rows - low) / (high - low) * (high_s - low_s)
    nearest_rows, nearest_s = times[0] if rows < times[0][0] else times[-1]
    return nearest_s * rows / nearest_rows


def knee_rows(weights: int, flops: FlopsByRows, stream_s: float) -> int | None:
    """Most rows whose arithmetic takes no longer than the stream."""
    if not flops:
        return None
    low, high = 0, MAX_KNEE_ROWS
    while low < high:
        middle = (low + high + 1) // 2
        if compute_seconds(weights, middle, flops) <= stream_s:
            low = middle
        else:
            high = middle - 1
    return low
