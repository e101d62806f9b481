"""`specexec plan`: shows the memory a pair would take and its speed, before any download."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from specexec_cli.cli import options
from specexec_cli.cli.live import PassingLine
from specexec_cli.cli.machine import DescribedMachine
from specexec_cli.cli.option_groups import Shown, grouped
from specexec_cli.cli.render import notice
from specexec_cli.config import DsiOptions
from specexec_cli.device import gpus
from specexec_cli.dsi.layout import Layout, target_servers
from specexec_cli.dsi.plan import advise
from specexec_cli.errors import ConfigError
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.planning.alternatives import check_own_copy, with_best_draft
from specexec_cli.planning.dtype_choice import eight_bit_gain, multiplies_bytes
from specexec_cli.planning.expected_speed import (
    Outlook,
    Richer,
    Run,
    cache_share,
    load_runs,
    outlook,
    runs_file,
    verdict_of,
    with_more_ram,
)
from specexec_cli.planning.hosts import read_hosts, told_of_idle
from specexec_cli.planning.machine import Site
from specexec_cli.planning.pass_time import PassTime, knee_rows, pass_time
from specexec_cli.planning.placement import without_ssd
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import Decision, resolve, told_of_assumed
from specexec_cli.planning.sizes import SizedModel

SCHEMA = 1


@grouped
def plan(
    *,
    asked: Annotated[
        Request,
        Shown(
            "model draft method models_file offline budget offload experts activations kv hosts sp "
            "devices"
        ),
    ],
    machine: DescribedMachine,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and text together. Default: 4096.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="With all tables.")] = False,
    as_json: options.Json = False,
) -> None:
    """Say how fast a model would write here, and where each layer would live.

    Nothing is downloaded: sizes come from models.toml, from the checkpoint's headers if it is on
    this machine, or else from its config.json on the hub. Rates not given are those of `specexec
    doctor`. With `--method dsi` the plan is of each target server: --vram of each GPU, --ram of all
    workers together.
    """
    request = replace(asked, context_tokens=context)
    site = _with_hosts(machine.site(), asked)
    layout = _layout(request, site)
    if layout is not None:
        site = layout.share(site)
    decision = _decided(request, site, shown=not as_json)
    dsi = dsi_advice(decision) if len(gpus()) > 1 else None
    if layout is not None:
        lines = [layout.describe(), "Speeds are those of draft trees on one of them.", dsi]
        dsi = " ".join(line for line in lines if line)
    verdict, runs = verdict_of(decision, site, asked.models_file), _runs(decision)
    speed = verdict.speed
    assert speed is not None, "it fits"
    one_pass = pass_time(decision.plan, speed.nodes + 1)
    if as_json:
        told = {
            "verdict": verdict.as_json(), "prediction": speed.as_json(), "dsi": dsi,
            "reached": [asdict(run) for run in runs], "experts": _experts_json(decision, request),
        }  # fmt: skip
        typer.echo(json.dumps({**_as_json(decision, one_pass), **told}))
        return
    from specexec_cli.cli.plan_view import show_plan

    draft_sizes = decision.draft.sizes if decision.draft else None
    more = without_ssd(decision.plan, draft_sizes, request.experts)
    by_rows, richer = expert_outlook(decision, request)
    gain = ""
    if decision.activations == "full" and multiplies_bytes():
        times = eight_bit_gain(site, decision.dtype, decision.target)
        gain = times and (
            f"With --activations 8bit its products would be {times}, and its text another: rows "
            "are rounded to 8 bits, as llama.cpp does. With 8bit-draft only a draft model's are."
        )
    show_plan(
        decision, verdict, one_pass, more, dsi, runs, by_rows, richer, gain, everything=everything
    )


def _with_hosts(site: Site, asked: Request) -> Site:
    """The site with the machines that a file of hosts describes."""
    if asked.hosts is None:
        return site
    return replace(site, hosts=tuple(host.described() for host in read_hosts(asked.hosts).hosts))


def _decided(request: Request, site: Site, *, shown: bool) -> Decision:
    """Plans for the site; shows a line meanwhile, since sizes of some models take torch to count.

    Raises:
        SpecexecError: as `resolve` and `check_own_copy`.
    """
    with PassingLine(f"planning {request.model or 'the model'}", shown=shown) as line:

        def tell(text: str) -> None:
            line.hide()
            notice(text)

        decision = resolve(with_best_draft(request, site, tell, _copy_obstacle), site)
        check_own_copy(decision, tell, request.models_file, _copy_obstacle)
        if assumed := told_of_assumed(decision, site.hosts):
            tell(assumed)
        for idle in told_of_idle([host.name for host in site.hosts], decision.plan.others):
            tell(idle)
    return decision


def _layout(request: Request, site: Site) -> Layout | None:
    """The workers of the method dsi; None for other methods.

    Raises:
        ConfigError: options for workers were given with another method.
    """
    options = request.dsi
    if request.method != "dsi":
        if options != DsiOptions():
            raise ConfigError("--sp and --devices are for --method dsi alone")
        return None
    on_gpu = site.settings["vram"].value > 0
    names = options.devices or tuple(f"cuda:{gpu.index}" for gpu in gpus() if on_gpu)
    if not names:
        names = ("cuda:0", "cuda:1") if on_gpu else ("cpu",)
    return Layout(devices=names, servers=target_servers(options, names))


def _copy_obstacle(target: Checkpoint, bits: int) -> str:
    """Why a target on this machine can have no copy of itself; imports torch only when called."""
    from specexec_cli.models.own_copy import copy_obstacle

    return copy_obstacle(target, bits)


def expert_outlook(
    decision: Decision, request: Request
) -> tuple[tuple[Outlook, ...], tuple[Richer, ...]]:
    """What a cache of experts is expected to gain, now and with more RAM; empty without a cache."""
    if not decision.plan.expert_bytes:
        return (), ()
    draft = decision.draft.sizes if decision.draft else None
    more = with_more_ram(decision.plan, draft, request.offload, request.experts)
    return outlook(decision.plan), more


def _experts_json(decision: Decision, request: Request) -> dict[str, Any] | None:
    by_rows, richer = expert_outlook(decision, request)
    experts = decision.target.sizes.experts
    if not by_rows or experts is None:
        return None
    return {
        "dense_bytes": sum(decision.target.sizes.dense.layers),
        "expert_bytes": sum(experts.layers),
        "cache_bytes": decision.plan.expert_bytes,
        "cache_share": cache_share(experts, decision.plan),
        "by_rows": [asdict(each) for each in by_rows],
        "more_ram": [asdict(each) for each in richer],
    }


def _runs(decision: Decision) -> list[Run]:
    """The results of these models' earlier sessions on this machine."""
    draft = decision.draft.entry.weights if decision.draft else None
    return list(load_runs(runs_file(decision.target.entry.weights, draft)))


def dsi_advice(decision: Decision) -> str | None:
    """Says whether the method dsi would pay on this machine's GPUs; None without a draft model."""
    if decision.draft is None:
        return None
    rate = decision.machine.gpu.memory_bytes_per_s
    memories = [gpu.total_bytes for gpu in gpus()]
    return advise(decision.target.sizes.total, decision.draft.sizes.total, memories, rate)


def _as_json(decision: Decision, one_pass: PassTime) -> dict[str, Any]:
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
        **asdict(one_pass),
        "pass_s": one_pass.seconds,
        "hosts_s": one_pass.hosts_s,
        "gpu": asdict(found.machine.gpu) if found.on_gpu else None,
        "bottleneck": one_pass.bottleneck,
        "knee_rows": knee_rows(found),
        "triton_obstacle": found.machine.triton_obstacle,
        "passes_per_s": 1 / one_pass.seconds,
        "hosts": [
            {
                "name": each.host.name,
                "layers": [each.layers.start, each.layers.stop],
                "tiers": list(each.plan.tiers),
                "peak_ram_bytes": each.plan.peak_ram_bytes,
                "peak_vram_bytes": each.plan.peak_vram_bytes,
                "hop_s": each.hop_s(one_pass.rows),
            }
            for each in found.others
        ],
    }
