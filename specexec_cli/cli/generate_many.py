"""`specexec generate --jsonl`: reads a file of prompts and writes a file of texts."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, SpecexecError

if TYPE_CHECKING:
    from specexec_cli.core import StepResult
    from specexec_cli.engine.jobs import Job
    from specexec_cli.planning.request import Request
    from specexec_cli.session import TextSession


def jobs_of(
    text: str, where: str, sampling: SamplingConfig, generation: GenerationConfig, chat: bool
) -> list[Job]:
    """The prompts of a file; see engine/jobs.py."""
    from specexec_cli.engine.jobs import read_jobs

    return read_jobs(text, where, sampling, generation, chat)


def longest(jobs: Sequence[Job]) -> tuple[str, int]:
    """The longest prompt, as text, and the greatest max_tokens: memory is planned for these."""
    prompts = [
        job.prompt
        if isinstance(job.prompt, str)
        else "\n".join(message["content"] for message in job.prompt)
        for job in jobs
    ]
    return max(prompts, key=len), max(job.generation.max_tokens for job in jobs)


def generate_many(request: Request, jobs: Sequence[Job], output: Path | None, quiet: bool) -> None:
    """Runs the jobs and writes one line of JSON for each finished text, to the file or stdout."""
    from specexec_cli.cli.render import CountBar, LoadingBar, notice
    from specexec_cli.engine.factory import open_engine
    from specexec_cli.engine.jobs import ResultFile, run_jobs
    from specexec_cli.session import open_session

    shown = not quiet
    bar = LoadingBar(shown=shown)
    tell = notice if shown else (lambda line: None)
    with open_session(request, notice=tell, progress=bar) as session:
        bar.close()
        models = session.text_identity()
        made_of = {job.id: job.made_of(models) for job in jobs}
        results = ResultFile(output, made_of) if output is not None else None
        left = [job for job in jobs if results is None or job.id not in results.done]
        if shown and len(left) < len(jobs):
            notice(f"{len(jobs) - len(left)} of {len(jobs)} texts are there already")
        engine = open_engine(session, slots=request.slots, most_waiting=2 * request.slots)
        failed: list[SpecexecError] = []
        printed = _InOrder([job.id for job in jobs])
        started = time.perf_counter()
        try:
            with CountBar("texts", len(jobs), done=len(jobs) - len(left), shown=shown) as counted:
                for job, found in run_jobs(engine, left, session):
                    counted.advance(_rate(engine.figures().generated_tokens, started))
                    if isinstance(found, SpecexecError):
                        printed.skip(job.id)
                        failed.append(found)
                        tell(f"{job.id}: {found}")
                        continue
                    line = _line(job, found, made_of[job.id], session)
                    (results or printed).add(line)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
        finally:
            engine.close()
            if results is not None:
                results.close()
    if failed:
        raise typer.Exit(failed[0].exit_code)


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
