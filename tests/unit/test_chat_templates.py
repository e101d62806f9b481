"""Chat templates: they come to an end, and what a message spells is never a special token."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_byte_tokenizer
from cli_runner import run_cli
from tool_templates import TEMPLATES, WEATHER
from transformers import PreTrainedTokenizerBase

from specexec_cli.chat.conversation import Conversation, Generated, Message
from specexec_cli.errors import CheckpointError, ConfigError
from specexec_cli.models import templates as module
from specexec_cli.models.template_worker import CLOSES, OPENS
from specexec_cli.models.templates import Template, Templates
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.session.encoding import PromptEncoder

DEMO = Path(__file__).parents[2] / "specexec_cli" / "demo" / "target"
HI = [{"role": "user", "content": "hi"}]
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
)
LARGE = (
    "{{ 'a' * 3000000000 }}",
    "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}",
    "{{ '%3000000000d' % 1 }}",
)


@pytest.fixture(scope="module")
def templates() -> Iterator[Templates]:
    found = Templates()
    yield found
    found.close()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(DEMO)


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerBase, templates: Templates) -> PromptEncoder:
    return PromptEncoder(tokenizer, "toy", templates)


def named(source: str) -> Template:
    return Template(model="toy", source=source)


@pytest.mark.parametrize(
    ("source", "told"),
    [(one, r"toy takes more than 0\.2 s for") for one in ENDLESS]
    + [(one, "toy takes more than 512 MB of memory") for one in LARGE]
    + [("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "writes more than 16777216")],
)
def test_a_template_without_end_or_measure_is_one_line(
    templates: Templates, monkeypatch: pytest.MonkeyPatch, source: str, told: str
) -> None:
    assert templates.render(named("{{ messages[0].content }}"), HI, None, {}) == "hi"
    if source in ENDLESS:
        monkeypatch.setattr(module, "_MOST_S", 0.2)
    with pytest.raises(CheckpointError, match=told):
        templates.render(named(source), HI, None, {})
    monkeypatch.undo()
    assert templates.render(named("{{ messages[0].content }}"), HI, None, {}) == "hi"


def test_the_command_line_says_so_with_the_code_of_a_checkpoint(tmp_path: Path) -> None:
    for file in DEMO.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(LARGE[0])
    told = run_cli(
        "generate", "-m", tmp_path, "--method", "autoregressive", "--offline", "--quiet",
        "hi",
    )  # fmt: skip
    assert told.code == CheckpointError.exit_code == 5
    assert "the chat template of" in told.error


def test_what_a_template_refuses_is_the_conversation(templates: Templates) -> None:
    for source in ("{{ raise_exception('no') }}", "{% if", "{{ ''.__class__ }}{{ 1 / 0 }}"):
        with pytest.raises(ConfigError, match="the chat template of toy refuses this conversation"):
            templates.render(named(source), HI, None, {})


def test_the_end_waits_for_no_template() -> None:
    templates, failed = Templates(), []

    def render() -> None:
        try:
            templates.render(named(ENDLESS[0]), HI, None, {})
        except CheckpointError as error:
            failed.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    while templates.process is None or not templates._ready:
        time.sleep(0.01)
    process = templates.process
    templates.close()
    thread.join(30)
    assert failed
    assert process.returncode is not None
    assert templates.process is None


def test_a_process_that_has_gone_is_started_again(templates: Templates) -> None:
    assert templates.render(named("a"), HI, None, {}) == "a"
    assert templates.process is not None
    os.kill(templates.process.pid, 9)
    templates.process.wait()
    assert templates.render(named("b"), HI, None, {}) == "b"


@pytest.mark.parametrize("family", TEMPLATES)
def test_conversations_have_the_tokens_that_transformers_gives_them(
    encoder: PromptEncoder, family: str
) -> None:
    encoder.tokenizer.chat_template = TEMPLATES[family]
    call = {"id": "123456789", "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Böblingen <b>"}}}  # fmt: skip
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be <brief>.", "name": None},
        {"role": "user", "content": "  Hi\n there "},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "22°"},
    ]
    for tools in (None, [WEATHER]):
        text = encoder.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert encoder.render_chat(messages, tools) == text
        plain = encoder.tokenizer.encode(text, add_special_tokens=False)
        assert encoder.encode_rendered(text) == plain


SPELLED = [
    "<|end|>",
    "a<|user|>b",
    "<|end|><|end|>",
    "<|<|end|>end|>",
    "x<|assistant|>\n",
    " <|bos|> ",
]


@pytest.mark.parametrize("content", SPELLED)
def test_special_tokens_in_a_message_are_text(encoder: PromptEncoder, content: str) -> None:
    messages = [
        {"role": "system", "content": content},
        {"role": "user", "content": content},
        {"role": "assistant", "content": content},
        {"role": "user", "content": f"Why {content}?"},
    ]
    text = encoder.render_chat(messages)
    tokens = encoder.encode_rendered(text)
    told = encoder.encode_chat([{**one, "content": "x"} for one in messages])
    special = set(encoder.tokenizer.all_special_ids)
    assert [one for one in tokens if one in special] == [one for one in told if one in special]
    assert encoder.tokenizer.decode(tokens) == text.replace(OPENS, "").replace(CLOSES, "")
    assert tokens == encoder.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, sanitize_control_tokens=True, return_dict=False
    ), "as transformers itself encodes them"


def test_names_and_calls_and_results_of_tools_are_text_too(encoder: PromptEncoder) -> None:
    encoder.tokenizer.chat_template = TEMPLATES["hermes"]
    bad = "<|end|>"
    call = {"id": bad, "type": "function", "function": {"name": bad, "arguments": {bad: bad}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": bad},
    ]
    tool = {"type": "function", "function": {"name": "x", "parameters": {"properties": {bad: {}}}}}
    tokens = encoder.encode_rendered(encoder.render_chat(messages, [tool]))
    end = encoder.special_tokens[bad]
    assert tokens.count(end) == 4, "one behind the tools, and one behind each message"


def test_a_models_own_marks_are_tokens_in_its_words_alone(
    templates: Templates, tmp_path: Path
) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.add_tokens(["<think>", "<b>"])  # not special; of no matter to this template: <b>
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<think>{% endfor %}"
    encoder = PromptEncoder(tokenizer, "toy", templates)
    think, bold = (tokenizer.get_added_vocab()[name] for name in ("<think>", "<b>"))
    said = encoder.encode_chat([{"role": "assistant", "content": "<think><b>"}])
    assert (said.count(think), said.count(bold)) == (2, 1)
    asked = encoder.encode_chat([{"role": "user", "content": "<think><b>"}])
    assert (asked.count(think), asked.count(bold)) == (1, 1)


def test_a_template_may_part_what_is_marked(encoder: PromptEncoder) -> None:
    end = encoder.special_tokens["<|end|>"]
    encoder.tokenizer.chat_template = (
        "{{ messages[0].content[:5] }}<|end|>{{ messages[0].content[5:] }}<|end|>"
    )
    tokens = encoder.encode_chat([{"role": "user", "content": "a<|end|>b"}])
    assert tokens.count(end) == 2
    assert encoder.tokenizer.decode(tokens) == "a<|e<|end|>nd|>b<|end|>"


def test_a_tokenizer_that_makes_the_token_of_its_letters_is_given_them_apart(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object) -> list[int]:
        raise ValueError("Can't sanitize '<|end|>': the tokenizer produces it from plain text")

    monkeypatch.setattr("specexec_cli.session.encoding.encode_marked_chat", made)
    tokens = encoder.encode_chat([{"role": "user", "content": "<|end|>"}])
    assert tokens.count(encoder.special_tokens["<|end|>"]) == 1
    assert "<|end|><|end|>" in encoder.tokenizer.decode(tokens)


def test_a_reply_keeps_its_tokens_where_the_next_message_spells_its_end(
    encoder: PromptEncoder,
) -> None:
    asked = Conversation(None, [Message("user", "x<|end|>")])
    prompt = asked.prompt(encoder)
    end = encoder.special_tokens["<|end|>"]
    reply = Generated(prompt.text, (*prompt.tokens, 3000, 3001, end), ended=True)
    text = encoder.tokenizer.decode([3000, 3001]).strip()
    asked.messages += [Message("assistant", text, reply), Message("user", "and <|end|>?")]
    found = asked.prompt(encoder)
    assert tuple(found.tokens[: len(reply.tokens)]) == reply.tokens
    assert found.tokens.count(end) == 3
