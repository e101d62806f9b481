"""Keeps on disk, for each mixture, how often sessions used each expert."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_path

from specexec_cli.kept import file_name, numbers, read_json, write_json
from specexec_cli.loading import Notice
from specexec_cli.offload.experts import ExpertStore

_MOST = 1e6  # a file with a greater count is damaged
_DECIMALS = 3  # decimals of a stored count


class ExpertCounts:
    """The file of one model's expert counts.

    Args:
        model: the model's name on the hub, or its folder.
        notice: told, in one line, if the file cannot be written.
    """

    def __init__(self, model: str, notice: Notice) -> None:
        folder = user_cache_path("specexec", appauthor=False) / "experts"
        self._path: Path = folder / f"{file_name(model)}.json"
        self._notice = notice

    def load(self, experts: ExpertStore) -> None:
        """Starts to read the most used experts into memory; does nothing without a usable file."""
        try:
            counts = numbers(read_json(self._path), experts.scores.counts.shape, 0.0, _MOST)
            experts.scores.restore(counts)
        except ValueError:  # missing or damaged: counts start from zero
            return
        experts.warm()

    def save(self, experts: ExpertStore) -> None:
        """Writes the counts for later sessions."""
        try:
            write_json(self._path, experts.scores.counts.round(_DECIMALS).tolist())
        except OSError as error:
            self._notice(
                f"which experts were used most cannot be kept in {self._path}: {error.strerror}"
            )
