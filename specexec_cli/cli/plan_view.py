"""Prints a plan for people. Imported only when needed, because rich is slow to import."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from specexec_cli.catalog.architectures import text_config, why_no_longer
from specexec_cli.device import format_bytes
from specexec_cli.planning.expected_speed import Outlook, Range, Richer, Run, Verdict, cache_share
from specexec_cli.planning.machine import Setting, taken_of_a_datasheet
from specexec_cli.planning.memory import Parts
from specexec_cli.planning.pass_time import PassTime, knee_rows, pass_time
from specexec_cli.planning.resolve import Decision
from specexec_cli.planning.sizes import SizedModel
from specexec_cli.planning.speed import Pace, Speed, figure
from specexec_cli.planning.tiers import Plan
from specexec_cli.triton_check import without_triton

_SHOWN_RUNS = 3
_PLACES = (("resident", "on the GPU"), ("ram", "in RAM"), ("ssd", "on SSD"))
_CPU_PLACES = (("resident", "loaded to stay"), *_PLACES[1:])


def show_plan(
    decision: Decision,
    verdict: Verdict,
    one_pass: PassTime,
    without_ssd: Plan | None,
    dsi: str | None,
    runs: Sequence[Run],
    by_rows: Sequence[Outlook] = (),
    richer: Sequence[Richer] = (),
    gain: str = "",
    *,
    everything: bool = False,
) -> None:
    """Prints the plan to stdout.

    Args:
        one_pass: the pass of the tree that is expected to be fastest.
        without_ssd: the same pass with so much RAM that no layer is on the SSD.
        dsi: a sentence that says whether several GPUs would pay.
        runs: the results of earlier sessions on this machine.
        by_rows: the expected gain from a cache of experts, by rows of a pass.
        richer: the expected gain with more memory.
        gain: a sentence on what rows in 8 bits would bring; empty where nothing.
        everything: with the tables of models, memory, a pass and experts.
    """
    target, draft, speed = decision.target, decision.draft, verdict.speed
    assert speed is not None, "it fits"
    settings, plan = decision.settings, decision.plan
    console = Console(highlight=False)
    _print_wrapped(console, f"{decision.pair.name} {verdict.sentence}.")
    _print_wrapped(console, _memory_line(decision))
    if why := why_no_longer(text_config(target.config)):
        _print_wrapped(console, f"Longer texts are refused: {why}.")
    console.print()
    tables = [_speed(speed, runs)]
    if everything:
        tables = [
            _models(target, draft), _memory(settings, plan), _pass(settings, one_pass, plan),
            *tables, *([_experts(by_rows)] if by_rows else []),
        ]  # fmt: skip
    for table in tables:
        console.print(table)
        console.print()
    found = _findings(settings, plan, one_pass, without_ssd)
    found += host_lines(plan, one_pass)
    if decision.dtype_reason:
        found.append(f"It computes in {decision.dtype}: {decision.dtype_reason}.")
    if gain:
        found.append(gain)
    if plan.machine.triton_obstacle and any(m and m.sizes.packed for m in (target, draft)):
        cost = f"{_seconds(one_pass.unpack_s)} of a pass" if one_pass.unpack_s else ""
        found.append(without_triton(plan.machine.triton_obstacle, cost))
    lines = [*found, *_drafting(decision, speed), *([dsi] if dsi else [])]
    if by_rows and everything:
        lines = [*_expert_lines(decision, richer), *lines]
    if not everything:
        lines.append("--all adds the tables of models, memory, a pass and experts.")
    for line in lines:
        _print_wrapped(console, line)


def _print_wrapped(console: Console, line: str) -> None:
    for part in textwrap.wrap(line, min(console.width, 100)):
        console.print(part)


def _memory_line(decision: Decision) -> str:
    """How much of each memory is taken, and for which context and passes."""
    work, plan, settings = decision.work, decision.plan, decision.settings
    rows = f"{work.verify_rows} rows" if work.budget else "one row"
    parts = [("RAM", plan.peak_ram_bytes, settings["ram"])]
    if settings["vram"].value:
        parts.insert(0, ("VRAM", plan.peak_vram_bytes, settings["vram"]))
    taken = ", ".join(
        f"{format_bytes(size)} of {format_bytes(limit.value)} {name}" for name, size, limit in parts
    )
    return f"Memory for {work.context_tokens} tokens of context and {rows} a pass: {taken}."


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        right = index and column not in ("where", "from", "layers")
        # a name that is too long continues on the next line instead of being cut off
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


def _pass(settings: Mapping[str, Setting], one_pass: PassTime, plan: Plan) -> Table:
    """The table of a pass: what it moves and computes, and the time that each part takes."""
    on_gpu = settings["vram"].value > 0
    table = _table(f"a pass of {_counted(one_pass.rows, 'row')}", "bytes", "rate", "time", "from")

    def link(label: str, n_bytes: int, key: str, seconds: float) -> None:
        table.add_row(
            label, format_bytes(n_bytes), f"{format_bytes(settings[key].value)}/s",
            _seconds(seconds), settings[key].source, style=_bold(key),
        )  # fmt: skip

    def _bold(key: str) -> str:
        return "bold" if one_pass.bottleneck == key else ""

    if one_pass.ssd_bytes:
        link("SSD to RAM", one_pass.ssd_bytes, "ssd", one_pass.ssd_s)
    if one_pass.link_bytes:
        link("RAM to GPU", one_pass.link_bytes, "link", one_pass.link_s)
    memory = "GPU memory" if on_gpu else "RAM to CPU"
    link(memory, one_pass.memory_bytes, "memory", one_pass.memory_s)
    if one_pass.compute_s:
        of_cpu = plan.machine.flops and not plan.machine.products_assumed
        measured = plan.machine.gpu.products if on_gpu else of_cpu
        unknown = settings["memory"].source if on_gpu else "assumed"
        source = "measured" if measured else unknown
        table.add_row(
            "products", "", "", _seconds(one_pass.compute_s), source, style=_bold("compute")
        )
    if one_pass.host_s:
        table.add_row("experts on the CPU", "", "", _seconds(one_pass.host_s), style=_bold("host"))
    if one_pass.unpack_s:
        table.add_row(
            "unpacking by PyTorch", "", "", _seconds(one_pass.unpack_s), "assumed",
            style=_bold("unpack"),
        )  # fmt: skip
    known = "measured" if plan.machine.layer_cost is not None and not on_gpu else "assumed"
    if on_gpu:
        known = "counted, " + ("measured" if plan.machine.gpu.products else "assumed")
        table.add_row(
            "starting kernels", "", "", _seconds(one_pass.starting_s), known,
            style=_bold("starting"),
        )  # fmt: skip
        table.add_row("waits for the GPU", "", "", _seconds(one_pass.waits_s), known)
    if one_pass.kv_s:
        source = settings["link"].source
        table.add_row("keys and values", "", "", _seconds(one_pass.kv_s), source)
    label = "between kernels" if on_gpu else "rest of the layers"
    table.add_row(label, "", "", _seconds(one_pass.layers_s), known)
    table.add_row(
        "computing",
        "",
        "",
        _seconds(one_pass.computing_s),
        "memory or products, and the rest" + (", or starting; and waits" if on_gpu else ""),
    )
    how = "the slowest, and the rest" if one_pass.links_wait else "the slowest"
    table.add_row(
        "[bold]together[/bold]", "", "", f"[bold]{_seconds(one_pass.seconds)}[/bold]", how
    )
    return table


def _speed(speed: Speed, runs: Sequence[Run]) -> Table:
    """The table of tokens per second, predicted and, if there were runs, reached.

    Tokens per second are the tokens of a pass over the time of the pass and its drafting.
    """
    table = _table("speed", "tok/s", "tok/pass", "pass", "drafting", "from")
    rate = speed.tokens_per_pass

    def add(label: str, pace: Pace, source: str, bold: str = "") -> None:
        table.add_row(
            label, f"{bold}{figure(pace.tokens_per_s)}", figure(pace.tokens_per_pass),
            _seconds(pace.pass_s), _seconds(pace.draft_s) if pace.draft_s else "", source,
        )  # fmt: skip

    if rate is not None:
        add("with drafting", speed.usual, rate.source, "[bold]")
        add("  from", speed.hard, "text that is hard to guess, slow links")
        add("  to", speed.easy, "easy text, drafted while layers come")
    add("without", speed.alone, "" if rate else "no draft model")
    for run in runs[-_SHOWN_RUNS:]:
        busy = ", beside other programs" if run.busy else ""
        rows = "" if run.activations == "full" else f", activations {run.activations}"
        hosts = f", hosts {run.hosts}" if run.hosts else ""
        how = f"{run.date}, offload {run.offload}, {run.device}{rows}{hosts}{busy}"
        table.add_row(
            "reached here", figure(run.tokens_per_s), figure(run.tokens_per_pass), "", "", how
        )
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


def host_lines(plan: Plan, one_pass: PassTime) -> list[str]:
    """What other machines have of the target, and what it costs to go there."""
    lines = []
    for each in plan.others:
        tiers = each.plan.tiers
        places = ", ".join(
            f"{tiers.count(tier)} {where}" for tier, where in _PLACES if tier in tiers
        )
        host, rows = each.host, _counted(one_pass.rows, "row")
        hop = _seconds(each.hop_s(one_pass.rows))
        taken, limit = format_bytes(each.plan.peak_ram_bytes), format_bytes(host.machine.ram_bytes)
        lines.append(
            f"{host.name}: layers {each.layers.start} to {each.layers.stop - 1} ({places}), "
            f"{taken} of {limit} RAM; {rows} there and back take {hop} at "
            f"{8 * host.link_bytes_per_s / 1e9:.3g} Gb/s."
        )
    return lines


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _seconds(seconds: float) -> str:
    if seconds >= 0.1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} us"


def _findings(
    settings: Mapping[str, Setting], plan: Plan, one_pass: PassTime, without_ssd: Plan | None
) -> list[str]:
    named = _PLACES if settings["vram"].value else _CPU_PLACES
    places = ", ".join(
        f"{plan.tiers.count(tier)} {where}" for tier, where in named if tier in plan.tiers
    )
    if plan.kv_layers:
        places += f"; keys and values of {len(plan.kv_layers)} in RAM"
    lines = [
        f"Layers: {places}.",
        f"A pass of {_counted(one_pass.rows, 'row')} takes about {_seconds(one_pass.seconds)}, "
        f"bound by {_words(one_pass.bottleneck)}.",
    ]
    knee = knee_rows(plan)
    if knee is not None:
        lines.append(
            f"A pass of up to {knee} rows takes no longer than one of 1 row."
            if knee > 1
            else "Every row more makes a pass longer."
        )
    if without_ssd is not None:
        lines.append(
            f"With {format_bytes(without_ssd.peak_ram_bytes)} of RAM nothing would be on the SSD, "
            f"and a pass would take {_seconds(pass_time(without_ssd, one_pass.rows).seconds)}."
        )
    unsure = _unsure(settings, plan)
    if unsure:
        lines.append(f"Not measured yet: {', '.join(unsure)}. `specexec doctor` does.")
    return lines


def _drafting(decision: Decision, speed: Speed) -> list[str]:
    if speed.tokens_per_pass is None:
        return []
    plan = decision.plan
    lines = [
        *([f"{decision.left_out}."] if decision.left_out else []),
        f"Growing a tree of {_counted(speed.nodes, 'node')} takes about "
        f"{_seconds(speed.usual.draft_s)}, and overlaps in part.",
    ]
    if plan.work.draft_tokens < plan.work.context_tokens:
        lines.append(f"The draft model sees a text's last {plan.work.draft_tokens} tokens at most.")
    if plan.shared_layers:
        lines.append(
            "Layers of the target that stay on the GPU draft in the place of their copies: "
            f"{plan.shared_layers}."
        )
    if not speed.drafting_pays:
        lines.append("Drafting would not pay here: --method autoregressive is faster.")
    return lines


def _unsure(settings: Mapping[str, Setting], plan: Plan) -> list[str]:
    """The rates that the plan assumes and that `specexec doctor` could measure on this machine."""
    used = {"ssd": plan.ssd_bytes > 0, "link": plan.link_bytes > 0}
    if not settings["vram"].value:
        used["memory"] = True
    names = [_words(key) for key, is_used in used.items()
             if is_used and settings[key].source == "assumed"]  # fmt: skip
    taken = taken_of_a_datasheet(settings, plan.machine.gpu)
    if taken:
        names.append(f"the GPU ({taken})")
    on_cpu_unknown = not plan.machine.flops and not settings["vram"].value
    return [*names, "arithmetic"] if on_cpu_unknown else names


def _words(key: str) -> str:
    return {
        "ssd": "the SSD", "link": "the link to the GPU", "memory": "memory",
        "compute": "arithmetic", "host": "experts on the CPU", "unpack": "unpacking",
        "starting": "the host that starts kernels", "hosts": "other machines and the way there",
    }[key]  # fmt: skip
