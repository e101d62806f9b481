"""What runs on this machine reached, kept per pair: `plan` shows it beside what it predicts.

It knows no models and no sessions; whoever decodes tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from platformdirs import user_cache_path

from specexec_cli.kept import file_name, is_number, read_json, write_json

_KEPT_RUNS = 20
# What a file may say of tokens, passes and seconds; beyond, it is damaged.
_LEAST, _MOST = 1e-9, 1e12
_FEWEST_TOKENS = 16  # behind the first pass; of fewer a run says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One session's generations together, without their first passes: those carry the prompts."""

    date: str  # as in 2026-11-22
    offload: str  # tiers in use
    device: str
    tokens: int
    passes: int
    seconds: float
    busy: bool = False  # other programs were, meanwhile

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes


def runs_file(target_repo: str, draft_repo: str | None) -> Path:
    """Where a pair's runs are kept."""
    name = file_name(target_repo, draft_repo or "plain")
    return user_cache_path("specexec", appauthor=False) / "runs" / f"{name}.json"


def keep_run(path: Path, run: Run) -> None:
    """Adds a run, where it was long enough to say anything.

    Raises:
        OSError: the folder cannot be written.
    """
    if run.tokens < _FEWEST_TOKENS or not run.seconds or not run.passes:
        return
    runs = [*load_runs(path), run][-_KEPT_RUNS:]
    write_json(path, [asdict(each) for each in runs])


def load_runs(path: Path) -> Sequence[Run]:
    """The runs kept there, the oldest first; none where the file is missing or damaged."""
    try:
        runs = [Run(**each) for each in read_json(path)]
    except (ValueError, TypeError):  # a cache: it fills again
        return []
    return runs if all(_usable(run) for run in runs) else []


def _usable(run: Run) -> bool:
    words = (run.date, run.offload, run.device)
    numbers = (run.tokens, run.passes, run.seconds)
    words_right = all(type(word) is str for word in words) and type(run.busy) is bool
    return words_right and all(is_number(number, _LEAST, _MOST) for number in numbers)
