"""`specexec plan`: what a pair would take and reach on a machine, before anything is downloaded."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, cast

import typer

from specexec_cli.choice import choose_models
from specexec_cli.cli import options
from specexec_cli.device import cpu_info, free_ram_bytes, gpus
from specexec_cli.dsi.plan import advise
from specexec_cli.errors import ConfigError, OutOfMemoryError
from specexec_cli.models_file import ModelEntry
from specexec_cli.offload.plan import Machine, Plan, Work, make_plan
from specexec_cli.offload.rates import load_rates, rates_file
from specexec_cli.offload.sizes import ModelBytes, architecture_bytes, checkpoint_bytes
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.registry import load_registry

SCHEMA = 1
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
# Used where nothing was given or measured; the output says so.
_ASSUMED = {"SSD": 2e9, "link": 20e9, "CPU memory": 15e9, "GPU memory": 500e9}
_PCIE_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_PCIE_SHARE = 0.82  # of the lanes' rate that large pinned copies reach

Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory to plan for, such as 64GB. Default: free here."),
]


@dataclass(frozen=True, slots=True)
class Sized:
    """A model and where its sizes come from."""

    entry: ModelEntry
    sizes: ModelBytes
    source: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A number the plan rests on, and where it comes from."""

    value: float
    source: str  # given, measured, here, assumed


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
    context: Annotated[int, typer.Option(help="Tokens of prompt and text together.")] = 2048,
    as_json: options.Json = False,
) -> None:
    """Show where each layer would live, what a pass moves, and the speed that allows.

    Nothing is downloaded: sizes come from models.toml, from the checkpoint's headers if it is on
    this machine, or else from its config.json on the hub. Rates that are not given are those
    `specexec doctor` measured here.
    """
    options.one_of(method, "--method", ("specexec", "autoregressive"))
    choice = choose_models(
        load_registry(models_file), pair=pair, target=target, draft=draft,
        method=cast(Any, method),
    )  # fmt: skip
    target_model = sized(choice.target, offline)
    draft_model = sized(choice.draft, offline) if choice.draft is not None else None
    settings = machine_settings(ram=ram, vram=vram, ssd=ssd, link=link)
    work = Work(
        context_tokens=context,
        budget=(choice.tree.budget if budget is None else budget) if draft_model else 0,
        item_bytes=2 if settings["vram"].value or _has_fast_bf16() else 4,
    )
    machine = Machine(
        ram_bytes=int(settings["ram"].value),
        vram_bytes=int(settings["vram"].value),
        ssd_bytes_per_s=settings["ssd"].value,
        link_bytes_per_s=settings["link"].value,
        memory_bytes_per_s=settings["memory"].value,
        flops=_known_flops(settings, work),
    )
    draft_sizes = draft_model.sizes if draft_model else None
    found = make_plan(target_model.sizes, draft_sizes, work, machine)
    more = without_ssd(target_model.sizes, draft_sizes, work, machine, found)
    dsi = dsi_advice(target_model.sizes, draft_sizes, settings)
    if as_json:
        shown = _as_json(target_model, draft_model, work, settings, found)
        typer.echo(json.dumps({**shown, "dsi": dsi}))
        return
    from specexec_cli.cli.plan_view import show_plan

    show_plan(choice.name, target_model, draft_model, work, settings, found, more, dsi)


def dsi_advice(
    target: ModelBytes, draft: ModelBytes | None, settings: dict[str, Setting]
) -> str | None:
    """Whether speculation over this machine's GPUs (--method dsi) would pay; None undrafted."""
    if draft is None:
        return None
    rate = settings["memory"].value if settings["vram"].value else _ASSUMED["GPU memory"]
    return advise(target.total, draft.total, [gpu.total_bytes for gpu in gpus()], rate)


def sized(entry: ModelEntry, offline: bool) -> Sized:
    """The model's sizes without downloading its weights.

    Raises:
        UnknownModelError: they are neither here, nor in models.toml, nor on the hub.
    """
    from specexec_cli.hub import cached_snapshot, fetch_config

    folder = entry.folder or cached_snapshot(entry)
    if folder is not None and any(folder.glob("*.safetensors")):
        config = fetch_config(replace(entry, repo=str(folder)))
        return Sized(entry, checkpoint_bytes(read_checkpoint(folder), config), "its files")
    if entry.shape:
        return Sized(entry, architecture_bytes(entry.config_json()), "models.toml")
    return Sized(entry, architecture_bytes(fetch_config(entry, offline=offline)), "config.json")


def machine_settings(
    *, ram: str | None, vram: str | None, ssd: str | None, link: str | None
) -> dict[str, Setting]:
    """Memory and rates to plan with: as given, else measured, else found here, else assumed."""
    rates = load_rates(rates_file(), platform.node())
    card = next(iter(gpus()), None) if vram is None or link is None else None

    def setting(given: float | None, measured: float | None, assumed: str) -> Setting:
        if given is not None:
            return Setting(given, "given")
        if measured is not None:
            return Setting(measured, "measured")
        return Setting(_ASSUMED[assumed], "assumed")

    settings = {
        "ram": Setting(free_ram_bytes(), "free here")
        if ram is None
        else Setting(parse_bytes(ram, "--ram"), "given"),
        "vram": Setting(card.free_bytes if card else 0, "free here")
        if vram is None
        else Setting(parse_bytes(vram, "--vram"), "given"),
        "ssd": setting(
            _rate(ssd, "--ssd"), rates.ssd_bytes_per_s if rates else None, "SSD"
        ),
        "link": setting(
            _rate(link, "--link"), rates.link_bytes_per_s if rates else None, "link"
        ),
    }  # fmt: skip
    lanes = _PCIE_LANE_BYTES_PER_S.get(card.pcie_gen or 0) if card else None
    if settings["link"].source == "assumed" and card and card.pcie_width and lanes:
        rate = lanes * card.pcie_width * _PCIE_SHARE
        settings["link"] = Setting(rate, f"PCIe {card.pcie_gen} x{card.pcie_width}")
    on_gpu = settings["vram"].value > 0
    memory = rates.memory_bytes_per_s if rates and not on_gpu else None
    settings["memory"] = setting(None, memory, "GPU memory" if on_gpu else "CPU memory")
    return settings


def _known_flops(settings: dict[str, Setting], work: Work) -> tuple[tuple[int, float], ...]:
    """Measured arithmetic of this CPU; nothing is known of a GPU's."""
    rates = load_rates(rates_file(), platform.node())
    if settings["vram"].value or rates is None:
        return ()
    return (rates.flops or {}).get("bfloat16" if work.item_bytes == 2 else "float32", ())


def without_ssd(
    target: ModelBytes, draft: ModelBytes | None, work: Work, machine: Machine, found: Plan
) -> Plan | None:
    """The plan on the same machine with just enough RAM that no layer stays on the SSD."""
    if not found.ssd_bytes:
        return None
    slack = (len(target.layers) + 1) * (2 << 20)
    enough = (found.peak_ram_bytes + found.ssd_bytes + slack) / (1 - machine.margin)
    try:
        return make_plan(target, draft, work, replace(machine, ram_bytes=int(enough)))
    except OutOfMemoryError:  # cannot happen with more memory; a plan without a hint is no loss
        return None


def _has_fast_bf16() -> bool:
    return bool({"avx512_bf16", "amx_bf16"} & set(cpu_info().flags))


def parse_bytes(text: str, flag: str) -> int:
    """'24GB', '1.5GiB', '300MB' or '0' as bytes.

    Raises:
        ConfigError: it is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if not found:
        raise ConfigError(f"{flag} '{text}' is not a size: write it as 24GB or 512MiB")
    unit = found[2] or ""
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


def _as_json(
    target: Sized, draft: Sized | None, work: Work, settings: dict[str, Setting], found: Plan
) -> dict[str, Any]:
    def model(item: Sized) -> dict[str, Any]:
        return {
            "name": item.entry.name,
            "repo": item.entry.repo,
            "bytes": item.sizes.total,
            "layers": len(item.sizes.layers),
            "source": item.source,
        }

    return {
        "schema": SCHEMA,
        "target": model(target),
        "draft": model(draft) if draft else None,
        "work": asdict(work),
        "machine": {name: asdict(setting) for name, setting in settings.items()},
        "tiers": list(found.tiers),
        "ssd_slots": found.ssd_slots,
        "device_slots": found.device_slots,
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
