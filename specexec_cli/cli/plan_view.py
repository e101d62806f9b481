"""How a plan is shown to a person. Imported when it is shown: rich takes its time to load."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from specexec_cli.device import format_bytes
from specexec_cli.planning.memory import Parts
from specexec_cli.planning.outlook import Outlook, Range, Richer, cache_share
from specexec_cli.planning.reached import Run
from specexec_cli.planning.resolve import Decision
from specexec_cli.planning.site import Setting
from specexec_cli.planning.sized import SizedModel
from specexec_cli.planning.speed import Speed, figure
from specexec_cli.planning.tiers import Plan

_SHOWN_RUNS = 3
_PLACES = (("resident", "on the GPU"), ("ram", "in RAM"), ("ssd", "on SSD"))
_CPU_PLACES = (("resident", "loaded to stay"), *_PLACES[1:])


def show_plan(
    decision: Decision,
    without_ssd: Plan | None,
    dsi: str | None,
    speed: Speed,
    runs: Sequence[Run],
    by_rows: Sequence[Outlook] = (),
    richer: Sequence[Richer] = (),
) -> None:
    """Print the plan to stdout.

    Args:
        without_ssd: with enough RAM that no layer is on the SSD.
        dsi: whether several GPUs would pay, in a sentence.
        speed: what is expected.
        runs: what earlier sessions reached here.
        by_rows: of a cache of experts, what it is expected to bring.
        richer: the same with more memory.
    """
    target, draft, work = decision.target, decision.draft, decision.work
    settings, plan = decision.settings, decision.plan
    console = Console(highlight=False)
    console.print(f"[bold]{decision.pair.name}[/bold]", end="")
    rows = f"{work.verify_rows} rows a pass" if work.budget else "one row a pass"
    console.print(f"  ·  {work.context_tokens} tokens of context, {rows}\n")
    for table in (
        _models(target, draft), _memory(settings, plan), _pass(settings, plan), _speed(speed, runs),
    ):  # fmt: skip
        console.print(table)
        console.print()
    if by_rows:
        console.print(_experts(by_rows))
        console.print()
    found = _findings(settings, plan, without_ssd, work.verify_rows)
    lines = [*found, *_drafting(speed, plan), *([dsi] if dsi else [])]
    if by_rows:
        lines = [*_expert_lines(decision, richer), *lines]
    for line in lines:
        for part in textwrap.wrap(line, min(console.width, 100)):
            console.print(part)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        right = index and column not in ("where", "from", "layers")
        # a name that is too long goes on in the next line and is not cut off
        table.add_column(
            column, justify="right" if right else "left", header_style="dim", overflow="fold"
        )
    return table


def _models(target: SizedModel, draft: SizedModel | None) -> Table:
    table = _table("model", "size", "layers", "from")
    for role, model in (("target", target), ("draft", draft)):
        if model is not None:
            layers = model.sizes.layers
            table.add_row(
                f"{role} {model.entry.name}",
                format_bytes(model.sizes.total),
                f"{len(layers)} of {format_bytes(max(layers))}",
                model.source,
            )
    return table


def _memory(settings: Mapping[str, Setting], plan: Plan) -> Table:
    on_gpu = settings["vram"].value > 0
    table = _table("memory", *(["VRAM"] if on_gpu else []), "RAM")
    ram, vram = dict(plan.ram), dict(plan.vram)
    for part in {**vram, **ram}:
        cells = [format_bytes(ram[part]) if part in ram else ""]
        if on_gpu:
            cells.insert(0, format_bytes(vram[part]) if part in vram else "")
        table.add_row(part, *cells)
    columns: list[tuple[str, Parts]] = [("vram", plan.vram)] if on_gpu else []
    columns.append(("ram", plan.ram))
    totals = [format_bytes(sum(size for _, size in parts)) for _, parts in columns]
    table.add_row("[bold]together[/bold]", *(f"[bold]{total}[/bold]" for total in totals))
    limits = [f"{format_bytes(settings[key].value)} {settings[key].source}" for key, _ in columns]
    table.add_row("of", *limits)
    return table


def _pass(settings: Mapping[str, Setting], plan: Plan) -> Table:
    on_gpu = settings["vram"].value > 0
    table = _table("one pass", "bytes", "rate", "time", "from")

    def link(label: str, n_bytes: int, key: str, seconds: float) -> None:
        bold = "bold" if plan.bottleneck == key else ""
        table.add_row(
            label, format_bytes(n_bytes), f"{format_bytes(settings[key].value)}/s",
            _seconds(seconds), settings[key].source, style=bold,
        )  # fmt: skip

    if plan.ssd_bytes:
        link("SSD to RAM", plan.ssd_bytes, "ssd", plan.ssd_s)
    if plan.link_bytes:
        link("RAM to GPU", plan.link_bytes, "link", plan.link_s)
    memory = int(plan.memory_s * settings["memory"].value)
    link("GPU memory" if on_gpu else "RAM to CPU", memory, "memory", plan.memory_s)
    if plan.compute_s:
        bold = "bold" if plan.bottleneck == "compute" else ""
        table.add_row("arithmetic", "", "", _seconds(plan.compute_s), "measured", style=bold)
    return table


def _speed(speed: Speed, runs: Sequence[Run]) -> Table:
    """Tokens per second: predicted, and reached where there were runs."""
    table = _table("speed", "tok/s", "tok/pass", "from")
    rate = speed.tokens_per_pass
    if rate is not None:
        table.add_row(
            "with drafting", f"[bold]{figure(speed.typical)}[/bold]", figure(rate.typical),
            rate.source,
        )  # fmt: skip
        table.add_row("  from", figure(speed.low), figure(rate.low), "text that is hard to guess")
        table.add_row("  to", figure(speed.high), figure(rate.high), "easy text")
    table.add_row("without", figure(speed.plain), "1", "" if rate else "no draft model")
    for run in runs[-_SHOWN_RUNS:]:
        busy = ", beside other programs" if run.busy else ""
        how = f"{run.date}, offload {run.offload}, {run.device}{busy}"
        table.add_row("reached here", figure(run.tokens_per_s), figure(run.tokens_per_pass), how)
    return table


def _experts(by_rows: Sequence[Outlook]) -> Table:
    table = _table("experts", "asked for", "in memory", "read", "tok/s at most")
    for each in by_rows:
        rows = "1 row" if each.rows == 1 else f"{each.rows} rows"
        read = " to ".join(map(format_bytes, each.ssd_bytes))
        table.add_row(
            f"a pass of {rows}", _between(each.experts, "{:.0f}"),
            _between(each.held_share, "{:.0%}"), read, _between(each.tokens_per_s, "{:.2g}"),
        )  # fmt: skip
    return table


def _between(values: Range, form: str) -> str:
    low, high = (form.format(value) for value in values)
    return low if low == high else f"{low} to {high}"


def _expert_lines(decision: Decision, richer: Sequence[Richer]) -> list[str]:
    sizes, plan = decision.target.sizes, decision.plan
    assert sizes.experts is not None, "only mixtures have experts"
    stored, share = sum(sizes.experts.layers), cache_share(sizes.experts, plan)
    fit = (
        "all of them" if share >= 1 else f"of which {format_bytes(plan.expert_bytes)} ({share:.0%})"
    )
    lines = [
        f"Experts: {format_bytes(stored)}, {fit} in memory; dense parts "
        f"{format_bytes(sum(sizes.dense.layers))}.",
        "From: all are chosen equally often. To: 27 % of them hold 80 % of the choices.",
    ]
    for each in richer if share < 1 else ():
        rate = _between(each.tokens_per_s, "{:.2g}")
        lines.append(
            f"With {format_bytes(each.ram_bytes)} of RAM: {each.cache_share:.0%} of the experts in "
            f"memory, {rate} tok/s without drafting."
        )
    return lines


def _seconds(seconds: float) -> str:
    if seconds >= 0.1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} us"


def _findings(
    settings: Mapping[str, Setting], plan: Plan, without_ssd: Plan | None, rows: int
) -> list[str]:
    named = _PLACES if settings["vram"].value else _CPU_PLACES
    places = ", ".join(
        f"{plan.tiers.count(tier)} {where}" for tier, where in named if tier in plan.tiers
    )
    one = f"A pass of {rows} rows" if plan.expert_bytes and rows > 1 else "A pass"
    lines = [
        f"Layers: {places}.",
        f"{one} takes at least {_seconds(plan.pass_s)}, bound by {_words(plan.bottleneck)}.",
    ]
    if plan.knee_rows is not None:
        lines.append(f"A pass of up to {plan.knee_rows} rows takes no longer than one of 1 row.")
    if without_ssd is not None:
        lines.append(
            f"With {format_bytes(without_ssd.peak_ram_bytes)} of RAM nothing would be on the SSD, "
            f"and a pass would take {_seconds(without_ssd.pass_s)}."
        )
    unsure = _unsure(settings, plan)
    if unsure:
        lines.append(f"Not measured yet: {', '.join(unsure)}. `specexec doctor` does.")
    return lines


def _drafting(speed: Speed, plan: Plan) -> list[str]:
    if speed.tokens_per_pass is None:
        return []
    nodes = "1 node" if speed.nodes == 1 else f"{speed.nodes} nodes"
    lines = [
        f"Growing a tree of {nodes} takes about {_seconds(speed.draft_s)}, and overlaps in part."
    ]
    if plan.shared_layers:
        lines.append(
            "Layers of the target that stay on the GPU draft in the place of their copies: "
            f"{plan.shared_layers}."
        )
    if not speed.drafting_pays:
        lines.append("Drafting would not pay here: --method autoregressive is faster.")
    return lines


def _unsure(settings: Mapping[str, Setting], plan: Plan) -> list[str]:
    """What the doctor could measure here and the plan has only assumed."""
    used = {"ssd": plan.ssd_bytes > 0, "link": plan.link_bytes > 0}
    if not settings["vram"].value:
        used["memory"] = True
    names = [_words(key) for key, is_used in used.items()
             if is_used and settings[key].source == "assumed"]  # fmt: skip
    on_cpu_unknown = plan.knee_rows is None and not settings["vram"].value
    return [*names, "arithmetic"] if on_cpu_unknown else names


def _words(key: str) -> str:
    return {
        "ssd": "the SSD", "link": "the link to the GPU", "memory": "memory",
        "compute": "arithmetic",
    }[key]  # fmt: skip
