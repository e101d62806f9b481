"""Replies in channels: headers go, thinking is marked."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import save_byte_tokenizer
from transformers import PreTrainedTokenizerBase

from specexec_cli.chat.thinking import ThinkSplitter
from specexec_cli.models.channels import without_thinking
from specexec_cli.models.text import TextStream
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.session.encoding import PromptEncoder

MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"]
REPLY = (
    "<|channel|>analysis<|message|>Say é.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>One moment. <|end|>"
    "<|start|>assistant<|channel|>final<|message|>Here: analysis 😀<|return|>"
)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("harmony")
    save_byte_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return tokenizer


def shown(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    stream = TextStream(tokenizer, tokenizer.encode("<|start|>assistant"), ())
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    return "".join(pieces) + stream.finish()


def test_headers_go_and_thinking_is_marked(harmony: PreTrainedTokenizerBase) -> None:
    text = shown(harmony, REPLY)
    assert text == "<think>Say é.</think>One moment. Here: analysis 😀"
    splitter = ThinkSplitter()
    parts = [*splitter.push(text), *splitter.finish()]
    assert [(part.text, part.thinking) for part in parts] == [
        ("Say é.", True), ("One moment. Here: analysis 😀", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("special", "others", "reply"),
    [
        (["<end_of_turn>", "<eos>"], [], "Here: é<end_of_turn>"),  # Gemma
        (["<|eot_id|>"], [], "Here: é<|eot_id|>"),  # Llama 3
        (["<|im_end|>"], ["<think>", "</think>"],
         "<think>Say é.</think>Here: é<|im_end|>"),  # Qwen3
        (["<|end|>", "<think>", "</think>"], [],
         "<think>Say é.</think>Here: é<|end|>"),  # where the marks are special, too
        (["<|user|>", "<|observation|>"], ["<think>", "</think>"],
         "<think>Say é.</think>Here: é<|user|>"),  # GLM-4.5
        (["[THINK]", "[/THINK]", "</s>"], [], "[THINK]Say é.[/THINK]Here: é</s>"),  # Mistral
        (["<seed:eos>"], ["<seed:think>", "</seed:think>"],
         "<seed:think>Say é.</seed:think>Here: é<seed:eos>"),  # Seed-OSS
    ],
)  # fmt: skip
def test_turns_end_unseen_and_thinking_is_told_apart_in_every_family(
    tmp_path: Path, special: list[str], others: list[str], reply: str
) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(others)
    splitter = ThinkSplitter()
    parts = [*splitter.push(shown(tokenizer, reply)), *splitter.finish()]
    thought = [("Say é.", True)] if "Say" in reply else []
    assert [(part.text, part.thinking) for part in parts] == [*thought, ("Here: é", False)]


def test_a_reply_that_only_answers(harmony: PreTrainedTokenizerBase) -> None:
    assert shown(harmony, "<|channel|>final<|message|>Yes.<|return|>") == "Yes."


def test_words_of_headers_are_words_elsewhere(tmp_path: Path) -> None:
    """Tokenizers without these marks: text is left as it is."""
    save_byte_tokenizer(tmp_path)
    assert shown(load_tokenizer(tmp_path), REPLY) == REPLY


def test_templates_are_told_answers_alone(harmony: PreTrainedTokenizerBase) -> None:
    harmony.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    )
    reply = "<think>Say é.</think>Here."
    assert without_thinking(reply) == "Here."
    assert without_thinking("a </think> b") == "a </think> b"
    messages = [{"role": "user", "content": reply}, {"role": "assistant", "content": reply}]
    assert PromptEncoder(harmony, "x").render_chat(messages) == f"user:{reply};assistant:Here.;"
