"""Turns and commands on a session without models."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from chat_toys import Recorder, ToySession
from cli_runner import run_cli

from specexec_cli.chat.chat import Chat
from specexec_cli.chat.commands import COMMANDS
from specexec_cli.chat.repl import Script, handle, run
from specexec_cli.chat.settings import KEYS, ChatSettings
from specexec_cli.chat.transcript import Transcript, load
from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.errors import ConfigError, SpecexecError, StreamError


class Setting:
    """A chat with everything a test looks at."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.screen = Recorder()
        self.session = ToySession(**options)  # type: ignore[arg-type]
        settings = ChatSettings(generation=GenerationConfig(max_tokens=2000))
        self.path = folder / "chat.jsonl"
        transcript = Transcript(self.path, "toy")
        self.chat = Chat(self.session, self.screen, settings, transcript=transcript)  # type: ignore[arg-type]

    def __call__(self, *lines: str) -> str:
        for line in lines:
            handle(self.chat, line)
        return self.screen.shown

    @property
    def contents(self) -> list[str]:
        """Messages; what the transcript holds must agree."""
        here = [m.content for m in self.chat.conversation.messages]
        if self.path.exists():
            there = load(self.path).conversation
            assert [m.content for m in there.messages] == here
            assert there.system == self.chat.conversation.system
        return here


@pytest.fixture
def at(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_a_reply_is_shown_and_kept(at: Setting) -> None:
    assert at("say hello", "say you") == "you"
    assert at.contents == ["say hello", "hello", "say you", "you"]


class Toys:
    """Models of a chat: toys of other names, one that has no room, one that refuses."""

    def __init__(self, session: ToySession) -> None:
        self.request = "toy"
        self.opened = {"toy": session}
        self.calls: list[str] = []

    def named(self, name: str) -> str:
        if name == "unknown":
            raise ConfigError("no model 'unknown'")
        return name

    def open(self, name: str) -> tuple[ToySession, SamplingConfig]:
        self.calls.append(name)
        if name == "large":
            raise ConfigError("it does not fit")
        self.request = name
        session = self.opened.setdefault(name, ToySession(draft=False))
        session.pair.target.name = f"{name}-target"
        if name == "refusing":
            session.render_chat = lambda messages: session.refuses()  # type: ignore[attr-defined]
            session.refuses = refuses  # type: ignore[attr-defined]
        return session, SamplingConfig(temperature=0.6, top_k=9)


def refuses() -> str:
    raise ConfigError("this model has no chat template")


def test_a_conversation_goes_on_with_another_model(at: Setting) -> None:
    at("say one", "/set seed 7", "/model")
    assert at.screen.notices == ["toy-target with draft toy-draft (offload none, device toy, dtype "
                                 "float32)"]  # fmt: skip
    with pytest.raises(ConfigError, match="no other model to go on with"):
        at("/model other")
    toys = at.chat.models = Toys(at.session)  # type: ignore[assignment]
    assert at("/model other", "say two") == "two"
    assert at.screen.notices[-1].startswith("going on with other-target (")
    other = toys.opened["other"]
    assert at.chat.session is other
    # it reads the whole conversation anew, for its tokens are its own
    (read,) = other.prompts
    assert "".join(chr(token) for token in read if token < 0x110000) == "say oneonesay two"
    assert at.contents == ["say one", "one", "say two", "two"]
    assert at.chat.settings.sampling == SamplingConfig(temperature=0.6, top_k=9, seed=7)
    assert at.chat.settings.method == "autoregressive", "it has no draft model"


@pytest.mark.parametrize("name", ["unknown", "large", "refusing"])
def test_a_model_that_cannot_go_on_leaves_the_chat_as_it_was(at: Setting, name: str) -> None:
    at("say one")
    toys = at.chat.models = Toys(at.session)  # type: ignore[assignment]
    before = at.chat.settings
    with pytest.raises(ConfigError):
        at(f"/model {name}")
    assert toys.calls == ([] if name == "unknown" else [name, "toy"])
    assert (at.chat.session, at.chat.settings, at.chat.leaving) == (at.session, before, False)
    assert at("say two") == "two"
    assert len(at.session.prompts[-1]) - at.chat.session.stats.prompt_rows > 8, "caches are used"


def test_undo_and_clear(at: Setting) -> None:
    at("/system Be kind.", "say 1", "say 2", "/undo")
    assert at.contents == ["say 1", "1"]
    at("/clear")
    assert at.contents == []
    assert at.chat.conversation.system == "Be kind."
    with pytest.raises(ConfigError, match="nothing to take back"):
        at("/undo")


def test_regen_takes_another_seed(at: Setting) -> None:
    with pytest.raises(ConfigError, match="no reply yet"):
        at("/regen")
    at("seed please")
    assert at("/regen") == "seed 1"
    assert at("/regen 7") == "seed 7"
    assert at.contents == ["seed please", "seed 7"]
    assert any("temperature 0" in notice for notice in at.screen.notices)
    with pytest.raises(ConfigError, match="whole number, not 'x'"):
        at("/regen x")


def test_edit_returns_the_message_or_replaces_it(at: Setting) -> None:
    at("say 1", "/edit")
    assert (at.chat.prefill, at.contents) == ("say 1", [])
    assert at("say 1", "/edit say 2") == "2"
    assert at.contents == ["say 2", "2"]


def test_system_prompts_are_checked(at: Setting) -> None:
    at("/system Be kind.", "/system")
    assert at.screen.rows["system"] == "Be kind."
    with pytest.raises(ConfigError, match="refuses"):
        at("/system forbidden")
    assert at("say x") == "x"
    at("/system -")
    assert at.chat.conversation.system is None
    assert at.contents == ["say x", "x"]


def test_set_reads_and_checks_every_key(at: Setting) -> None:
    at("/set")
    assert tuple(at.screen.rows) == KEYS
    at("/set temperature=0.7", "/set top-p 0.9", "/set max_tokens=3", r"/set stop=\n")
    settings = at.chat.settings
    assert (settings.sampling.temperature, settings.sampling.top_p) == (0.7, 0.9)
    assert settings.generation == GenerationConfig(max_tokens=3, stop=("\n",))
    at("/set budget=8")
    assert (at.chat.settings.tree.budget, at.chat.settings.tree.max_depth) == (8, 8)
    for line, message in {
        "/set temprature=1": "no setting 'temprature'. Did you mean 'temperature'",
        "/set seed=x": "seed takes a whole number, not 'x'",
        "/set top_p=2": "top-p must be above 0",
        "/set thinking=maybe": "thinking is on or off, not 'maybe'",
        "/set budget=0": "`budget` must be between",
    }.items():
        with pytest.raises(ConfigError, match=message):
            at(line)


def test_a_cut_reply_says_so(at: Setting) -> None:
    assert at("/set max_tokens=3", "say hello") == "hel"
    assert "cut at 3 tokens: /set max_tokens=6 allows more" in at.screen.notices
    assert at.contents == ["say hello", "hel"]


def test_save_and_load(at: Setting, tmp_path: Path) -> None:
    at("/system Be kind.", "say 1", f"/save {tmp_path}/a.jsonl", "/clear", "/system -", "say 2")
    at(f"/load {tmp_path}/a.jsonl")
    assert at.contents == ["say 1", "1"]
    assert at.chat.conversation.system == "Be kind."
    with pytest.raises(ConfigError, match="/save needs a file"):
        at("/save")
    with pytest.raises(ConfigError, match="cannot read the transcript"):
        at("/load /no/such")


def test_read_puts_a_file_in_front_of_the_next_message(at: Setting, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("from the file\n")
    at(f"/read {tmp_path}/notes.txt", "and this")
    assert at.contents[0] == "from the file\n\nand this"
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    for name in ("bad", "none"):
        with pytest.raises(ConfigError):
            at(f"/read {tmp_path}/{name}")


def test_draft_off_decodes_token_by_token(at: Setting) -> None:
    at("say 1", "/draft off", "say 2", "/draft on", "say 3")
    assert at.session.methods == [None, "autoregressive", None]
    with pytest.raises(ConfigError, match="/draft is on or off, not ''"):
        at("/draft")


def test_draft_needs_a_draft_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="started without a draft model"):
        Setting(tmp_path, draft=False)("/draft on")


def test_stats_and_info(at: Setting) -> None:
    with pytest.raises(ConfigError, match="no statistics before"):
        at("/stats")
    at("say hello", "say hello", "/stats", "/info")
    assert at.screen.rows["replies"] == "2"
    assert at.screen.rows["replied"].startswith("12 tokens at")
    assert at.screen.rows["passes"] == "4, 3.00 tok/pass"
    assert at.screen.rows["draft"] == "toy-draft (on)"
    assert at.screen.rows["turns"] == "2"
    assert at.screen.rows["context"] == f"{len(at.session.context)} of 4096 tokens (1%)"


def test_compact_keeps_system_prompt_and_last_turns(tmp_path: Path) -> None:
    at = Setting(tmp_path, context_length=150)
    at("/system Be kind.", "say 1")
    with pytest.raises(ConfigError, match="no older turns"):
        at("/compact")
    at("say 2", "say 3", "/compact")
    assert at.contents == ["say 2", "2", "say 3", "3"]
    assert at.chat.conversation.system == "Be kind."
    assert at("say 4") == "4"


def test_a_full_window_asks_before_turns_are_dropped(tmp_path: Path) -> None:
    at = Setting(tmp_path, context_length=200)
    at("say " + "a" * 50)
    at.screen.agrees = False
    with pytest.raises(ConfigError, match=r"takes \d+ of 200 tokens: /compact or /clear"):
        at("say " + "b" * 50)
    assert at.contents == ["say " + "a" * 50, "a" * 50]
    assert at.chat.prefill == "say " + "b" * 50
    at.screen.agrees = True
    assert at("say " + "b" * 50) == "b" * 50
    assert at.contents == ["say " + "b" * 50, "b" * 50]
    with pytest.raises(ConfigError, match="this message alone is too long"):
        at("c" * 300)
    assert at.contents == ["say " + "b" * 50, "b" * 50]


def test_a_failed_pass_keeps_what_came_before_it(at: Setting) -> None:
    at("say 1")
    at.session.fails_after = 0
    with pytest.raises(StreamError):
        at("say 2")
    assert at.contents == ["say 1", "1"]
    assert at.chat.prefill == "say 2"
    at.session.fails_after = 1
    at("say hello, world")
    assert at.screen.errors == ["layer 3: the disk is gone"]
    assert at.contents == ["say 1", "1", "say hello, world", "hello"]


def test_ctrl_c_keeps_the_partial_reply(at: Setting) -> None:
    at.session.on_step = lambda number: number == 1 and signal.raise_signal(signal.SIGINT)
    at("say hello, world, and more")
    assert at.contents[1] == "hello, wor"
    assert json.loads(at.path.read_text().splitlines()[-1])["finish_reason"] == "interrupted"
    at.session.on_step = lambda number: None
    before = list(at.session.context)
    at("say on")
    assert at.session.prompts[-1][: len(before)] == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_unwritable_transcript_is_said_once(at: Setting) -> None:
    if os.geteuid() == 0 and not Path("/proc/self").exists():
        pytest.skip("no place that cannot be written")
    at.chat.transcript = Transcript(Path("/proc/no/such/chat.jsonl"), "toy")
    assert at("say 1", "say 2") == "2"
    (notice,) = at.screen.notices
    assert "cannot be written" in notice
    assert "/save FILE" in notice


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/svae", "no command '/svae'. Did you mean '/save'"),
        ("/xyzzy", "no command '/xyzzy'. /help lists them"),
        ("/", "no command '/'"),
    ],
)
def test_unknown_commands_name_the_nearest(at: Setting, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        at(line)


def test_help_names_every_command(at: Setting) -> None:
    at("/help")
    for command in COMMANDS:
        assert f"/{command.name} {command.argument}".strip() in at.screen.rows


def scripted(at: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: bytes) -> int:
    (tmp_path / "script").write_bytes(text)
    with (tmp_path / "script").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        return run(at.chat, Script())


def test_a_script_runs_turn_by_turn(
    at: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = b'say 1\n\n/svae\n"""\nsay 2\nmore\n"""\n/exit\nsay 3\n'
    assert scripted(at, monkeypatch, tmp_path, script) == ConfigError.exit_code
    assert at.contents == ["say 1", "1", "say 2\nmore", "2\nmore"]
    assert len(at.screen.errors) == 1


def test_an_open_block_at_the_end_of_a_script_is_sent(
    at: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert scripted(at, monkeypatch, tmp_path, b'"""say 1\nmore') == 0
    assert at.contents[0] == "say 1\nmore"
    assert any("is not closed" in notice for notice in at.screen.notices)


def test_a_script_that_is_not_utf8_is_one_line(
    at: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert scripted(at, monkeypatch, tmp_path, b"say 1\n\xff\n") == SpecexecError.exit_code + 1
    assert "line 2, is not UTF-8" in at.screen.errors[0]


def test_the_program_opens_another_model_and_the_first_again() -> None:
    lines = "say a\n/model demo-target\n/model nope\nsay b\n/model demo\n/info\n"
    ran = run_cli(
        "chat", "demo", "--offline", "--no-history", "--max-tokens", 2, "--method",
        "autoregressive", stdin=lines.encode(),
    )  # fmt: skip
    assert ran.code == 3, "of the unknown name"
    told = [line for line in ran.err.splitlines() if "going on" in line or "error" in line]
    assert len(told) == 3
    assert [told[0].startswith("notice: going on with demo-target"), "nope" in told[1]] == [
        True
    ] * 2
    assert "turns       2" in ran.err
