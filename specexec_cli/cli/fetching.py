"""Downloads missing models, after saying whether they fit and how much it is, and one question."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from specexec_cli.catalog.downloads import Download, missing, pull
from specexec_cli.device import format_bytes
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, NotFetchedError, UnknownModelError
from specexec_cli.planning.alternatives import check_own_copy
from specexec_cli.planning.chosen_models import check_room, entries_of, to_fetch
from specexec_cli.planning.machine import described_site
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import Decision, resolve

_CHUNK_BYTES = 1 << 20


def fetch_first(request: Request, *, yes: bool, quiet: bool) -> None:
    """Downloads the models that a request needs and this machine lacks, if the user agrees.

    Args:
        yes: download without asking.
        quiet: show only errors and the question.
    Raises:
        OutOfMemoryError: the models would not fit this machine; nothing was downloaded.
        ConfigError: the target's own copy is to draft, but would not make it faster.
        UnknownModelError: a model is unknown or unreachable, or its licence was not accepted.
        NotFetchedError: nobody agreed, or the disk is too small.
    """
    downloads = to_fetch(request)
    if not downloads:
        return
    in_file = any(item.entry.file for item in downloads)
    decision = planned(request) if not in_file else None
    if decision is not None:
        check_own_copy(decision, models_file=request.models_file)
    agree(downloads, fit_line(decision), yes=yes, quiet=quiet)
    fetch_all(downloads, quiet=quiet)


def planned(request: Request) -> Decision | None:
    """Plans the request for this machine, before its models are downloaded.

    None for the method dsi, which may use other machines, and for a GGUF file that is missing: only
    the file itself tells how large its layers are.

    Raises:
        OutOfMemoryError: the models do not fit this machine.
    """
    if request.method == "dsi" or any(entry.file for entry in missing(entries_of(request))):
        return None
    request = request.with_estimated_prompt()
    return resolve(request, described_site(vram_bytes=0 if request.device == "cpu" else None))


def fit_line(decision: Decision | None) -> str:
    """A sentence that says where the target's layers would be; empty without a decision."""
    if decision is None:
        return ""
    places = {"resident": "on the GPU", "ram": "in RAM", "ssd": "on SSD"}
    if decision.plan.stays:
        return "It fits this machine: the whole target is loaded to stay."
    tiers = decision.plan.tiers
    counts = [f"{tiers.count(tier)} {where}" for tier, where in places.items() if tier in tiers]
    return f"It fits this machine, with {' and '.join(counts)} of {len(tiers)} layers."


def agree(downloads: Sequence[Download], fits: str, *, yes: bool, quiet: bool) -> None:
    """Says how much would be downloaded, and asks once.

    Args:
        fits: a sentence that says whether the models fit this machine; may be empty.
    Raises:
        UnknownModelError: the hub refuses a model.
        NotFetchedError: the answer is not yes, nobody can be asked, or the disk is too small.
    """
    for download in downloads:
        if download.obstacle:
            raise UnknownModelError(download.obstacle)
    free = check_room(downloads)
    amount = format_bytes(sum(download.fetch_bytes for download in downloads))
    if not yes and (quiet or not someone_is_there()):
        names = " and ".join(download.entry.name for download in downloads)
        raise NotFetchedError(
            f"{names} {'is' if len(downloads) == 1 else 'are'} not on this machine, and {amount} "
            "would have to be fetched: agree with --yes, or fetch it with `specexec pull`"
        )
    if not quiet:
        print(_described(downloads), file=sys.stderr)
        if fits:
            print(fits, file=sys.stderr)
        print(f"To fetch: {amount}; {format_bytes(free)} are free on the disk.", file=sys.stderr)
    if not yes and not said_yes(f"Fetch {amount}?"):
        raise NotFetchedError("nothing was fetched")


def said_yes(question: str) -> bool:
    """Asks on stderr; any answer except y and yes means no."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


def someone_is_there() -> bool:
    """Whether there is a terminal for a question and its answer."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def _described(downloads: Sequence[Download]) -> str:
    """One line per model: name, size, repository, and how much is on this machine already."""
    lines = []
    for item in downloads:
        entry = item.entry
        revision = f"@{entry.revision}" if entry.revision else ""
        line = f"Not here: {entry.name}, {format_bytes(item.total_bytes)}"
        if entry.name.partition("@")[0] != entry.repo:
            line += f" ({entry.repo}{revision})"
        if entry.file and entry.file not in entry.name:
            line += f", the file {entry.file}"
        if item.fetch_bytes < item.total_bytes:
            line += f", {format_bytes(item.total_bytes - item.fetch_bytes)} of it here already"
        if item.gated:
            line += ", gated (your licence is accepted)"
        lines.append(line)
    return "\n".join(lines)


def fetch_all(downloads: Sequence[Download], *, quiet: bool) -> None:
    """Downloads one model after another, under one bar; after Ctrl-C, finished parts stay.

    Raises:
        UnknownModelError, CheckpointError: the hub, the network or the disk failed.
    """
    bar = FetchBar(sum(item.fetch_bytes for item in downloads), shown=not quiet)
    stop = threading.Event()

    def came(n_bytes: int) -> None:
        if stop.is_set():
            raise _StoppedError  # ends the download thread that called this
        bar.advance(n_bytes)

    try:
        with _interruptible(stop):
            for download in downloads:
                bar.name(download.entry.name)
                pull(download, came)
    except KeyboardInterrupt:
        bar.close()
        if not quiet:
            print("stopped: the same command goes on where this was", file=sys.stderr)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    finally:
        bar.close()


class _StoppedError(Exception):
    """The user has stopped the download."""


@contextmanager
def _interruptible(stop: threading.Event) -> Iterator[None]:
    """Makes Ctrl-C set `stop` first, so that the threads end that huggingface_hub waits for."""
    from huggingface_hub import constants

    def interrupt(number: int, frame: object) -> None:
        stop.set()
        raise KeyboardInterrupt

    # The threads report after each chunk; the usual chunk of 10 MB takes long on a slow line.
    usual, constants.DOWNLOAD_CHUNK_SIZE = constants.DOWNLOAD_CHUNK_SIZE, _CHUNK_BYTES
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        constants.DOWNLOAD_CHUNK_SIZE = usual


class FetchBar:
    """Bytes, rate and time left of a download; silent unless stderr is a terminal."""

    def __init__(self, total_bytes: int, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(None), DownloadColumn(),
            TransferSpeedColumn(), TimeRemainingColumn(compact=True),
            console=Console(stderr=True), transient=True, expand=True,
            disable=not (shown and sys.stderr.isatty()),
        )  # fmt: skip
        self._task = self._progress.add_task("fetching", total=total_bytes)
        self._progress.start()

    def name(self, model: str) -> None:
        """Shows the name of the model that is being downloaded."""
        self._progress.update(self._task, description=model)

    def advance(self, n_bytes: int) -> None:
        """Adds downloaded bytes."""
        self._progress.advance(self._task, n_bytes)

    def close(self) -> None:
        """Clears the bar; idempotent."""
        self._progress.stop()
