"""The machine to plan for: memory and rates, each with where its figure comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from specexec_cli.device import GpuInfo, free_ram_bytes, gpus
from specexec_cli.errors import ConfigError
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.planning.measured_rates import (
    FlopsByRows,
    LayerCost,
    Rates,
    arithmetic_name,
    load_rates,
    rates_file,
)
from specexec_cli.planning.memory import GPU_CONTEXT_BYTES
from specexec_cli.triton_check import triton_lack

# Used where nothing was given or measured; the output says so.
ASSUMED = {"ssd": 2e9, "link": 20e9, "CPU memory": 15e9, "GPU memory": 500e9}
_PCIE_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_PCIE_SHARE = 0.82  # of the lanes' rate that large pinned copies reach
PROGRAM_BYTES = 500_000_000  # of a process that has yet to be started, before any weight


# Of RAM that a GPU copies from, pages are pinned: what else runs on the machine must find memory
# that is not, and so this share of it and so many bytes at least stay free.
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
    layer_cost: LayerCost | None = None  # likewise; None is not known
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

    def ram_for(self, needed_bytes: int) -> int:
        """The RAM of which so many bytes may be filled."""
        enough = needed_bytes / (1 - self.margin)
        if self.vram_bytes:
            enough = max(needed_bytes / (1 - _UNPINNED_SHARE), needed_bytes + _UNPINNED_BYTES)
        return int(enough) + 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A number that a plan rests on, and where it comes from."""

    value: float
    source: str  # given, measured, assumed, free here, or the PCIe link it was worked out from


# (target's files, bytes that a pass reads from the SSD, bytes that it copies to a GPU) -> rates
# measured for the links in use
Measure = Callable[[Checkpoint, int, int], Mapping[str, Setting]]
# (dtype, bits of packed weights) -> the CPU's products and the rest of its layers, measured
Calibrate = Callable[[str, int], tuple[FlopsByRows, LayerCost]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A machine, real or described."""

    device: str  # cpu, or the GPU that computes, as in cuda:0
    settings: Mapping[str, Setting]  # ram, vram in bytes; ssd, link, memory in bytes per second
    flops: Mapping[str, FlopsByRows] = field(default_factory=dict)  # the CPU's, by arithmetic_name
    layers: Mapping[str, LayerCost] = field(default_factory=dict)  # the CPU's, by dtype
    host_bytes_per_s: float = ASSUMED["CPU memory"]  # at which the CPU reads weights
    program_bytes: int = PROGRAM_BYTES  # RAM that is still to be taken by the process itself
    context_bytes: int = GPU_CONTEXT_BYTES  # VRAM that is still to be taken by CUDA itself
    measure: Measure | None = None  # None: nothing is measured, the rates above are what there is
    calibrate: Calibrate | None = None  # likewise
    triton_obstacle: str | None = None  # why Triton's kernels do not run on the GPU

    def calibrated(self, dtype: str, packed_bits: int) -> Site:
        """The site with this arithmetic known: measured now if it never was."""
        name = arithmetic_name(dtype, packed_bits)
        if self.calibrate is None or (name in self.flops and dtype in self.layers):
            return self
        points, cost = self.calibrate(dtype, packed_bits)
        return replace(
            self, flops={**self.flops, name: points}, layers={**self.layers, dtype: cost}
        )

    def machine(self, dtype: str, packed_bits: int = 0) -> Machine:
        """The plain numbers that placing layers takes.

        Args:
            dtype: to compute in.
            packed_bits: of the weights; 0 where they are not packed.
        """
        found = self.settings
        flops = self.flops.get(arithmetic_name(dtype, packed_bits)) or self.flops.get(dtype, ())
        return Machine(
            ram_bytes=int(found["ram"].value),
            vram_bytes=int(found["vram"].value),
            ssd_bytes_per_s=found["ssd"].value,
            link_bytes_per_s=found["link"].value,
            memory_bytes_per_s=found["memory"].value,
            # nothing is known of a GPU's arithmetic
            flops=() if found["vram"].value else flops,
            layer_cost=self.layers.get(dtype),
            base_bytes=self.program_bytes,
            context_bytes=self.context_bytes,
            host_bytes_per_s=self.host_bytes_per_s,
            host_flops=flops,
            triton_obstacle=self.triton_obstacle if found["vram"].value else None,
        )


def described_site(
    *,
    ram_bytes: int | None = None,
    vram_bytes: int | None = None,
    ssd_bytes_per_s: float | None = None,
    link_bytes_per_s: float | None = None,
) -> Site:
    """A machine of these numbers; what is left out is measured, found here, or assumed."""
    rates = load_rates(rates_file())
    card = None
    if vram_bytes is None or link_bytes_per_s is None:
        card = next(iter(gpus()), None)
    ram = (
        Setting(free_ram_bytes(), "free here") if ram_bytes is None else Setting(ram_bytes, "given")
    )
    vram = (
        Setting(card.free_bytes if card else 0, "free here")
        if vram_bytes is None
        else Setting(vram_bytes, "given")
    )
    settings = {
        "ram": ram,
        "vram": vram,
        **known_rates(rates, bool(vram.value), ssd_bytes_per_s, link_bytes_per_s, card),
    }
    device = "cuda:0" if vram.value else "cpu"
    # of another machine's GPU nothing is known
    lack = triton_lack() if card is not None and vram_bytes is None else None
    return Site(
        device=device,
        settings=settings,
        flops=(rates and rates.flops) or {},
        layers=(rates and rates.layers) or {},
        host_bytes_per_s=host_rate(rates),
        triton_obstacle=lack.what if lack else None,
    )


def host_rate(rates: Rates | None) -> float:
    """Bytes per second at which the CPU reads weights: as measured, or else assumed."""
    return (rates and rates.memory_bytes_per_s) or ASSUMED["CPU memory"]


def known_rates(
    rates: Rates | None,
    on_gpu: bool,
    ssd_bytes_per_s: float | None = None,
    link_bytes_per_s: float | None = None,
    card: GpuInfo | None = None,
) -> dict[str, Setting]:
    """ssd, link and memory: as given, else as the doctor measured them, else assumed."""

    def setting(given: float | None, measured: float | None, assumed: str) -> Setting:
        if given is not None:
            return Setting(given, "given")
        if measured is not None:
            return Setting(measured, "measured")
        return Setting(ASSUMED[assumed], "assumed")

    link = setting(link_bytes_per_s, rates.link_bytes_per_s if rates else None, "link")
    lanes = _PCIE_LANE_BYTES_PER_S.get(card.pcie_gen or 0) if card else None
    if link.source == "assumed" and card and card.pcie_width and lanes:
        rate = lanes * card.pcie_width * _PCIE_SHARE
        link = Setting(rate, f"PCIe {card.pcie_gen} x{card.pcie_width}")
    memory = rates.memory_bytes_per_s if rates and not on_gpu else None
    return {
        "ssd": setting(ssd_bytes_per_s, rates.ssd_bytes_per_s if rates else None, "ssd"),
        "link": link,
        "memory": setting(None, memory, "GPU memory" if on_gpu else "CPU memory"),
    }
