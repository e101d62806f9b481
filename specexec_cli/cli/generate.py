"""`specexec generate`: one prompt in, text out."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specexec_cli.cli import option_groups, options
from specexec_cli.cli.generate_many import ManyOptions, generate_many, jobs_of
from specexec_cli.cli.lean_imports import load_torch_beside
from specexec_cli.cli.live import LiveStatus
from specexec_cli.cli.opening import opened, tell_of_demo
from specexec_cli.cli.printed import PrintedText
from specexec_cli.cli.render import notice, stats_line
from specexec_cli.cli.sampling import settled_sampling
from specexec_cli.cli.turn import TurnOptions
from specexec_cli.config import GenerationConfig, SamplingChoice, SamplingConfig
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ConfigError
from specexec_cli.planning.request import Request

if TYPE_CHECKING:
    from specexec_cli.core import StepResult
    from specexec_cli.session import TextSession

JSON_SCHEMA = 1


@option_groups.grouped
def generate(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; or use -f.")] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", help="Read the prompt from a file; - is standard input."),
    ] = None,
    turn: TurnOptions,
    generation: GenerationConfig,
    sampling: SamplingChoice,
    asked: Annotated[Request, option_groups.Shown(argument="")],
    yes: options.Yes = False,
    stats: options.Stats = False,
    as_json: options.Json = False,
    many: ManyOptions,
    quiet: options.Quiet = False,
) -> None:
    """Answer a prompt; a base model continues it. All but the answer goes to stderr.

    With --json: {"schema": 1, "text", "tokens", "finish_reason": "length"|"eos"|"stop", "seed",
    "method", "pair", "config": {...}, "stats": {...}}; after Ctrl-C finish_reason is
    "interrupted".
    """
    load_torch_beside()
    from specexec_cli.cli.fetching import fetch_first

    asked = replace(option_groups.with_drafts(asked), remember=True)
    if many.as_lines:
        _check_lines(prompt, file, as_json, stats)
        output, where = many.place(), file or "standard input"
        jobs = jobs_of(read_prompt(None, file), where, sampling, generation)
        request = many.request(asked, jobs, turn)
        fetch_first(request, yes=yes, quiet=quiet)
        generate_many(request, jobs, turn, output, quiet)
        return
    if many.output is not None:
        raise ConfigError("--output needs --jsonl: the text of one prompt goes to stdout")
    text = read_prompt(prompt, file)
    context = generation.max_tokens + options.TEMPLATE_TOKENS
    request = replace(asked, prompt=turn.planned(text), context_tokens=context)
    for line in [] if quiet else option_groups.without_effect(asked):
        notice(line)
    fetch_first(request, yes=yes, quiet=quiet)
    with opened(request, quiet=quiet, shown=not as_json) as session:
        settled = settled_sampling(session, sampling, quiet)
        rendered, tokens = turn.prompt(session, text)
        live = LiveStatus(shown=not quiet and not as_json)
        shown = None if as_json else PrintedText(rendered, live, quiet)
        steps, interrupted = _run(session, tokens, settled, generation, live, shown)
        if not quiet and not interrupted and steps[-1].finish_reason == "length":
            notice(_limit(session, generation.max_tokens))
        if as_json:
            used = {**asdict(settled), **asdict(generation), "raw": rendered is None}
            print(json.dumps(_result(session, steps, interrupted, used)))
        elif stats and not quiet:
            print(stats_line(session.stats), file=sys.stderr)
    if interrupted:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    if not quiet:
        tell_of_demo(request)


def _limit(session: TextSession, max_tokens: int) -> str:
    """Which limit ended the session's last text, and what allows more."""
    if session.stats.generated_tokens >= max_tokens:
        return f"cut at {max_tokens} tokens: `max_tokens={2 * max_tokens}` allows more"
    return (
        f"cut where the context window ({session.context_length} tokens) is full, before "
        f"`max_tokens={max_tokens}`: a shorter prompt leaves more room"
    )


def _check_lines(prompt: str | None, file: str | None, as_json: bool, stats: bool) -> None:
    if prompt is not None:
        raise ConfigError("--jsonl reads prompts from a file: -f prompts.jsonl")
    if as_json or stats:
        raise ConfigError(f"--jsonl and --{'json' if as_json else 'stats'} exclude each other")


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt from the argument, a file, or standard input.

    Raises:
        ConfigError: none or two were given, it is empty, or it cannot be read as UTF-8.
    """
    if prompt is not None and file is not None:
        raise ConfigError("give the prompt either as an argument or with -f, not both")
    if prompt is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError("no prompt: give it as an argument, with -f FILE, or on standard input")
    if prompt is None:
        prompt = _read_file(file or "-")
    if not prompt:
        raise ConfigError("the prompt is empty: give at least one character to continue from")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        # Python has these characters for bytes of an argument that its encoding cannot decode
        raise ConfigError("the prompt is not UTF-8 text: put it in a file and use -f")
    return prompt


def _read_file(name: str) -> str:
    where = "standard input" if name == "-" else name
    try:
        if name != "-":
            return Path(name).read_bytes().decode("utf-8")
        if sys.stdin is None:
            raise ConfigError("cannot read the prompt from standard input: it is closed")
        return sys.stdin.buffer.read().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the prompt from {where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}): "
            "convert it, for example with iconv"
        ) from error


def _run(
    session: TextSession,
    tokens: Sequence[int],
    sampling: SamplingConfig,
    generation: GenerationConfig,
    live: LiveStatus,
    shown: PrintedText | None,
) -> tuple[list[StepResult], bool]:
    """Prints text as it comes; returns the steps and whether Ctrl-C ended the text early."""
    steps: list[StepResult] = []
    session.on_layer(live.layer)
    running = session.generate(tokens, sampling=sampling, generation=generation)
    try:
        with live:
            for step in running:
                steps.append(step)
                if shown is not None:
                    shown.add(step.text)
    except KeyboardInterrupt:
        return steps, True
    finally:
        if shown is not None:
            shown.finish()
    return steps, False


def _result(
    session: TextSession,
    steps: Sequence[StepResult],
    interrupted: bool,
    used: Mapping[str, Any],
) -> dict[str, Any]:
    """The object that --json prints; its schema is documented and tested.

    Args:
        used: the settings of the text, those of sampling among them.
    """
    return {
        "schema": JSON_SCHEMA,
        "text": "".join(step.text for step in steps),
        "tokens": [token for step in steps for token in step.tokens],
        "finish_reason": "interrupted" if interrupted else steps[-1].finish_reason,
        "seed": used["seed"],
        "method": session.method,
        "pair": session.pair.name,
        "config": {
            **asdict(session.pair.tree), **used, **session.settings,
            "target": session.pair.target.repo,
            "draft": session.pair.draft.repo if session.pair.draft else None,
        },
        "stats": session.stats.named(),
    }  # fmt: skip
