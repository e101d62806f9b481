"""Chats with real, tiny models: live caches, lossless turns, stops in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import save_byte_tokenizer, save_pair
from terminal import CTRL_C, CTRL_D, Terminal

from specexec_cli.chat.chat import Chat
from specexec_cli.chat.settings import ChatSettings
from specexec_cli.config import GenerationConfig, OffloadMode, SamplingConfig, TreeConfig
from specexec_cli.core import GenerationStats, PassProgress, StepResult
from specexec_cli.errors import ConfigError
from specexec_cli.session import Session, TextSession

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}[assistant]"
)
MESSAGES = ("Hello, who are you?", "Tell me more of it.", "Grüße, und noch etwas!")
MOST_TOKENS = 16
MAIN = [sys.executable, "-m", "specexec_cli.cli.main", "chat"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = save_pair(tmp_path_factory.mktemp("pair"))
    for folder in folders:
        save_byte_tokenizer(folder, chat_template=TEMPLATE)
    return folders


def opened(pair: tuple[Path, Path], offload: OffloadMode) -> TextSession:
    return Session.open(
        model=str(pair[0]), draft=str(pair[1]), offload=offload, device="cpu", dtype="float32"
    )


@pytest.fixture(scope="module")
def session(pair: tuple[Path, Path]) -> Iterator[TextSession]:
    """One streaming session for all: every chat must do with the caches the last one left."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are too small to share
    with opened(pair, "ssd") as session:
        yield session
    torch.set_num_threads(threads)


class View:
    """A screen that keeps the steps, and may press Ctrl-C."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.interrupt_at: tuple[int, int] | None = None  # pass and layer

    def notice(self, text: str) -> None:
        pass

    error = echo = notice

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        pass

    def stats(self, stats: GenerationStats) -> None:
        pass

    def confirm(self, question: str) -> bool:
        return True

    @contextmanager
    def reply(self, prompt: str, settings: ChatSettings) -> Iterator[View]:
        self.steps = []
        yield self

    def layer(self, progress: PassProgress) -> None:
        if (progress.number, progress.layer) == self.interrupt_at:
            signal.raise_signal(signal.SIGINT)

    def step(self, step: StepResult) -> None:
        self.steps.append(step)

    def stopping(self) -> None:
        pass


def chat_on(session: TextSession, **sampling: float) -> tuple[Chat, View]:
    view = View()
    settings = ChatSettings(
        sampling=SamplingConfig(**sampling),  # type: ignore[arg-type]
        tree=TreeConfig(budget=16, max_depth=6, batch=8),
        generation=GenerationConfig(max_tokens=MOST_TOKENS),
    )
    return Chat(session, view, settings), view


def replies(chat: Chat) -> list[str]:
    return [m.content for m in chat.conversation.messages if m.role == "assistant"]


def test_a_new_turn_processes_its_new_tokens_only(session: TextSession) -> None:
    chat, view = chat_on(session)
    chat.send(MESSAGES[0])
    whole_pass = view.steps[0].bytes_streamed
    before = len(session.context)
    chat.send(MESSAGES[1])
    tail = session.encode_rendered(f"</s>[user]{MESSAGES[1]}</s>[assistant]")
    # the last token of a reply is never in the cache: nothing came after it
    assert view.steps[0].pending_rows == len(tail) + 1
    assert session.stats.prompt_tokens == before + len(tail)
    assert session.stats.prompt_rows == len(tail) + 1
    assert {step.bytes_streamed for step in view.steps} == {whole_pass}
    assert whole_pass > 0
    assert len(view.steps) < MOST_TOKENS, "several tokens a pass"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}])
def test_replies_are_the_same_with_and_without_a_draft(
    session: TextSession, sampling: dict[str, float]
) -> None:
    drafted, _ = chat_on(session, **sampling)
    plain, _ = chat_on(session, **sampling)
    plain.settings = replace(plain.settings, method="autoregressive")
    mixed, _ = chat_on(session, **sampling)
    for number, message in enumerate(MESSAGES):
        mixed.settings = replace(mixed.settings, method="autoregressive" if number == 1 else None)
        for chat in (drafted, plain, mixed):
            chat.send(message)
    assert replies(drafted) == replies(plain) == replies(mixed)
    assert [m.generated for m in drafted.conversation.messages] == [
        m.generated for m in plain.conversation.messages
    ], "the same tokens"


@pytest.mark.parametrize("interrupt_at", [(1, 4), (2, 1), (2, 3)])
def test_after_ctrl_c_the_chat_goes_on_as_a_fresh_one_would(
    pair: tuple[Path, Path], session: TextSession, interrupt_at: tuple[int, int]
) -> None:
    chat, view = chat_on(session, temperature=0.8, seed=3)
    chat.send(MESSAGES[0])
    view.interrupt_at = interrupt_at
    chat.send(MESSAGES[1])
    assert chat.interrupted
    passes = interrupt_at[0] - 1 + (interrupt_at[1] == session.layers)
    assert len(view.steps) == passes
    assert replies(chat)[1] == "".join(step.text for step in view.steps)
    view.interrupt_at = None
    chat.send(MESSAGES[2])
    assert view.steps[0].pending_rows < 60, "from the caches"
    context, prompt_tokens = list(session.context), session.stats.prompt_tokens
    kept = chat.conversation.messages[3].generated
    assert kept is not None
    assert context[: len(kept.tokens)] == list(kept.tokens)
    with opened(pair, "none") as fresh:
        for _ in fresh.generate(
            context[:prompt_tokens], sampling=chat.settings.sampling,
            generation=chat.settings.generation, method="autoregressive",
        ):  # fmt: skip
            pass
        assert fresh.context == context


def test_a_stop_string_inside_a_burst_ends_the_reply_before_it(session: TextSession) -> None:
    chat, view = chat_on(session)
    chat.send(MESSAGES[0])
    (whole,) = replies(chat)
    # a character behind which its pass has committed more
    inside = [piece.strip("\ufffd") for step in view.steps for piece in step.pieces[:-1]]
    stop = next(text for text in inside if text)
    stopped, _ = chat_on(session)
    stopped.settings = replace(
        stopped.settings, generation=GenerationConfig(max_tokens=MOST_TOKENS, stop=(stop,))
    )
    stopped.send(MESSAGES[0])
    assert replies(stopped) == [whole[: whole.index(stop)]]
    stopped.send(MESSAGES[1])  # goes on behind the text that was shown
    prompt = session.encode_chat(stopped.conversation.plain()[:-1])
    assert session.context[: len(prompt)] == prompt


def test_a_model_without_a_chat_template_is_refused_with_a_way_out(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    for source in pair[0].iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    save_byte_tokenizer(tmp_path)
    with Session.open(model=str(tmp_path), method="autoregressive", device="cpu") as session:
        chat, _ = chat_on(session)
        with pytest.raises(ConfigError, match=r"has no chat template.*generate with"):
            chat.check()


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


def test_a_piped_script_prints_replies_and_nothing_else(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    script = f"{MESSAGES[0]}\n/stats\n{MESSAGES[1]}\n"
    arguments = [str(pair[0]), "--draft", str(pair[1]), "--max-tokens", "12"]
    done = subprocess.run(
        [*MAIN, *arguments, "--system", "Be brief."], input=script.encode(), capture_output=True,
        env=environment(tmp_path), timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    (path,) = (tmp_path / "specexec" / "chats").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line["content"] for line in lines if line.get("role") == "assistant"]
    assert done.stdout.decode() == "".join(f"{text}\n" for text in kept)
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"tok/pass" in done.stderr
    assert lines[1] == {"role": "system", "content": "Be brief."}


def test_bad_arguments_are_one_line_before_any_model_loads(tmp_path: Path) -> None:
    done = subprocess.run(
        [*MAIN, "--system-file", str(tmp_path / "none.txt")], stdin=subprocess.DEVNULL,
        capture_output=True, env=environment(tmp_path), timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == [
        f"error: cannot read {tmp_path}/none.txt: No such file or directory"
    ]


def test_a_chat_with_the_demo_pair_in_a_terminal(tmp_path: Path) -> None:
    chat = Terminal([*MAIN, "demo"], environment=environment(tmp_path))
    try:
        chat.prompt(180)
        assert "demo-target with draft demo-draft" in chat.text()
        first = chat.ask("What does len do?")
        assert "tok/pass" in first
        second = chat.ask("And os.path.join?")
        assert " new), first text " in second
        chat.type(CTRL_C)
        chat.prompt()
        chat.type(CTRL_D)
        assert chat.end() == 0
    finally:
        chat.kill()
