"""How long a CPU computes: products by their rows, and all else that a decoder layer does.

Plain numbers; probe.py and models/arithmetic_probe.py measure them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

FlopsByRows = tuple[tuple[int, float], ...]  # (rows, FLOP/s) by rising rows; () is not known
PACKED_BITS = (4, 8)  # of quantized weights, whose products are measured
MAX_KNEE_ROWS = 4096
PROBED_HIDDEN, PROBED_INTERMEDIATE = 4096, 11008  # of the layer that is measured


def arithmetic_name(dtype: str, packed_bits: int = 0) -> str:
    """Under which name the rates of rows of `dtype` are kept; 0 bits are weights of two bytes."""
    return f"{dtype}, {packed_bits} bits" if packed_bits else dtype


def product_seconds(weights: int, rows: int, flops: FlopsByRows) -> float:
    """Products of `rows` rows with `weights` weights; the rate interpolated between points.

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


def most_rows(seconds: Callable[[int], float], limit_s: float) -> int:
    """Most rows that take no longer than the limit; 0 where one row does."""
    low, high = 0, MAX_KNEE_ROWS
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(middle) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What a decoder layer takes on a CPU besides its products: attention, norms, activations,
    additions, and the Python that starts them.

    Measured on a layer of PROBED_HIDDEN and PROBED_INTERMEDIATE.
    """

    layer_s: float  # whatever its rows
    row_s: float  # more for each row
    slot_s: float  # and for each cache slot that the row attends to

    def seconds(self, hidden: int, intermediate: int, rows: int, slots: int) -> float:
        """Seconds of one layer.

        Args:
            hidden, intermediate: widths of the layer.
            slots: that each row attends to.
        """
        width = (hidden + intermediate) / (PROBED_HIDDEN + PROBED_INTERMEDIATE)
        heads = hidden / PROBED_HIDDEN
        return self.layer_s + rows * (width * self.row_s + heads * slots * self.slot_s)
