"""The thread that writes rows of texts to disk while passes go on.

A committed row never changes until it is dropped, so rows are copied without a lock: one is held
only while it is looked up where they lie, as they may move into blocks that texts share. A target
counts in `cuts`, beforehand, how often rows are dropped; a file whose rows may have been dropped
while they were copied is thrown away.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import ref

from torch import Tensor

from specexec_cli.errors import OutOfMemoryError, clear_shortage
from specexec_cli.models.layer_state import LayerState
from specexec_cli.prefixes.folder import Bound, touch
from specexec_cli.prefixes.kept_file import Staging, file_bytes, write_file
from specexec_cli.prefixes.kept_rows import KeptRows
from specexec_cli.prefixes.segments import BLOCK_TOKENS, Segment
from specexec_cli.prefixes.tensor_bytes import form_of, put


class _OutdatedError(Exception):
    """Rows were dropped before they were written; never shown."""


@dataclass(frozen=True, slots=True)
class Job:
    """A segment of a text that is to be written.

    Attributes:
        cuts: the target's, when the segment's rows were there.
        before: every whole segment of the text in front of this one, and perhaps more behind.
        states: of an end, the layers' state behind its last token.
        missed: called if the segment was not written, since its rows were dropped.
    """

    target: KeptRows
    cuts: int
    segment: Segment
    before: Sequence[Segment]
    states: Sequence[Tensor]
    missed: Callable[[Segment], None]


@dataclass(frozen=True, slots=True)
class Used:
    """Segments of a text that has ended, in order. Their files count as used now, the first ones
    last: what many texts begin with leaves after that which goes on from it."""

    segments: Sequence[Segment]


class Writer:
    """Writes segments in the order in which they come.

    Args:
        folder: of the model's files; it is made at the first one.
        bound: what all files may take together.
        notice: told, in one line, why nothing is written any more.
    """

    def __init__(self, folder: Path, bound: Bound, notice: Callable[[str], None]) -> None:
        self._folder = folder
        self._bound = bound
        self._notice = notice
        self._jobs: deque[Job | Used] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._refused: tuple[ref[KeptRows], int] | None = None  # a text without room, and its cuts
        self.gave_up = False  # whether nothing is written any more

    def put(self, job: Job | Used) -> None:
        """Adds a segment, which is written soon, or a text that was used."""
        if self.gave_up:
            return
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefixes", daemon=True)
            self._thread.start()

    def wait(self, most_s: float) -> None:
        """Waits until every segment is written, but no longer than `most_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs or self.gave_up, most_s)

    def close(self, most_s: float | None = None) -> None:
        """Ends the thread after the segment that it writes now; idempotent.

        Args:
            most_s: the longest wait for it, where the process ends next; None waits as long as it
                takes, since the thread reads rows whose memory may be freed then.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(most_s)

    def _run(self) -> None:
        try:
            self._write_all()
        finally:  # nobody waits for a thread that has ended
            self._staging.close()
            with self._changed:
                self.gave_up = True
                self._jobs.clear()
                self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = self._jobs[0]
            try:
                with clear_shortage("rows of a text were to be kept"):
                    self._write(job)
            except _OutdatedError:
                assert isinstance(job, Job)
                job.missed(job.segment)
            except (OSError, OutOfMemoryError) as error:
                self._give_up(error)
                return
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()
            del job  # and with it the rows of a target that nobody else has

    def _give_up(self, error: OSError | OutOfMemoryError) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        self._notice(
            f"rows of this text cannot be kept in {self._folder} ({reason}): another session will "
            "compute them again"
        )

    def _write(self, job: Job | Used) -> None:
        if isinstance(job, Used):
            touch(self._folder / each.name for each in reversed(job.segments))
            return
        path = self._folder / job.segment.name
        if path.exists():
            touch([path])
            return
        tensors = [*_rows(job), *job.states]
        forms = [form_of(tensor) for tensor in tensors]
        if not forms or self._refused == (ref(job.target), job.cuts):
            return
        if not self._bound.make_room(file_bytes(forms), lambda: self._before(job)):
            self._refused = ref(job.target), job.cuts  # its beginning alone takes all the room
            return

        def fill(index: int, view: memoryview) -> None:
            put(tensors[index], view)
            if index == len(tensors) - 1:
                _check_current(job)

        # the folder was removed meanwhile, perhaps while it was made: it is a cache
        with suppress(FileNotFoundError, FileExistsError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(path, job.segment.key, forms, fill, self._staging)

    def _before(self, job: Job) -> list[Path]:
        """The files of the text's beginning."""
        whole = job.segment.start // BLOCK_TOKENS
        return [self._folder / each.name for each in job.before[:whole]]


def _check_current(job: Job) -> None:
    if job.target.cuts != job.cuts:
        raise _OutdatedError


def _rows(job: Job) -> list[Tensor]:
    """Views of the segment's rows in all layers."""
    layers: Sequence[LayerState] = job.target.state.layers
    found = [
        rows for layer in layers for rows in layer.kept_rows(job.segment.start, job.segment.stop)
    ]
    _check_current(job)
    return found
