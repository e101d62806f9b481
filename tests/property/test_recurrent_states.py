"""Recurrent states after any passes, commits and crops are those of the committed text alone."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from specexec_cli.models import recurrent
from specexec_cli.models.recurrent import Recurrence, RecurrentState, SelectiveScan, Windows
from specexec_cli.planning.memory import CHECKPOINTS

_HEADS, _KEY_DIM, _VALUE_DIM, _CHANNELS = 2, 4, 6, 3
KINDS: list[Callable[[], RecurrentState]] = [
    lambda: Windows(3),
    lambda: Windows(1),
    lambda: Recurrence(corrects=True),
    lambda: Recurrence(corrects=False),
    SelectiveScan,
]


def rows_of(state: RecurrentState, tokens: list[int]) -> tuple[Tensor, ...]:
    """The inputs that these tokens have, (1, n, ...) each."""
    shapes = [(_CHANNELS,)]
    if isinstance(state, Recurrence):
        shapes = [
            (1, _KEY_DIM), (1, _KEY_DIM), (_HEADS, _VALUE_DIM), (_HEADS,), (_HEADS,),
        ]  # fmt: skip
    elif isinstance(state, SelectiveScan):
        shapes = [(1, _KEY_DIM), (1, _KEY_DIM), (_CHANNELS,), (_CHANNELS,)]
    made = [
        [torch.rand(shape, generator=torch.Generator().manual_seed(token)) for token in tokens]
        for shape in shapes
    ]
    found = tuple(torch.stack(rows)[None] for rows in made)
    if isinstance(state, SelectiveScan):
        rates = -torch.rand(_KEY_DIM, _CHANNELS, generator=torch.Generator().manual_seed(0))
        found += (rates.expand(1, len(tokens), -1, -1),)
    return found


class StateMachine(RuleBasedStateMachine):
    """A text, and its state; `tokens` has a token for each slot, `parents` the slot before it."""

    def __init__(self) -> None:
        super().__init__()
        # as many checkpoints in a few rows as usually in thousands
        few = {"_TURN_ROWS": 2, "_BEFORE_END": 2, "_EVERY": 3}
        self.patch = mock.patch.multiple(recurrent, **few)
        self.patch.start()

    def teardown(self) -> None:
        self.patch.stop()

    def fresh(self) -> RecurrentState:
        return KINDS[self.kind]()

    @initialize(kind=st.integers(0, len(KINDS) - 1))
    def begin(self, kind: int) -> None:
        self.kind, self.count = kind, 0
        self.state = self.fresh()
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.committed = self.prefix = 0  # tokens, and those with pending ones

    def path(self, slot: int) -> list[int]:
        """The tokens up to a slot."""
        found: list[int] = []
        while slot >= 0:
            found.insert(0, self.tokens[slot])
            slot = self.parents[slot]
        return found

    def run(self, parents: list[int], pending: int, chunk: int) -> None:
        first = len(self.tokens)
        self.state.begin(np.array(parents), pending)
        self.count += len(parents)
        self.tokens += range(self.count, self.count + len(parents))
        self.parents += parents
        outputs = []
        for start in range(0, len(parents), chunk):
            stop = min(start + chunk, len(parents))
            outputs.append(
                self.state.run(*rows_of(self.state, self.tokens[first + start : first + stop]))
            )
        found = torch.cat(outputs, dim=1)[0]
        for row, slot in enumerate(range(first, len(self.tokens))):
            alone = self.fresh()
            path = self.path(slot)
            alone.begin(np.arange(-1, len(path) - 1), len(path))
            expected = alone.run(*rows_of(alone, path))[0, -1]
            assert torch.equal(found[row], expected)

    @rule(
        pending=st.integers(0, 5), nodes=st.integers(0, 6), chunk=st.integers(1, 7), data=st.data()
    )
    def a_pass(self, pending: int, nodes: int, chunk: int, data: st.DataObject) -> None:
        """Pending rows behind the committed ones, and then a tree below the last of them."""
        if len(self.tokens) > self.committed:
            pending = 0  # a text's undecided nodes come behind its pending rows
        first = len(self.tokens)
        parents = list(range(first - 1, first - 1 + pending))
        self.prefix = self.prefix + pending
        for node in range(nodes):
            above = range(self.prefix - 1, first + pending + node)
            parents.append(data.draw(st.sampled_from(above)))
        if parents:
            self.run(parents, pending, chunk)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def a_commit(self, data: st.DataObject) -> None:
        """Of a path of nodes."""
        slot = data.draw(st.integers(self.prefix - 1, len(self.tokens) - 1))
        path: list[int] = []
        while slot >= self.prefix:
            path.insert(0, slot)
            slot = self.parents[slot]
        self.tokens = self.path(path[-1] if path else self.prefix - 1)
        self.state.commit(self.prefix, torch.tensor(path, dtype=torch.int64))
        self.committed = self.prefix = len(self.tokens)
        self.parents = list(range(-1, self.committed - 1))
        self.check()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def a_crop(self, data: st.DataObject) -> None:
        wanted = data.draw(st.integers(0, len(self.tokens)))
        length = self.state.reachable(wanted)
        nearest = max((at for at in self.state.checkpoints if at <= wanted), default=0)
        assert length >= (nearest if wanted < self.committed else self.committed)
        self.state.crop(length)
        del self.tokens[length:], self.parents[length:]
        self.committed = min(self.committed, length)
        self.prefix = min(self.prefix, length)
        self.check()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def a_copy(self, data: st.DataObject) -> None:
        """A text that begins as this one does."""
        length = self.state.reachable(data.draw(st.integers(0, len(self.tokens))))
        other = self.fresh()
        other.copy(self.state, length)
        assert other.length == length
        if length:
            self.same(other.base, self.path(length - 1))

    def check(self) -> None:
        assert self.state.length == len(self.tokens)
        assert self.state.committed == self.committed
        kept = self.state.checkpoints
        assert len(kept) <= CHECKPOINTS
        assert list(kept) == sorted(kept)
        for at, state in kept.items():
            self.same(state, self.path(at - 1))
        if self.committed:
            self.same(self.state.base, self.path(self.committed - 1))

    def same(self, state: tuple[Tensor, ...], tokens: list[int]) -> None:
        """Bit for bit the state of a text that was read one row a pass."""
        plain = self.fresh()
        for at, token in enumerate(tokens):
            plain.begin(np.array([at - 1]), 1)
            plain.run(*rows_of(plain, [token]))
            plain.commit(at + 1, torch.zeros(0, dtype=torch.int64))
        pairs = zip(state, plain.base, strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


TestStates = StateMachine.TestCase
TestStates.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)
