"""A running chat: its turns, the context window, and the transcript."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specexec_cli.chat import transcript as transcripts
from specexec_cli.chat.conversation import Conversation, Generated, Message, Prompt
from specexec_cli.chat.reply import Interrupts, Reply, ReplyView, run_reply
from specexec_cli.chat.settings import ChatSettings
from specexec_cli.chat.transcript import Transcript
from specexec_cli.core import GenerationStats
from specexec_cli.errors import ConfigError, SpecexecError

if TYPE_CHECKING:
    from specexec_cli.config import SamplingConfig
    from specexec_cli.planning.request import Request
    from specexec_cli.session import TextSession

LEAST_ROOM = 64  # fewest tokens that a reply should have room for
WARN_AT = 0.8  # share of the context window in use
_NEXT = "Hello"  # in the place of a message that is still to come
_SHORT = 400  # characters that fit into the input line without filling the screen


class Screen(Protocol):
    """Shows a chat's lines and replies, and asks the user questions."""

    def notice(self, text: str) -> None:
        """Shows one line that the user should know but need not act on."""

    def error(self, text: str) -> None:
        """Shows one line that says what is wrong and how to mend it."""

    def echo(self, text: str) -> None:
        """Shows a message of the user's that was not typed here, such as one from a script."""

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Shows a command's answer: rows of a name and a value."""

    def reply(self, prompt: str, settings: ChatSettings) -> AbstractContextManager[ReplyView]:
        """Shows one reply to a rendered prompt."""

    def stats(self, stats: GenerationStats) -> None:
        """Shows the statistics of a reply that has ended, on one line."""

    def confirm(self, question: str) -> bool:
        """Asks a yes-or-no question; True if standard input is no terminal to ask at."""


class Models(Protocol):
    """Opens the models of a chat, one at a time."""

    request: Request  # the open model's

    def named(self, name: str) -> Request:
        """The request for another model, once its files are here.

        Raises:
            SpecexecError: there is no such model, or its files cannot be had.
        """

    def open(self, request: Request) -> tuple[TextSession, SamplingConfig]:
        """Closes the open model and opens another; returns its session and its sampling.

        Raises:
            SpecexecError: it cannot be opened; no model is open then.
        """


@dataclass(slots=True)
class Chat:
    """The state of a chat, and what one can do with it."""

    session: TextSession
    screen: Screen
    settings: ChatSettings
    conversation: Conversation = field(default_factory=Conversation)
    transcript: Transcript | None = None  # None: nothing is written down
    models: Models | None = None  # None: there is no other model to go on with
    totals: GenerationStats = field(default_factory=GenerationStats)
    replies: int = 0
    attached: list[str] = field(default_factory=list)  # texts of files for the next message
    prefill: str = ""  # text that the input line should begin with next
    multi: bool = False  # Enter breaks the line, Alt-Enter sends
    _typed: str = ""  # the last message as it was typed
    _files: list[str] = field(default_factory=list)  # texts of files in front of that message
    interrupted: bool = False  # the last thing that happened was a Ctrl-C
    leaving: bool = False

    def send(self, text: str) -> None:
        """Takes a message and shows the reply.

        Raises:
            SpecexecError: no reply came; the message is in `prefill`.
            KeyboardInterrupt: Ctrl-C came twice.
        """
        self._typed, self._files = text, list(self.attached)
        text = (
            "\n\n".join([*self.attached, *filter(None, [text])]).encode("utf-8", "replace").decode()
        )
        self.attached.clear()
        if self.conversation.unanswered is not None:
            self.drop(len(self.conversation.messages) - 1)
        self._add(Message("user", text))
        self.answer()

    def answer(self) -> None:
        """Replies to the last message; see send()."""
        try:
            prompt = self._fitting_prompt()
            with (
                self.screen.reply(prompt.text, self.settings) as view,
                Interrupts(view) as interrupts,
            ):
                reply = run_reply(self.session, prompt, self.settings, view, interrupts)
        except SpecexecError:
            self._take_back()
            raise
        self.interrupted = reply.finish == "interrupted"
        if reply.text or reply.finish == "eos":
            self._keep(prompt, reply)
        else:
            self._take_back()
        if reply.leave:
            raise KeyboardInterrupt
        if reply.stats.target_passes:
            self.screen.stats(reply.stats)
        self._explain(reply, len(prompt.tokens) + len(reply.tokens))

    def _keep(self, prompt: Prompt, reply: Reply) -> None:
        # a stop string may end inside a token, so a reply that may have met one keeps no tokens
        exact = reply.finish in ("eos", "length") or not (
            reply.finish == "stop" or self.settings.generation.stop
        )
        generated = Generated(
            prompt.text, (*prompt.tokens, *reply.tokens), ended=reply.finish == "eos"
        )
        stats = reply.stats
        self._add(
            Message("assistant", reply.text, generated if exact else None),
            finish_reason=reply.finish, seed=self.settings.sampling.seed,
            tokens=len(reply.tokens), passes=stats.target_passes, seconds=round(stats.total_s, 3),
        )  # fmt: skip
        self.replies += 1
        add_stats(self.totals, stats)

    def _explain(self, reply: Reply, used: int) -> None:
        window = self.session.context_length
        if reply.error is not None:
            self.screen.error(str(reply.error))
        if reply.finish == "interrupted":
            kept = "what there is counts as the reply" if reply.text else "nothing had come yet"
            self.screen.notice(f"stopped: {kept}. Ctrl-C again leaves")
        elif reply.finish == "length" and used < window:
            limit = self.settings.generation.max_tokens
            self.screen.notice(f"cut at {limit} tokens: /set max_tokens={2 * limit} allows more")
        if used >= WARN_AT * window:
            self.screen.notice(
                f"the context window is {used / window:.0%} full ({used} of {window} tokens): "
                "/compact drops the oldest turns, /clear all of them"
            )

    def _fitting_prompt(self) -> Prompt:
        """The prompt, after making room in the context window if there is none.

        Raises:
            ConfigError: the prompt does not fit, or the user does not want to drop old turns.
        """
        prompt = self.conversation.prompt(self.session)
        window = self.session.context_length
        least = min(self.settings.generation.max_tokens, LEAST_ROOM, window // 2)
        if len(prompt.tokens) + least <= window:
            return prompt
        full = f"the conversation takes {len(prompt.tokens)} of {window} tokens"
        dropped = self.conversation.oldest_turns(self.session, window // 2)
        shorter = Conversation(self.conversation.system, self.conversation.messages[dropped:])
        if len(shorter.prompt(self.session).tokens) + least > window:
            raise ConfigError(
                f"{full}, and this message alone is too long: shorten it, or the system prompt"
            )
        turns = _turns(dropped, self.conversation)
        if not self.screen.confirm(f"{full}: drop the oldest {turns} to go on?"):
            raise ConfigError(f"{full}: /compact or /clear makes room")
        self.drop(0, dropped)
        self.screen.notice(f"dropped the oldest {turns}: the context window was full")
        return self.conversation.prompt(self.session)

    def regenerate(self, seed: int | None) -> None:
        """Replaces the last reply by one with this seed, or with the next seed if it is None.

        Raises:
            ConfigError: there is nothing to reply to.
        """
        messages = self.conversation.messages
        if not messages:
            raise ConfigError("there is no reply yet: send a message first")
        sampling = self.settings.sampling
        sampling = replace(sampling, seed=sampling.seed + 1 if seed is None else seed)
        self.settings = replace(self.settings, sampling=sampling)
        if messages[-1].role == "assistant":
            self.drop(len(messages) - 1)
        if sampling.temperature == 0:
            self.screen.notice("at temperature 0 every seed gives the same reply: /set temperature")
        self.answer()

    def undo(self) -> str:
        """Takes the last message and its reply back; returns the message.

        Raises:
            ConfigError: there is no message.
        """
        starts = self.conversation.turn_starts
        if not starts:
            raise ConfigError("there is nothing to take back yet")
        text = self.conversation.messages[starts[-1]].content
        self.drop(starts[-1])
        return text

    def compact(self) -> str:
        """Drops the oldest turns, at least one, until at most half of the window is used.

        Returns:
            The dropped turns in words, as in "turn" or "3 turns".
        Raises:
            ConfigError: there is only one turn.
        """
        if len(self.conversation.turn_starts) < 2:
            raise ConfigError("there are no older turns to drop: /clear starts afresh")
        dropped = self.conversation.oldest_turns(self.session, self.session.context_length // 2)
        dropped = dropped or self.conversation.turn_starts[1]
        turns = _turns(dropped, self.conversation)
        self.drop(0, dropped)
        return turns

    def drop(self, start: int, stop: int | None = None) -> None:
        """Removes messages start..stop from the conversation; to its end if stop is None."""
        stop = len(self.conversation.messages) if stop is None else stop
        if stop > start:
            del self.conversation.messages[start:stop]
            self._record({"drop": [start, stop]})

    def change_model(self, name: str) -> None:
        """Goes on with another model: the conversation stays, sampling is as its makers suggest.

        Raises:
            SpecexecError: it cannot be opened, or refuses the conversation; the model before is
                open again.
        """
        if self.models is None:
            raise ConfigError("this chat has no other model to go on with")
        before, request, settings = self.models.request, self.models.named(name), self.settings
        self.leaving = True  # if Ctrl-C leaves no model open
        try:
            self._open(request)
            self.check()
        except BaseException:
            self._open(before)
            self.settings, self.leaving = settings, False
            raise
        self.leaving = False
        # replies are read anew: their tokens are those of the model before
        messages = self.conversation.messages
        messages[:] = [replace(message, generated=None) for message in messages]

    def _open(self, request: Request) -> None:
        assert self.models is not None
        self.session, sampling = self.models.open(request)
        pair = self.session.pair
        self.settings = replace(
            self.settings, sampling=replace(sampling, seed=self.settings.sampling.seed),
            tree=pair.tree, method=None if pair.draft_name is not None else "autoregressive",
        )  # fmt: skip

    def set_system(self, text: str | None) -> None:
        """Replaces the system prompt."""
        self.conversation.system = text
        self._record({"role": "system", "content": text})

    def load(self, path: Path) -> None:
        """Replaces this conversation by that of a transcript.

        Raises:
            ConfigError: the transcript cannot be read.
        """
        loaded = transcripts.load(path)
        if loaded.notice:
            self.screen.notice(loaded.notice)
        self.drop(0)
        self.set_system(loaded.conversation.system)
        for message in loaded.conversation.messages:
            self._add(message)
        self.read_ahead()

    def read_ahead(self) -> None:
        """Has what is kept of this conversation read from disk while the next message is typed."""
        messages = self.conversation.messages
        if self.conversation.unanswered is None:
            messages = [*messages, Message("user", _NEXT)]
        if len(messages) > 1:
            ahead = Conversation(self.conversation.system, messages)
            # what the template refuses, or memory has no room for, the next message tells of
            with suppress(SpecexecError):
                tokens = ahead.prompt(self.session).tokens
                self.session.prepare(tokens, self.settings.generation.max_tokens)

    def used_tokens(self) -> int:
        """Tokens of the context window that the conversation takes."""
        messages = self.conversation.messages
        if messages and (generated := messages[-1].generated) is not None:
            return len(generated.tokens)
        plain = self.conversation.plain()
        return len(self.session.encode_rendered(self.session.render_chat(plain))) if plain else 0

    def check(self) -> None:
        """Makes sure that the model has a chat template and takes the system prompt.

        Raises:
            ConfigError: it has no template, or the template refuses the system prompt.
        """
        system = Conversation(self.conversation.system, [Message("user", _NEXT)])
        self.session.render_chat(system.plain())

    def _take_back(self) -> None:
        """Takes the unanswered message back into the input line, or into the input history."""
        text = self.undo()
        if self._files and text.endswith(self._typed):
            self.attached, text = self._files, self._typed
        if len(text) <= _SHORT:
            self.prefill = text
        else:  # a long message would push the error off the screen
            self.screen.notice("the message was not sent: Up brings it back")

    def _add(self, message: Message, **details: Any) -> None:
        self.conversation.messages.append(message)
        self._record({"role": message.role, "content": message.content, **details})

    def _record(self, record: Mapping[str, Any]) -> None:
        if self.transcript is None:
            return
        try:
            self.transcript.append(record)
        except OSError as error:
            self.screen.notice(
                f"the transcript {self.transcript.path} cannot be written ({error.strerror}): "
                "it ends here. /save FILE writes one elsewhere"
            )
            self.transcript = None


def _turns(dropped: int, conversation: Conversation) -> str:
    count = sum(start < dropped for start in conversation.turn_starts)
    return "turn" if count == 1 else f"{count} turns"


def add_stats(total: GenerationStats, one: GenerationStats) -> None:
    """Adds the statistics of one generation to a running total, in place."""
    for name in (each.name for each in fields(GenerationStats)):
        before, value = getattr(total, name), getattr(one, name)
        if name == "link_bytes_per_s":
            setattr(total, name, value)
        elif name.startswith("peak_"):
            setattr(total, name, max(before, value))
        else:
            setattr(total, name, before + value)
