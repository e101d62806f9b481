"""Prompts that continue the very tokens the caches hold."""

from __future__ import annotations

import pytest
from chat_toys import END, SPECIAL, ToySession
from hypothesis import given
from hypothesis import strategies as st

from specexec_cli.chat.conversation import Conversation, Generated, Message

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=20)


def encoded(session: ToySession, text: str) -> tuple[int, ...]:
    return tuple(session.encode_rendered(text))


def after_reply(
    session: ToySession, reply: str, tokens: tuple[int, ...], *, ended: bool
) -> tuple[Conversation, Generated]:
    """A first turn whose reply was generated as `tokens`, and a second message."""
    conversation = Conversation("Be brief.", [Message("user", "Hi")])
    prompt = conversation.prompt(session)
    generated = Generated(prompt.text, (*prompt.tokens, *tokens), ended)
    conversation.messages += [Message("assistant", reply, generated), Message("user", "More")]
    return conversation, generated


def test_the_next_prompt_begins_with_the_generated_tokens() -> None:
    session = ToySession()
    odd = (7777, 8888, END)  # "Hello" as the encoder would not split it
    conversation, generated = after_reply(session, "Hello", odd, ended=True)
    new = encoded(session, "<|user|>More<|end|><|assistant|>")
    assert tuple(conversation.prompt(session).tokens) == generated.tokens + new


def test_a_reply_that_was_cut_is_closed_by_the_template() -> None:
    session = ToySession()
    conversation, generated = after_reply(session, "Hello", (7777, 8888), ended=False)
    new = encoded(session, "<|end|><|user|>More<|end|><|assistant|>")
    assert tuple(conversation.prompt(session).tokens) == generated.tokens + new


def test_another_end_token_than_the_templates_is_replaced() -> None:
    session = ToySession()
    conversation, generated = after_reply(session, "Hello", (7777, 8888, 99999), ended=True)
    new = encoded(session, "<|end|><|user|>More<|end|><|assistant|>")
    assert tuple(conversation.prompt(session).tokens) == generated.tokens[:-1] + new


def test_a_template_that_rewrites_old_replies_gets_its_way() -> None:
    session = ToySession(rewrites=True)
    reply = "<think>hm</think>Hello"
    conversation, _ = after_reply(session, reply, (7777, END), ended=True)
    text = session.render_chat(conversation.plain())
    assert "hm" not in text
    assert tuple(conversation.prompt(session).tokens) == encoded(session, text)


def test_changed_history_is_encoded_anew() -> None:
    session = ToySession()
    conversation, _ = after_reply(session, "Hello", (7777, END), ended=True)
    conversation.system = "Be verbose."
    text = session.render_chat(conversation.plain())
    assert tuple(conversation.prompt(session).tokens) == encoded(session, text)


def test_an_end_marker_inside_the_message_does_not_move_the_seam() -> None:
    session = ToySession()
    conversation, generated = after_reply(session, "Hello", (7777, END), ended=True)
    conversation.messages[-1] = Message("user", "a<|end|>b")
    new = encoded(session, "<|user|>a<|end|>b<|end|><|assistant|>")
    assert tuple(conversation.prompt(session).tokens) == generated.tokens + new


def test_no_special_token_behind_the_reply_means_no_splicing() -> None:
    class Plain(ToySession):
        def render_chat(self, messages):  # type: ignore[no-untyped-def]
            return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "

    session = Plain()
    conversation, _ = after_reply(session, "Hello", (7777, END), ended=True)
    text = session.render_chat(conversation.plain())
    assert tuple(conversation.prompt(session).tokens) == encoded(session, text)


@given(reply=TEXTS, message=TEXTS, ended=st.booleans())
def test_tokens_that_encode_the_same_give_the_plain_encoding(
    reply: str, message: str, ended: bool
) -> None:
    session = ToySession()
    tokens = encoded(session, reply) + ((END,) if ended else ())
    conversation, _ = after_reply(session, reply, tokens, ended=ended)
    conversation.messages[-1] = Message("user", message)
    prompt = conversation.prompt(session)
    assert tuple(prompt.tokens) == encoded(session, prompt.text)


@pytest.mark.parametrize(("limit", "dropped"), [(500, 0), (60, 2), (10, 4)])
def test_the_oldest_turns_are_dropped_and_the_last_is_kept(limit: int, dropped: int) -> None:
    session = ToySession()
    turns = [Message("user", "u" * 10), Message("assistant", "a" * 10)] * 2
    conversation = Conversation("system", [*turns, Message("user", "last")])
    assert conversation.oldest_turns(session, limit) == dropped
    assert SPECIAL["<|system|>"] in encoded(session, session.render_chat(conversation.plain(4)))
