"""How fast this machine is: as `doctor` and sessions measured it, or by the datasheet of its card.

What is measured is kept between runs; `plan` reads it. A CPU has a rate for products by their rows,
and a cost for all else that a decoder layer does. On a GPU products of a pass take the longer of
reading the weights and multiplying. A kernel multiplies rows in tiles and reads a weight once for
each tile of up to 128 rows, so 129 rows are a tile of 128 and one of 16. What the host takes to
start a pass's operations is counted beside that (pass_time.py).
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, pairwise, product
from pathlib import Path
from platform import node
from typing import Any

from platformdirs import user_cache_path

from specexec_cli.config import DTYPE_BYTES
from specexec_cli.device import cpu_info, usable_cores
from specexec_cli.kept import installed_version, is_number, read_json, write_json

# What products are expected to reach of a datasheet's rates. Every figure of a card that was not
# measured rests on these two shares, which are assumed.
BANDWIDTH_SHARE = 0.85
TENSOR_SHARE = 0.60

# Instructions that a kernel issues for a packed weight while it reads and unpacks it for a tile of
# rows, by the format in which it stays on the GPU: an H100's microseconds for one row of 8192 x
# 28672 weights (docs/gpu.md), less those of the bytes, at 33.5e12 instructions a second. Bytes and
# instructions add up there, and so do the products of a tile; why they overlap so little is not
# known. UNPACKING_OTHERS are formats that were not timed.
UNPACKING = {
    "gptq": 7.0, "awq": 10.0, "Q4_0": 12.0, "Q8_0": 11.0, "Q4_K": 19.0, "Q6_K": 21.0,
    "compressed-tensors": 10.0, "fp8": 14.0,
}  # fmt: skip
UNPACKING_OTHERS = 19.0
_TENSOR_PER_INSTRUCTION = 4.0  # tensor operations of a GeForce for each instruction

# Rows that a kernel multiplies together: packed weights in the smallest tile that holds them, plain
# ones always in the largest, in which a library is asked for them (models/own_rows.py).
PACKED_TILES = (16, 32, 64, 128)
BLOCK = PACKED_TILES[-1]

PROBED_ROWS = (1, 16, 64, 128, 129)  # of products that doctor measures

SecondsByRows = tuple[tuple[int, float], ...]  # (rows, seconds a weight) by rising rows

_CORE_FLOPS = 16e9  # of one row's products, of one core of a Zen 5
# Of the rate at which RAM is read, what one row's products reach with weights of few bits. That of
# llama.cpp's is taken as all of it; beside them these are at 0.62 to 0.83 with two cores of a
# Zen 3, at 0.69 and 0.9 with other CPUs (docs/measured.md, "Beside other programs").
_FEW_BITS_SHARE = 0.6

FlopsByRows = tuple[tuple[int, float], ...]  # (rows, FLOP/s) by rising rows; () is not known
PACKED_BITS = (4, 8)  # of quantized weights, whose products are measured
PLAIN_BITS = 16  # of others
MAX_KNEE_ROWS = 4096
PROBED_HIDDEN, PROBED_INTERMEDIATE = 4096, 11008  # of the layer that is measured
CALLED_ROWS = 16  # most of a pass whose layers are one call each: cpu_layer.MOST_ROWS
CALLED_DTYPES = ("float32", "bfloat16")  # and in which: cpu_layer.DTYPES
USUAL_CALL_S = 2e-4  # of such a call, where it was not measured


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

    @property
    def instructions_per_s(self) -> float:
        """What it can issue, for each lane of a warp: 128 a clock and multiprocessor."""
        card = card_named(self.card)
        if card is not None:
            return card.instructions_per_s
        return self.tensor_flops / TENSOR_SHARE / _TENSOR_PER_INSTRUCTION

    def arithmetic_seconds(
        self, weights: float, rows: int, packed_bits: int, packed_as: str = ""
    ) -> float:
        """Seconds of multiplying, of packed weights with those of reading and unpacking them.

        Reading plain weights is left out where products were not measured: it goes on meanwhile.

        Args:
            weights: of the matrices, together.
            packed_bits: the measured width that is nearest to theirs; 0 where they are plain.
            packed_as: their format, as ModelBytes has it.
        """
        found = tiles(rows, bool(packed_bits))
        points = dict(self.products).get(packed_bits)
        asked = UNPACKING.get(packed_as, UNPACKING_OTHERS)
        if points is None:
            tensor_s = 2.0 * weights * sum(found) / self.tensor_flops
            if not packed_bits:
                return tensor_s
            a_tile_s = packed_bits / 8 / self.memory_bytes_per_s + asked / self.instructions_per_s
            return tensor_s + weights * len(found) * a_tile_s
        # what was measured is GPTQ's; other formats issue more for a weight
        more = (
            (asked - UNPACKING["gptq"]) * len(found) / self.instructions_per_s if packed_bits else 0
        )
        seconds = sum(_at(points, size) for size in found)
        if len(found) > 1:
            # by what 129 rows take of the two tiles that they are multiplied in
            of_two = sum(_at(points, size) for size in tiles(BLOCK + 1, bool(packed_bits)))
            seconds *= _at(points, BLOCK + 1) / of_two
        return weights * (seconds + more)


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
    clocks: float = (
        0.0  # 1e12 instructions a second; 0: a quarter of the tensor rate, as a GeForce's
    )

    @property
    def memory_bytes(self) -> int:
        return self.memory_gb * 10**9

    @property
    def instructions_per_s(self) -> float:
        """Instructions that all lanes can be given."""
        return 1e12 * (self.clocks or self.tensor_tflops / _TENSOR_PER_INSTRUCTION)

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
    Card("L4", 24, 300, 121.0, 4, clocks=15.1),
    Card("RTX 5090", 32, 1792, 209.5, 5),
    Card("A100", 40, 1555, 312.0, 4, clocks=19.5),
    Card("RTX A6000", 48, 768, 154.8, 4, clocks=19.4),
    Card("L40S", 48, 864, 362.0, 4, clocks=45.8),
    Card("A100 80GB", 80, 1935, 312.0, 4, clocks=19.5),
    Card("H100", 80, 3350, 989.0, 5, clocks=33.5),
    Card("H100 PCIe", 80, 2000, 756.0, 5, clocks=25.6),
    Card("H200", 141, 4800, 989.0, 5, clocks=33.5),
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


def arithmetic_name(dtype: str, packed_bits: int = 0, *, eight_bit_rows: bool = False) -> str:
    """Under which name the rates of rows of `dtype` are kept; 0 bits are weights of two bytes.

    Args:
        eight_bit_rows: whether rows are rounded to 8 bits, which takes as long in every dtype.
    """
    if eight_bit_rows and packed_bits:
        return f"8-bit rows, {packed_bits} bits"
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


def one_row_flops() -> FlopsByRows:
    """What one row's products reach on this CPU, where none were measured: by its cores."""
    return ((1, _CORE_FLOPS * usable_cores()),)


def unmeasured_seconds(seconds: float, packed_bits: int) -> float:
    """One row's products with weights in RAM, where products were not measured.

    Args:
        seconds: that llama.cpp's products are expected to take.
        packed_bits: of the weights, as arithmetic_name's.
    """
    return seconds / (_FEW_BITS_SHARE if packed_bits == PACKED_BITS[0] else 1.0)


def steady_flops(flops: float) -> FlopsByRows:
    """Of a CPU that computes at one rate whatever the rows, as one that is only described."""
    return ((1, flops),)


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
    # in place of layer_s, where a layer of few rows is one call; None: not known
    call_s: float | None = None

    def seconds(
        self, hidden: int, intermediate: int, rows: int, slots: int, *, one_call: bool = False
    ) -> float:
        """Seconds of one layer.

        Args:
            hidden, intermediate: widths of the layer.
            slots: that each row attends to.
            one_call: whether layers of few rows are one compiled call (models/usual_layer.py).
        """
        width = (hidden + intermediate) / (PROBED_HIDDEN + PROBED_INTERMEDIATE)
        heads = hidden / PROBED_HIDDEN
        once_s = self.layer_s
        if one_call and rows <= CALLED_ROWS and self.call_s is not None:
            once_s = self.call_s
        return once_s + rows * (width * self.row_s + heads * slots * self.slot_s)


_VERSION_DIGITS = 12  # of the kernels' digest
# What a file may say; beyond, it is damaged.
_LEAST, _MOST = 1.0, 1e18  # bytes or operations a second
_MOST_ROWS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured; None is not measured."""

    host: str  # whose disk and link it is
    cpu: str  # see cpu_key; whose memory and arithmetic it is
    measured: str  # date
    ssd_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    flops: dict[str, FlopsByRows] | None = None  # by arithmetic_name
    layers: dict[str, LayerCost] | None = None  # by the dtype that is computed in
    gpu: GpuRates | None = None  # in this host, started by this CPU

    @property
    def weights_bytes_per_s(self) -> float:
        """At which measured products of one row read their weights at least; 0 if none are."""
        found = [0.0]
        for bits in (0, *PACKED_BITS):
            bytes_of_one = (bits or PLAIN_BITS) / 8
            for dtype, rounds in product(DTYPE_BYTES, (False, True)):
                name = arithmetic_name(dtype, bits, eight_bit_rows=rounds)
                one_row = dict((self.flops or {}).get(name, ())).get(1, 0.0)
                found.append(one_row / 2 * bytes_of_one)  # two operations for each weight
        return max(found)


def rates_file() -> Path:
    """Where the rates are kept."""
    return user_cache_path("specexec", appauthor=False) / "rates.json"


def cpu_key() -> str:
    """What measured arithmetic holds for: this CPU, its cores, and what multiplies on it."""
    cpu = cpu_info()
    versions = f"torch {installed_version('torch')}, llvmlite {installed_version('llvmlite')}"
    flags = " ".join(cpu.flags)
    return f"{cpu.name}, {cpu.cores} cores, {flags}, {versions}, kernels {kernels_version()}"


@cache
def kernels_version() -> str:
    """A digest of the kernels' sources: another one, and they may be faster or slower."""
    found = importlib.util.find_spec("specexec_kernels")
    assert found is not None, "it is part of this distribution"
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:_VERSION_DIGITS]


def new_rates() -> Rates:
    """Of this machine, with nothing measured yet."""
    return Rates(host=node(), cpu=cpu_key(), measured=datetime.date.today().isoformat())


def save_rates(rates: Rates, path: Path) -> None:
    """Keep the rates for later runs; of what was not measured, what is kept already stays.

    Raises:
        OSError: the folder cannot be written.
    """
    older = load_rates(path)
    if older is not None:
        new = {name: value for name, value in asdict(rates).items() if value is not None}
        merged = {
            "flops": {**(older.flops or {}), **(rates.flops or {})} or None,
            "layers": {**(older.layers or {}), **(rates.layers or {})} or None,
        }
        rates = replace(older, **new | merged)
    write_json(path, asdict(rates), indent=2)


def load_rates(path: Path) -> Rates | None:
    """What is kept of this machine; None if there is nothing, or nothing that can be used.

    What was measured with another CPU, torch or kernels is left out, and so are another host's disk
    and GPU.
    """
    try:
        rates = checked_rates(read_json(path))
    except (ValueError, TypeError):  # a cache: what cannot be read is measured again
        return None
    here = new_rates()
    if rates.host != here.host:
        rates = replace(
            rates, host=here.host, ssd_bytes_per_s=None, link_bytes_per_s=None, gpu=None
        )
    if rates.cpu != here.cpu:
        rates = replace(
            rates, cpu=here.cpu, memory_bytes_per_s=None, flops=None, layers=None, gpu=None
        )
    return rates


def checked_rates(value: Any) -> Rates:
    """The rates that are written as JSON, of a file or of another machine.

    Raises:
        ValueError, TypeError: they are none.
    """
    rates = Rates(**value)
    speeds = rates.ssd_bytes_per_s, rates.memory_bytes_per_s, rates.link_bytes_per_s
    if not all(speed is None or is_number(speed, _LEAST, _MOST) for speed in speeds):
        raise ValueError("no memory, disk or link is so fast")
    if not all(type(word) is str for word in (rates.host, rates.cpu, rates.measured)):
        raise ValueError("it is of no machine")
    if not all(kept is None or type(kept) is dict for kept in (rates.flops, rates.layers)):
        raise ValueError("no rates by arithmetic")
    flops = rates.flops and {name: _points(points) for name, points in rates.flops.items()}
    layers = rates.layers and {name: _layer_cost(cost) for name, cost in rates.layers.items()}
    return replace(rates, flops=flops, layers=layers, gpu=rates.gpu and _gpu(rates.gpu))


def _gpu(value: Any) -> GpuRates:
    """What was measured of a GPU.

    Raises:
        ValueError, TypeError: nothing was.
    """
    kept = GpuRates(**value)
    products = tuple((bits, _seconds(points)) for bits, points in kept.products)
    if type(kept.card) is not str or not all(bits in (0, *PACKED_BITS) for bits, _ in products):
        raise ValueError("it is of no GPU")
    if not all(
        is_number(rate, _LEAST, _MOST) for rate in (kept.memory_bytes_per_s, kept.tensor_flops)
    ):
        raise ValueError("no GPU is so fast")
    times = (kept.operation_s, kept.kernel_s, kept.start_s, kept.wait_s)
    if not all(is_number(seconds, 0.0, 1.0) for seconds in times):
        raise ValueError("nothing takes so long to start")
    return replace(kept, products=products)


def _seconds(value: Any) -> SecondsByRows:
    """The seconds a weight of one kind of product, by rising rows.

    Raises:
        ValueError, TypeError: they are none.
    """
    points = tuple((rows, seconds) for rows, seconds in value)
    if tuple(rows for rows, _ in points) != PROBED_ROWS:
        raise ValueError("products of other rows")
    if not all(is_number(seconds, 0.0, 1.0) and seconds for _, seconds in points):
        raise ValueError("no product takes so long")
    return points


def _layer_cost(value: Any) -> LayerCost:
    """What layers of one dtype take besides products.

    Raises:
        ValueError, TypeError: it is none.
    """
    cost = LayerCost(**value)
    call_s = 0.0 if cost.call_s is None else cost.call_s
    times = (cost.layer_s, cost.row_s, cost.slot_s, call_s)
    if not all(is_number(seconds, 0.0, 1.0) for seconds in times):
        raise ValueError("no row takes so long")
    return cost


def _points(value: Any) -> FlopsByRows:
    """The rates of one arithmetic.

    Raises:
        ValueError, TypeError: they are none, or not by rising rows.
    """
    points = tuple((rows, rate) for rows, rate in value)
    if not all(type(rows) is int and 1 <= rows <= _MOST_ROWS for rows, _ in points):
        raise ValueError("rates of no number of rows")
    if any(this[0] >= following[0] for this, following in pairwise(points)):
        raise ValueError("rows do not rise")
    if not all(is_number(rate, _LEAST, _MOST) for _, rate in points):
        raise ValueError("no arithmetic is so fast")
    return points
