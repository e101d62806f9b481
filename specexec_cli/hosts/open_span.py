"""A span of layers on a worker, and its rows of every text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specexec_cli.hosts.kept_span import KeptSpan, SpanText
from specexec_cli.hosts.messages import PassOrder
from specexec_cli.hosts.wire import WireError
from specexec_cli.models.spans import Elsewhere
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.prefixes.folder import Bound
from specexec_cli.prefixes.kept_texts import LAST_WRITES_S
from specexec_cli.prefixes.reading import counts


class OtherRowsError(WireError):
    """The span has other rows of a text than the first machine."""


class OpenSpan:
    """A span of layers, opened, and its rows of every text.

    Args:
        rows: of the largest pass.
        features: see Work, of this span.
    Attributes:
        most_body: bytes of the residual stream of so many rows.
    """

    def __init__(
        self, model: StreamedModel, span: range, rows: int, features: Sequence[int] = ()
    ) -> None:
        self.model, self._span, self._features = model, span, features
        self.most_body: int = 4 * rows * model.skeleton.config.hidden_size
        self.kept: KeptSpan | None = None
        self._texts: dict[int, SpanText] = {}
        self._unknown = False  # whether texts may have other rows than they are told to have
        self._incoming = self._outgoing = torch.empty(0)
        model.layers[span.start - 1].elsewhere = lambda hidden, tuples: self._incoming
        model.layers[span.start].register_forward_pre_hook(self._check_incoming)
        model.layers[span.stop - 1].register_forward_hook(self._keep)

    def _keep(self, module: Any, given: Any, output: Any) -> None:
        self._outgoing = output[0] if isinstance(output, tuple) else output

    def _check_incoming(self, module: Any, given: tuple[Any, ...]) -> None:
        """Refuses rows that modelling code has taken for a tuple, or a tuple for rows.

        Raises:
            WireError: layers of this model give tuples, and the order says not, or the reverse.
        """
        rows = given[0] if given else None
        if not isinstance(rows, Tensor) or rows.shape != self._incoming.shape:
            raise WireError("layers give tuples here and not on the first machine, or the reverse")

    def run(self, order: PassOrder) -> Tensor:
        """The residual stream behind the span, as it was sent in front of it: (1, rows, hidden).
        What a trained head reads besides is the model's context's to give away.

        Raises:
            SpecexecError: the weights cannot be read, or memory ran out. Rows of the pass are
                dropped.
            WireError: what is said to have been done to texts cannot be, or rows of another width,
                or at no position of a text.
            OtherRowsError: it leaves other rows of them here than the first machine has, as where
                a pass that was interrupted there cost a recurrent layer an earlier state here, or
                where an earlier order failed before all was done that it told.
        """
        self.do(order.done)
        width = self.model.skeleton.config.hidden_size
        if order.hidden.shape[2] != width:
            raise WireError(f"rows of {order.hidden.shape[2]} numbers came, and have {width} here")
        most = self.model.context_length
        if any(not 0 <= at < most for _, rows in order.texts for at in rows.positions):
            raise WireError(f"a row came whose position is none of the {most} that a text has")
        there = [(rows, self.text(number)) for number, rows in order.texts]
        texts = [(rows, text.state, ()) for rows, text in there]
        for rows, state, _ in texts:
            own = state.layers[self._span.start : self._span.stop]
            if any(layer.get_seq_length() != rows.prefix_len for layer in own):
                raise OtherRowsError(
                    f"a text has other rows here than the {rows.prefix_len} on the first machine"
                )
            for layer in state.layers:  # with the rows of earlier waves, where it is elsewhere
                if isinstance(layer, Elsewhere):
                    layer.length = rows.prefix_len
        self.model.context.layers_give_tuples = order.tuples
        self.model.context.take(self._features)
        self._incoming = order.hidden.to(self.model.device)
        before = [state.length for _, state, _ in texts]
        for rows, text in there:
            text.took(rows.prefix_len, rows.tokens)
        try:
            if len(texts) == 1:
                self.model.forward(*texts[0])
            else:
                self.model.forward_together(texts)
            return self._outgoing
        except BaseException:
            self.model.context.take(())
            for (_, text), length in zip(there, before, strict=True):
                text.crop(length)
            if self.model.source is not None:
                self.model.source.restart()
            raise
        finally:
            self._incoming = self._outgoing = torch.empty(0)  # a session may rest for hours

    def text(self, number: int) -> SpanText:
        """The text of that number, which may be new.

        Raises:
            OtherRowsError: it is not known which rows of it the first machine has.
        """
        if self._unknown:
            raise OtherRowsError("what was done to texts on the first machine is not all known")
        if number not in self._texts:
            self._texts[number] = SpanText(self.model)
        return self._texts[number]

    @contextmanager
    def or_unknown(self) -> Iterator[None]:
        """Counts all texts as unknown until they are forgotten, if the block fails: what was done
        to them is told once, so that what the block has not done never will be."""
        try:
            yield
        except BaseException:
            self._unknown = True
            raise

    def do(self, done: Sequence[Sequence[Any]]) -> None:
        """Does to texts what was done to them on the first machine.

        Raises:
            WireError: it cannot be done.
        """
        for what, *values in done:
            if self._unknown and what != "forget":
                continue
            try:
                with self.or_unknown():
                    self._do(what, values)
            except (IndexError, ValueError, AssertionError) as error:
                raise WireError(f"'{what}' of {values} cannot be done to a text") from error

    def _do(self, what: str, values: Sequence[int]) -> None:
        """Does one thing to a text.

        Raises:
            WireError: nothing is called that.
            IndexError, ValueError: numbers are lacking, or are none of a row, or a path's rows
                do not come one behind another.
        """
        if what == "forget":
            self._texts.clear()
            self._unknown = False
            return
        number, *rest = values
        if min(values) < 0:
            raise ValueError("a number is below 0")
        if what == "drop":
            self._texts.pop(number, None)
            return
        text = self.text(number)
        if what == "commit":
            prefix, *slots = rest
            if slots != sorted(set(slots)) or min(slots, default=prefix) < prefix:
                raise ValueError("the rows of a path do not come one behind another")
            own = text.state.layers[self._span.start]
            if max([prefix, *(slot + 1 for slot in slots)]) > own.length:
                raise IndexError("a row is kept that is not there")
            text.commit(prefix, slots)
        elif what == "crop":
            text.crop(rest[0])
        elif what == "copy":
            text.copy(self.text(rest[0]), rest[1])
        elif what == "keep_at":
            text.keep_at(rest[0])
        elif what == "reserve":
            text.state.reserve(min(rest[0], self.model.context_length))
        elif what == "keep":
            if self.kept is not None:
                self.kept.put(text, rest[0], rest[1], end=bool(rest[2]))
        else:
            raise WireError(f"'{what}' is nothing that is done to a text")

    def keep_as(
        self, name: str, identity: str, bound: Bound, notice: Callable[[str], None]
    ) -> bool:
        """Keeps rows of texts from now on, see KeptSpan; whether the layers can be brought back."""
        if self.kept is not None:
            self.kept.close()
        layers = self.model.new_state().layers
        if any(layer.kept_tensors is None for layer in layers):
            return False
        name = f"{name}-layers-{self._span.start}-{self._span.stop - 1}"
        self.kept = KeptSpan(name, identity, counts(layers), bound, notice)
        return True

    def close(self, most_s: float = LAST_WRITES_S) -> None:
        """Writes rows that are to be kept, for `most_s` seconds at most, and frees all memory."""
        try:
            if self.kept is not None:
                self.kept.close(most_s)
        finally:
            self.model.close()
