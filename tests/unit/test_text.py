"""Text as it is shown: whole characters, nothing of a stop string, nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import save_byte_tokenizer, save_sentencepiece_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

import specexec_cli
from specexec_cli.models.text import TextStream
from specexec_cli.models.tokenizer import load_tokenizer

HARD = "a😀é 你好\u0301e\u0301 👩\u200d👩\u200d👧 \ufffd x\n\t\u00a0ﬀ"
texts = st.text(st.sampled_from(list(HARD + "abc .,")), max_size=30)


@pytest.fixture(scope="module")
def byte_words(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return save_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def sentencepiece_words(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("sentencepiece")
    save_sentencepiece_tokenizer(folder, None)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def demo_words() -> PreTrainedTokenizerBase:
    return load_tokenizer(Path(specexec_cli.__file__).parent / "demo" / "target")


def streamed(
    words: PreTrainedTokenizerBase,
    tokens: list[int],
    prompt: list[int] | None = None,
    stop: tuple[str, ...] = (),
) -> list[str]:
    stream = TextStream(words, prompt or [], stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces
    return [*pieces, stream.finish()]


@settings(max_examples=150, deadline=None)
@given(text=texts)
@example(HARD)
@example("\ufffd" * 5 + "😀" + "\ufffd")
def test_text_cut_at_every_byte(byte_words, text):
    pieces = streamed(byte_words, byte_words.encode(text))
    assert "".join(pieces) == text
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text


@pytest.fixture(scope="module")
def bytes_to_tokens(byte_words) -> dict[int, int]:
    """The backend knows each byte by a printable stand-in: itself, or one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins |= {byte: chr(256 + at) for at, byte in enumerate(others)}
    return {byte: byte_words.convert_tokens_to_ids(text) for byte, text in stand_ins.items()}


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(
        st.sampled_from([*"😀é你x".encode(), 0xFF, 0xC0, *"\ufffd".encode(), ord("y")]), max_size=24
    )
)
@example(list(b"\xff\xff\xff" + "😀".encode() + b"y"))
@example(list("\ufffd😀".encode()))
def test_bytes_that_are_no_text_cost_no_text(byte_words, bytes_to_tokens, data):
    """Whatever comes, the pieces are what the bytes mean as a whole, damage replaced."""
    pieces = streamed(byte_words, [bytes_to_tokens[byte] for byte in data])
    assert "".join(pieces) == bytes(data).decode("utf-8", errors="replace")


def test_a_prompt_that_ends_inside_a_character(byte_words, bytes_to_tokens):
    data = [bytes_to_tokens[byte] for byte in "x😀y".encode()]
    assert "".join(streamed(byte_words, data[3:], prompt=data[:3])) == "😀y"


@settings(max_examples=80, deadline=None)
@given(text=texts, prompt=st.sampled_from(["a", "a b", "x:\n", "é"]))
@example(HARD, "a")
def test_sentencepiece_with_byte_fallback(sentencepiece_words, text, prompt):
    words = sentencepiece_words
    both = words.encode(prompt + text)
    cut = len(words.encode(prompt))
    if both[:cut] != words.encode(prompt):
        return  # the prompt's last token joined the text
    pieces = streamed(words, both[cut:], prompt=both[:cut])
    assert prompt + "".join(pieces) == prompt + text
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text


def test_spaces_between_words_come_with_the_word(sentencepiece_words):
    words = sentencepiece_words
    prompt = words.encode("def")
    pieces = streamed(words, words.encode("def is not a list")[len(prompt) :], prompt=prompt)
    assert "".join(pieces) == " is not a list"
    assert all(not piece.endswith(" ") for piece in pieces), "a space belongs to what follows"


@settings(max_examples=80, deadline=None)
@given(text=texts, prompt=texts)
@example(HARD, "x")
def test_the_demo_tokenizer(demo_words, text, prompt):
    tokens = demo_words.encode(text, add_special_tokens=False)
    pieces = streamed(demo_words, tokens, prompt=demo_words.encode(prompt))
    assert "".join(pieces) == text


def test_special_tokens_are_not_shown(demo_words):
    tokens = [*demo_words.encode("ok"), demo_words.eos_token_id]
    assert "".join(streamed(demo_words, tokens)) == "ok"


stops = st.lists(st.text(st.sampled_from("ab😀\n"), min_size=1, max_size=4), max_size=3)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("ab😀\n"), max_size=20), stop=stops)
@example("ab", ["ab"])
@example("aab", ["ab"])
@example("aaab", ["aab", "b"])
@example("😀b", ["😀b"])
def test_stop_strings_across_tokens(byte_words, text, stop):
    """Cut before the first stop string that completes, the longest match of that moment."""
    expected, stopped = text, False
    for end in range(1, len(text) + 1):
        found = [text[:end].find(s) for s in stop if s in text[:end]]
        if found:
            expected, stopped = text[: min(found)], True
            break
    stream = TextStream(byte_words, [], tuple(stop))
    shown = ""
    for token in byte_words.encode(text):
        shown += stream.push(token)
        assert expected.startswith(shown), "nothing is shown that has to be taken back"
        if stream.stopped:
            break
    else:
        shown += stream.finish()
    assert (shown, stream.stopped) == (expected, stopped)


def test_a_stop_string_inside_one_token(demo_words):
    """A token may hold text before, of, and behind the stop string."""
    tokens = demo_words.encode("    return self.value", add_special_tokens=False)
    assert len(tokens) < 12
    pieces = streamed(demo_words, tokens, stop=("urn",))
    assert "".join(pieces) == "    ret"


def test_a_stop_string_at_the_very_start(byte_words):
    assert "".join(streamed(byte_words, byte_words.encode("\n\nfoo"), stop=("\n",))) == ""


def test_a_stop_string_that_the_prompt_began_is_not_one(byte_words):
    """Only generated text counts, or a prompt that ends in half a stop string would end at once."""
    prompt, tokens = byte_words.encode("x END"), byte_words.encode("ING")
    assert "".join(streamed(byte_words, tokens, prompt=prompt, stop=("ENDING",))) == "ING"


def test_held_text_is_released_at_the_end(byte_words):
    tokens = byte_words.encode("one two EN")
    assert "".join(streamed(byte_words, tokens, stop=("END",))) == "one two EN"


def test_a_byte_that_is_a_character_is_shown_at_once(sentencepiece_words):
    """Decoders take it back if broken bytes follow; what was shown stays."""
    line_break, broken = sentencepiece_words.convert_tokens_to_ids(["<0x0A>", "<0xE4>"])
    assert sentencepiece_words.decode([line_break, broken]) == "\ufffd\ufffd"
    pieces = streamed(sentencepiece_words, [line_break, broken])
    assert pieces[0] == "\n"
    assert set("".join(pieces[1:])) == {"\ufffd"}
