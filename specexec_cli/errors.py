"""The errors a user can meet, each with the exit code that README documents.

main() catches SpecexecError alone: any other exception is a bug of ours and shows its traceback.
A message says what, where, and the mend.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import ClassVar

INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it


class SpecexecError(Exception):
    """Base of every error shown to the user as one line."""

    exit_code: ClassVar[int] = 1


class ConfigError(SpecexecError):
    """An option, a prompt or a settings file that cannot be used."""

    exit_code = 2


class UnknownModelError(SpecexecError):
    """A model, pair, or draft that is not known, or not reachable."""

    exit_code = 3


class TokenizerMismatchError(SpecexecError):
    """Target and draft model do not share one vocabulary."""

    exit_code = 4


class CheckpointError(SpecexecError):
    """A checkpoint file that is missing, damaged, or of an unsupported kind."""

    exit_code = 5


class OutOfMemoryError(SpecexecError):
    """More bytes are needed than are free; the message names both and the flag to lower."""

    exit_code = 6


class StreamError(SpecexecError):
    """Reading or copying weights failed in the middle of a pass."""

    exit_code = 7


class NonFiniteLogitsError(SpecexecError):
    """The target produced NaN or infinite logits, so no token can be drawn from them."""

    exit_code = 8


class WorkerError(SpecexecError):
    """A DSI worker died, hung, or none is left."""

    exit_code = 9


def nearest(name: str, known: list[str]) -> str:
    """' Did you mean ...?' for the known name closest to `name`, or an empty string."""
    matches = get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean '{matches[0]}'?" if matches else ""
