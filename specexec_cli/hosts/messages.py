"""What machines tell each other: orders and answers as a frame's JSON head, rows as its body.

worker -> first   hello: PROTOCOL, its name, its memory and rates, how it rounds
first -> worker   refused: why; the worker leaves
                  echo: with a body, which comes back; the link is timed by it
                  open: PROTOCOL, the layers to open, for texts of which size, and which rows in
                  front of layers a trained head reads; a worker may have several spans, where
                  another machine did not come back
                  close: the span to close that begins with a layer, if it is open
                  pass: through which span, what was done to texts since the last
                  pass, their rows, and the residual stream as body
                  keep: has a span's rows of texts be kept on disk, under a name
                  and with the identity of all machines' arithmetic

                  with what was done to texts, as a pass:
                  kept: which of some files are there
                  read: a text's tokens and segments, whose rows are read from files
                  note: waits up to some seconds until all is written
worker -> first   echo, closed, rows (with the residual stream, and behind it what a trained
                  head reads of the span's layers, in the compute dtype), or failed: why
                  ready: where the layers wait, whether passes bring their weights from
                  there, the RAM and VRAM that they take, and what their rows' bits depend on
                  keeps: whether it keeps rows; kept: names; noted
                  read, or unread: a file that cannot be used, so that nothing was read
                  anew: its rows of a text are others, or not known; the first machine has
                  it drop all, and reads texts again
                  alive: every ALIVE_S seconds while an order is carried out

The rows in front of a span's first layer, and behind its last, are the residual stream that goes to
it and comes back: what a head reads of them is rounded on the first machine.

An answer's body is no longer than its order's and what a head reads of as many rows; an order's has
the rows of the longest text that an open span's model takes, with the trees beside it, or
ECHO_BYTES, at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specexec_cli.hosts.wire import Part, WireError
from specexec_cli.models.pass_rows import PassRows

# Raised with every change to these messages. Both ends refuse another one.
PROTOCOL = 5

ECHO_BYTES = 4 << 20  # by which a link is timed
MOST_TOLD = 16 << 20  # bytes of an answer beside rows: names of 10 million tokens' files are 12
ALIVE_S = 2.0  # between signs of life
SILENCE_S = 20.0  # without one, after which a machine counts as lost


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOrder:
    """Segments of a text that are read from a machine's disk."""

    text: int  # its number
    tokens: Sequence[int]  # up to the last segment's end
    segments: Sequence[tuple[int, int, bool]]  # start, stop, whether a state is kept at the end

    @classmethod
    def read(cls, head: Mapping[str, Any]) -> ReadOrder:
        """The order of a frame.

        Raises:
            WireError: the frame is none.
        """
        try:
            found = cls(
                text=_whole(head["text"]),
                tokens=_wholes(head["tokens"]),
                segments=[
                    (_whole(start), _whole(stop), bool(_whole(end)))
                    for start, stop, end in head["segments"]
                ],
            )
        except (LookupError, TypeError, ValueError) as error:
            raise WireError(f"an order to read cannot be read: {error!r}") from error
        if not found.segments or found.segments[-1][1] != len(found.tokens):
            raise WireError("the tokens to read do not end where their last segment does")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOrder:
    """A pass through a span."""

    first: int  # layer of the span
    done: Sequence[Sequence[Any]]  # to texts since the last pass: (what, text's number, ...)
    texts: Sequence[tuple[int, PassRows]]  # the texts of the pass by number, with their rows
    tuples: bool  # whether the model's layers give tuples
    hidden: Tensor  # (1, rows, hidden) float32, the residual stream

    def head(self) -> dict[str, Any]:
        """As a frame's head."""
        return {
            "kind": "pass",
            "first": self.first,
            "done": [list(each) for each in self.done],
            "texts": [[number, _told(rows)] for number, rows in self.texts],
            "tuples": self.tuples,
            "shape": list(self.hidden.shape),
        }

    @classmethod
    def read(cls, head: Mapping[str, Any], body: bytearray) -> PassOrder:
        """The order of a frame.

        Raises:
            WireError: the frame is none.
        """
        try:
            found = cls(
                first=_whole(head["first"]),
                done=done_of(head),
                texts=[(_whole(number), _rows(told)) for number, told in head["texts"]],
                tuples=bool(head["tuples"]),
                hidden=stream_of(head, body),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise WireError(f"a pass cannot be read: {error!r}") from error
        numbers = {number for number, _ in found.texts}
        count = sum(len(rows.tokens) for _, rows in found.texts)
        if not numbers or len(numbers) < len(found.texts) or count != found.hidden.shape[1]:
            raise WireError(
                f"{found.hidden.shape[1]} rows of the residual stream are not the {count} of "
                f"{len(numbers)} different texts"
            )
        return found


def done_of(head: Mapping[str, Any]) -> list[Sequence[Any]]:
    """What was done to texts, as an order tells it: (what, text's number, ...) each.

    Raises:
        WireError: it cannot be read.
    """
    try:
        return [(str(what), *map(_whole, rest)) for what, *rest in _flat(head["done"])]
    except (LookupError, TypeError, ValueError) as error:
        raise WireError(f"what was done to texts cannot be read: {error!r}") from error


def body_of(hidden: Tensor, beside: Sequence[Tensor] = ()) -> list[Part]:
    """The bytes of a residual stream, which is (1, rows, hidden) float32, and behind it of what
    goes with it as it is; of tensors of a CPU no copies."""
    return [
        each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for each in (hidden.float(), *beside)
    ]


def stream_of(head: Mapping[str, Any], body: bytearray | memoryview) -> Tensor:
    """The residual stream of a frame.

    Raises:
        WireError: the body is not of the shape that the head says.
    """
    shape = head.get("shape")
    if (
        not isinstance(shape, list) or [type(size) for size in shape] != [int] * 3
        or shape[0] != 1 or min(shape) < 1 or 4 * shape[1] * shape[2] != len(body)
    ):  # fmt: skip
        raise WireError(f"{len(body)} bytes are no rows of shape {shape}")
    return torch.frombuffer(body, dtype=torch.float32).view(shape)


def _told(rows: PassRows) -> dict[str, Any]:
    return {
        "tokens": list(rows.tokens),
        "positions": list(rows.positions),
        "prefix": rows.prefix_len,
        "pending": rows.pending,
        "seen": np.packbits(rows.tree_mask).tobytes().hex(),
        "places": rows.tree_positions.tolist(),
        "parents": rows.parents.tolist(),
    }


def _rows(told: Mapping[str, Any]) -> PassRows:
    tokens, positions = _wholes(told["tokens"]), _wholes(told["positions"])
    parents, places = _wholes(told["parents"]), _wholes(told["places"])
    prefix, pending = _whole(told["prefix"]), _whole(told["pending"])
    shape = len(tokens) - pending, len(places)
    bits = np.frombuffer(bytes.fromhex(told["seen"]), dtype=np.uint8)
    if not len(tokens) == len(positions) == len(parents) or not 0 <= pending <= len(tokens):
        raise ValueError("rows do not agree in number")
    if (
        min(shape) < 0
        or shape[0] != shape[1]
        or prefix < 0
        or len(bits) != -(-shape[0] * shape[1] // 8)
    ):
        raise ValueError("a mask does not agree with its rows")
    slots = prefix + np.arange(len(tokens))
    above = np.array(parents, dtype=np.int64)
    nodes = above[pending:]
    if (above[:pending] != slots[:pending] - 1).any() or not (
        (prefix + pending - 1 <= nodes) & (nodes < slots[pending:])
    ).all():
        raise ValueError("a row comes behind one that it cannot")
    return PassRows(
        tokens=tokens,
        positions=positions,
        prefix_len=prefix,
        pending=pending,
        tree_mask=np.unpackbits(bits, count=shape[0] * shape[1]).astype(bool).reshape(shape),
        tree_positions=np.array(places, dtype=np.int64),
        parents=above,
    )


def _whole(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value!r} is no whole number of 64 bits")
    return value


def _wholes(values: Any) -> list[int]:
    return [_whole(value) for value in values]


def _flat(done: Any) -> list[list[Any]]:
    """What was done to texts, with the slots of a path behind the other numbers."""
    return [[*each[:-1], *each[-1]] if isinstance(each[-1], list) else each for each in done]
