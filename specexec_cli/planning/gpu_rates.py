"""How fast a GPU is: as `doctor` measured it, or by the datasheet of a card of its name.

Products of a pass take the longer of reading the weights and multiplying. A kernel multiplies rows
in tiles and reads a weight once for each tile of up to 128 rows, so 129 rows are a tile of 128 and
one of 16. What the host takes to start a pass's operations is counted beside that (launches.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

# What products are expected to reach of a datasheet's rates. Every figure of a card that was not
# measured rests on these two shares, which are assumed.
BANDWIDTH_SHARE = 0.85
TENSOR_SHARE = 0.60

# Rows that a kernel multiplies together: packed weights in the smallest tile that holds them, plain
# ones always in the largest, in which a library is asked for them (models/own_rows.py).
PACKED_TILES = (16, 32, 64, 128)
BLOCK = PACKED_TILES[-1]

PROBED_ROWS = (1, 16, 64, 128, 129)  # of products that doctor measures

SecondsByRows = tuple[tuple[int, float], ...]  # (rows, seconds a weight) by rising rows


def tiles(rows: int, packed: bool) -> list[int]:
    """The tiles in which so many rows are multiplied, by their rows."""
    blocks, rest = divmod(rows, BLOCK)
    sizes = PACKED_TILES if packed else (BLOCK,)
    return [BLOCK] * blocks + [next(size for size in sizes if size >= rest)] * (rest > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """A GPU's rates. Where nothing else is said they hold for two-byte dtypes."""

    card: str  # its name, as the driver or the datasheet has it
    memory_bytes_per_s: float
    tensor_flops: float  # operations a second of large products, sums in float32
    # Measured products by the bits of packed weights, 0 for plain ones; () if nothing was measured.
    products: tuple[tuple[int, SecondsByRows], ...] = ()
    # What Python and the driver take to start something, on the host: an operation of PyTorch, with
    # its share of the Python around it, and one of our own kernels. Assumed until it is measured:
    # the H100's host took 37 us for either (docs/gpu.md), a desktop's core is taken for faster.
    operation_s: float = 20e-6
    kernel_s: float = 25e-6
    start_s: float = 2e-6  # between the end of one kernel on the GPU and the beginning of the next
    wait_s: float = 20e-6  # what the GPU stands idle where the host waits for a result of it

    def arithmetic_seconds(self, weights: float, rows: int, packed_bits: int) -> float:
        """Seconds of multiplying; without measured products, reading the weights is left out.

        Args:
            weights: of the matrices, together.
            packed_bits: the measured width that is nearest to theirs; 0 where they are plain.
        """
        found = tiles(rows, bool(packed_bits))
        points = dict(self.products).get(packed_bits)
        if points is None:
            return 2.0 * weights * sum(found) / self.tensor_flops
        seconds = sum(_at(points, size) for size in found)
        if len(found) > 1:
            # by what 129 rows take of the two tiles that they are multiplied in
            of_two = sum(_at(points, size) for size in tiles(BLOCK + 1, bool(packed_bits)))
            seconds *= _at(points, BLOCK + 1) / of_two
        return weights * seconds


def _at(points: SecondsByRows, rows: int) -> float:
    """Seconds a weight of so many rows, between the measured points; at the ends, the last one."""
    for (low, low_s), (high, high_s) in pairwise(points):
        if low <= rows <= high:
            return low_s + (rows - low) / (high - low) * (high_s - low_s)
    return points[0][1] if rows < points[0][0] else points[-1][1]


@dataclass(frozen=True, slots=True)
class Card:
    """What a datasheet says of a card."""

    name: str
    memory_gb: int
    bandwidth_gb_s: float
    tensor_tflops: float  # dense, float16 with sums in float32
    pcie_gen: int
    pcie_width: int = 16

    @property
    def memory_bytes(self) -> int:
        return self.memory_gb * 10**9

    @property
    def rates(self) -> GpuRates:
        """What passes are expected to reach on it."""
        return GpuRates(
            card=self.name,
            memory_bytes_per_s=BANDWIDTH_SHARE * self.bandwidth_gb_s * 1e9,
            tensor_flops=TENSOR_SHARE * self.tensor_tflops * 1e12,
        )


# NVIDIA's datasheets and architecture papers, by memory, the usual card of a size first. With sums
# in float32 a GeForce multiplies at half of the rate that its makers print.
CARDS = (
    Card("RTX 4060", 8, 272, 30.2, 4, 8),
    Card("RTX 3060 Ti", 8, 448, 32.4, 4),
    Card("RTX 3070", 8, 448, 40.6, 4),
    Card("RTX 3070 Ti", 8, 608, 43.5, 4),
    Card("RTX 3080", 10, 760, 59.5, 4),
    Card("RTX 3060", 12, 360, 25.5, 4),
    Card("RTX 3080 Ti", 12, 912, 68.2, 4),
    Card("RTX 4070", 12, 504, 58.3, 4),
    Card("RTX 4070 Super", 12, 504, 71.0, 4),
    Card("RTX 4070 Ti", 12, 504, 80.2, 4),
    Card("RTX 5070", 12, 672, 61.7, 5),
    Card("RTX 4060 Ti", 16, 288, 44.1, 4, 8),
    Card("RTX 4070 Ti Super", 16, 672, 88.2, 4),
    Card("RTX 4080", 16, 717, 97.5, 4),
    Card("RTX 4080 Super", 16, 736, 104.4, 4),
    Card("RTX 5060 Ti", 16, 448, 47.4, 5, 8),
    Card("RTX 5070 Ti", 16, 896, 87.9, 5),
    Card("RTX 5080", 16, 960, 112.6, 5),
    Card("RTX 3090", 24, 936, 71.0, 4),
    Card("RTX 3090 Ti", 24, 1008, 80.0, 4),
    Card("RTX 4090", 24, 1008, 165.2, 4),
    Card("L4", 24, 300, 121.0, 4),
    Card("RTX 5090", 32, 1792, 209.5, 5),
    Card("A100", 40, 1555, 312.0, 4),
    Card("RTX A6000", 48, 768, 154.8, 4),
    Card("L40S", 48, 864, 362.0, 4),
    Card("A100 80GB", 80, 1935, 312.0, 4),
    Card("H100", 80, 3350, 989.0, 5),
    Card("H100 PCIe", 80, 2000, 756.0, 5),
    Card("H200", 141, 4800, 989.0, 5),
)
_MAKERS_WORDS = {"nvidia", "geforce", "rtx"}


def card_named(name: str) -> Card | None:
    """The card of a name such as "4090", "RTX 4060 Ti" or "NVIDIA A100-SXM4-80GB"; None: unknown.

    A laptop's chip has the name of a card, and is another one.
    """
    words = _words(name)
    found = [card for card in CARDS if _words(card.name) <= words]
    if not found or "laptop" in words:
        return None
    return max(found, key=lambda card: len(_words(card.name)))


def card_of_memory(n_bytes: float) -> Card:
    """The usual card of so much memory: the first one that has it, or the largest."""
    return next((card for card in CARDS if card.memory_bytes >= n_bytes), CARDS[-1])


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+|\d+", name.lower())) - _MAKERS_WORDS
