"""States of recurrent layers: what a layer made of all tokens so far, along a tree's branches.

No token can be taken out of such a state again. So three things are kept: the state behind the last
committed row, the state behind the pending rows of the present pass, and the inputs of draft nodes,
which are a small part of a state's size. A node's state is made from its ancestors' inputs whenever
it is needed, and commit makes that of the accepted path. Both are the sums of a pass over the path
alone, bit for bit.

A text that is cropped goes back to a checkpoint: a state that was kept on the way. Checkpoints are
where a turn of a chat ended and another began, a little before the end of a prompt, whose last
tokens the next prompt may lack, every so many tokens, and where another text is known to part.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
from specexec_kernels import recurrence
from specexec_kernels.cpu_recurrence_ir import UNROLL
from specexec_kernels.recurrence import Order
from torch import Tensor
from torch.nn import functional

from specexec_cli.errors import CheckpointError
from specexec_cli.models.layer_state import Ints, LayerState
from specexec_cli.planning.memory import CHECKPOINTS
from specexec_cli.transfers import sent

_TURN_ROWS = 8  # a pass with as many pending rows or more reads a prompt
_BEFORE_END = 16  # tokens between a prompt's last checkpoint and its end
_EVERY = 1024  # tokens between checkpoints in a long text
_MOST_DECAYS = 1 << 21  # of Mamba-1's channels at a time
# Channels that run together are a multiple of this, so that those of a GPU's kernel are cut into
# its blocks in one way for any number of rows.
_WHOLE_CHANNELS = 256


class RecurrentState(LayerState):
    """A state that each row makes of its parent's.

    Slots up to `committed` are in `base`, those up to `settled` in `head`, and the rows behind them
    are kept as inputs. A subclass says what a state is and how rows change it.
    """

    row_dim = 1
    kept_tensors = (0, 1)

    base: tuple[Tensor, ...]
    head: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]  # of the rows behind `settled`
    parents: list[int]  # slots of their parents
    committed: int
    settled: int
    checkpoints: dict[int, tuple[Tensor, ...]]  # length -> the state, in RAM; lengths rise
    keeps_checkpoints = True  # False: another state of the same text does, see shared_cache.py
    _turn: int  # where a turn began
    _parting: int  # where another text parts from this one
    _read_to: int  # how far prompts were read

    def __init__(self) -> None:
        super().__init__()
        self.release()

    def begin(self, parents: Ints, pending: int) -> None:
        """See LayerState; tells a turn's first pass from those that go on with reading it."""
        super().begin(parents, pending)
        if pending < _TURN_ROWS:
            return
        if self._start != self._read_to:
            self._turn = self._start
        elif (near_end := self._read_to - _BEFORE_END) != self._turn:
            self.checkpoints.pop(near_end, None)  # the prompt's end is farther on
        self._read_to = self._start + pending

    def keep_at(self, length: int) -> None:
        """See LayerState; of several lengths that are still to come, the greatest counts."""
        self._parting = max(length, self._parting if self._parting > self.length else 0)

    @abstractmethod
    def outputs(self, inputs: tuple[Tensor, ...], parents: Sequence[int], first: int) -> Tensor:
        """What the layer goes on with for each row from `first` on, (rows, ...).

        Args:
            inputs: (n, ...) each, rows that come behind `head`.
            parents: each row's parent among them, -1 for `head`.
        """

    @abstractmethod
    def after(
        self, state: tuple[Tensor, ...], inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The outputs of a chain of rows behind a state, and the state behind the last of them."""

    @abstractmethod
    def empty(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The state before the first token, of the sizes that these inputs have."""

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> Tensor:
        """Appends (1, n, ...) inputs; returns (1, n, ...) outputs. See LayerState."""
        inputs = tuple(part[0] for part in rows)
        self.device = inputs[0].device
        if not self.base:
            self.base = self.head = self.empty(inputs)
        first, count = self.length, len(parents)
        settled = self._settled(first, count, parents)
        self.length += count
        found = []
        if settled:
            found += self._settle(tuple(part[:settled] for part in inputs))
        if settled < count:
            rest = tuple(part[settled:] for part in inputs)
            kept = len(self.parents)
            self.parents += parents[settled:].tolist()
            if kept:
                rest = tuple(torch.cat(both) for both in zip(self.inputs, rest, strict=True))
            self.inputs = rest
            behind = [max(parent - self.settled, -1) for parent in self.parents]
            found.append(self.outputs(self.inputs, behind, kept))
        return (found[0] if len(found) == 1 else torch.cat(found))[None]

    def _settled(self, first: int, count: int, parents: Ints) -> int:
        """How many of the next rows continue the committed text, so that only their end is kept."""
        if self.parents:
            return 0
        pending = min(max(self._start + self._pending - first, 0), count)
        straight = parents[:pending] == np.arange(first - 1, first - 1 + pending)
        return pending if straight.all() else 0

    def _settle(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """The outputs of rows that continue the committed text, on whose way states are kept."""
        first, count = self.settled, len(inputs[0])
        stops = [stop for stop in self._stops() if first <= stop < first + count]
        if stops and stops[0] == first:
            self._keep()
        outputs = []
        for stop in [*stops, first + count]:
            if rows := stop - self.settled:
                begun = self.settled - first
                part = tuple(each[begun : begun + rows] for each in inputs)
                # on one line: Ctrl-C comes between two, and a head that is ahead would stay
                (found, self.head), self.settled = self.after(self.head, part), stop
                outputs.append(found)
                if stop < first + count:
                    self._keep()
        return outputs

    def _stops(self) -> list[int]:
        """The lengths at which the present pass keeps a copy of the state, rising."""
        end = self._start + self._pending
        if self._pending < _TURN_ROWS or not self.keeps_checkpoints:
            return []
        between = range(self._start + _EVERY, end - _BEFORE_END, _EVERY)
        turn = {self._start} & {self._turn}
        parting = {self._parting} if self._start < self._parting < end else set()
        return sorted({*turn, *parting, *between, max(end - _BEFORE_END, self._start)} - {0})

    def _keep(self) -> None:
        """Makes a checkpoint of `head`, and drops one if there are too many.

        That one goes whose neighbours lie the closest beside its distance from the text's end, so
        that checkpoints become rarer towards the beginning; never where the last turn began, nor,
        while a prompt is read, where another text parts from it.
        """
        kept = self.checkpoints
        needed = {self._turn, self._parting if self.settled < self._read_to else 0}
        kept.pop(self.settled, None)
        kept[self.settled] = tuple(part.cpu() for part in self.head)
        if len(kept) > CHECKPOINTS:
            around = [0, *kept]
            gaps = {
                at: (around[place + 1] - around[place - 1]) / (self.settled - at)
                for place, at in enumerate(around[:-1])
                if place and at not in needed
            }
            del kept[min(gaps, key=lambda at: gaps[at])]

    def _path(self, slot: int) -> list[int]:
        """The kept rows from the first behind `head` to a slot, as indices into `inputs`."""
        path: list[int] = []
        while slot >= self.settled:
            path.insert(0, slot - self.settled)
            slot = self.parents[slot - self.settled]
        assert slot == self.settled - 1, "every kept row comes behind the pending ones"
        return path

    def _state_at(self, length: int) -> tuple[Tensor, ...]:
        """The state behind slot `length` - 1."""
        if length == self.committed:
            return self.base
        if length < self.committed:
            return tuple(part.to(self.device) for part in self.checkpoints[length])
        path = torch.tensor(self._path(length - 1), dtype=torch.int64)
        if not len(path):
            return self.head
        path = path.to(self.device)
        return self.after(self.head, tuple(part[path] for part in self.inputs))[1]

    def commit(self, prefix_len: int, slots: Tensor) -> None:
        """See LayerState: makes the state behind the accepted path, and drops all else."""
        assert prefix_len >= self.settled, "pending rows are committed together"
        path = [*range(self.settled, prefix_len), *slots.tolist()]
        state = self._state_at(path[-1] + 1 if path else self.settled)
        self._stand_at(state, prefix_len + len(slots))
        if self.committed - max(self.checkpoints, default=0) >= _EVERY:
            self._keep()

    def reachable(self, length: int) -> int:
        """The greatest length up to `length` that `crop` and `copy` can go back to."""
        if length >= self.settled:
            return min(length, self.length)
        if length >= self.committed:
            return self.committed
        return max((at for at in self.checkpoints if at <= length), default=0)

    def crop(self, length: int) -> None:
        """Drops every slot from `length` on."""
        if not length:
            if self.length:  # otherwise a length to keep is still to come
                self.release()
        elif length <= self.committed:
            if length < self.committed:
                self._parting = 0  # of the text that was
            self._stand_at(self._state_at(length), length)
        else:
            kept = length - self.settled
            inputs = tuple(part[:kept] for part in self.inputs) if kept else ()
            self.inputs, self.parents, self.length = inputs, self.parents[:kept], length
        self._forget_behind(self.settled)

    def _stand_at(self, state: tuple[Tensor, ...], length: int) -> None:
        """Makes a state that of the committed text, and drops all else but checkpoints.

        In one call: Ctrl-C comes between two lines, and nothing would tell which of them had run.
        """
        self.__dict__.update(
            base=state, head=state, inputs=(), parents=[],
            committed=length, settled=length, length=length,
        )  # fmt: skip

    def _forget_behind(self, length: int) -> None:
        """Drops the checkpoints of longer texts."""
        self.checkpoints = {at: kept for at, kept in self.checkpoints.items() if at <= length}

    def copy(self, other: Self, length: int) -> None:
        """Replaces this state by another text's first `length` slots."""
        self.release()
        if length:
            self.device = other.device
            self._stand_at(other._state_at(length), length)
            if self.keeps_checkpoints:
                self.checkpoints = dict(other.checkpoints)
                self._forget_behind(length)

    def kept_ends(self) -> set[int]:
        """The lengths of checkpoints, and that of the committed text."""
        return {*self.checkpoints, self.committed} - {0}

    def kept_state(self, length: int) -> list[Tensor]:
        """See LayerState."""
        return list(self.base if length == self.committed else self.checkpoints[length])

    def bring_back(
        self, length: int, filled: int, state: Sequence[Tensor], device: torch.device
    ) -> None:
        """See LayerState; checkpoints of the same text stay."""
        self._forget_behind(length)
        self.device = device
        self._stand_at(tuple(part.to(device) for part in state), length)

    def release(self) -> None:
        """Drops every slot and frees all memory."""
        self.checkpoints = {}
        self._stand_at((), 0)
        self._turn, self._read_to, self._parting = 0, -1, 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        both = self.base if self.head is self.base else (*self.base, *self.head)
        kept = (part for state in self.checkpoints.values() for part in state)
        parts = {id(part): part for part in (*both, *self.inputs, *kept)}
        return sum(part.numel() * part.element_size() for part in parts.values())


class Windows(RecurrentState):
    """The last inputs of a causal convolution over tokens.

    Rows are (1, n, channels). The output of a row is its window: its own input and those of its
    `width` - 1 nearest ancestors, the farthest first, zeros before the first token.

    Args:
        width: tokens that the convolution sees.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__()

    def empty(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See RecurrentState: no token has been seen."""
        return (inputs[0].new_zeros(self.width - 1, inputs[0].shape[1]),)

    def after(
        self, state: tuple[Tensor, ...], inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See RecurrentState; outputs are (n, width, channels)."""
        seen = torch.cat([state[0], inputs[0]])
        windows = seen.unfold(0, self.width, 1).transpose(1, 2)
        return windows, (seen[len(inputs[0]) :].clone(),)

    def outputs(self, inputs: tuple[Tensor, ...], parents: Sequence[int], first: int) -> Tensor:
        """See RecurrentState; (rows, width, channels)."""
        before = self.width - 1
        seen = torch.cat([self.head[0], inputs[0]])
        # places in `seen`: the tail of the committed text, each token behind the one before it,
        # and then the rows; the first token's parent is never looked at
        above = [*range(-1, before - 1), *(before + parent for parent in parents)]
        places = []
        for row in range(first, len(parents)):
            place, window = before + row, []
            for _ in range(self.width):
                window.append(place)
                place = above[place]
            places.append(window[::-1])
        return seen[torch.tensor(places, dtype=torch.int64, device=seen.device)]


class Recurrence(RecurrentState):
    """The matrix that each head of a linear recurrence keeps; see specexec_kernels.recurrence.

    Rows are queries and keys (1, n, key_heads, key_dim), values (1, n, heads, value_dim), decays
    (1, n, heads) or (1, n, heads, key_dim) and betas (1, n, heads), all float32. The outputs are
    (1, n, heads, value_dim).

    Args:
        corrects: whether rows write by the delta rule.
    """

    def __init__(self, *, corrects: bool) -> None:
        self.corrects = corrects
        super().__init__()

    def empty(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See RecurrentState: zeros.

        Raises:
            CheckpointError: the config asks for heads that no recurrence can have.
        """
        _, keys, values, _, _ = inputs
        if values.shape[1] % keys.shape[1] or keys.shape[2] % UNROLL:
            raise CheckpointError(
                f"the config gives a recurrent layer {values.shape[1]} heads that share "
                f"{keys.shape[1]} key heads of {keys.shape[2]} dimensions, which is not supported: "
                "get another copy of the model"
            )
        heads, padded = values.shape[1], recurrence.padded_dim(values.shape[2])
        return (keys.new_zeros(heads, keys.shape[2], padded),)

    def after(
        self, state: tuple[Tensor, ...], inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See RecurrentState."""
        outputs, last = self._run(state[0], inputs, _chain(len(inputs[0])))
        return outputs, (last,)

    def outputs(self, inputs: tuple[Tensor, ...], parents: Sequence[int], first: int) -> Tensor:
        """See RecurrentState."""
        order = _depth_first(tuple(parents), first)
        return self._run(self.head[0], inputs, order)[0][first:]

    def _run(
        self, state: Tensor, inputs: tuple[Tensor, ...], order: Order
    ) -> tuple[Tensor, Tensor]:
        queries, keys, values, decays, betas = inputs
        missing = state.shape[2] - values.shape[2]
        padded = functional.pad(values, (0, missing)) if missing else values
        outputs, last = recurrence.recurrence(
            state, queries, keys, padded, decays, betas, order, corrects=self.corrects
        )
        return outputs[..., : values.shape[2]], last


class SelectiveScan(RecurrentState):
    """The states of Mamba-1's channels: each element decays at a rate of its own.

    Rows are queries and keys (1, n, 1, states), values and steps (1, n, channels), and rates (1, n,
    states, channels), the same for every row, all float32. The outputs are (1, n, channels). The
    rates are a layer's weights, which are gone when a path is committed; they are kept beside the
    state.
    """

    kept_tensors = (0, 2)  # the rates are kept beside the state on disk too

    rates: Tensor | None = None  # (states, channels)

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> Tensor:
        """See RecurrentState; takes the rates from the rows."""
        self.rates = rows[-1][0, 0]
        return super().append(rows[:-1], parents)

    def empty(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See RecurrentState: zeros, and the rates.

        Raises:
            CheckpointError: the config asks for states that no recurrence can have.
        """
        assert self.rates is not None, "rows bring rates"
        states, channels = self.rates.shape
        if states % UNROLL:
            raise CheckpointError(
                f"the config gives a channel of a recurrent layer {states} states, which is not "
                "supported: get another copy of the model"
            )
        padded = functional.pad(self.rates, (0, recurrence.padded_dim(channels) - channels))
        padded = padded.contiguous()  # as they are when they come back from disk
        return padded.new_zeros(1, *padded.shape), padded

    def after(
        self, state: tuple[Tensor, ...], inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See RecurrentState."""
        outputs, last = self._run(state, inputs, _chain(len(inputs[0])))
        return outputs, (last, state[1])

    def outputs(self, inputs: tuple[Tensor, ...], parents: Sequence[int], first: int) -> Tensor:
        """See RecurrentState."""
        order = _depth_first(tuple(parents), first)
        return self._run(self.head, inputs, order)[0][first:]

    def _run(
        self, state: tuple[Tensor, ...], inputs: tuple[Tensor, ...], order: Order
    ) -> tuple[Tensor, Tensor]:
        """Runs some channels at a time: decays are many times as large as rows."""
        (before, rates), (queries, keys, values, steps) = state, inputs
        rows, channels = values.shape
        missing = rates.shape[1] - channels
        values, steps = (functional.pad(part, (0, missing)) for part in (values, steps))
        betas = torch.ones(rows, 1, device=values.device)
        width = recurrence.padded_dim(max(1, _MOST_DECAYS // (rows * len(rates))))
        width += -width % _WHOLE_CHANNELS
        outputs, last = [], []
        for channel in range(0, rates.shape[1], width):
            own = slice(channel, channel + width)
            decays = torch.exp(steps[:, None, own] * rates[:, own])
            found = recurrence.recurrence(
                before[..., own], queries, keys, values[:, None, own], decays[:, None], betas,
                order, corrects=False,
            )  # fmt: skip
            outputs.append(found[0][:, 0])
            last.append(found[1])
        return torch.cat(outputs, dim=1)[:, :channels], torch.cat(last, dim=2)


@lru_cache(maxsize=16)
def _chain(rows: int) -> Order:
    return Order.chain(rows)


@lru_cache(maxsize=16)
def _depth_first(parents: tuple[int, ...], first: int) -> Order:
    """The order of a tree's rows from `first` on; all layers of a pass ask for the same."""
    return Order.depth_first(parents, range(first, len(parents)))


class Parts(LayerState):
    """The state of a layer that keeps several, each with rows of its own: `parts`.

    Where one of them is keys and values, it is the last.
    """

    def __init__(self, *parts: LayerState) -> None:
        super().__init__()
        self.parts = parts

    @property
    def length(self) -> int:  # type: ignore[override]
        """Slots that every part has."""
        return min(part.get_seq_length() for part in self.parts)

    @property
    def device(self) -> torch.device:
        """Where the parts lie; the CPU where one of them waits in RAM."""
        return min((part.device for part in self.parts), key=lambda each: each.type != "cpu")

    def begin(self, parents: Ints, pending: int) -> None:
        """See LayerState."""
        for part in self.parts:
            part.begin(parents, pending)

    def reserve(self, slots: int) -> None:
        """See LayerState."""
        for part in self.parts:
            part.reserve(slots)

    def keep_at(self, length: int) -> None:
        """See LayerState."""
        for part in self.parts:
            part.keep_at(length)

    def append(self, rows: tuple[Tensor, ...], parents: Ints) -> Any:
        """Not to be called: rows are appended to a part."""
        raise NotImplementedError

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> Any:
        """Appends keys and values, as attention in a layer beside a recurrence asks."""
        return self.parts[-1].update(key_states, value_states)

    def commit(self, prefix_len: int, slots: Tensor) -> None:
        """See LayerState."""
        for part in self.parts:
            part.commit(prefix_len, sent(slots, part.device) if len(slots) else slots)

    def reachable(self, length: int) -> int:
        """See LayerState: what every part can go back to."""
        while (least := min(part.reachable(length) for part in self.parts)) < length:
            length = least
        return length

    def crop(self, length: int) -> None:
        """See LayerState."""
        for part in self.parts:
            part.crop(length)

    def copy(self, other: Self, length: int) -> None:
        """See LayerState."""
        for own, theirs in zip(self.parts, other.parts, strict=True):
            own.copy(theirs, length)

    @property
    def kept_tensors(self) -> tuple[int, int] | None:  # type: ignore[override]
        """See LayerState: those of all parts."""
        counts = [part.kept_tensors for part in self.parts]
        if any(count is None for count in counts):
            return None
        rows, states = zip(*(count for count in counts if count is not None), strict=True)
        return sum(rows), sum(states)

    def kept_rows(self, start: int, stop: int) -> list[Tensor]:
        """See LayerState."""
        return [rows for part in self.parts for rows in part.kept_rows(start, stop)]

    def kept_ends(self) -> set[int] | None:
        """See LayerState: what every part has."""
        found = [ends for part in self.parts if (ends := part.kept_ends()) is not None]
        return set.intersection(*found) if found else None

    def kept_state(self, length: int) -> list[Tensor]:
        """See LayerState."""
        return [state for part in self.parts for state in part.kept_state(length)]

    def room_for(
        self, start: int, stop: int, like: Sequence[Tensor], device: torch.device
    ) -> list[Tensor]:
        """See LayerState."""
        waiting = iter(like)
        return [
            room
            for part in self.parts
            for room in part.room_for(start, stop, _next(waiting, part, 0), device)
        ]

    def bring_back(
        self, length: int, filled: int, state: Sequence[Tensor], device: torch.device
    ) -> None:
        """See LayerState."""
        waiting = iter(state)
        for part in self.parts:
            part.bring_back(length, filled, _next(waiting, part, 1), device)

    def release(self) -> None:
        """See LayerState."""
        for part in self.parts:
            part.release()

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(part.nbytes for part in self.parts)


def _next(tensors: Iterator[Tensor], part: LayerState, which: int) -> list[Tensor]:
    """The next tensors, as many as a part keeps of its rows (0) or of its state (1)."""
    assert part.kept_tensors is not None, "only what can be brought back is asked for"
    return list(islice(tensors, part.kept_tensors[which]))
