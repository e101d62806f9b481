"""`specexec plan`: what a pair would take and reach on a machine, before anything is downloaded."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer

from specexec_cli.cli import options
from specexec_cli.config import Method
from specexec_cli.device import gpus
from specexec_cli.dsi.plan import advise
from specexec_cli.errors import ConfigError
from specexec_cli.planning.placement import without_ssd
from specexec_cli.planning.reached import Run, load_runs, runs_file
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.planning.resolve import Decision, SizedModel, resolve
from specexec_cli.planning.site import ASSUMED, described_site
from specexec_cli.planning.tokens import predicted

SCHEMA = 1
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory to plan for, such as 64GB. Default: free here."),
]


def plan(
    pair: options.Pair = None,
    target: options.Target = None,
    draft: options.Draft = None,
    method: options.MethodName = "specexec",
    models_file: options.ModelsFile = None,
    offline: options.Offline = False,
    ram: Memory = None,
    vram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="GPU memory to plan for; 0 is none. Default: the first GPU here."
        ),
    ] = None,
    ssd: Annotated[
        str | None, typer.Option(metavar="RATE", help="SSD read rate, such as 3GB/s.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="RATE", help="RAM to GPU rate, such as 25GB/s.")
    ] = None,
    budget: options.Budget = None,
    offload: options.Offload = "auto",
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and text together. Default: 4096.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show where each layer would live, what a pass moves, and the speed that allows.

    Nothing is downloaded: sizes come from models.toml, from the checkpoint's headers if it is on
    this machine, or else from its config.json on the hub. Rates that are not given are those
    `specexec doctor` measured here.
    """
    options.one_of(method, "--method", ("specexec", "autoregressive"))
    request = Request(
        pair=pair, target=target, draft=draft, method=cast(Method, method),
        models_file=models_file, offline=offline, offload=options.offload_mode(offload),
        tree=TreeRequest(budget=budget), context_tokens=context,
    )  # fmt: skip
    site = described_site(
        ram_bytes=None if ram is None else parse_bytes(ram, "--ram"),
        vram_bytes=None if vram is None else parse_bytes(vram, "--vram"),
        ssd_bytes_per_s=_rate(ssd, "--ssd"),
        link_bytes_per_s=_rate(link, "--link"),
    )
    decision = resolve(request, site)
    dsi = dsi_advice(decision) if len(gpus()) > 1 else None
    speed, runs = predicted(decision, models_file), _runs(decision)
    if as_json:
        told = {"prediction": asdict(speed), "reached": [asdict(run) for run in runs], "dsi": dsi}
        typer.echo(json.dumps({**_as_json(decision), **told}))
        return
    from specexec_cli.cli.plan_view import show_plan

    draft_sizes = decision.draft.sizes if decision.draft else None
    more = without_ssd(
        decision.target.sizes, draft_sizes, decision.work, decision.machine, decision.plan
    )
    show_plan(decision, more, dsi, speed, runs)


def _runs(decision: Decision) -> list[Run]:
    """What earlier sessions of these models reached on this machine."""
    draft = decision.draft.entry.repo if decision.draft else None
    return list(load_runs(runs_file(decision.target.entry.repo, draft)))


def dsi_advice(decision: Decision) -> str | None:
    """Whether speculation over this machine's GPUs (--method dsi) would pay; None undrafted."""
    if decision.draft is None:
        return None
    on_gpu = decision.machine.vram_bytes > 0
    rate = decision.machine.memory_bytes_per_s if on_gpu else ASSUMED["GPU memory"]
    memories = [gpu.total_bytes for gpu in gpus()]
    return advise(decision.target.sizes.total, decision.draft.sizes.total, memories, rate)


def parse_bytes(text: str, flag: str) -> int:
    """'24GB', '1.5GiB', '300MB' or '0' as bytes; a number alone is gigabytes.

    Raises:
        ConfigError: it is none of these.
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


def _as_json(decision: Decision) -> dict[str, Any]:
    found = decision.plan

    def model(item: SizedModel) -> dict[str, Any]:
        return {
            "name": item.entry.name,
            "repo": item.entry.repo,
            "bytes": item.sizes.total,
            "layers": len(item.sizes.layers),
            "source": item.source,
        }

    return {
        "schema": SCHEMA,
        "target": model(decision.target),
        "draft": model(decision.draft) if decision.draft else None,
        "work": asdict(decision.work),
        "machine": {name: asdict(setting) for name, setting in decision.settings.items()},
        "tiers": list(found.tiers),
        "ssd_slots": found.ssd_buffers,
        "device_slots": found.device_buffers,
        "ram": dict(found.ram),
        "vram": dict(found.vram),
        "peak_ram_bytes": found.peak_ram_bytes,
        "peak_vram_bytes": found.peak_vram_bytes,
        "ssd_bytes": found.ssd_bytes,
        "link_bytes": found.link_bytes,
        "ssd_s": found.ssd_s,
        "link_s": found.link_s,
        "memory_s": found.memory_s,
        "compute_s": found.compute_s,
        "pass_s": found.pass_s,
        "bottleneck": found.bottleneck,
        "knee_rows": found.knee_rows,
        "passes_per_s": 1 / found.pass_s,
    }
