"""`specexec simulate`: predicts what more devices or machines would gain before they are there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specexec_cli.cli.machine import DescribedComputer
from specexec_cli.cli.option_groups import Shown, grouped
from specexec_cli.cli.panels import PanelCommand, PanelGroup
from specexec_cli.cli.render import notice
from specexec_cli.errors import ConfigError
from specexec_cli.guarded import read_json
from specexec_cli.planning.request import Request

if TYPE_CHECKING:
    from specexec_cli.lab.simulate.hosts import ManyRows, Way
    from specexec_cli.lab.simulate.methods import FakePair
    from specexec_cli.planning.hosts import TextRows

app = typer.Typer(
    cls=PanelGroup,
    help="Predict what several devices (DSI), several machines or streaming would gain.",
    no_args_is_help=True,
)

Servers = Annotated[int, typer.Option("--sp", help="Target servers at once (SP degree).")]
Repeats = Annotated[int, typer.Option(help="Texts to average over.")]
Seed = Annotated[int, typer.Option(help="Seed of the first text.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


@app.command(cls=PanelCommand)
def dsi(
    target_ms: Annotated[
        float | None, typer.Option(help="Milliseconds of one target pass.")
    ] = None,
    draft_ms: Annotated[
        float | None, typer.Option(help="Milliseconds of one drafter pass.")
    ] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="Probability that a draft token is the target's, 0 to 1.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="What `specexec measure --json` wrote, for numbers not given here."),
    ] = None,
    lookahead: Annotated[
        str, typer.Option(help="Draft tokens per verification; several: 1,5,10.")
    ] = "1,5,10",
    sp: Servers = 7,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 50,
    row_ms: Annotated[
        float, typer.Option(help="Milliseconds each further row adds to a target pass.")
    ] = 0.0,
    repeats: Repeats = 100,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare decoding without speculation, with plain speculation (SI) and with DSI.

    DSI is the orchestrator of --method dsi, run with fake models under a virtual clock. A server
    that answers for the first time after a restart may be behind by several tasks: --row-ms
    charges those rows too.
    """
    from specexec_cli.lab.simulate.clock import Latencies
    from specexec_cli.lab.simulate.methods import FakePair, dsi_bound_s

    lookaheads = _integers(lookahead, "--lookahead")
    _positive(sp=sp, tokens=tokens, repeats=repeats)
    given = {"target_ms": target_ms, "draft_ms": draft_ms, "acceptance": acceptance}
    numbers = _numbers(given, measured)
    latencies = Latencies(
        target_s=numbers["target_ms"] / 1e3,
        draft_s=numbers["draft_ms"] / 1e3,
        target_row_s=row_ms / 1e3,
    )
    pair = FakePair(latencies=latencies, acceptance=numbers["acceptance"])
    rows = _methods(pair, tokens, lookaheads, sp, range(seed, seed + repeats))
    bound_s = dsi_bound_s(latencies.target_s, latencies.draft_s, pair.acceptance, tokens)
    bound_ms = bound_s * 1e3 / tokens
    if as_json:
        inputs = {**numbers, "sp": sp, "row_ms": row_ms, "tokens": tokens, "repeats": repeats,
                  "seed": seed}  # fmt: skip
        bound = {"ms_per_token": bound_ms, "tokens": tokens}
        print(json.dumps({"schema": 1, "config": inputs, "methods": rows, "proposition_1": bound}))
    else:
        _print_dsi(rows, lookahead, tokens, bound_ms)


def _methods(
    pair: FakePair, tokens: int, lookaheads: Sequence[int], sp: int, seeds: Iterable[int]
) -> list[dict[str, Any]]:
    """Each method's mean outcome over the texts of these seeds; SI has its best lookahead."""
    from specexec_cli.lab.simulate.methods import (
        mean,
        run_autoregressive,
        run_dsi,
        run_speculative,
    )

    latencies = pair.latencies
    samples = [pair.sample(tokens, seed) for seed in seeds]
    plain = run_autoregressive(latencies, tokens)
    si = [(k, mean([run_speculative(latencies, s, k) for s in samples])) for k in lookaheads]
    best, speculative = min(si, key=lambda found: found[1].seconds)
    dsi = [("DSI", k, mean([run_dsi(latencies, s, k, sp) for s in samples])) for k in lookaheads]
    return [
        {
            "method": method,
            "lookahead": k or None,
            "ms_per_token": o.seconds * 1e3 / tokens,
            "speedup_over_si": speculative.seconds / o.seconds,
            "speedup_over_non_si": plain.seconds / o.seconds,
            "target_forwards": o.forwards,
            "servers_used": o.servers,
            "gpu_s": o.gpu_s,
        }
        for method, k, o in [("non-SI", 0, plain), ("SI", best, speculative), *dsi]
    ]


def _print_dsi(
    rows: Sequence[dict[str, Any]], lookaheads: str, tokens: int, bound_ms: float
) -> None:
    """Prints a table of methods, and below it the meaning of its words."""
    header = ("method", "lookahead", "ms/token", "over SI", "over non-SI", "target forwards",
              "servers used", "GPU-s")  # fmt: skip
    _print_table(header, [
        (r["method"], r["lookahead"] or "-", f"{r['ms_per_token']:.2f}",
         f"{r['speedup_over_si']:.2f}x", f"{r['speedup_over_non_si']:.2f}x",
         r["target_forwards"], r["servers_used"], f"{r['gpu_s']:.2f}")
        for r in rows
    ])  # fmt: skip
    print(f"SI at its best lookahead of {lookaheads}; GPU-s: seconds of work on all devices for "
          f"{tokens} tokens")  # fmt: skip
    print(f"Proposition 1: {bound_ms:.2f} ms/token at most are expected of DSI for {tokens} tokens "
          "at lookahead 1 with as many servers as it wants")  # fmt: skip


def _numbers(given: dict[str, float | None], measured: Path | None) -> dict[str, float]:
    """Each number as given by the user, else from the measured file.

    Raises:
        ConfigError: a number is missing in both, or `specexec measure` did not write the file.
    """
    found: dict[str, float] = {}
    if measured is not None:
        try:
            content = read_json(measured)
            found = {
                "target_ms": float(content["target"]["tpot_ms"]),
                "draft_ms": float(content["draft"]["tpot_ms"]),
                "acceptance": float(content["acceptance"]["rate"]),
            }
        except OSError as error:
            raise ConfigError(f"cannot read {measured}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{measured} is not what `specexec measure --json` prints: write one with "
                "`specexec measure --json > FILE`"
            ) from error
    found |= {name: value for name, value in given.items() if value is not None}
    lacking = [f"--{name.replace('_', '-')}" for name in given if name not in found]
    if lacking:
        raise ConfigError(f"give {', '.join(lacking)}, or --measured FILE")
    return {name: found[name] for name in given}


@app.command(cls=PanelCommand)
def table(
    repeats: Repeats = 100,
    seed: Seed = 0,
    ttft: Annotated[
        float,
        typer.Option(help="The target's TTFT over its TPOT in the published accounting."),
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """The ten pairs of the DSI paper: published speedup over SI beside the simulated ones."""
    from specexec_cli.lab.simulate.table import (
        PUBLISHED,
        WHY,
        geometric_mean,
        simulate_row,
        spearman,
        within,
    )

    _positive(repeats=repeats)
    if not 1.0 <= ttft <= 1000.0:
        raise ConfigError(f"--ttft must be between 1 and 1000, not {ttft:g}")
    rows = [simulate_row(row, repeats, seed, ttft) for row in PUBLISHED]
    paper = [r.published.speedup for r in rows]
    columns = {
        "paper": paper,
        "exact": [r.exact for r in rows],
        "accounting": [r.accounting for r in rows],
        "restarts": [r.restarts for r in rows],
    }
    means = {name: geometric_mean(values) for name, values in columns.items()}
    ranks = {name: spearman(values, paper) for name, values in columns.items()}
    near = {name: within(values, paper) for name, values in columns.items()}
    if as_json:
        listed = [
            {"target": r.published.target, "drafter": r.published.drafter,
             "dataset": r.published.dataset, "target_ms": r.published.target_ms,
             "draft_ms": r.published.draft_ms, "acceptance": r.published.acceptance,
             **{name: values[at] for name, values in columns.items()}}
            for at, r in enumerate(rows)
        ]  # fmt: skip
        print(json.dumps({"schema": 2, "repeats": repeats, "seed": seed, "ttft": ttft,
                          "rows": listed, "geometric_mean": means, "spearman": ranks,
                          "within_10_percent": near, "why": WHY}))  # fmt: skip
        return
    header = ("target", "drafter", "dataset", "target ms", "draft ms", "acceptance",
              *columns)  # fmt: skip
    lines: list[Sequence[Any]] = [
        (r.published.target, r.published.drafter, r.published.dataset, r.published.target_ms,
         r.published.draft_ms, f"{r.published.acceptance:.2f}",
         *(f"{values[at]:.2f}x" for values in columns.values()))
        for at, r in enumerate(rows)
    ]  # fmt: skip
    lines.append(("geometric mean", *[""] * 5, *(f"{m:.2f}x" for m in means.values())))
    lines.append(("Spearman with paper", *[""] * 5, *(f"{r:.2f}" for r in ranks.values())))
    lines.append(("rows within 10 %", *[""] * 5, *(str(count) for count in near.values())))
    _print_table(header, lines)
    print(f"\n{WHY}")


@app.command(cls=PanelCommand)
def heatmap(
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG to write.")] = Path(
        "dsi-heatmap.png"
    ),
    sp: Servers = 7,
    points: Annotated[int, typer.Option(help="Grid points along each axis.")] = 20,
    lookahead: Annotated[
        int | None, typer.Option(help="Of SI, at every point. Default: its best at each.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw SI / non-SI, DSI / SI, DSI / non-SI and DSI / the better of both.

    Over drafter latency (as a share of the target's) and acceptance rate. With --json the numbers
    are printed and nothing is drawn.
    """
    from specexec_cli.lab.simulate.heatmap import PANELS, draw, simulated_heatmap

    _positive(sp=sp, lookahead=1 if lookahead is None else lookahead)
    result = simulated_heatmap(points, sp, lookahead)
    maxima = {panel: result.maximum(panel) for panel in PANELS}
    if as_json:
        print(json.dumps({"schema": 1, "sp": sp, "lookahead": lookahead,
                          "draft_fractions": result.draft_fractions,
                          "acceptances": result.acceptances, "speedups": result.speedups,
                          "maximum": maxima}))  # fmt: skip
        return
    draw(result, output, sp, lookahead)
    _print_table(("speedup", "maximum"), [(p, f"{m:.2f}x") for p, m in maxima.items()])
    print(f"written to {output}")


@app.command(cls=PanelCommand)
def offload(
    target_gb: Annotated[float, typer.Option(help="GB of target weights read per pass.")],
    link_gb_s: Annotated[float, typer.Option(help="GB/s at which weights reach one device.")],
    draft_ms: Annotated[float, typer.Option(help="Milliseconds of one drafter step.")],
    acceptance: Annotated[
        float, typer.Option(help="Probability that the drafter's best token is the target's.")
    ],
    devices: Annotated[int, typer.Option(help="Devices at hand.")] = 1,
    device_gb: Annotated[float, typer.Option(help="Memory of one device, GB.")] = 24.0,
    memory_gb_s: Annotated[
        float, typer.Option(help="Bandwidth of a device's own memory, GB/s.")
    ] = 1000.0,
    row_ms: Annotated[
        float, typer.Option(help="Arithmetic of one row of a pass, milliseconds.")
    ] = 0.0,
    shared_link: Annotated[
        bool, typer.Option("--shared-link", help="All devices stream through one link.")
    ] = False,
    budgets: Annotated[
        str, typer.Option(help="Draft tree sizes to try.")
    ] = "1,16,64,128,256,512,1024",
    tokens: Annotated[int, typer.Option(help="Tokens to generate in DSI runs.")] = 64,
    as_json: Json = False,
) -> None:
    """When one streamed target with a big draft tree is better than replicas, and when not.

    Assumes that the drafter's r-th best token is the target's with probability a (1 - a)^(r-1),
    that a streamed pass takes the longer of transfer and arithmetic, and that the drafter sits
    on the first device beside it.
    """
    from specexec_cli.lab.simulate.offload import Scenario, compare, verdict

    _positive(tokens=tokens)
    scenario = Scenario(
        target_bytes=target_gb * 1e9, link_bytes_per_s=link_gb_s * 1e9,
        memory_bytes_per_s=memory_gb_s * 1e9, device_bytes=device_gb * 1e9, devices=devices,
        draft_s=draft_ms / 1e3, acceptance=acceptance, row_s=row_ms / 1e3, shared_link=shared_link,
    )  # fmt: skip
    estimates = compare(scenario, tuple(_integers(budgets, "--budgets")), tokens)
    if as_json:
        listed = [
            {"name": e.name, "devices": e.devices, "pass_s": e.pass_s,
             "tokens_per_pass": e.tokens_per_pass, "tokens_per_s": e.tokens_per_s,
             "device_s_per_token": e.device_s_per_token}
            for e in estimates
        ]  # fmt: skip
        print(json.dumps({"schema": 1, "estimates": listed, "verdict": verdict(estimates)}))
        return
    header = ("way", "devices", "s/pass", "tokens/pass time", "tokens/s", "device-s/token")
    _print_table(header, [
        (e.name, e.devices, f"{e.pass_s:.3f}", f"{e.tokens_per_pass:.2f}",
         f"{e.tokens_per_s:.2f}", f"{e.device_s_per_token:.3f}")
        for e in estimates
    ])  # fmt: skip
    print(verdict(estimates))


@app.command(cls=PanelCommand)
@grouped
def hosts(
    *,
    asked: Annotated[Request, Shown("model draft models_file offline activations kv hosts")],
    machine: DescribedComputer,
    budgets: Annotated[
        str, typer.Option(help="Draft tree sizes to try, besides none.")
    ] = "16,64,256",
    gbit_s: Annotated[
        str | None,
        typer.Option(help="Gb/s of all links, several: 0.3,1,10. Default: as the file says."),
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Passes in waves: 512 rows of a prompt, or 4x17 of four trees.")
    ] = "4x17,512,2048",
    as_json: Json = False,
) -> None:
    """A model over the machines of --hosts beside one machine, by the planner's own times.

    No machine need be there: the file describes all but the first (ram_gb, memory_gb_s, tflops,
    link_gbit_s, ...), and --ram, --memory and so on that. A CPU without tflops has 0.5 TFLOP/s.
    """
    from specexec_cli.lab.simulate.hosts import PUBLISHED, compare, many_rows, verdict
    from specexec_cli.planning.alternatives import with_best_draft
    from specexec_cli.planning.hosts import read_hosts
    from specexec_cli.planning.resolve import resolve, told_of_assumed

    if asked.hosts is None:
        raise ConfigError("give --hosts FILE, which describes the other machines: docs/hosts.md")
    links = [] if gbit_s is None else _rates(gbit_s, "--gbit-s")
    site, entries = machine.site(), read_hosts(asked.hosts).hosts
    others = tuple(entry.described() for entry in entries)
    several = replace(site, hosts=others)
    asked = with_best_draft(asked, several)
    ways = compare(asked, site, others, _integers(budgets, "--budgets"), links, asked.models_file)
    passes = many_rows(asked, site, others, _passes(rows), links)
    if assumed := told_of_assumed(resolve(asked, several), others):
        notice(assumed)
    if as_json:
        print(json.dumps({"schema": 1, "ways": [asdict(way) for way in ways],
                          "many_rows": [asdict(each) for each in passes],
                          "verdict": verdict(ways),
                          "published": [asdict(each) for each in PUBLISHED]}))  # fmt: skip
        return
    _print_hosts(ways, passes)


def _print_hosts(ways: Sequence[Way], passes: Sequence[ManyRows]) -> None:
    from specexec_cli.lab.simulate.hosts import PUBLISHED, verdict

    header = ("layers", "Gb/s", "nodes", "s/pass", "on the way", "GB of SSD", "drafting s",
              "tokens/pass", "tokens/s")  # fmt: skip
    _print_table(header, [
        (way.machines, "-" if way.gbit_s is None else f"{way.gbit_s:.3g}", way.nodes,
         f"{way.pass_s:.2f}", f"{way.away_s:.3f}", f"{way.ssd_bytes / 1e9:.1f}",
         f"{way.draft_s:.2f}", f"{way.tokens_per_pass:.1f}", f"{way.tokens_per_s:.2f}")
        for way in ways
    ])  # fmt: skip
    print(verdict(ways))
    print()
    _print_table(("layers", "Gb/s", "rows", "waves", "s/pass", "in one wave"), [
        (each.machines, "-" if each.gbit_s is None else f"{each.gbit_s:.3g}",
         f"{each.texts}x{each.rows // each.texts}" if each.texts > 1 else each.rows, each.waves,
         f"{each.pass_s:.2f}", f"{each.one_wave_s:.2f}")
        for each in passes
    ])  # fmt: skip
    for known in PUBLISHED:
        print(f"published: {known.program} {known.tokens_per_s:.1f} tokens/s, {known.model} on "
              f"{known.machines} ({known.source})")  # fmt: skip


def _rates(text: str, flag: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(1e-6 <= value < 1e6 for value in values):
        raise ConfigError(f"{flag} takes rates above 0, as in 0.3,1,10, not '{text}'")
    return values


def _integers(text: str, flag: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ConfigError(f"{flag} takes whole numbers of 1 or more, as in 1,5,10, not '{text}'")
    return values


def _passes(text: str) -> list[list[TextRows]]:
    """Passes such as 512, the rows of a prompt, or 4x17, four texts with a root and 16 nodes."""
    found: list[list[TextRows]] = []
    for part in text.split(","):
        texts, several, rows = part.strip().rpartition("x")
        try:
            count, each = int(texts) if several else 1, int(rows)
        except ValueError:
            count = each = 0
        if min(count, each) < 1:
            raise ConfigError(
                f"--rows takes rows of a prompt, or of several trees, as in 512,4x17, not '{text}'"
            )
        found.append([(each, 1 if several else each)] * count)
    return found


def _positive(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise ConfigError(f"--{name} must be 1 or more, not {value}")


def _print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table with padded columns; text is aligned to the left, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        padded = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(padded).rstrip())
