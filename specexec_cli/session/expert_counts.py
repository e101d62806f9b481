"""Which experts of a mixture earlier sessions used most, kept on disk per model."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_path

from specexec_cli.kept import file_name, numbers, read_json, write_json
from specexec_cli.loading import Notice
from specexec_cli.offload.experts import ExpertStore

_MOST = 1e6  # rows that a count can come to; beyond, the file is damaged
_DECIMALS = 3  # of a count


class ExpertCounts:
    """What is kept of one model's routing.

    Args:
        model: its name on the hub, or its folder.
        notice: told, in one line, if the file cannot be written.
    """

    def __init__(self, model: str, notice: Notice) -> None:
        folder = user_cache_path("specexec", appauthor=False) / "experts"
        self._path: Path = folder / f"{file_name(model)}.json"
        self._notice = notice

    def load(self, experts: ExpertStore) -> None:
        """Begins to read the experts used most; none where nothing is kept that can be used."""
        try:
            counts = numbers(read_json(self._path), experts.scores.counts.shape, 0.0, _MOST)
            experts.scores.restore(counts)
        except ValueError:  # a cache: it is counted anew
            return
        experts.warm()

    def save(self, experts: ExpertStore) -> None:
        """Keeps the counts for later sessions."""
        try:
            write_json(self._path, experts.scores.counts.round(_DECIMALS).tolist())
        except OSError as error:
            self._notice(
                f"which experts were used most cannot be kept in {self._path}: {error.strerror}"
            )
