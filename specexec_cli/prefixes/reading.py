"""Reads kept segments of a text straight into the caches, by a few threads, all of them or none.

A damaged file is deleted, and rows are used once every file was found whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path

from torch import Tensor

from specexec_cli.errors import StreamError
from specexec_cli.models.layer_state import LayerState
from specexec_cli.offload.reader import READER_THREADS
from specexec_cli.prefixes.kept_file import DamagedError, Form, KeptFile, Staging
from specexec_cli.prefixes.kept_rows import KeptRows
from specexec_cli.prefixes.segments import Segment
from specexec_cli.prefixes.tensor_bytes import fill_rows, form_of, like, taken

_ROW_DIMENSIONS = 4  # (1, heads, rows, size)


class UnreadError(Exception):
    """A file cannot be used; never shown.

    Args:
        name: of the file; None if no file can be, as where a machine is gone.
    """

    def __init__(self, name: str | None) -> None:
        super().__init__(name)
        self.name = name


def counts(layers: Sequence[LayerState]) -> tuple[int, int]:
    """How many tensors of rows, and of states at one length, are kept of layers, which all can be
    brought back."""
    of_each = [layer.kept_tensors or (0, 0) for layer in layers]
    return sum(rows for rows, _ in of_each), sum(states for _, states in of_each)


class Reading:
    """Brings back segments that follow one another, all or none of them.

    Args:
        folder: of their files.
        target: holds the text up to a token of the first segment, or up to its start.
        found: the segments; the last one has states where layers keep any.
        no_more: whether nobody wants them any longer.
    """

    def __init__(
        self,
        folder: Path,
        target: KeptRows,
        found: Sequence[Segment],
        no_more: Callable[[], bool],
    ) -> None:
        self._folder = folder
        self._target = target
        self._no_more = no_more
        self._have, self._stop = len(target.tokens), found[-1].stop
        self._layers = target.state.layers
        self._rows, states = counts(self._layers)
        self._found = [each for each in found if self._rows or (each.end and states)]
        self._states: list[Tensor] = []
        self._room: list[Tensor] = []
        self._like: list[Form] = []  # of the first segment's rows

    def run(self, prompt: Sequence[int]) -> None:
        """Reads the files, and gives the target its text.

        Raises:
            UnreadError: a file is damaged, gone, or cannot be read; the text is as before.
            OutOfMemoryError: there is no memory for the rows.
        """
        try:
            self._make_room()
            parts = [self._found[each::READER_THREADS] for each in range(READER_THREADS)]
            with ThreadPoolExecutor(READER_THREADS) as pool:
                list(pool.map(self._read, parts))
        except BaseException:
            self._give_back(self._have, ())
            raise
        self._give_back(self._stop, self._states)
        self._target.tokens = list(prompt[: self._stop])

    def _give_back(self, length: int, states: Sequence[Tensor]) -> None:
        """Ends the filling of the layers' room, of which the first `length` slots are rows."""
        waiting, device = iter(states), self._target.model.device
        if not states and any(layer.kept_tensors[1] for layer in self._layers):
            return  # what was filled lies behind the rows that there are
        try:
            for layer in self._layers:
                own = list(islice(waiting, layer.kept_tensors[1]))
                layer.bring_back(length, self._stop, own, device)
        except BaseException:
            self._target.crop(0)
            raise

    def _make_room(self) -> None:
        if not self._rows:
            return
        staging = Staging()
        try:
            with self._opened(self._found[0], staging) as file:
                self._like = file.forms[: self._rows]
        finally:
            staging.close()
        waiting = map(like, self._like)
        for layer in self._layers:
            own = list(islice(waiting, layer.kept_tensors[0]))
            self._room += layer.room_for(self._have, self._stop, own, self._target.model.device)

    def _read(self, part: Sequence[Segment]) -> None:
        """Reads some of the segments into the room of their rows."""
        staging = Staging()
        try:
            for segment in part:
                if self._no_more():
                    raise UnreadError(segment.name)
                with self._opened(segment, staging) as file:
                    self._read_one(segment, file)
        finally:
            staging.close()

    def _read_one(self, segment: Segment, file: KeptFile) -> None:
        had = max(self._have - segment.start, 0)  # of its rows
        rows = segment.stop - segment.start
        room = [form_of(each[:, :, :1].expand(-1, -1, rows, -1)) for each in self._room]
        if file.forms[: self._rows] != room:
            raise DamagedError("rows of another size")
        for index, view in file.tensors():
            tensor = taken(view, file.forms[index])
            if index < self._rows:
                at = segment.start + had - self._have
                fill_rows(self._room[index], at, tensor[:, :, had:])
            else:
                self._states.append(tensor.clone())

    @contextmanager
    def _opened(self, segment: Segment, staging: Staging) -> Iterator[KeptFile]:
        """A segment's file, with its header checked; deleted where it turns out to be damaged.

        Raises:
            UnreadError: the file is damaged, gone, or cannot be read.
        """
        path = self._folder / segment.name
        try:
            with closing(KeptFile(path, segment.key, staging)) as file:
                states = counts(self._layers)[1] if segment.end else 0
                if len(file.forms) != self._rows + states:
                    raise DamagedError("the number of tensors")
                if any(len(form.shape) != _ROW_DIMENSIONS for form in file.forms[: self._rows]):
                    raise DamagedError("rows of another kind")
                yield file
        except DamagedError:
            with suppress(OSError):
                path.unlink()
            raise UnreadError(segment.name) from None
        except StreamError:
            raise UnreadError(segment.name) from None
