"""What sessions learn about a pair, kept on disk from one session to the next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specexec_cli.drafting.learned import Learned
from specexec_cli.loading import Notice

_NAME = "learned.json"


class LearnedFile:
    """The file of one pair, and the part of it that holds on this machine.

    Args:
        folder: the pair's.
        settings: of the session; what an iteration costs depends on its offload tier, device and
            dtype.
        notice: told, in one line, if the file cannot be written.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str], notice: Notice) -> None:
        self._path = folder / _NAME
        self._machine = " ".join(settings[name] for name in ("offload", "device", "dtype"))
        self._notice = notice

    def load(self, learned: Learned) -> None:
        """Adds what earlier sessions kept; nothing where that is missing or cannot be used."""
        learned.load(self._path, self._machine)

    def save(self, learned: Learned) -> None:
        """Keeps it for later sessions."""
        try:
            learned.save(self._path, self._machine)
        except OSError as error:
            self._notice(
                f"what was learned about the pair cannot be kept in {self._path}: {error.strerror}"
            )
