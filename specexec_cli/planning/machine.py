"""The machine to plan for: memory and rates, each with where its figure comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from specexec_cli.config import DTYPE_BYTES
from specexec_cli.device import GpuInfo, free_ram_bytes, gpus
from specexec_cli.errors import ConfigError
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.planning.machine_rates import (
    BANDWIDTH_SHARE,
    CALLED_DTYPES,
    PACKED_BITS,
    PLAIN_BITS,
    TENSOR_SHARE,
    Card,
    FlopsByRows,
    GpuRates,
    LayerCost,
    Rates,
    arithmetic_name,
    card_named,
    card_of_memory,
    load_rates,
    product_seconds,
    rates_file,
    steady_flops,
    unmeasured_seconds,
)
from specexec_cli.planning.memory import GPU_CONTEXT_BYTES
from specexec_cli.triton_check import triton_lack

# Used where nothing was given or measured; the output says so.
# The memory's is what products reach of two channels of DDR4-3200, which are read at 40 GB/s.
ASSUMED = {"ssd": 2e9, "link": 20e9, "CPU memory": 32e9}
# Products of a usual CPU with eight cores, in passes of many rows: taken where several machines are
# weighed against each other and one of them tells no arithmetic.
ASSUMED_FLOPS = 0.5e12
_PCIE_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_PCIE_SHARE = 0.82  # of the lanes' rate that large pinned copies reach
PROGRAM_BYTES = 500_000_000  # of a process that has yet to be started, before any weight


# RAM that a GPU copies from is pinned. Other programs need memory that is not, so this share of the
# RAM stays free, and at least these bytes.
_UNPINNED_SHARE, _UNPINNED_BYTES = 0.1, 4_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What may be used, and how fast it is. `vram_bytes` 0: the CPU computes."""

    ram_bytes: int
    vram_bytes: int = 0
    ssd_bytes_per_s: float = 2e9
    link_bytes_per_s: float = 20e9  # pinned host memory to device
    memory_bytes_per_s: float = 20e9  # of the memory the arithmetic reads weights from
    flops: FlopsByRows = ()  # of the CPU where it computes
    products_assumed: bool = False  # `flops` are a usual CPU's
    layer_cost: LayerCost | None = None  # of the CPU where it computes; None: not known
    one_call: bool = True  # whether a CPU has compiled calls of whole layers in the compute dtype
    gpu: GpuRates = card_of_memory(0).rates  # of the GPU where one computes
    base_bytes: int = 500_000_000  # the process before any weight is loaded
    context_bytes: int = GPU_CONTEXT_BYTES  # that CUDA itself has yet to take of the VRAM
    margin: float = 0.04  # share of each memory that is left alone
    # of the CPU beside a GPU, by which the place of a mixture's experts is chosen
    host_bytes_per_s: float = 20e9
    host_flops: FlopsByRows = ()
    # Why PyTorch unpacks packed weights on the GPU before every product; None: Triton's kernels do.
    triton_obstacle: str | None = None

    def __post_init__(self) -> None:
        rates = (self.ssd_bytes_per_s, self.link_bytes_per_s, self.memory_bytes_per_s)
        if min(rates) <= 0 or min(self.ram_bytes, self.vram_bytes) < 0:
            raise ConfigError("memory must be 0 or more and every rate above 0")

    def usable(self, memory_bytes: int) -> int:
        """How much of a memory may be filled: all but the margin."""
        return int(memory_bytes * (1 - self.margin))

    def usable_ram(self, least_bytes: int = 0) -> int:
        """How much of the RAM may be filled; beside a GPU all but what is to stay unpinned.

        Args:
            least_bytes: without which nothing runs at all; only the margin is kept from it.
        """
        usable = self.usable(self.ram_bytes)
        if not self.vram_bytes:
            return usable
        unpinned = max(int(self.ram_bytes * _UNPINNED_SHARE), _UNPINNED_BYTES)
        return min(usable, max(self.ram_bytes - unpinned, least_bytes))

    def with_products(self) -> Machine:
        """The machine with a rate of products, a usual one where its CPU computes and has none."""
        if self.flops or self.vram_bytes:
            return self
        return replace(self, flops=steady_flops(ASSUMED_FLOPS), products_assumed=True)

    def host_s(self, n_bytes: int, packed_bits: int) -> float:
        """Seconds in which the CPU beside a GPU multiplies few rows with weights in RAM.

        Args:
            n_bytes: of the weights.
            packed_bits: as a ModelBytes'.
        """
        if not self.host_flops:
            return unmeasured_seconds(n_bytes / self.host_bytes_per_s, packed_bits)
        weights = 8 * n_bytes // (packed_bits or PLAIN_BITS)
        products_s = product_seconds(weights, 1, self.host_flops)
        return max(n_bytes / self.host_bytes_per_s, products_s)

    def ram_for(self, needed_bytes: int) -> int:
        """The RAM that a machine must have for `needed_bytes` of it to be usable."""
        enough = needed_bytes / (1 - self.margin)
        if self.vram_bytes:
            enough = max(needed_bytes / (1 - _UNPINNED_SHARE), needed_bytes + _UNPINNED_BYTES)
        return int(enough) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Another machine that may have layers of the target, and the link to it."""

    name: str
    machine: Machine
    link_bytes_per_s: float
    delay_s: float  # of rows on their way there, or back, besides what their bytes take
    layers: int | None = None  # that it is to have; None: as many as make a pass fastest
    flops: Mapping[str, FlopsByRows] = field(default_factory=dict)  # as a Site's, as it tells them
    layer_costs: Mapping[str, LayerCost] = field(default_factory=dict)  # likewise, by dtype

    def computing(self, dtype: str, packed_bits: int, *, eight_bit_rows: bool) -> Host:
        """The machine with what it tells of one arithmetic; the arguments are `Site.machine`'s."""
        found = self.machine.flops or _rate_of(self.flops, dtype, packed_bits, eight_bit_rows)
        cost = self.layer_costs.get(dtype, self.machine.layer_cost)
        one_call = dtype in CALLED_DTYPES
        machine = replace(self.machine, flops=found, layer_cost=cost, one_call=one_call)
        return replace(self, machine=machine.with_products())

    def hop_s(self, rows: int, hidden: int, beside: int = 0) -> float:
        """Seconds that rows of float32 are on their way there and back.

        Args:
            beside: bytes that come back for each number of a row besides.
        """
        return 2 * self.delay_s + (8 + beside) * rows * hidden / self.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class Setting:
    """A number that a plan rests on, and where it comes from."""

    value: float
    source: str  # given, measured, assumed, free here, or the PCIe link it was worked out from


# (target's files, bytes that a pass reads from the SSD, bytes that it copies to a GPU) -> rates
# measured for the links in use
Measure = Callable[[Checkpoint, int, int], Mapping[str, Setting]]
# (dtype, bits of packed weights, whether rows are rounded to 8 bits) -> the CPU's products and the
# rest of its layers, measured
Calibrate = Callable[[str, int, bool], tuple[FlopsByRows, LayerCost]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A machine, real or described."""

    device: str  # cpu, or the GPU that computes, as in cuda:0
    settings: Mapping[str, Setting]  # ram, vram in bytes; ssd, link, memory in bytes per second
    flops: Mapping[str, FlopsByRows] = field(default_factory=dict)  # the CPU's, by arithmetic_name
    layers: Mapping[str, LayerCost] = field(default_factory=dict)  # the CPU's, by dtype
    gpu: GpuRates | None = None  # None: a usual card with this much memory
    host_bytes_per_s: float = ASSUMED["CPU memory"]  # at which the CPU reads weights
    program_bytes: int = PROGRAM_BYTES  # RAM that is still to be taken by the process itself
    context_bytes: int = GPU_CONTEXT_BYTES  # VRAM that is still to be taken by CUDA itself
    measure: Measure | None = None  # None: nothing is measured, the rates above are what there is
    calibrate: Calibrate | None = None  # None: nothing is measured
    triton_obstacle: str | None = None  # why Triton's kernels do not run on the GPU
    hosts: tuple[Host, ...] = ()  # other machines, in the order in which a pass visits them

    def with_products(self) -> Site:
        """The site with a usual CPU's rate for arithmetic that is not known, if its CPU computes,
        as a Machine's."""
        if self.settings["vram"].value:
            return self
        usual = dict.fromkeys(DTYPE_BYTES, steady_flops(ASSUMED_FLOPS))
        return replace(self, flops={**usual, **self.flops})

    def calibrated(self, dtype: str, packed_bits: int, *, eight_bit_rows: bool = False) -> Site:
        """The site with this arithmetic known: measured now if it never was."""
        name = arithmetic_name(dtype, packed_bits, eight_bit_rows=eight_bit_rows)
        if self.calibrate is None or (name in self.flops and dtype in self.layers):
            return self
        points, cost = self.calibrate(dtype, packed_bits, eight_bit_rows)
        return replace(
            self, flops={**self.flops, name: points}, layers={**self.layers, dtype: cost}
        )

    def machine(self, dtype: str, packed_bits: int = 0, *, eight_bit_rows: bool = False) -> Machine:
        """The plain numbers that placing layers takes.

        Args:
            dtype: to compute in.
            packed_bits: of the weights; 0 where they are not packed.
            eight_bit_rows: whether rows are rounded to 8 bits.
        """
        found = self.settings
        flops = _rate_of(self.flops, dtype, packed_bits, eight_bit_rows)
        return Machine(
            ram_bytes=int(found["ram"].value),
            vram_bytes=int(found["vram"].value),
            ssd_bytes_per_s=found["ssd"].value,
            link_bytes_per_s=found["link"].value,
            memory_bytes_per_s=found["memory"].value,
            flops=() if found["vram"].value else flops,
            gpu=self.gpu or card_of_memory(found["vram"].value).rates,
            layer_cost=self.layers.get(dtype),
            one_call=dtype in CALLED_DTYPES,
            base_bytes=self.program_bytes,
            context_bytes=self.context_bytes,
            host_bytes_per_s=self.host_bytes_per_s,
            host_flops=flops,
            triton_obstacle=self.triton_obstacle if found["vram"].value else None,
        )


def _rate_of(
    known: Mapping[str, FlopsByRows], dtype: str, packed_bits: int, eight_bit_rows: bool
) -> FlopsByRows:
    """A CPU's rates for an arithmetic, or for the nearest that is known; () is not known."""
    names = [
        arithmetic_name(dtype, packed_bits, eight_bit_rows=eight_bit_rows),
        arithmetic_name(dtype, packed_bits), dtype,
    ]  # fmt: skip
    return next((known[name] for name in names if known.get(name)), ())


def described_site(
    *,
    ram_bytes: int | None = None,
    vram_bytes: int | None = None,
    ssd_bytes_per_s: float | None = None,
    link_bytes_per_s: float | None = None,
    memory_bytes_per_s: float | None = None,
    flops: float | None = None,
    card: Card | None = None,
) -> Site:
    """A machine of these numbers; what is left out is measured, found here, or assumed.

    Args:
        memory_bytes_per_s, flops: the CPU's.
        card: the GPU, whose memory and link are taken where they are left out.
    """
    rates = load_rates(rates_file())
    here = None
    if card is None and (vram_bytes is None or link_bytes_per_s is None):
        here = next(iter(gpus()), None)
    ram = (
        Setting(free_ram_bytes(), "free here") if ram_bytes is None else Setting(ram_bytes, "given")
    )
    if vram_bytes is not None:
        vram = Setting(vram_bytes, "given")
    elif card is not None:
        vram = Setting(card.memory_bytes, f"an {card.name}'s")
    else:
        vram = Setting(here.free_bytes if here else 0, "free here")
    is_here = here is not None and vram_bytes is None
    name = here.name if here is not None and is_here else None
    gpu, source = gpu_rates(rates, vram.value, name, card)
    settings = {
        "ram": ram,
        "vram": vram,
        **known_rates(rates, ssd_bytes_per_s, memory_bytes_per_s),
        "link": link_rate(rates, link_bytes_per_s, here, card),
    }
    if vram.value:
        settings["memory"] = Setting(gpu.memory_bytes_per_s, source)
    lack = triton_lack() if is_here else None  # of another machine's GPU nothing is known
    known_flops = (rates and rates.flops) or {}
    if flops is not None:  # of whatever it multiplies
        rounded = [arithmetic_name("", bits, eight_bit_rows=True) for bits in PACKED_BITS]
        known_flops = dict.fromkeys([*DTYPE_BYTES, *rounded], steady_flops(flops))
    return Site(
        device="cuda:0" if vram.value else "cpu",
        settings=settings,
        flops=known_flops,
        layers=(rates and rates.layers) or {},
        gpu=gpu,
        host_bytes_per_s=memory_bytes_per_s or host_rate(rates),
        triton_obstacle=lack.what if lack else None,
    )


def host_rate(rates: Rates | None) -> float:
    """Bytes per second at which the CPU reads weights: as measured, or else assumed."""
    return known_rates(rates)["memory"].value


def gpu_rates(
    rates: Rates | None, vram_bytes: float, name: str | None, card: Card | None = None
) -> tuple[GpuRates, str]:
    """A GPU's rates, and where they come from: measured, or from a datasheet.

    Args:
        vram_bytes: of its memory, by which a usual card is taken where nothing else is known.
        name: of the GPU, as the driver tells it; None: it is not in this machine.
        card: that was named.
    """
    if card is None and name is not None:
        if rates is not None and rates.gpu is not None and rates.gpu.card == name:
            return rates.gpu, "measured"
        card = card_named(name)
    if card is None:
        usual = card_of_memory(vram_bytes)
        return usual.rates, f"as an {usual.name}"
    return card.rates, f"{card.name}'s datasheet"


def taken_of_a_datasheet(settings: Mapping[str, Setting], gpu: GpuRates) -> str:
    """What a plan takes of a GPU's datasheet, in words; empty where it takes nothing.

    Args:
        settings: as in a Site.
        gpu: the rates that were taken.
    """
    known = settings["memory"].source in ("measured", "given")
    if not settings["vram"].value or known:
        return ""
    return (
        f"{gpu.card}'s datasheet: {BANDWIDTH_SHARE:.0%} of its bandwidth, {TENSOR_SHARE:.0%} of "
        "its tensor rate"
    )


def link_rate(
    rates: Rates | None,
    given: float | None = None,
    here: GpuInfo | None = None,
    card: Card | None = None,
) -> Setting:
    """Pinned RAM to the GPU: as given, as the doctor measured it, by PCIe's lanes, or assumed.

    Args:
        here: the GPU in this machine, if it is the one.
        card: another one, which was named.
    """
    if given is not None:
        return Setting(given, "given")
    if card is not None:
        generation, width = card.pcie_gen, card.pcie_width
    elif rates is not None and rates.link_bytes_per_s is not None:
        return Setting(rates.link_bytes_per_s, "measured")
    else:
        generation, width = (here.pcie_gen or 0, here.pcie_width or 0) if here else (0, 0)
    lane = _PCIE_LANE_BYTES_PER_S.get(generation)
    if width and lane:
        return Setting(lane * width * _PCIE_SHARE, f"PCIe {generation} x{width}")
    return Setting(ASSUMED["link"], "assumed")


def known_rates(
    rates: Rates | None,
    ssd_bytes_per_s: float | None = None,
    memory_bytes_per_s: float | None = None,
) -> dict[str, Setting]:
    """ssd and the CPU's memory: as given, else as the doctor measured them, else assumed.

    The memory is no slower than measured products read weights from it.
    """
    products = rates.weights_bytes_per_s if rates else 0.0
    copied = rates.memory_bytes_per_s if rates else None

    def setting(given: float | None, measured: float | None, assumed: str) -> Setting:
        if given is not None:
            return Setting(given, "given")
        if measured is not None:
            return Setting(measured, "measured")
        return Setting(ASSUMED[assumed], "assumed")

    return {
        "ssd": setting(ssd_bytes_per_s, rates.ssd_bytes_per_s if rates else None, "ssd"),
        "memory": setting(
            memory_bytes_per_s,
            max(copied or 0.0, products) if copied or products > ASSUMED["CPU memory"] else None,
            "CPU memory",
        ),
    }
