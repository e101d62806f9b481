"""`specexec doctor`: what this machine is, how fast its links are, and what will be slow."""

from __future__ import annotations

import json
import sys
import textwrap
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specexec_cli.cli import options
from specexec_cli.cli.render import notice
from specexec_cli.device import format_bytes
from specexec_cli.dsi.plan import advise
from specexec_cli.planning.machine_rates import GpuRates, rates_file, save_rates

if TYPE_CHECKING:
    from specexec_cli.cli.doctor_report import Report

SCHEMA = 1


def doctor(
    hosts: Annotated[
        Path | None,
        typer.Option(help="File of hosts: times the links to their workers too (docs/hosts.md)."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Look at this machine and measure its disk, memory and arithmetic; takes some seconds.

    What is measured is kept for `specexec plan`, unless other programs were busy meanwhile.
    """
    links = [] if hosts is None else _links(hosts)
    from specexec_cli.cli.doctor_report import examine, slow_parts

    report = examine(_tell_step if sys.stderr.isatty() and not as_json else lambda step: None)
    slow = slow_parts(report)
    try:
        save_rates(report.kept_rates, rates_file())
    except OSError as error:
        slow.append(f"The measured rates cannot be kept in {rates_file()}: {error.strerror}.")
    if as_json:
        told = {"schema": SCHEMA, **asdict(report), "slow": slow}
        typer.echo(json.dumps(told if hosts is None else {**told, "hosts": links}))
        return
    _show(report, slow)
    for link in links:
        print(
            f"{link['name']}: {format_bytes(link['ram_bytes'])} RAM free, "
            f"{8 * link['link_bytes_per_s'] / 1e9:.3g} Gb/s, "
            f"{link['delay_s'] * 1e3:.2f} ms each way"
        )


def _links(file: Path) -> list[dict[str, Any]]:
    """The machines of a file once their workers have joined, and the links to them, timed."""
    from specexec_cli.hosts.pool import HostPool
    from specexec_cli.hosts.wire import token_of_environment
    from specexec_cli.planning.hosts import read_hosts

    with closing(HostPool(read_hosts(file), token_of_environment(), notice)) as pool:
        return [
            {
                "name": host.name,
                "ram_bytes": host.machine.ram_bytes,
                "vram_bytes": host.machine.vram_bytes,
                "link_bytes_per_s": host.link_bytes_per_s,
                "delay_s": host.delay_s,
            }
            for host in pool.gather()
        ]


def _tell_step(step: str) -> None:
    print(f"measuring {step} ...", file=sys.stderr)


def _show(report: Report, slow: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in named_findings(report):
        table.add_row(name, value)
    console.print(table)
    console.print("\n[bold]What will be slow, and why[/bold]")
    for line in slow or ["Nothing stands out."]:
        for part in textwrap.wrap(
            line, min(console.width, 100), initial_indent="- ", subsequent_indent="  ",
            break_on_hyphens=False, break_long_words=False,
        ):  # fmt: skip
            console.print(part, markup=False, soft_wrap=True)


def _gpu_findings(gpu: GpuRates) -> list[tuple[str, str]]:
    """What was measured of the GPU, as (name, value) lines."""
    found = [
        ("GPU memory", f"copies {format_bytes(gpu.memory_bytes_per_s)}/s, read and written"),
        ("GPU products", f"{gpu.tensor_flops / 1e12:.3g} TFLOP/s of large ones in float16"),
    ]
    for bits, points in gpu.products:
        speeds = ", ".join(f"{2 * rows / s / 1e12:.3g} ({rows})" for rows, s in points)
        found.append((f"{bits or 16}-bit weights", f"TFLOP/s by rows: {speeds}"))
    starts = {
        "an operation": gpu.operation_s, "a kernel": gpu.kernel_s, "between two": gpu.start_s,
        "a wait": gpu.wait_s,
    }  # fmt: skip
    told = ", ".join(f"{what} {seconds * 1e6:.1f}" for what, seconds in starts.items())
    return [*found, ("GPU starts", f"microseconds: {told}")]


# The pair of the advice (a 7B target in 16-bit weights, a draft model a hundredth of its size) and
# the memory of a common GPU.
_7B_BYTES, _DRAFT_BYTES, _GPU_BYTES_PER_S = 13_000_000_000, 130_000_000, 1e12


def _dsi_advice(report: Report) -> str:
    """Says whether the method dsi would pay on several devices, for a typical pair."""
    memories = [gpu.total_bytes for gpu in report.gpus]
    return advise(_7B_BYTES, _DRAFT_BYTES, memories, _GPU_BYTES_PER_S)


def named_findings(report: Report) -> list[tuple[str, str]]:
    """The report as (name, value) lines."""
    rates = report.rates
    versions = [f"{name} {version}" for name, version in report.versions.items()]
    found = [
        ("software", ", ".join(versions)),
        ("system", report.platform),
        ("CPU", f"{report.cpu.name}, {report.cpu.cores} cores"),
        ("", ", ".join(report.cpu.flags) or "no vector instructions known to us"),
    ]
    for dtype, points in (rates.flops or {}).items():
        speeds = ", ".join(f"{rate / 1e9:.3g} ({n})" for n, rate in points)
        found.append((f"{dtype}", f"GFLOP/s by rows: {speeds}"))
    memory = (
        f"{format_bytes(report.free_ram_bytes)} free of {format_bytes(report.ram_bytes)}, "
        f"huge pages: {report.huge_pages}"
    )
    if rates.memory_bytes_per_s:
        memory += f", copies {format_bytes(rates.memory_bytes_per_s)}/s"
    found.append(("RAM", memory))
    for gpu in report.gpus:
        lanes = f", PCIe {gpu.pcie_gen or '?'} x{gpu.pcie_width or '?'}"
        found.append(
            (f"GPU {gpu.index}", f"{gpu.name}, {format_bytes(gpu.free_bytes)} free of "
             f"{format_bytes(gpu.total_bytes)}{lanes}, driver {gpu.driver}")
        )  # fmt: skip
    if not report.gpus:
        found.append(("GPU", "none"))
    found.append(("DSI for 7B", _dsi_advice(report)))
    if report.kernels:
        found.append(("kernels", ", ".join(f"{k}: {v}" for k, v in report.kernels.items())))
    if rates.link_bytes_per_s:
        found.append(("RAM to GPU", f"{format_bytes(rates.link_bytes_per_s)}/s"))
    if rates.gpu is not None:
        found += _gpu_findings(rates.gpu)
    disk = f"{format_bytes(report.disk_free_bytes)} free"
    if rates.ssd_bytes_per_s:
        how = "O_DIRECT" if report.direct_reads else "through the page cache"
        disk = f"reads {format_bytes(rates.ssd_bytes_per_s)}/s ({how}), {disk}"
    found += [
        ("models in", report.cache),
        ("disk there", disk),
        ("hub", report.hub + (f": {report.hub_error}" if report.hub_error else ", reachable")),
    ]
    return found
