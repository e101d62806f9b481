"""Measured rates of this machine, kept between runs: `specexec doctor` writes, `plan` reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from platformdirs import user_cache_path

from specexec_cli.planning.arithmetic import FlopsByRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the doctor measured; None is not measured."""

    host: str
    measured: str  # date
    ssd_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    flops: dict[str, FlopsByRows] | None = None  # by arithmetic_name


def rates_file() -> Path:
    """Where the rates are kept."""
    return user_cache_path("specexec", appauthor=False) / "rates.json"


def save_rates(rates: Rates, path: Path) -> None:
    """Keep the rates for later runs.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(rates), indent=2) + "\n")
    partial.replace(path)


def load_rates(path: Path, host: str) -> Rates | None:
    """The rates kept for this host; None if there are none, or none that can be used."""
    try:
        rates = Rates(**json.loads(path.read_text()))
        flops = {
            name: tuple((int(rows), float(rate)) for rows, rate in points)
            for name, points in (rates.flops or {}).items()
        }
        numbers = (rates.ssd_bytes_per_s, rates.memory_bytes_per_s, rates.link_bytes_per_s)
        usable = all(number is None or float(number) > 0 for number in numbers)
    except (OSError, ValueError, TypeError):  # a cache: what cannot be read is measured again
        return None
    if rates.host != host or not usable:
        return None
    return Rates(**{**asdict(rates), "flops": flops})
