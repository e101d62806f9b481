"""A prompt as a turn of a chat: thinking on or off, and where each part of the text is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_runner import run_cli

import specexec_cli
from specexec_cli.cli.live import LiveStatus
from specexec_cli.cli.printed import PrintedText
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.session.encoding import PromptEncoder

DEMO = Path(specexec_cli.__file__).parent / "demo" / "target"
HI = [{"role": "user", "content": "hi"}]


def printed(capsys: pytest.CaptureFixture[str], rendered: str | None, quiet: bool) -> Any:
    shown = PrintedText(rendered, LiveStatus(shown=False), quiet)
    for piece in ("Hm", "m</thi", "nk>\n\nPar", "is."):
        shown.add(piece)
    shown.finish()
    return tuple(capsys.readouterr())


def test_thinking_goes_to_stderr_and_the_answer_to_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(capsys, "<think>\n", False) == ("Paris.\n", "Hmm\n")
    assert printed(capsys, "<think>\n", True) == ("Paris.\n", "")
    assert printed(capsys, None, False) == ("Hmm</think>\n\nParis.\n", "")


@pytest.mark.parametrize(
    ("think", "wanted"),
    [(None, "hi none none<think>\n"), (True, "hi True none<think>\n"),
     (False, "hi False low<think>\n\n</think>\n\n")],
)  # fmt: skip
def test_a_template_is_asked_for_thinking_or_for_none(think: bool | None, wanted: str) -> None:
    tokenizer = load_tokenizer(DEMO)
    tokenizer.chat_template = (
        "{{ messages[0].content }} {{ enable_thinking | default('none') }} "
        "{{ reasoning_effort | default('none') }}<think>{{ '\\n' }}"
    )
    encoder = PromptEncoder(tokenizer, "toy")
    encoder.think = think
    assert encoder.render_chat(HI) == wanted
    told = encoder.render_chat(HI, None, {"enable_thinking": 5})
    assert told == "hi 5 none<think>\n", "a request's own variables come first"


def test_chat_and_generate_have_the_same_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool | None] = []
    rendered: list[Any] = []
    monkeypatch.setattr(
        "specexec_cli.cli.chat.converse",
        lambda session, settings, **more: asked.append(session.think) or 0,
    )  # fmt: skip
    for option in ((), ("--think",), ("--no-think",)):
        assert run_cli("chat", "demo-target", "--method", "autoregressive", "-q", *option).code == 0
    assert asked == [None, True, False]
    render = PromptEncoder.render_chat
    monkeypatch.setattr(
        PromptEncoder, "render_chat",
        lambda self, *told: (rendered.append((self.think, *told)), render(self, *told))[1],
    )  # fmt: skip
    run_cli("generate", "hi", "--no-think", "--system", "Be short", "--max-tokens", 1, "-q")
    assert rendered == [(False, [{"role": "system", "content": "Be short"}, *HI])]
