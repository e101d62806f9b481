"""Compares SI and DSI over drafter latency and acceptance rate, as in the papers' figures.

Values are long-run speedups by closed formulas, with each method at its best lookahead. Tests
compare the formulas with the orchestrator under the virtual clock. If no lookahead suits the number
of servers, DSI stands for decoding without speculation, as in the planner's decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexec_cli.dsi.closed_forms import dsi_s, servers_needed, speculative_s
from specexec_cli.errors import ConfigError

MAX_LOOKAHEAD = 200  # as in DSI, section 4
PANELS = ("SI / non-SI", "DSI / SI", "DSI / non-SI", "DSI / better of both")


@dataclass(frozen=True, slots=True)
class Heatmap:
    """Speedups in each panel; rows are acceptance rates, columns are drafter latencies."""

    draft_fractions: tuple[float, ...]  # drafter latency divided by target latency
    acceptances: tuple[float, ...]
    speedups: dict[str, list[list[float]]]

    def maximum(self, panel: str) -> float:
        """The largest speedup in a panel."""
        return max(max(row) for row in self.speedups[panel])


def best_si_s(draft_fraction: float, acceptance: float, lookahead: int | None = None) -> float:
    """Seconds per token of SI at this lookahead, or at its best; a target pass is one second."""
    tried = range(1, MAX_LOOKAHEAD + 1) if lookahead is None else (lookahead,)
    return min(speculative_s(1.0, draft_fraction, acceptance, k) for k in tried)


def drafting_dsi_s(draft_fraction: float, acceptance: float, servers: int) -> float:
    """Seconds per token of DSI at its best lookahead that needs at most `servers` target servers.

    Drafting a lookahead takes no longer than a target pass. Infinite without such a lookahead.
    """
    usable = (
        dsi_s(1.0, draft_fraction, acceptance, k)
        for k in range(1, MAX_LOOKAHEAD + 1)
        if k * draft_fraction <= 1.0 and servers_needed(1.0, draft_fraction, k) <= servers
    )
    return min(usable, default=math.inf)


def best_dsi_s(draft_fraction: float, acceptance: float, servers: int) -> float:
    """Seconds per token of DSI, or of decoding without speculation if that is faster."""
    return min(1.0, drafting_dsi_s(draft_fraction, acceptance, servers))


def simulated_heatmap(points: int, servers: int, lookahead: int | None = None) -> Heatmap:
    """Speedups on a grid of `points` drafter latencies up to the target's, and acceptances 0 to 1.

    Args:
        lookahead: SI's lookahead at every point, as in DSI's figure 6; None takes the best one, as
            in figure 1.
    """
    if points < 2:
        raise ConfigError(f"`points` must be 2 or more, not {points}")
    fractions = tuple((i + 1) / points for i in range(points))
    acceptances = tuple(i / points for i in range(points + 1))
    speedups: dict[str, list[list[float]]] = {panel: [] for panel in PANELS}
    for acceptance in acceptances:
        si = [best_si_s(fraction, acceptance, lookahead) for fraction in fractions]
        dsi = [best_dsi_s(fraction, acceptance, servers) for fraction in fractions]
        pairs = list(zip(si, dsi, strict=True))
        speedups[PANELS[0]].append([1.0 / s for s in si])
        speedups[PANELS[1]].append([s / d for s, d in pairs])
        speedups[PANELS[2]].append([1.0 / d for d in dsi])
        speedups[PANELS[3]].append([min(s, 1.0) / d for s, d in pairs])
    return Heatmap(fractions, acceptances, speedups)


def drawn(heatmap: Heatmap, servers: int, lookahead: int | None = None) -> Any:
    """Draws the four panels as one figure of matplotlib.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import Normalize, TwoSlopeNorm
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed: pip install matplotlib, "
            "or print the numbers with `json`"
        ) from error
    figure = Figure(figsize=(11.0, 9.0), layout="constrained")
    FigureCanvasAgg(figure)
    half = 0.5 / len(heatmap.draft_fractions)
    extent = (
        heatmap.draft_fractions[0] - half,
        heatmap.draft_fractions[-1] + half,
        heatmap.acceptances[0] - half,
        heatmap.acceptances[-1] + half,
    )
    for number, panel in enumerate(PANELS):
        axes = figure.add_subplot(2, 2, number + 1)
        # colours are logarithmic, because a perfect drafter is many times faster than any other
        rows = [[math.log2(value) for value in row] for row in heatmap.speedups[panel]]
        low, high = min(0.0, *map(min, rows)), max(0.001, *map(max, rows))
        slower = low < -0.001  # if so, two colours meet at 1; otherwise white stands for 1
        image = axes.imshow(
            rows,
            origin="lower",
            aspect="auto",
            extent=extent,
            cmap="RdBu" if slower else "Blues",
            norm=TwoSlopeNorm(0.0, vmin=low, vmax=high) if slower else Normalize(0.0, high),
        )
        ticks = [low, low / 2] if slower else []
        ticks += [high * quarter / 4 for quarter in range(5)]
        bar = figure.colorbar(image, ax=axes, label="speedup", ticks=ticks)
        bar.set_ticklabels([f"{2**tick:.2f}x" for tick in ticks])
        axes.set_title(f"{panel}  (max {heatmap.maximum(panel):.2f}x)")
        axes.set_xlabel("drafter latency / target latency")
        axes.set_ylabel("acceptance rate")
    si = "best lookahead" if lookahead is None else f"lookahead {lookahead}"
    figure.suptitle(f"SI: {si}; DSI: best lookahead, at most {servers} target servers")
    return figure


def draw(heatmap: Heatmap, path: Path, servers: int, lookahead: int | None = None) -> None:
    """Writes the four panels to a PNG file.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = drawn(heatmap, servers, lookahead)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
