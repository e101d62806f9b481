"""One reply: run the session, show the text as it comes, stop at Ctrl-C."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Literal, Protocol

from specexec_cli.chat.conversation import Prompt
from specexec_cli.chat.settings import ChatSettings
from specexec_cli.core import GenerationStats, PassProgress, StepResult
from specexec_cli.errors import SpecexecError

if TYPE_CHECKING:
    from specexec_cli.session import TextSession

Finish = Literal["length", "eos", "stop", "interrupted", "failed"]


class ReplyView(Protocol):
    """Shows one reply as it comes."""

    def layer(self, progress: PassProgress) -> None:
        """A layer of the target is done."""

    def step(self, step: StepResult) -> None:
        """A pass is done; `step.text` may be shown."""

    def stopping(self) -> None:
        """The reply will end as soon as it can."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply as far as it came, and how it ended."""

    text: str
    tokens: tuple[int, ...]  # of the reply, up to the end of the shown text
    finish: Finish
    stats: GenerationStats
    error: SpecexecError | None = None  # ended the reply, if `finish` is "failed"
    leave: bool = False  # Ctrl-C came twice


class Interrupts:
    """While active, a first Ctrl-C sets `stopping`, a second raises KeyboardInterrupt.

    The first one must not raise: between two layers the caches can be put right, in the middle of
    an update they cannot.
    """

    def __init__(self, view: ReplyView) -> None:
        self.stopping = False
        self._view = view

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        self._view.stopping()

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGINT, self._before)


class _Stopped(Exception):
    """Raised by the layer callback to leave a pass between two layers after Ctrl-C."""


def run_reply(
    session: TextSession,
    prompt: Prompt,
    settings: ChatSettings,
    view: ReplyView,
    interrupts: Interrupts,
) -> Reply:
    """Generates a reply and shows it; at Ctrl-C the text so far is the reply.

    Raises:
        SpecexecError: the generation failed before its first token.
    """
    tokens: list[int] = []
    pieces: list[str] = []
    finish: Finish = "interrupted"
    error: SpecexecError | None = None
    leave = False

    def on_layer(progress: PassProgress) -> None:
        if interrupts.stopping:
            raise _Stopped
        view.layer(progress)

    session.on_layer(on_layer)
    try:
        for step in session.generate(
            prompt.tokens, sampling=settings.sampling, tree=settings.tree,
            generation=settings.generation, method=settings.method,
        ):  # fmt: skip
            tokens += step.tokens
            pieces += step.pieces
            view.step(step)
            finish = step.finish_reason or finish
            if interrupts.stopping:
                break
    except _Stopped:
        pass
    except KeyboardInterrupt:
        leave = True
    except SpecexecError as failure:
        if not tokens:
            raise
        finish, error = "failed", failure
    finally:
        session.on_layer(lambda progress: None)
    if finish in ("interrupted", "failed"):
        # tokens were held back and not shown if they ended in half a character or in the beginning
        # of a stop string
        while pieces and not pieces[-1]:
            pieces.pop()
        del tokens[len(pieces) :]
    return Reply("".join(pieces), tuple(tokens), finish, session.stats, error, leave)
