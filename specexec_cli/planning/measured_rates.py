"""Rates of this machine that were measured: what is kept between runs, and the seconds that follow.

`doctor` and sessions write them, `plan` reads. A CPU has a rate for products by their rows, and a
cost for all else that a decoder layer does. What is measured of a GPU is in gpu_rates.py.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from platform import node
from typing import Any

from platformdirs import user_cache_path

from specexec_cli.device import cpu_info
from specexec_cli.kept import is_number, read_json, write_json
from specexec_cli.planning.gpu_rates import PROBED_ROWS, GpuRates, SecondsByRows

FlopsByRows = tuple[tuple[int, float], ...]  # (rows, FLOP/s) by rising rows; () is not known
PACKED_BITS = (4, 8)  # of quantized weights, whose products are measured
MAX_KNEE_ROWS = 4096
PROBED_HIDDEN, PROBED_INTERMEDIATE = 4096, 11008  # of the layer that is measured


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

    def seconds(self, hidden: int, intermediate: int, rows: int, slots: int) -> float:
        """Seconds of one layer.

        Args:
            hidden, intermediate: widths of the layer.
            slots: that each row attends to.
        """
        width = (hidden + intermediate) / (PROBED_HIDDEN + PROBED_INTERMEDIATE)
        heads = hidden / PROBED_HIDDEN
        return self.layer_s + rows * (width * self.row_s + heads * slots * self.slot_s)


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


def rates_file() -> Path:
    """Where the rates are kept."""
    return user_cache_path("specexec", appauthor=False) / "rates.json"


def cpu_key() -> str:
    """What measured arithmetic holds for: this CPU, its cores, and what multiplies on it."""
    from importlib import metadata  # it imports email, which takes as long as reading models.toml

    cpu = cpu_info()
    versions = f"torch {metadata.version('torch')}, llvmlite {metadata.version('llvmlite')}"
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
    if not all(is_number(seconds, 0.0, 1.0) for seconds in astuple(cost)):
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
