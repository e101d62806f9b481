"""What a worker tells of its machine when it joins, and how it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from specexec_kernels import dispatch

from specexec_cli.hosts.messages import PROTOCOL
from specexec_cli.hosts.wire import WireError
from specexec_cli.planning.machine import Machine, Site
from specexec_cli.planning.machine_rates import (
    FlopsByRows,
    LayerCost,
    card_of_memory,
    checked_rates,
)

_RATES = ("ssd", "link", "memory")


def hello_of(name: str, site: Site) -> dict[str, Any]:
    """The first frame of a worker on a machine."""
    return {
        "kind": "hello",
        "protocol": PROTOCOL,
        "name": name,
        "settings": {each: found.value for each, found in site.settings.items()},
        "rounding": list(dispatch.rounding(torch.device(site.device))),
        "arithmetic": {
            "flops": dict(site.flops),
            "layers": {dtype: asdict(cost) for dtype, cost in site.layers.items()},
        },
    }


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker tells of its machine."""

    machine: Machine  # without arithmetic
    flops: Mapping[str, FlopsByRows]  # of its CPU, as a Site's
    layers: Mapping[str, LayerCost]  # likewise


def read_facts(hello: Mapping[str, Any]) -> Facts:
    """What a worker's machine may be filled with, and how fast it is.

    Raises:
        WireError: it tells no such figures.
    """
    settings = hello.get("settings")
    found = {}
    for name in ("ram", "vram", *_RATES):
        value = settings.get(name) if isinstance(settings, dict) else None
        least = 1.0 if name in _RATES else 0.0
        if not isinstance(value, int | float) or not least <= value < 1e18 or math.isnan(value):
            raise WireError(f"the worker tells no {name} of its machine")
        found[name] = float(value)
    told = hello.get("arithmetic")
    try:
        rates = checked_rates({"host": "", "cpu": "", "measured": "", **told})  # type: ignore[dict-item]
    except (TypeError, ValueError) as error:
        raise WireError("the worker tells no arithmetic of its machine") from error
    machine = Machine(
        ram_bytes=int(found["ram"]),
        vram_bytes=int(found["vram"]),
        ssd_bytes_per_s=found["ssd"],
        link_bytes_per_s=found["link"],
        memory_bytes_per_s=found["memory"],
        gpu=card_of_memory(found["vram"]).rates,
        base_bytes=0,  # free memory does not include the process that runs already
    )
    return Facts(machine, rates.flops or {}, rates.layers or {})
