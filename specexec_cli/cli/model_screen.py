"""The screen of `specexec models list`: what runs here and how fast, the models at hand first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from specexec_cli.catalog.found_files import FoundFile
from specexec_cli.catalog.models_file import PACKAGE_PREFIX, ModelEntry
from specexec_cli.device import format_bytes
from specexec_cli.planning.alternatives import Fit, rank
from specexec_cli.planning.machine import Setting, Site
from specexec_cli.planning.speed import figure

_NAME_COLUMNS = 31  # of the longest name in models.toml; a longer one has a line of its own
_HEADER = ("model", "tok/s", "llama.cpp", "fetch GB", "verdict")
_LINES_BESIDE = 10  # of a screen, for what stands above and below the rows, and the prompt
_FEWEST_ROWS = 8
_HERE_SHARE = 2  # models at hand take at most one row in this many

Row = tuple[str, str, str, str, str]


def sorted_fits(found: Sequence[Fit]) -> list[Fit]:
    """The most useful pairs first: those whose models are all here, then by `rank`."""
    return sorted(found, key=lambda fit: (fit.verdict.fetch_bytes == 0, rank(fit)), reverse=True)


def screen(
    found: Sequence[Fit],
    unpaired: Sequence[Fit],
    files: Sequence[FoundFile],
    site: Site,
    most_lines: int,
    word: str | None,
) -> list[str]:
    """The lines of one screen.

    Args:
        found: the pairs to list.
        unpaired: models without a draft model.
        files: models that other programs brought here.
        most_lines: lines of the terminal.
        word: by which the others were filtered; None lists no built-in toys.
    """
    pairs = [
        fit
        for fit in sorted_fits([*found, *unpaired])
        if word is not None or not _is_built_in(fit.target)
    ]
    here = [_pair_row(fit) for fit in pairs if fit.verdict.fetch_bytes == 0]
    here += [_size_row(_short(each), each.size_bytes, site.settings) for each in files]
    others = [_pair_row(fit) for fit in pairs if fit.verdict.fetch_bytes != 0]
    room = max(_FEWEST_ROWS, most_lines - _LINES_BESIDE)
    shown_here = here[: max(room // _HERE_SHARE, room - len(others))]
    shown = others[: room - sum(_height(row) for row in shown_here)]
    lines = [f"For {memory_words(site)}:", "", *_lines([_HEADER, *shown_here, *shown]), ""]
    lines += [
        "tok/s: predicted, with drafting; llama.cpp: plain, at its best split. *: gated.",
        "`specexec chat MODEL` runs one, `specexec plan MODEL` tells where it would lie.",
    ]
    if left := len(here) + len(others) - len(shown_here) - len(shown):
        lines.append(f"{left} more: `specexec models list WORD` filters, --all lists all.")
    return lines


def memory_words(site: Site) -> str:
    """The memory of a machine, as in `8.0 GB of GPU memory and 32.0 GB of RAM`."""
    vram, ram = (format_bytes(site.settings[name].value) for name in ("vram", "ram"))
    on_gpu = f"{vram} of GPU memory and " if site.settings["vram"].value else ""
    return f"{on_gpu}{ram} of RAM"


def _is_built_in(model: ModelEntry) -> bool:
    return model.repo.startswith(PACKAGE_PREFIX)


def _pair_row(fit: Fit) -> Row:
    verdict = fit.verdict
    fetch = "here" if verdict.fetch_bytes == 0 else _gigabytes(verdict.fetch_bytes)
    predicted = verdict.speed.typical if verdict.speed is not None else None
    speeds = (predicted, verdict.llama_cpp_tokens_per_s)
    own, other = ("-" if speed is None else figure(speed) for speed in speeds)
    return fit.pair.name, own, other, fetch + "*" * verdict.gated, verdict.words


def _gigabytes(n_bytes: int | None) -> str:
    if n_bytes is None:
        return "?"
    return f"{n_bytes / 1e9:.0f}" if n_bytes >= 1e11 else f"{n_bytes / 1e9:.3g}"


def _size_row(name: str, size: int, settings: Mapping[str, Setting]) -> Row:
    """The row of a file whose size alone is known: where it would lie, but no speed."""
    place = next(
        (words for key, words in (("vram", "GPU memory"), ("ram", "RAM"))
         if size <= settings[key].value),
        "SSD",
    )  # fmt: skip
    return name, "", "", "here", f"{format_bytes(size)}, from {place}" if size else ""


def _short(found: FoundFile) -> str:
    """A file's name as every command takes it, the home folder as ~."""
    if found.name != str(found.path):
        return found.name
    try:
        return str(Path("~") / found.path.relative_to(Path.home()))
    except ValueError:
        return found.name


def _height(row: Row) -> int:
    return 1 + (len(row[0]) > _NAME_COLUMNS)


def _lines(rows: Sequence[Row]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    widths[0] = min(widths[0], _NAME_COLUMNS)
    found = []
    for row in rows:
        name = row[0]
        if _height(row) > 1:
            found.append(name)
            name = ""
        cells = [name.ljust(widths[0]), *(
            cell.rjust(width) for cell, width in zip(row[1:4], widths[1:4], strict=True)
        ), row[4]]  # fmt: skip
        found.append("  ".join(cells).rstrip())
    return found
