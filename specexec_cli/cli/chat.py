"""`specexec chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specexec_cli.cli import options
from specexec_cli.cli.lean_imports import load_torch_beside
from specexec_cli.cli.opening import tell_of_demo
from specexec_cli.cli.option_groups import Shown, grouped, with_drafts, without_effect
from specexec_cli.cli.past_chats import end_of, last_chat, listed_chats, state_folder
from specexec_cli.cli.render import notice
from specexec_cli.config import GenerationConfig, SamplingChoice
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ConfigError
from specexec_cli.planning.request import Request

if TYPE_CHECKING:
    from specexec_cli.chat.chat import Chat, Screen
    from specexec_cli.chat.repl import Source
    from specexec_cli.chat.settings import ChatSettings
    from specexec_cli.chat.transcript import Loaded, Transcript
    from specexec_cli.cli.chat_models import ChatModels
    from specexec_cli.session import TextSession


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of a conversation and of how it is shown."""

    system: options.System = None
    system_file: Annotated[
        Path | None, typer.Option(help="Read the system prompt from a file.")
    ] = None
    resume: Annotated[
        Path | None, typer.Option(help="Go on with a transcript, and write on in it.")
    ] = None
    continue_last: Annotated[
        bool, typer.Option("--continue", "-c", help="Go on with the last chat, and show its end.")
    ] = False
    list_chats: Annotated[
        bool, typer.Option("--list", help="List the chats that can be resumed, and leave.")
    ] = False
    no_history: Annotated[
        bool,
        typer.Option(
            "--no-history",
            help="Write neither transcript nor input history, nor keep rows of the text.",
        ),
    ] = False
    show_drafts: Annotated[
        bool,
        typer.Option(
            "--show-drafts", help="Paint tokens by origin: draft model green, target yellow."
        ),
    ] = False
    think: options.Think = None
    hide_thinking: Annotated[
        bool, typer.Option("--hide-thinking", help="Do not show <think> parts of replies.")
    ] = False

    def transcript(self) -> Path | None:
        """The transcript to go on with; None for a new chat.

        Raises:
            ConfigError: two transcripts were asked for.
            UnknownModelError: the last one was asked for, and there is none.
        """
        if not self.continue_last:
            return self.resume
        if self.resume is not None:
            raise ConfigError("give either --continue or --resume, not both")
        return last_chat()

    def system_prompt(self) -> str | None:
        """The system prompt, given as text or as a file.

        Raises:
            ConfigError: both were given, or the file cannot be read.
        """
        from specexec_cli.chat.commands import read_text

        if self.system is not None and self.system_file is not None:
            raise ConfigError("give either --system or --system-file, not both")
        return read_text(self.system_file).strip() if self.system_file is not None else self.system


@grouped
def chat(
    *,
    chosen: ChatOptions,
    generation: Annotated[GenerationConfig, Shown(max_tokens=1024)],
    context: options.Context = None,
    sampling: SamplingChoice,
    asked: Request,
    yes: options.Yes = False,
    quiet: options.Quiet = False,
) -> None:
    """Chat with a model. /help lists the commands; Ctrl-C stops a reply, Ctrl-D leaves.

    Replies go to stdout, everything else to stderr. Standard input that is not a terminal is a
    script: one message or command a line, or blocks between \"\"\"; the exit code is then that of
    the first error.
    """
    if chosen.list_chats:
        _list_chats(quiet)
        return
    load_torch_beside()
    resume = chosen.transcript()
    if resume is None and not (quiet or yes) and _names_no_model(asked):
        from specexec_cli.cli.first_chat import offered_pair

        asked = replace(asked, model=offered_pair())
    request = replace(with_drafts(asked), context_tokens=context, remember=True)
    if chosen.no_history:
        request = replace(request, cache=False)

    from specexec_cli.chat.settings import ChatSettings
    from specexec_cli.chat.transcript import load
    from specexec_cli.cli.chat_models import ChatModels
    from specexec_cli.cli.fetching import fetch_first

    loaded = load(resume) if resume is not None else None
    system = chosen.system_prompt()
    for line in [] if quiet else without_effect(asked):
        notice(line)
    fetch_first(request, yes=yes, quiet=quiet)
    try:
        with ChatModels(request, sampling, think=chosen.think, yes=yes, quiet=quiet) as models:
            session, found = models.open(request)
            if not quiet:
                tell_of_demo(request)
            settings = ChatSettings(
                sampling=found, tree=session.pair.tree, generation=generation,
                thinking=not chosen.hide_thinking, show_drafts=chosen.show_drafts,
            )  # fmt: skip
            code = converse(
                session, settings, models=models, system=system, resume=resume, loaded=loaded,
                history=not chosen.no_history, quiet=quiet,
            )  # fmt: skip
    except KeyboardInterrupt:  # while the models load
        code = INTERRUPTED_EXIT_CODE
    raise typer.Exit(code)


def _list_chats(quiet: bool) -> None:
    found = listed_chats()
    for line in found:
        print(line)
    if not found and not quiet:
        print(f"no chats yet in {state_folder() / 'chats'}", file=sys.stderr)


def _names_no_model(asked: Request) -> bool:
    """Whether the user named no model, and no setting of one."""
    machine = {
        name: getattr(asked, name)
        for name in [
            "tree",
            "offload",
            "experts",
            "device",
            "dtype",
            "activations",
            "kv",
            "dsi",
            "cache",
            "cache_gb",
        ]
    }
    return asked == Request(**machine)


def converse(
    session: TextSession,
    settings: ChatSettings,
    *,
    models: ChatModels | None = None,
    system: str | None = None,
    resume: Path | None = None,
    loaded: Loaded | None = None,
    history: bool = True,
    quiet: bool = False,
) -> int:
    """Runs a chat on an open session until the user leaves.

    Args:
        models: opens other models for the chat; None if there are none.
        resume, loaded: the file of the transcript to continue, and its content.
        history: whether to keep a transcript and the input history.
    Returns:
        The exit code.
    Raises:
        ConfigError: the model has no chat template, or refuses the system prompt.
    """
    from specexec_cli.chat.chat import Chat
    from specexec_cli.chat.conversation import Conversation
    from specexec_cli.chat.repl import run
    from specexec_cli.cli.chat_screen import ConsoleScreen

    if session.pair.draft_name is None:
        settings = replace(settings, method="autoregressive")
    interactive = sys.stdin is not None and sys.stdin.isatty()
    screen = ConsoleScreen(quiet=quiet, interactive=interactive)
    running = Chat(
        session, screen, settings, loaded.conversation if loaded else Conversation(),
        _transcript(session, resume, loaded) if history else None, models,
    )  # fmt: skip
    if system is not None and system != running.conversation.system:
        running.set_system(system)
    running.check()
    source = _source(interactive, history, screen)
    try:
        if interactive and not quiet:
            _introduce(running)
        if loaded is not None:
            _recall(running, loaded, shown=interactive and not quiet)
        return run(running, source)
    finally:
        if running.transcript is not None:
            running.transcript.close()


def _introduce(chat: Chat) -> None:
    from specexec_cli.chat.commands import described

    chat.screen.notice(f"{described(chat.session)}. /help lists the commands, Ctrl-D leaves")


def _recall(chat: Chat, loaded: Loaded, *, shown: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    if loaded.notice:
        chat.screen.notice(loaded.notice)
    console = Console(stderr=True, highlight=False)
    for line in end_of(chat.conversation.messages) if shown else []:
        console.print(Text(line), soft_wrap=not console.is_terminal)  # breaks lines between words
    count = len(chat.conversation.turn_starts)
    chat.screen.notice(f"going on after {count} turn{'' if count == 1 else 's'}")
    if chat.conversation.unanswered is not None:
        chat.screen.notice("the last message has no reply yet: send it again, or /regen")
        chat.prefill = chat.conversation.unanswered
    chat.read_ahead()


def _source(interactive: bool, history: bool, screen: Screen) -> Source:
    from specexec_cli.chat.repl import Script

    if not interactive:
        return Script()
    from specexec_cli.cli.chat_prompt import Prompt

    path = state_folder() / "chat_history" if history else None
    try:
        return Prompt(path)
    except OSError as error:
        screen.notice(f"{path} cannot be written ({error.strerror}): no input history is kept")
        return Prompt(None)


def _transcript(session: TextSession, resume: Path | None, loaded: Loaded | None) -> Transcript:
    from specexec_cli.chat.transcript import Transcript

    name = session.pair.target.name
    if resume is not None and loaded is not None:
        return Transcript(resume, name, loaded.good_bytes)
    now = datetime.now()
    # microseconds, because two chats may begin within one second
    return Transcript(state_folder() / "chats" / f"{now:%Y%m%d-%H%M%S-%f}.jsonl", name)
