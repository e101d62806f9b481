"""`specexec generate --jsonl`: reads a file of prompts and writes a file of texts."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specexec_cli.cli.opening import opened
from specexec_cli.cli.options import TEMPLATE_TOKENS, option
from specexec_cli.cli.panels import MANY
from specexec_cli.cli.render import CountBar, notice
from specexec_cli.cli.sampling import tell_left_out
from specexec_cli.config import GenerationConfig, SamplingChoice
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, SpecexecError
from specexec_cli.planning.request import MOST_SLOTS, Request

if TYPE_CHECKING:
    from specexec_cli.cli.turn import TurnOptions
    from specexec_cli.core import StepResult
    from specexec_cli.engine.jobs import Job
    from specexec_cli.session import TextSession


def jobs_of(
    text: str, where: str, sampling: SamplingChoice, generation: GenerationConfig
) -> list[Job]:
    """The prompts of a file; see engine/jobs.py."""
    from specexec_cli.engine.jobs import read_jobs

    return read_jobs(text, where, sampling, generation)


@dataclass(frozen=True, kw_only=True)
class ManyOptions:
    """Options for a file of prompts."""

    as_lines: Annotated[
        bool,
        option(
            MANY,
            'Each line of -f is a prompt: {"prompt"} or {"messages": [{"role", "content"}]}, an '
            '"id" if it has one, and max_tokens, stop and sampling options where they differ. '
            'Each text is a line {"id", "text", "tokens", "finish_reason", "seed", "pair", '
            '"made_of"}, the one it would be alone.',
            "--jsonl",
        ),
    ] = False
    output: Annotated[
        Path | None,
        option(
            MANY, "File for the texts; those that it has already are left out.", "--output", "-o"
        ),
    ] = None
    slots: Annotated[
        int, option(MANY, "Texts at once, each with memory of its own.", min=1, max=MOST_SLOTS)
    ] = 4

    def place(self) -> Path | None:
        """The file for the texts; None for standard output.

        Raises:
            ConfigError: a device, a pipe or a folder is there.
        """
        from specexec_cli.engine.jobs import place_of_texts

        return place_of_texts(self.output) if self.output is not None else None

    def request(self, asked: Request, jobs: Sequence[Job], turn: TurnOptions) -> Request:
        """The request with memory planned for the longest prompt and the greatest max_tokens."""
        prompts = [
            job.prompt
            if isinstance(job.prompt, str)
            else "\n".join(message["content"] for message in job.prompt)
            for job in jobs
        ]
        longest = turn.planned(max(prompts, key=len))
        most_tokens = max(job.generation.max_tokens for job in jobs)
        return replace(
            asked, prompt=longest, context_tokens=most_tokens + TEMPLATE_TOKENS,
            slots=1 if asked.method == "dsi" else min(self.slots, len(jobs)),
        )  # fmt: skip


def generate_many(
    request: Request, jobs: Sequence[Job], turn: TurnOptions, output: Path | None, quiet: bool
) -> None:
    """Runs the jobs and writes one line of JSON for each finished text, to the file or stdout."""
    from specexec_cli.engine.factory import open_engine
    from specexec_cli.engine.jobs import ResultFile, run_jobs

    with opened(request, quiet=quiet) as session:
        tell_left_out(session.makers_sampling, quiet)
        jobs = _settled(session, jobs, turn)
        models = session.text_identity()
        if turn.think is not None:
            models += f" think {turn.think}"
        made_of = {job.id: job.made_of(models) for job in jobs}
        results = ResultFile(output, made_of) if output is not None else None
        left = [job for job in jobs if results is None or job.id not in results.done]
        if not quiet and len(left) < len(jobs):
            notice(f"{len(jobs) - len(left)} of {len(jobs)} texts are there already")
        session.keep_beginnings_alone()
        engine = open_engine(session, slots=request.slots, most_waiting=2 * request.slots)
        failed: list[SpecexecError] = []
        printed = _InOrder([job.id for job in jobs])
        started, cut = time.perf_counter(), 0
        try:
            with CountBar("texts", len(jobs), done=len(jobs) - len(left), shown=not quiet) as bar:
                for job, found in run_jobs(engine, left, session):
                    bar.advance(_rate(engine.figures().generated_tokens, started))
                    if isinstance(found, SpecexecError):
                        printed.skip(job.id)
                        failed.append(found)
                        if not quiet:
                            notice(f"{job.id}: {found}")
                        continue
                    cut += found[-1].finish_reason == "length"
                    line = _line(job, found, made_of[job.id], session)
                    (results or printed).add(line)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
        finally:
            engine.close()
            if results is not None:
                results.close()
        if cut and not quiet:
            notice(f"{cut} of {len(left)} texts were cut: `max_tokens`, or a line's, allows more")
    if failed:
        raise typer.Exit(failed[0].exit_code)


def _settled(session: TextSession, jobs: Sequence[Job], turn: TurnOptions) -> list[Job]:
    """The jobs as this model runs them: the makers' sampling, plain prompts as turns of a chat."""
    session.think, settled = turn.think, []
    for job in jobs:
        prompt = job.prompt
        if isinstance(prompt, str):
            messages = turn.messages(session, prompt)
            prompt = prompt if messages is None else tuple(messages)
        settled.append(replace(job.with_makers(session.makers_sampling), prompt=prompt))
    return settled


class _InOrder:
    """Prints lines in the order of the prompts, each as soon as all earlier ones are printed."""

    def __init__(self, ids: Sequence[str | int]) -> None:
        self._left = deque(ids)
        self._ready: dict[str | int, str | None] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Takes the line of a finished text."""
        self._take(line["id"], json.dumps(line))

    def skip(self, text: str | int) -> None:
        """Notes that a text has failed and has no line."""
        self._take(text, None)

    def _take(self, text: str | int, line: str | None) -> None:
        self._ready[text] = line
        while self._left and self._left[0] in self._ready:
            ready = self._ready.pop(self._left.popleft())
            if ready is not None:
                print(ready, flush=True)


def _rate(tokens: int, started: float) -> str:
    return f"{tokens / max(time.perf_counter() - started, 1e-9):.1f} tokens/s"


def _line(
    job: Job, steps: Sequence[StepResult], made_of: str, session: TextSession
) -> dict[str, Any]:
    """The line of JSON for a finished text; its schema is documented and tested.

    The line does not depend on speed or on other texts, so the file is the same whether the run was
    interrupted and resumed or not.
    """
    return {
        "id": job.id,
        "text": "".join(step.text for step in steps),
        "tokens": [token for step in steps for token in step.tokens],
        "finish_reason": steps[-1].finish_reason,
        "seed": job.sampling.seed,
        "pair": session.pair.name,
        "made_of": made_of,
    }
