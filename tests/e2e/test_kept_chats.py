"""Chats that are gone on with: what is kept of them is read while the next message is typed."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_toys import Recorder
from checkpoints import BYTE_VOCAB, byte_llama, save_byte_tokenizer, save_checkpoint
from gguf_toys import TOYS, save_toy

from specexec_cli.chat.chat import Chat
from specexec_cli.chat.settings import ChatSettings
from specexec_cli.chat.transcript import Transcript
from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.reader import READER_THREADS
from specexec_cli.prefixes import reading
from specexec_cli.prefixes.folder import prefixes_folder
from specexec_cli.session import Session, local_session
from specexec_cli.session.local_session import LocalSession

# Prompts end as those of thinking models do, and of earlier replies the beginning is left out, in
# the place of the thoughts that toys do not write.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content[40:] if m.role == 'assistant' else m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
PLAIN = TEMPLATE.replace("m.content[40:]", "m.content").replace("<think>", "")
SYSTEM = "You are a careful assistant, who answers in few words, and says where they stand. " * 3
MODELS = ["llama", "qwen3_5", "falcon_h1"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def model(name: str, folder: Path, template: str) -> Path:
    if name == "llama":
        save_checkpoint(folder, byte_llama(max_position_embeddings=2048), std=0.12)
    else:
        toy, sizes = TOYS[name], {"vocab_size": BYTE_VOCAB, "max_position_embeddings": 2048}
        save_toy(replace(toy, options={**toy.options, **sizes}), folder)
    save_byte_tokenizer(folder, chat_template=template)
    return folder


def opened(folder: Path, **asked: Any) -> LocalSession:
    usual = {"draft": "suffix", "dtype": "float32", "offload": "ssd", "remember": True}
    found = Session.open(model=str(folder), **{**usual, **asked})
    assert isinstance(found, LocalSession)
    return found


def chat(session: LocalSession, path: Path) -> Chat:
    settings = ChatSettings(
        sampling=SamplingConfig(), tree=session.pair.tree,
        generation=GenerationConfig(max_tokens=60),
    )  # fmt: skip
    return Chat(session, Recorder(), settings, transcript=Transcript(path, "toy"))


def two_turns(session: LocalSession, path: Path) -> tuple[Chat, list[int]]:
    """A chat of two turns, and how many rows each prompt took."""
    running, rows = chat(session, path), []
    running.set_system(SYSTEM)
    for message in ("What is a tree?", "And a forest?"):
        running.send(message)
        rows.append(session.stats.prompt_rows)
    return running, rows


def replies(running: Chat) -> list[str]:
    return [each.content for each in running.conversation.messages if each.role == "assistant"]


def settled(session: LocalSession) -> None:
    """Waits until rows have been brought back."""
    until = time.monotonic() + 30
    while not session.target.tokens and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_template_that_drops_earlier_thoughts(name: str, dtype: str, tmp_path: Path) -> None:
    """The second turn goes on from in front of the first reply, whose rows are another text's."""
    folder = model(name, tmp_path / name, TEMPLATE)
    with opened(folder, dtype=dtype, cache=False) as plain:
        running, _ = two_turns(plain, tmp_path / "plain.jsonl")
        expected = replies(running)
    with opened(folder, dtype=dtype) as one:
        running, rows = two_turns(one, tmp_path / "chat.jsonl")
        assert replies(running) == expected
        new = (
            len(running.conversation.messages[1].content.encode())
            - 40
            + len("</s><user>And a forest?</s><assistant><think>")
        )
        assert rows[1] <= new + 16 + len("<think>"), "rows up to the reply are gone on from"


@pytest.mark.parametrize("template", [PLAIN, TEMPLATE], ids=["plain", "thoughts dropped"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_read_while_the_next_message_is_typed(
    name: str, template: str, tmp_path: Path
) -> None:
    folder, path = model(name, tmp_path / name, template), tmp_path / "chat.jsonl"
    with opened(folder) as one:
        first, _ = two_turns(one, path)
    with opened(folder, cache=False) as plain:
        going_on = chat(plain, tmp_path / "plain.jsonl")
        going_on.load(path)
        going_on.send("Why?")
        expected, all_rows = replies(going_on), plain.stats.prompt_rows
    assert expected[:2] == replies(first)
    with opened(folder) as two:
        going_on = chat(two, tmp_path / "more.jsonl")
        going_on.load(path)
        settled(two)
        brought = len(two.target.tokens)
        shutil.rmtree(prefixes_folder())  # nothing is read any more
        going_on.send("Why?")
        assert replies(going_on) == expected
        if template == PLAIN:
            assert all_rows - two.stats.prompt_rows == brought > len(SYSTEM)
        else:
            assert brought


def test_a_turn_that_is_taken_back(tmp_path: Path) -> None:
    """Nothing of it is in the next reply, and recurrent layers go back to where it began."""
    folder, found, rows = model("qwen3_5", tmp_path / "hybrid", PLAIN), [], []
    with opened(folder, cache=False) as session:
        for taken_back in (True, False):
            session.forget()
            running = chat(session, tmp_path / "chat.jsonl")
            running.settings = replace(running.settings, generation=GenerationConfig(max_tokens=6))
            running.send("A tree?")
            if taken_back:
                running.send("A forest?")
                rows.append(session.stats.prompt_rows)
                running.undo()
            running.send("A wood?")
            rows.append(session.stats.prompt_rows)
            found.append(replies(running))
    assert found[0] == found[1]
    assert rows == [rows[0], *[rows[0] - len("forest") + len("wood")] * 2]


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_another_text_than_the_one_that_was_prepared(name: str, tmp_path: Path) -> None:
    folder, path = model(name, tmp_path / name, PLAIN), tmp_path / "chat.jsonl"
    prompts = [[*SYSTEM.encode(), *end.encode()] for end in ("Why?", "A tree is" * 20)]
    generation = GenerationConfig(max_tokens=40)
    with opened(folder) as one:
        two_turns(one, path)
        expected = []
        for prompt in prompts:
            one.forget()
            steps = one.generate(prompt, generation=generation)
            expected.append([token for step in steps for token in step.tokens])
    with opened(folder) as two:
        for prompt, text in zip(reversed(prompts), reversed(expected), strict=True):
            two.prepare([*prompts[0], *b"and more"], 40)
            steps = two.generate(prompt, generation=generation)
            assert [token for step in steps for token in step.tokens] == text
        two.prepare([5] * two.context_length, 40)  # it would leave no room for a text
        two.prepare([], 40)


def next_tokens(session: LocalSession) -> tuple[list[int], list[int]]:
    """The tokens of a session's text, and those that follow when it is read anew."""
    context = list(session.context)
    session.forget()
    steps = session.generate(context, generation=GenerationConfig(max_tokens=20))
    return context, [token for step in steps for token in step.tokens]


def test_a_reading_that_fails_is_tried_again_by_the_next_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = model("llama", tmp_path / "llama", PLAIN), tmp_path / "chat.jsonl"
    with opened(folder) as one:
        two_turns(one, path)
        context, expected = next_tokens(one)
    with opened(folder) as two:
        assert two.kept is not None
        bring_back, tries = two.kept.bring_back, []

        def fails_once(*arguments: Any) -> None:
            tries.append(1)
            if len(tries) == 1:
                raise OutOfMemoryError("no memory")
            bring_back(*arguments)

        monkeypatch.setattr(two.kept, "bring_back", fails_once)
        two.prepare(context, 20)
        steps = two.generate(context, generation=GenerationConfig(max_tokens=20))
        assert [token for step in steps for token in step.tokens] == expected
        assert len(tries) == 2


def test_a_chat_begins_where_nothing_can_be_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = model("llama", tmp_path / "llama", PLAIN), tmp_path / "chat.jsonl"

    def none_left(*arguments: Any) -> None:
        raise OutOfMemoryError("no memory")

    with opened(folder) as one:
        two_turns(one, path)
    with opened(folder) as two:
        going_on = chat(two, tmp_path / "more.jsonl")
        monkeypatch.setattr(two.target, "reserve", none_left)
        going_on.load(path)
        with pytest.raises(OutOfMemoryError):
            going_on.send("Why?")


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_no_passes_are_timed_before_the_first_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are by the text, behind the rows that were brought back, which stay."""
    folder, path = model(name, tmp_path / name, PLAIN), tmp_path / "chat.jsonl"
    draft = str(model("llama", tmp_path / "draft", PLAIN))
    with opened(folder) as one:
        two_turns(one, path)
    with opened(folder, cache=False) as plain:
        going_on = chat(plain, tmp_path / "plain.jsonl")
        going_on.load(path)
        going_on.send("Why?")
        expected = replies(going_on)
    timed, measured = [], local_session.measured_prior

    def counted(*arguments: Any) -> Any:
        timed.append(1)
        return measured(*arguments)

    monkeypatch.setattr(local_session, "measured_prior", counted)
    with opened(folder, draft=draft) as two:
        going_on = chat(two, tmp_path / "more.jsonl")
        going_on.load(path)
        assert not timed
        settled(two)
        brought = len(two.target.tokens)
        shutil.rmtree(prefixes_folder())  # nothing is read any more
        going_on.send("Why?")
        assert (len(timed), replies(going_on)) == (1, expected)
        assert two.stats.prompt_tokens - two.stats.prompt_rows == brought > len(SYSTEM)


def test_who_leaves_does_not_wait_for_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path = model("llama", tmp_path / "llama", PLAIN), tmp_path / "chat.jsonl"
    with opened(folder) as one:
        two_turns(one, path)
        context, expected = next_tokens(one)
    fill, filled = reading.fill_rows, []

    def slowly(*arguments: Any) -> None:
        filled.append(1)
        time.sleep(0.2)
        fill(*arguments)

    monkeypatch.setattr(reading, "fill_rows", slowly)
    with opened(folder) as two:
        two.prepare(context, 20)
        two.forget()  # what is no longer wanted is read no further
        assert two.target.tokens == []
        two.prepare(context, 20)
    files = len([*prefixes_folder().rglob("*.rows")])
    assert files > 5
    # each thread fills the file that it is at: keys and values of four layers
    assert len(filled) <= 2 * READER_THREADS * 2 * 4 < 2 * files * 2 * 4
    monkeypatch.setattr(reading, "fill_rows", fill)
    with opened(folder) as three:
        three.prepare(context, 20)
        steps = three.generate(context, generation=GenerationConfig(max_tokens=20))
        assert [token for step in steps for token in step.tokens] == expected
        assert three.stats.prompt_rows < 64
