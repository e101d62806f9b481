"""The commands of a chat, in one table from which /help, completion and the docs are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specexec_cli.chat import transcript
from specexec_cli.chat.chat import Chat
from specexec_cli.chat.settings import on_or_off
from specexec_cli.core import GenerationStats
from specexec_cli.errors import ConfigError, nearest

if TYPE_CHECKING:
    from specexec_cli.session import TextSession


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the chat, a line that begins with /."""

    name: str
    argument: str  # as shown in /help
    help: str
    run: Callable[[Chat, str], None]
    also: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        """How the command is typed, as in '/save FILE'."""
        return f"/{self.name} {self.argument}".strip()


def run_command(chat: Chat, line: str) -> None:
    """Runs a line that begins with /.

    Raises:
        ConfigError: there is no such command, or the command cannot be done.
    """
    name, _, argument = line.strip()[1:].partition(" ")
    for command in COMMANDS:
        if name in (command.name, *command.also):
            command.run(chat, argument.strip())
            return
    known = [name for command in COMMANDS for name in (command.name, *command.also)]
    hint = nearest(name, known).replace("'", "'/", 1)
    raise ConfigError(
        f"there is no command '/{name}'.{hint} /help lists them; a message that begins with / "
        'goes between """'
    )


def _help(chat: Chat, argument: str) -> None:
    chat.screen.table([*((c.usage, c.help) for c in COMMANDS), *KEYS])


def _exit(chat: Chat, argument: str) -> None:
    chat.leaving = True


def _clear(chat: Chat, argument: str) -> None:
    chat.drop(0)
    chat.attached.clear()
    chat.screen.notice("the conversation starts afresh; the system prompt stays")


def _regen(chat: Chat, argument: str) -> None:
    if argument and not argument.isdigit():
        raise ConfigError(f"/regen takes a seed, a whole number, not '{argument}'")
    chat.regenerate(int(argument) if argument else None)


def _undo(chat: Chat, argument: str) -> None:
    chat.screen.notice(f"taken back: {_shortened(chat.undo())}")


def _edit(chat: Chat, argument: str) -> None:
    if not chat.conversation.turn_starts:
        raise ConfigError("there is no message to edit yet")
    text = chat.undo()
    if argument:
        chat.send(argument)
    else:
        chat.prefill = text


def _system(chat: Chat, argument: str) -> None:
    if not argument:
        chat.screen.table([("system", chat.conversation.system or "(none)")])
        return
    text = None if argument == "-" else argument
    before = chat.conversation.system
    chat.set_system(text)
    try:
        chat.check()
    except ConfigError:
        chat.set_system(before)
        raise
    chat.screen.notice("system prompt removed" if text is None else "system prompt set")


def _model(chat: Chat, argument: str) -> None:
    if argument:
        chat.change_model(argument)
        chat.totals, chat.replies = GenerationStats(), 0  # of this model alone
    chat.screen.notice(("going on with " if argument else "") + described(chat.session))


def described(session: TextSession) -> str:
    """An open session's models and machine, on one line."""
    draft = f" with draft {session.pair.draft_name}" if session.pair.draft_name else ""
    facts = ", ".join(f"{name} {value}" for name, value in session.settings.items())
    return f"{session.pair.target.name}{draft} ({facts})"


def _set(chat: Chat, argument: str) -> None:
    if not argument:
        chat.screen.table(chat.settings.described())
        return
    key, equals, value = argument.partition("=")
    if not equals:
        key, _, value = argument.partition(" ")
    key, value = key.strip().replace("-", "_"), value.strip()
    chat.settings = chat.settings.with_value(key, value)
    chat.screen.table([row for row in chat.settings.described() if row[0] == key])


def _save(chat: Chat, argument: str) -> None:
    path = _path(argument, "/save")
    transcript.save(path, chat.conversation, chat.session.pair.target.name)
    chat.screen.notice(f"saved to {path}")


def _load(chat: Chat, argument: str) -> None:
    chat.load(_path(argument, "/load"))
    turns = len(chat.conversation.turn_starts)
    chat.screen.notice(f"loaded a conversation of {turns} turn{'' if turns == 1 else 's'}")


def _read(chat: Chat, argument: str) -> None:
    path = _path(argument, "/read")
    text = read_text(path)
    chat.attached.append(text.strip("\n"))
    chat.screen.notice(f"{path.name} ({len(text)} characters) goes in front of the next message")


def _multi(chat: Chat, argument: str) -> None:
    chat.multi = not chat.multi if not argument else on_or_off("/multi", argument)
    chat.screen.notice(
        "Enter breaks the line, Alt-Enter sends" if chat.multi
        else "Enter sends, Alt-Enter breaks the line"
    )  # fmt: skip


def _stats(chat: Chat, argument: str) -> None:
    if not chat.replies:
        raise ConfigError("there are no statistics before the first reply")
    total = chat.totals
    rows = [
        ("replies", str(chat.replies)),
        ("prompt", f"{total.prompt_tokens} tokens, {total.prompt_rows} of them new to the caches"),
        ("replied", f"{total.generated_tokens} tokens at {total.tokens_per_s:.2f} tok/s"),
        ("first text", f"{total.ttft_s / chat.replies:.2f} s on average"),
        ("passes", f"{total.target_passes}, {total.generation_rate:.2f} tok/pass"),
        ("time", f"draft {total.draft_s:.1f} s, verify {total.verify_s:.1f} s"),
    ]
    if total.bytes_streamed:
        rate = total.stream_bytes_per_s
        streamed = f"{total.bytes_streamed / 1e9:.2f} GB at {rate / 1e9:.2f} GB/s"
        if total.link_bytes_per_s:
            streamed += f", {rate / total.link_bytes_per_s:.0%} of the link"
        rows.append(("streamed", streamed))
    rows.append(("peak RAM", f"{total.peak_ram_bytes / 1e9:.2f} GB"))
    if total.peak_vram_bytes:
        rows.append(("peak VRAM", f"{total.peak_vram_bytes / 1e9:.2f} GB"))
    chat.screen.table(rows)


def _info(chat: Chat, argument: str) -> None:
    pair, session = chat.session.pair, chat.session
    drafting = chat.settings.method != "autoregressive"
    used, window = chat.used_tokens(), session.context_length
    rows = [
        ("target", pair.target.name),
        ("draft", f"{pair.draft_name} ({'on' if drafting else 'off'})" if pair.draft_name else "-"),
        *session.settings.items(),
        ("context", f"{used} of {window} tokens ({used / window:.0%})"),
        ("turns", str(len(chat.conversation.turn_starts))),
        ("transcript", str(chat.transcript.path) if chat.transcript else "(not kept)"),
    ]
    chat.screen.table(rows)


def _compact(chat: Chat, argument: str) -> None:
    turns = chat.compact()
    used, window = chat.used_tokens(), chat.session.context_length
    chat.screen.notice(f"dropped the oldest {turns}: {used} of {window} tokens are used now")


def _draft(chat: Chat, argument: str) -> None:
    on = on_or_off("/draft", argument)
    if on and chat.session.pair.draft_name is None:
        raise ConfigError("this chat was started without a draft model: `draft`")
    chat.settings = replace(chat.settings, method=None if on else "autoregressive")
    chat.screen.notice(
        "drafting is on: several tokens a pass" if on
        else "drafting is off: one token a pass, the same text"
    )  # fmt: skip


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise ConfigError(f"{command} needs a file: {command} FILE")
    return Path(argument).expanduser()


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start + 1})") from error


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


COMMANDS = (
    Command("help", "", "Show this list.", _help, ("?",)),
    Command("exit", "", "Leave, as Ctrl-D does.", _exit, ("quit", "bye")),
    Command("clear", "", "Forget the conversation; the system prompt stays.", _clear),
    Command("regen", "[SEED]", "Replace the last reply, with a new seed.", _regen),
    Command("undo", "", "Take back the last message and its reply.", _undo),
    Command("edit", "[TEXT]", "Write the last message anew, or replace it.", _edit),
    Command("system", "[TEXT|-]", "Show, replace or remove (-) the system prompt.", _system),
    Command("model", "[MODEL]", "Show the model, or go on with another one.", _model),
    Command("set", "[KEY=VALUE]", "Show or change settings: temperature, seed, budget, ...", _set),
    Command("save", "FILE", "Write the conversation as it stands to a transcript.", _save),
    Command("load", "FILE", "Go on with the conversation of a transcript.", _load),
    Command("read", "FILE", "Put a file's text in front of the next message.", _read),
    Command("multi", "[on|off]", "Make Enter break the line and Alt-Enter send.", _multi),
    Command("stats", "", "Show this session's statistics.", _stats),
    Command("info", "", "Show models, machine, context window and transcript.", _info),
    Command("compact", "", "Drop the oldest turns to make room in the context window.", _compact),
    Command("draft", "on|off", "Draft trees or one token a pass; the text is the same.", _draft),
)  # fmt: skip
KEYS = (
    ("Enter, Alt-Enter", "Send; break the line."),
    ('"""', 'Begins a message of several lines; the next """ ends it.'),
    ("Ctrl-C, Ctrl-D", "Stop the reply, and once more to leave; leave."),
)
