"""Options that describe a machine to plan for: plan, models list, models recommend, simulate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specexec_cli.errors import ConfigError
from specexec_cli.planning.machine_rates import CARDS, Card, card_named

if TYPE_CHECKING:  # the help of all commands reads these options, and nothing of plans
    from specexec_cli.planning.machine import Site

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _option(metavar: str, help: str) -> Any:
    return typer.Option(metavar=metavar, help=help, rich_help_panel="Machine to plan for")


@dataclass(frozen=True, kw_only=True)
class DescribedMachine:
    """A machine as the user describes it; what is left out is filled in from this machine."""

    ram: Annotated[str | None, _option("SIZE", "Memory, such as 64GB. Default: free here.")] = None
    vram: Annotated[
        str | None,
        _option("SIZE", "GPU memory, such as 24GB; 0: none. Default: free here."),
    ] = None
    gpu: Annotated[
        str | None,
        _option("CARD", "Another GPU, such as 'RTX 4090', by its datasheet."),
    ] = None
    ssd: Annotated[str | None, _option("RATE", "SSD read rate, such as 3GB/s.")] = None
    link: Annotated[str | None, _option("RATE", "RAM to GPU rate, such as 25GB/s.")] = None

    def site(self) -> Site:
        """The machine to plan for.

        Raises:
            ConfigError: an option is not a size or not a rate, or names no card.
        """
        from specexec_cli.planning.machine import described_site

        return described_site(
            ram_bytes=None if self.ram is None else parse_bytes(self.ram, "--ram"),
            vram_bytes=None if self.vram is None else parse_bytes(self.vram, "--vram"),
            ssd_bytes_per_s=_rate(self.ssd, "--ssd"),
            link_bytes_per_s=_rate(self.link, "--link"),
            card=None if self.gpu is None else _card(self.gpu),
            **self._of_cpu(),
        )

    def _of_cpu(self) -> dict[str, float | None]:
        return {}


@dataclass(frozen=True, kw_only=True)
class DescribedComputer(DescribedMachine):
    """A machine with its CPU, which need not be like this one's."""

    memory: Annotated[
        str | None, _option("RATE", "At which the CPU reads RAM, such as 60GB/s.")
    ] = None
    tflops: Annotated[float | None, _option("TFLOP/S", "Of the CPU's products, such as 1.5.")] = (
        None
    )

    def _of_cpu(self) -> dict[str, float | None]:
        if self.tflops is not None and not 0 < self.tflops < 1e6:
            raise ConfigError(f"--tflops must be above 0, not {self.tflops:g}")
        return {
            "memory_bytes_per_s": _rate(self.memory, "--memory"),
            "flops": None if self.tflops is None else self.tflops * 1e12,
        }


def _card(name: str) -> Card:
    found = card_named(name)
    if found is None:
        known = ", ".join(card.name for card in CARDS)
        raise ConfigError(f"--gpu '{name}' is none of the cards whose rates are known: {known}")
    return found


def parse_bytes(text: str, flag: str) -> int:
    """Reads a size such as '24GB', '1.5GiB', '300MB' or '0', in bytes; a bare number is gigabytes.

    Raises:
        ConfigError: the text is not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if not found:
        raise ConfigError(f"{flag} '{text}' is not a size: write it as 24GB or 512MiB")
    unit = found[2] or ("" if "b" in text.lower() else "g")
    return int(float(found[1]) * {**_UNITS, **_BINARY_UNITS}[unit])


def _rate(text: str | None, flag: str) -> float | None:
    if text is None:
        return None
    try:
        value = parse_bytes(re.sub(r"/s(ec)?$|ps$", "", text.strip().lower()), flag)
    except ConfigError:
        value = 0
    if value <= 0:
        raise ConfigError(f"{flag} '{text}' is not a rate above 0: write it as 3GB/s")
    return float(value)
