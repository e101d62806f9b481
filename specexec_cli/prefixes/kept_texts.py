"""A session's view of kept prefixes: brings rows back before a text begins, and keeps new ones.

Rows are read by a few threads straight into the caches, and are used once every file of a prefix
was found whole. A damaged file is deleted, and the prefix ends in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import Event
from weakref import WeakKeyDictionary

from torch import Tensor

from specexec_cli.errors import StreamError
from specexec_cli.models.layer_state import ModelState
from specexec_cli.offload.reader import READER_THREADS
from specexec_cli.prefixes.folder import Bound, names_in, prefixes_folder, touch
from specexec_cli.prefixes.kept_file import DamagedError, Form, KeptFile, Staging
from specexec_cli.prefixes.kept_rows import KeptRows
from specexec_cli.prefixes.segments import BLOCK_TOKENS, Segment, Segments
from specexec_cli.prefixes.tensor_bytes import fill_rows, form_of, like, taken
from specexec_cli.prefixes.writer import Job, Used, Writer

_ROW_DIMENSIONS = 4  # (1, heads, rows, size)
LAST_WRITES_S = 10.0  # the longest that the end of a session waits for what is still to be written


class _Text:
    """What is known of the text that a target holds: its segments, and which were offered."""

    def __init__(self, identity: str) -> None:
        self.segments = Segments(identity)
        self.cuts = -1  # the target's, when the text was last looked at
        self.offered = 0  # whole segments that are on disk, or are to be
        self.ends: list[int] = []  # lengths whose states are
        self.number = 0  # of the texts that have begun, where only what several have is kept

    def follow(self, tokens: Sequence[int]) -> None:
        """Goes over to a text that may differ."""
        self.offered = min(self.offered, self.segments.follow(tokens))
        self.ends = [end for end in self.ends if end <= self.offered * BLOCK_TOKENS]

    def missed(self, segment: Segment) -> None:
        """Notes that a segment is not on disk; called by the thread that writes."""
        if segment.end:
            with suppress(ValueError):
                self.ends.remove(segment.stop)
        else:
            self.offered = min(self.offered, segment.start // BLOCK_TOKENS)


class KeptTexts:
    """Keeps the rows of texts of one model in a folder, and brings them back.

    Args:
        name: of the folder: readable, and another one for other weights and other arithmetic.
        identity: of all that a row's bits depend on, besides the tokens up to it.
        bound: what the files of all models may take together.
        notice: told, in one line, why nothing is kept any more.
    """

    def __init__(
        self, name: str, identity: str, bound: Bound, notice: Callable[[str], None]
    ) -> None:
        self._folder = prefixes_folder() / name
        self._identity = identity
        self._writer = Writer(self._folder, bound, notice)
        self._texts = WeakKeyDictionary[KeptRows, _Text]()
        self._begun = 0  # texts so far
        self.read_no_more = Event()  # ends `bring_back` in another thread, which brings nothing
        self._first: dict[str, int] | None = None  # the text that first had a segment, by its name

    def keep_beginnings_alone(self) -> None:
        """Keeps from now on only what two texts of this session have in common."""
        self._first = {}

    def _text_of(self, target: KeptRows) -> _Text | None:
        """What is known of the target's text; None if its layers cannot be brought back."""
        if any(layer.kept_tensors is None for layer in target.state.layers):
            return None
        return self._texts.setdefault(target, _Text(self._identity))

    def bring_back(
        self,
        target: KeptRows,
        prompt: Sequence[int],
        no_more: Callable[[], bool] = lambda: False,
    ) -> None:
        """Gives a target the rows of a prompt's beginning that are on disk, where it has fewer.

        Args:
            target: holds a proper prefix of the prompt, or nothing.
            prompt: its last token's row is never brought back: the next token follows from it.
            no_more: polled before each file, by several threads; once it is true, nothing is
                brought back.
        Raises:
            OutOfMemoryError: there is no memory for the rows.
        """

        def ended() -> bool:
            return self.read_no_more.is_set() or no_more()

        most, have = len(prompt) - 1, len(target.tokens)
        text = self._text_of(target)
        if text is not None and self._first is not None:
            self._begun += 1
            text.number, text.offered, text.ends = self._begun, 0, []
        if text is None or most - have < BLOCK_TOKENS:
            return
        text.follow(prompt[:most])
        text.cuts = target.cuts
        names = names_in(self._folder)
        while found := _longest(text.segments, target.state, have, names):
            try:
                _Reading(self._folder, target, found, ended).run(prompt)
            except _UnreadError as error:
                if ended():
                    return
                names.discard(error.name)
                continue
            stop = found[-1].stop
            text.offered = max(text.offered, stop // BLOCK_TOKENS)
            if found[-1].end:
                text.ends.append(stop)
            touch(self._folder / each.name for each in reversed(found))
            break
        # where this text parts from those on disk, whose states may all lie elsewhere
        missing = (each.start for each in text.segments.blocks if each.name not in names)
        target.keep_at(next(missing, most))

    def offer(self, target: KeptRows, *, length: int | None = None, ended: bool = False) -> None:
        """Has new segments of a target's text written, in the background.

        Args:
            length: tokens of the text, where those behind them are only supposed to follow.
            ended: whether the text has ended, so that its last state is worth keeping.
        """
        text = None if self._writer.gave_up else self._text_of(target)
        if text is None:
            return
        tokens = target.tokens[:length]
        whole = len(tokens) // BLOCK_TOKENS
        news = ended or whole > text.offered or target.state.kept_ends() is not None
        if text.cuts == target.cuts and not news:
            return
        text.follow(tokens)
        text.cuts = target.cuts
        first, text.offered = text.offered, max(text.offered, whole)
        for segment in text.segments.blocks[first:whole]:
            self._put(target, text, segment, ())
        for length in _worthwhile(target, len(tokens), text.ends, ended):
            states = [state for layer in target.state.layers for state in layer.kept_state(length)]
            text.ends.append(length)
            self._put(target, text, text.segments.end(length), states)
        if ended:
            self._writer.put(Used(text.segments.blocks[:whole]))

    def _put(
        self, target: KeptRows, text: _Text, segment: Segment, states: Sequence[Tensor]
    ) -> None:
        first = self._first
        if first is not None and first.setdefault(segment.name, text.number) == text.number:
            return
        before = text.segments.blocks
        self._writer.put(Job(target, target.cuts, segment, before, states, text.missed))

    def flush(self, most_s: float = LAST_WRITES_S) -> None:
        """Waits until what was offered is on disk, but no longer than `most_s` seconds."""
        self._writer.wait(most_s)

    def close(self, most_s: float = LAST_WRITES_S, last_s: float | None = None) -> None:
        """Writes what was offered, for `most_s` seconds at most, and ends the thread.

        Idempotent.

        Args:
            last_s: see Writer.close, of the segment that is being written by then.
        """
        self.flush(most_s)
        self._writer.close(last_s)
        self._texts.clear()


def _worthwhile(target: KeptRows, now: int, known: Sequence[int], ended: bool) -> list[int]:
    """The lengths up to `now` whose states are to be kept: each spares a segment's tokens at
    least."""
    lengths = target.state.kept_ends()
    if lengths is None:
        return []
    found = list[int]()
    for length in sorted(lengths):
        if length > now or (length == now and not ended):
            continue
        if not any(0 <= length - other < BLOCK_TOKENS for other in (0, *known, *found)):
            found.append(length)
    return found


def _longest(segments: Segments, state: ModelState, have: int, names: set[str]) -> list[Segment]:
    """The segments on disk that bring a text the farthest beyond `have` tokens; none if none do."""
    rows = sum(layer.kept_tensors[0] for layer in state.layers)
    with_states = any(layer.kept_tensors[1] for layer in state.layers)
    first = have // BLOCK_TOKENS
    whole = list[Segment]()
    for segment in segments.blocks[first:]:
        if rows and segment.name not in names:
            break
        whole.append(segment)
    if not with_states:
        return whole
    for end in segments.ends_among(names):
        if end.stop <= have:
            break
        if end.start <= (first + len(whole)) * BLOCK_TOKENS:
            before = [each for each in whole if each.stop <= end.start] if rows else []
            return [*before, end]
    return []


class _UnreadError(Exception):
    """A file cannot be used; never shown.

    Args:
        name: of the file.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Reading:
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
        self._found = found
        self._no_more = no_more
        self._have, self._stop = len(target.tokens), found[-1].stop
        self._layers = target.state.layers
        self._rows = sum(layer.kept_tensors[0] for layer in self._layers)
        self._states: list[Tensor] = []
        self._room: list[Tensor] = []
        self._like: list[Form] = []  # of the first segment's rows

    def run(self, prompt: Sequence[int]) -> None:
        """Reads the files, and gives the target its text.

        Raises:
            _UnreadError: a file is damaged, gone, or cannot be read; the text is as before.
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
                    raise _UnreadError(segment.name)
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
            _UnreadError: the file is damaged, gone, or cannot be read.
        """
        path = self._folder / segment.name
        try:
            with closing(KeptFile(path, segment.key, staging)) as file:
                counts = sum(layer.kept_tensors[1] for layer in self._layers) if segment.end else 0
                if len(file.forms) != self._rows + counts:
                    raise DamagedError("the number of tensors")
                if any(len(form.shape) != _ROW_DIMENSIONS for form in file.forms[: self._rows]):
                    raise DamagedError("rows of another kind")
                yield file
        except DamagedError:
            with suppress(OSError):
                path.unlink()
            raise _UnreadError(segment.name) from None
        except StreamError:
            raise _UnreadError(segment.name) from None
