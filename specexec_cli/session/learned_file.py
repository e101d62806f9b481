"""What sessions learn about a pair, kept on disk from one session to the next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specexec_cli.drafting.learned import Learned
from specexec_cli.loading import Notice
from specexec_cli.planning.expected_speed import Run, keep_run

_NAME = "learned.json"


class LearnedFile:
    """What is kept of one pair, as far as it holds on this machine, and its runs.

    Args:
        folder: the pair's.
        runs: see planning/expected_speed.py.
        settings: of the session; what an iteration costs depends on its offload tier, device and
            dtype.
        notice: told, in one line, if the file cannot be written.
    """

    def __init__(
        self, folder: Path, runs: Path, settings: Mapping[str, str], notice: Notice
    ) -> None:
        self._runs = runs
        self._path = folder / _NAME
        self._machine = " ".join(settings[name] for name in ("offload", "device", "dtype"))
        self._notice = notice

    def load(self, learned: Learned) -> None:
        """Adds what earlier sessions kept; nothing where that is missing or cannot be used."""
        learned.load(self._path, self._machine)

    def save(self, learned: Learned, run: Run) -> None:
        """Keeps it for later sessions, and what this one reached.

        What iterations cost beside other busy programs is not kept: a later session may be alone.
        """
        try:
            learned.save(self._path, self._machine, costs_too=not run.busy)
            keep_run(self._runs, run)
        except OSError as error:
            self._notice(
                f"what was learned about the pair cannot be kept in {self._path}: {error.strerror}"
            )
