"""The errors a user can meet, each with the exit code that docs/cli.md documents.

main() catches SpecexecError alone: any other exception is a bug of ours and shows its traceback.
A message says what is wrong, where, and how to mend it. It names settings in backquotes as Python
takes them, `budget` or `offload='ssd'`; the command line writes its options in their place.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import ClassVar

INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it
CLOSED_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE
_MOST_NAME = 200  # characters of a name that is compared with the known names
_MOST_CHARACTERS, _BEGINNING, _END = 1000, 700, 250  # of a message; both ends of a longer one
# How PyTorch, cuBLAS, Triton and a CPU's allocator say that memory ran out. Except for
# torch.OutOfMemoryError, which says so too, these are RuntimeErrors like any other. PyTorch says
# the last one inside the capture of a CUDA graph, where its search for memory to give back breaks
# the capture off (pytorch/pytorch#159594).
_SHORTAGES = (
    "out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED",
    "previous error during capture",
)  # fmt: skip


class SpecexecError(Exception):
    """Base of every error shown to the user as one line.

    A message may quote text of any length and content from a file, a hub or a request. So the
    middle of a long message is left out, and line breaks and a terminal's own codes are spelled
    out.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str) -> None:
        if len(message) > _MOST_CHARACTERS:
            message = f"{message[:_BEGINNING]} [...] {message[-_END:]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


class ConfigError(SpecexecError):
    """An option, a prompt, a settings file or an output that cannot be used."""

    exit_code = 2


class UnknownModelError(SpecexecError):
    """A model, pair or draft that is not known or not reachable."""

    exit_code = 3


class TokenizerMismatchError(SpecexecError):
    """Target and draft model do not share a tokenizer."""

    exit_code = 4


class CheckpointError(SpecexecError):
    """A checkpoint file that is missing, damaged, or of an unsupported kind."""

    exit_code = 5


class OutOfMemoryError(SpecexecError):
    """More memory is needed than is free, at the start or in the middle of a text."""

    exit_code = 6


class StreamError(SpecexecError):
    """Reading or copying weights failed in the middle of a pass."""

    exit_code = 7


class NonFiniteLogitsError(SpecexecError):
    """The target produced NaN or infinite logits, so no token can be drawn from them."""

    exit_code = 8


class WorkerError(SpecexecError):
    """A worker of DSI or of `hosts` died, hung, is not wanted, or none is left."""

    exit_code = 9


class NotFetchedError(SpecexecError):
    """A model is not here: nobody agreed to fetch it (`--yes`), or the disk is too full for it."""

    exit_code = 10


class ClaimLostError(SpecexecError):
    """A claim of a paper does not hold here (`specexec bench paper`); its report is written."""

    exit_code = 11


def nearest(name: str, known: list[str]) -> str:
    """' Did you mean ...?' for the known name closest to `name`, or an empty string."""
    if len(name) > _MOST_NAME:
        return ""  # comparing takes quadratic time
    begun = re.sub(r"[:_/\s]+", "-", name.lower())  # llama3.3:70b, as other programs write it
    matches = [one for one in known if len(begun) > 2 and one.startswith(begun)]
    matches = matches or get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean '{matches[0]}'?" if matches else ""


@contextmanager
def clear_shortage(what: str) -> Iterator[None]:
    """Turns a shortage of memory inside the block, a GPU's or the machine's, into one line.

    Args:
        what: what memory was missing for, as in "it ran out in a pass of 9 rows".
    Raises:
        OutOfMemoryError: in place of the library's own error.
    """
    try:
        yield
    except OutOfMemoryError as error:  # it became one line further inside
        traceback.clear_frames(error.__traceback__)
        raise
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if not (isinstance(error, MemoryError) or any(words in text for words in _SHORTAGES)):
            raise
        # whoever keeps the error must not keep the tensors that its frames refer to
        traceback.clear_frames(error.__traceback__)
        # "DefaultCPUAllocator: ..."; a MemoryError is Python's or numpy's
        if isinstance(error, MemoryError) or "CPUAllocator" in text:
            where, close, tier = "RAM", "Close other programs", "ssd"
        else:
            where, close, tier = "the GPU's memory", "Close what else runs on the GPU", "ram"
        raise OutOfMemoryError(
            f"{where} is too small: {what}. {close}, or use a smaller draft tree (`budget`), "
            f"a shorter text (`max_tokens`), or `offload='{tier}'`"
        ) from None
