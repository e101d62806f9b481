"""Keeps on disk what sessions learn about a pair."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specexec_cli.drafting.learned import Learned
from specexec_cli.loading import Notice
from specexec_cli.planning.expected_speed import Run, keep_run

_NAME = "learned.json"


class LearnedFile:
    """The files of what one pair's sessions learned and of their runs.

    Args:
        folder: the pair's folder.
        runs: the file of runs, see planning/expected_speed.py.
        settings: the session's settings. The cost of an iteration is kept for each combination of
            offload tier, device, dtype, rounding of rows, keys and values, and layers on other
            machines.
        notice: told, in one line, if a file cannot be written.
    """

    def __init__(
        self, folder: Path, runs: Path, settings: Mapping[str, str], notice: Notice
    ) -> None:
        self._runs = runs
        self._path = folder / _NAME
        names = ("offload", "device", "dtype", "activations", "kv", "hosts")
        self._machine = " ".join(settings[name] for name in names if name in settings)
        self._notice = notice

    def load(self, learned: Learned) -> None:
        """Adds what earlier sessions kept; adds nothing if the file is missing or unusable."""
        learned.load(self._path, self._machine)

    def save(self, learned: Learned, run: Run) -> None:
        """Writes what was learned, and this session's run, for later sessions.

        Costs of iterations that ran beside other busy programs are not kept: a later session may
        have the machine for itself.
        """
        try:
            learned.save(self._path, self._machine, costs_too=not run.busy)
            keep_run(self._runs, run)
        except OSError as error:
            self._notice(
                f"what was learned about the pair cannot be kept in {self._path}: {error.strerror}"
            )
