"""A conversation as messages, and as the tokens that the models' caches hold for it.

Text that a model has generated may be split into other tokens when it is encoded again. So a reply
keeps its tokens, and the next prompt is those tokens, followed by the tokens of the text that the
chat template puts after the reply. Only the new turn is then new to the caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from specexec_cli.models.template_worker import SPELLED

Role = Literal["user", "assistant"]


class ChatEncoder(Protocol):
    """A session as a conversation uses it: the chat template and the tokenizer."""

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The messages in the model's chat template, ready for the reply."""

    def encode_rendered(self, text: str) -> list[int]:
        """Tokens of text that render_chat returned."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Spelling -> id of each token that never merges with the text around it."""


@dataclass(frozen=True, slots=True)
class Generated:
    """How a reply came about: the rendered text before it, and every token up to its end."""

    before: str
    tokens: tuple[int, ...]  # prompt and reply, the end-of-text token included if it was drawn
    ended: bool  # the last token is an end-of-text token


@dataclass(frozen=True, slots=True)
class Message:
    """One side of a turn."""

    role: Role
    content: str
    generated: Generated | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text that the target continues, and the text's tokens."""

    text: str
    tokens: list[int]


@dataclass(slots=True)
class Conversation:
    """System prompt and messages; users and assistants take turns, users begin."""

    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    @property
    def unanswered(self) -> str | None:
        """The last message if it has no reply yet."""
        if self.messages and self.messages[-1].role == "user":
            return self.messages[-1].content
        return None

    @property
    def turn_starts(self) -> list[int]:
        """Indexes of the user's messages, each of which begins a turn."""
        return [index for index, m in enumerate(self.messages) if m.role == "user"]

    def plain(self, dropped: int = 0) -> list[dict[str, str]]:
        """Messages as a chat template takes them, without the first `dropped` ones."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [{"role": m.role, "content": m.content} for m in self.messages[dropped:]]

    def prompt(self, encoder: ChatEncoder) -> Prompt:
        """The prompt for the reply to the last message.

        Raises:
            ConfigError: the model has no chat template, or the template refuses the conversation.
        """
        text = encoder.render_chat(self.plain())
        tokens = encoder.encode_rendered(text)
        if len(self.messages) > 1 and (reply := self.messages[-2]).generated is not None:
            known = encoder.special_tokens
            tokens = splice(reply.generated, reply.content, text, tokens, known) or tokens
        return Prompt(text, tokens)

    def oldest_turns(self, encoder: ChatEncoder, limit: int) -> int:
        """How many messages to drop from the front so that the rest takes at most `limit` tokens.

        Whole turns are dropped, and never the last one.
        """
        starts = self.turn_starts or [0]
        for dropped in starts[:-1]:
            if len(encoder.encode_rendered(encoder.render_chat(self.plain(dropped)))) <= limit:
                return dropped
        return starts[-1]


def splice(
    generated: Generated,
    reply: str,
    text: str,
    tokens: Sequence[int],
    special_tokens: Mapping[str, int],
) -> list[int] | None:
    """The generated tokens, followed by the tokens of the text after the reply.

    The seam must lie at a special token, where both sides have the same tokens whether they are
    encoded apart or together.

    Args:
        generated: how the last reply came about.
        reply: the text of the last reply.
        text: the whole conversation as the chat template renders it now.
        tokens: the tokens of `text`.
        special_tokens: spelling -> id of each token that never merges with the text around it.
    Returns:
        None if the template has rewritten the text up to the reply's end (some drop the thinking
        part of old replies), or if no special token follows the reply.
    """
    if not text.startswith(generated.before + reply):
        return None
    tail = text[len(generated.before) + len(reply) :]
    ending = tail.lstrip()
    marker = max((m for m in special_tokens if m and ending.startswith(m)), key=len, default=None)
    # a special token that a message spells out is text, and has other tokens
    told, behind = (SPELLED.sub("", each) for each in (text, tail))
    if marker is None or told.count(marker) != tokens.count(special_tokens[marker]):
        return None
    token = special_tokens[marker]
    at = [index for index, one in enumerate(tokens) if one == token][-behind.count(marker)]
    if generated.ended and generated.tokens[-1] == token:
        return [*generated.tokens, *tokens[at + 1 :]]
    if ending != tail:  # white space before the marker would need tokens of its own
        return None
    kept = generated.tokens[:-1] if generated.ended else generated.tokens
    return [*kept, *tokens[at:]]
