"""A target server: one target model, its state, and one pass per verification."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from specexec_cli.core import DraftTree
from specexec_cli.models.graphs import PassRunner
from specexec_cli.models.kv_cache import SlotCache
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.spans import SpanLostError
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.verify.masks import verification_rows

_TRIES = 5  # of one pass, where machines with layers die in it


class TargetServer(Protocol):
    """The target as decoding uses it: verify a tree, commit its accepted nodes, crop the text."""

    tokens: list[int]  # committed tokens whose rows are in the cache

    def verify(self, pending: Sequence[int], tree: DraftTree) -> Tensor:
        """Logits behind the last pending token and behind every node, (1 + nodes, vocab)."""

    def commit(self, nodes: Sequence[int]) -> None:
        """Keeps the accepted nodes of the last verification, drops the rest."""

    def crop(self, length: int) -> None:
        """Forgets every committed token from `length` on; `tokens` says what is left."""

    @property
    def bytes_streamed(self) -> int:
        """Bytes that came over the link so far."""

    @property
    def read_s(self) -> float:
        """Seconds so far in which the SSD was read; 0 where that is not known."""


class LocalTarget:
    """A target in this process.

    Args:
        replays: whether there is memory for passes of few rows that a GPU replays, see graphs.py.
        notice: told, in one line, if it replays none after all.
    """

    def __init__(
        self,
        model: StreamedModel,
        *,
        replays: bool = False,
        notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.cuts = 0  # how often committed rows were dropped, counted before they are
        self._state = model.new_state()
        self._pending: list[int] = []
        self._tree = DraftTree.empty()
        self.steps: PassRunner | None = None
        if replays and isinstance(self._state, SlotCache):
            self.steps = PassRunner(model, self._state, notice)

    @property
    def bytes_streamed(self) -> int:
        """Bytes that came over the link so far."""
        return self.model.bytes_streamed

    @property
    def read_s(self) -> float:
        """Seconds so far in which the SSD was read; 0 where that is not known."""
        return self.model.read_s

    @property
    def state(self) -> ModelState:
        """The layers' state for the committed tokens, and after them for the last pass's tree."""
        return self._state

    @property
    def tree_nodes(self) -> int:
        """Draft nodes in the running or the last pass."""
        return len(self._tree)

    def reserve(self, slots: int) -> None:
        """Makes room for `slots` cache rows at the next growth."""
        self._state.reserve(slots)

    def keep_at(self, length: int) -> None:
        """Has recurrent layers keep their state where the text will have `length` tokens: other
        texts part from it there."""
        if length > len(self.tokens):
            self._state.keep_at(length)

    def verify(self, pending: Sequence[int], tree: DraftTree) -> Tensor:
        """One pass over pending rows and tree.

        Args:
            pending: committed tokens not in the cache yet, at least one; the last is the root.
        Returns:
            (1 + nodes, vocab), row 0 behind the last pending token, row i + 1 behind node i.
        Raises:
            StreamError: the weights could not be read; the cache is as before the call.
        """
        [logits] = verify_together([(self, pending, tree)])
        return logits

    def begin(
        self, pending: Sequence[int], tree: DraftTree
    ) -> tuple[PassRows, ModelState, Sequence[int]]:
        """Begins a pass: its rows, the state for them, and the indexes of the rows with logits."""
        if self._state.lost:
            pending = [*self.tokens, *pending]
            self.crop(0)
        # a caller that failed or was interrupted before commit() left its rows behind
        self._state.crop(len(self.tokens))
        self._pending, self._tree = list(pending), tree
        rows = verification_rows(self._pending, tree, len(self.tokens))
        return rows, self._state, range(len(self._pending) - 1, len(rows.tokens))

    def run(self, rows: PassRows, state: ModelState, logit_rows: Sequence[int]) -> Tensor:
        """The pass that `begin` gave, by itself."""
        if self.steps is not None:
            return self.steps.forward(rows, logit_rows)
        return self.model.forward(rows, state, logit_rows)

    def copy_rows(self, other: LocalTarget, length: int) -> None:
        """Replaces this text by the first `length` tokens of another text on the same model.

        A recurrent layer may allow only fewer of them: `tokens` says which were copied.

        Args:
            length: at most the number of tokens that the other text has committed.
        """
        self.crop(0)
        self.tokens = other.tokens[: self._state.copy(other._state, length)]

    def commit(self, nodes: Sequence[int]) -> None:
        """Keeps pending rows and accepted nodes in the cache, drops the rest of the tree."""
        tree_start = len(self.tokens) + len(self._pending)
        self._state.commit(tree_start, [tree_start + node for node in nodes])
        self.tokens += [*self._pending, *(int(self._tree.tokens[node]) for node in nodes)]

    def crop(self, length: int) -> None:
        """Forgets every committed token from `length` on, and perhaps some before.

        A recurrent layer may have to begin anew from an earlier token: `tokens` says what is left.
        """
        if length < len(self.tokens):
            self.cuts += 1
        del self.tokens[self._state.crop(min(length, len(self.tokens))) :]

    def recover(self) -> None:
        """Begins to read ahead again if that has failed, perhaps long ago: the disk may be back."""
        if self.model.source is not None and self.model.source.failed:
            self.model.source.restart()

    def close(self) -> None:
        """Gives the model's threads, files and memory back."""
        self.model.close()


def verify_together(
    texts: Sequence[tuple[LocalTarget, Sequence[int], DraftTree]],
) -> list[Tensor]:
    """One pass over the pending rows and trees of several texts on one model.

    Args:
        texts: at least one, each as (target, pending, tree); see LocalTarget.verify.
    Returns:
        For each text, the logits that LocalTarget.verify returns.
    Raises:
        StreamError: the weights could not be read; the caches are as before the call.
        WorkerError: another machine with layers of the model is gone, or fails in every try.
    """
    model = texts[0][0].model
    for tries in itertools.count(1):
        if len(texts) > 1:
            _read_again([target for target, *_ in texts])
        begun = [target.begin(pending, tree) for target, pending, tree in texts]
        try:
            if len(begun) == 1:
                return [texts[0][0].run(*begun[0])]
            return model.forward_together(begun)
        except BaseException as error:
            # also Ctrl-C: layers before the interruption hold rows of an unfinished pass
            for target, *_ in texts:
                target.crop(len(target.tokens))
            if model.source is not None:
                model.source.restart()
            if not isinstance(error, SpanLostError) or tries == _TRIES:
                raise
        # The texts lost rows with the machine: `begin` reads them again, from the first token. If
        # this try has begun to, it has dropped committed tokens, and they are pending now.
        texts = [(target, target._pending, tree) for target, _, tree in texts]
        assert model.others is not None, "a span was lost"
        model.others.reopen()
    raise AssertionError("the last try returns or raises")


def _read_again(targets: Sequence[LocalTarget]) -> None:
    """Reads texts that a machine took along with it again, each in a pass of its own: memory is
    planned for the rows of one whole text at once, not of all.

    Raises:
        StreamError, WorkerError: as verify_together.
    """
    while lost := next((target for target in targets if target.state.lost), None):
        lost.verify([], DraftTree.empty())
        lost.commit([])
