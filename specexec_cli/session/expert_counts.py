"""Which experts of a mixture earlier sessions used most, kept on disk per model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from platformdirs import user_cache_path

from specexec_cli.loading import Notice
from specexec_cli.offload.experts import ExpertStore


class ExpertCounts:
    """What is kept of one model's routing.

    Args:
        model: its name on the hub, or its folder.
        notice: told, in one line, if the file cannot be written.
    """

    def __init__(self, model: str, notice: Notice) -> None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.")
        folder = user_cache_path("specexec", appauthor=False) / "experts"
        self._path: Path = folder / f"{name}.npy"
        self._notice = notice

    def load(self, experts: ExpertStore) -> None:
        """Begins to read the experts used most; none where nothing is kept that can be used."""
        try:
            kept = np.load(self._path, allow_pickle=False)
            experts.scores.restore(np.asarray(kept, dtype=np.float64))
        except (OSError, ValueError, TypeError, EOFError):  # a cache: it is counted anew
            return
        experts.warm()

    def save(self, experts: ExpertStore) -> None:
        """Keeps the counts for later sessions."""
        partial = self._path.with_suffix(".partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                np.save(file, experts.scores.counts, allow_pickle=False)
            partial.replace(self._path)
        except OSError as error:
            self._notice(
                f"which experts were used most cannot be kept in {self._path}: {error.strerror}"
            )
