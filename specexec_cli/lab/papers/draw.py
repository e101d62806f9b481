"""Draws the papers' kinds of figures, with matplotlib (the `plots` extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from specexec_cli.lab.bench.plots import new_figure

# name of a line -> (x, y, half heights of its error bars, or empty)
Lines = Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]]
Spans = Sequence[tuple[float, float]]  # from when to when


def curves(title: str, x_label: str, y_label: str, lines: Lines, *, doubling: bool = False) -> Any:
    """Draws one line per name.

    Args:
        doubling: whether the x axis doubles from mark to mark.
    """
    figure, axes = new_figure(title)
    marks: set[float] = set()
    for number, (name, (x, y, errors)) in enumerate(lines.items()):
        axes.errorbar(
            x, y, yerr=errors or None, label=name, color=f"C{number}", capsize=2,
            marker="os^vDPX"[number % 7] if len(x) < 30 else None,
        )  # fmt: skip
        marks |= set(x)
    if doubling:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(marks), [f"{mark:g}" for mark in sorted(marks)])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(frameon=False, fontsize=8)
    return figure


def bars(title: str, x_label: str, y_label: str, groups: Lines) -> Any:
    """Draws the bars of all groups side by side, without errors."""
    figure, axes = new_figure(title)
    for number, (name, (x, y, _)) in enumerate(groups.items()):
        step = min((b - a for a, b in pairwise(x)), default=1.0)
        width = 0.8 * step / len(groups)
        left = (number - (len(groups) - 1) / 2) * width
        axes.bar([at + left for at in x], y, width, label=name, color=f"C{number}")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if len(groups) > 1:
        axes.legend(frameon=False, fontsize=8)
    return figure


def spans(title: str, x_label: str, rows: Mapping[str, tuple[int, Spans]]) -> Any:
    """Draws what each worker does over time, the first row on top.

    Args:
        rows: name of a worker -> the number of its colour, and when each of its passes runs.
    """
    figure, axes = new_figure(title)
    for number, (color, each) in enumerate(rows.values()):
        lengths = [(begun, ended - begun) for begun, ended in each]
        axes.broken_barh(lengths, (number - 0.4, 0.8), color=f"C{color}", edgecolor="white")
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(x_label)
    return figure


def grids(
    title: str,
    x: tuple[str, Sequence[int]],
    y: tuple[str, Sequence[int]],
    grids: Mapping[str, Sequence[Sequence[float]]],
) -> Any:
    """Draws heat maps with numbers side by side, with one range of colours.

    Args:
        x, y: name and values of each axis; a grid has one row for each value of y.
    """
    figure, _ = new_figure("")
    figure.clear()
    figure.suptitle(title, fontsize=10)
    highest = max(value for grid in grids.values() for row in grid for value in row)
    for number, (name, grid) in enumerate(grids.items(), start=1):
        axes = figure.add_subplot(1, len(grids), number)
        axes.imshow(grid, vmin=1.0, vmax=highest, cmap="viridis", aspect="auto", origin="lower")
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                color = "white" if value < (1.0 + highest) / 2 else "black"
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=color)
        axes.set_title(name, fontsize=9)
        axes.set_xticks(range(len(x[1])), [str(value) for value in x[1]])
        axes.set_yticks(range(len(y[1])), [str(value) for value in y[1]])
        axes.set_xlabel(x[0])
        if number == 1:
            axes.set_ylabel(y[0])
    return figure
