"""Runs steps one after another, each in a process of its own, and writes a report of them.

Knows no GPU: first_gpu_plan says what a step runs, what it needs and how its output is judged.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHOWN_LINES = 25  # the last lines of a step's output that are shown if a check of it failed
EXIT_STATUS = "exit status"  # the check's name
STOPPING_S = 10.0  # seconds that a step has to end after it is told to


@dataclass(frozen=True, slots=True)
class Check:
    """One result of a step, and what it should be."""

    name: str
    passed: bool
    found: str
    wanted: str = ""  # empty if the result is only reported, not judged

    @property
    def line(self) -> str:
        """One line of the report."""
        wanted = f" (wanted: {self.wanted})" if self.wanted else ""
        return f"- {'pass' if self.passed else 'FAIL'}: {self.name}: {self.found}{wanted}"


class NotPossibleError(Exception):
    """A step found, while it ran, why it cannot be tried here."""


# judge(exit status, output) gives the step's checks; raises ValueError and the like if the output
# cannot be read, and NotPossibleError.
Judge = Callable[[int, str], list[Check]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One process to run."""

    name: str
    title: str
    command: Sequence[str]
    limit_s: float
    judge: Judge
    # Says why the step is not possible here, or None if it is; called just before it would run.
    obstacle: Callable[[], str | None] = lambda: None
    environment: dict[str, str] = field(default_factory=dict)  # added to the runner's own


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step."""

    step: Step
    checks: tuple[Check, ...]
    seconds: float
    skipped: str = ""  # why it was not possible; empty if it ran
    broken: bool = False  # it was ended, or its output cannot be read: its checks say no more

    @property
    def crashed(self) -> bool:
        """Whether it ended otherwise than by its results."""
        return self.broken or any(
            check.name == EXIT_STATUS and not check.passed for check in self.checks
        )

    @property
    def verdict(self) -> str:
        """One word for the table."""
        if self.skipped:
            return "not possible"
        return "pass" if all(check.passed for check in self.checks) else "FAIL"


@dataclass(frozen=True, slots=True)
class Claim:
    """A line of the documentation, and the checks that prove it right or wrong."""

    line: str
    proofs: Mapping[str, Sequence[str]]  # step -> words, each in the name of a check of it

    def verdict(self, outcomes: Sequence[Outcome]) -> str:
        """One line of the report: right, wrong with what was found, or why it was not judged.

        It is right if every step that was possible ran to its end and has passed each check that
        is named, and one at least was possible.
        """
        wrong, missing, skipped, proved = list[str](), list[str](), list[str](), False
        ran = {outcome.step.name: outcome for outcome in outcomes}
        for name, words in self.proofs.items():
            outcome = ran.get(name)
            if outcome is None:
                missing.append(f"{name} was not run")
            elif outcome.skipped:
                skipped.append(f"{name} was not possible: {outcome.skipped}")
            elif outcome.crashed:
                missing.append(f"{name} did not run to its end")
            else:
                found = {word: [each for each in outcome.checks if word in each.name]
                         for word in words}  # fmt: skip
                checks = [check for checks in found.values() for check in checks]
                missing += [f"{name} has no check '{word}'" for word in words if not found[word]]
                wrong += [f"{each.name}: {each.found}" for each in checks if not each.passed]
                proved = True
        if wrong:
            return f"- **wrong**: {self.line}{''.join(f' ({each})' for each in wrong)}"
        if missing or not proved:
            return f"- not judged, because {'; '.join(missing or skipped)}: {self.line}"
        return f"- right: {self.line}"


def run_steps(
    steps: Sequence[Step], report: Path, heading: str, logs: Path, claims: Sequence[Claim] = ()
) -> list[Outcome]:
    """Runs every step, also after others have failed.

    Args:
        steps: in their order.
        report: a Markdown file, written again after each step.
        heading: the report's beginning.
        logs: a folder for the steps' whole outputs.
        claims: with whose verdicts the report ends.
    """
    logs.mkdir(parents=True, exist_ok=True)
    _write(report, f"{heading}\n", new=True)
    outcomes: list[Outcome] = []
    try:
        for number, step in enumerate(steps, 1):
            print(f"[{number}/{len(steps)}] {step.title}", flush=True)
            outcomes.append(_run(step, logs / f"{step.name}.log"))
            outcome = outcomes[-1]
            _write(report, _section(outcome, logs / f"{step.name}.log"))
            said = outcome.skipped or f"{outcome.seconds:.0f} s"
            print(f"    {outcome.verdict}: {said}", flush=True)
    except KeyboardInterrupt:
        _write(report, f"\nInterrupted in step {len(outcomes) + 1} of {len(steps)}.\n")
        raise
    _write(report, summary(outcomes))
    if claims:
        verdicts = [claim.verdict(outcomes) for claim in claims]
        _write(report, "\n".join(["", "## What docs/gpu.md says", "", *verdicts, ""]))
    return outcomes


def _run(step: Step, log: Path) -> Outcome:
    obstacle = step.obstacle()
    if obstacle is not None:
        return Outcome(step, (), 0.0, obstacle)
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        try:
            child = subprocess.Popen(
                step.command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ | step.environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            missing = Check("it starts", False, f"{step.command[0]}: {error.strerror}")
            return Outcome(step, (missing,), 0.0, broken=True)
        status = _wait(child, step.limit_s)
    seconds = time.monotonic() - started
    output = log.read_text("utf-8", errors="replace")
    if status is None:
        late = Check("time", False, f"stopped after {step.limit_s:.0f} s", "it ends by itself")
        return Outcome(step, (late,), seconds, broken=True)
    try:
        return Outcome(step, tuple(step.judge(status, output)), seconds)
    except NotPossibleError as error:
        return Outcome(step, (), seconds, str(error))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        reason = f"exit status {status}, and its output cannot be read: {error!r}"
        return Outcome(step, (Check("output", False, reason),), seconds, broken=True)


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Waits for a child; its exit status, or None if it was too late and was ended with all that it
    had started."""
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(STOPPING_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _section(outcome: Outcome, log: Path) -> str:
    lines = ["", f"## {outcome.step.title}", ""]
    if outcome.skipped:
        return "\n".join([*lines, f"Not possible here: {outcome.skipped}", ""])
    lines += [f"`{' '.join(outcome.step.command)}`, {outcome.seconds:.0f} s", ""]
    lines += [check.line for check in outcome.checks]
    if outcome.verdict == "FAIL" and log.is_file():
        shown = log.read_text("utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
        lines += ["", "```", *(line[:400] for line in shown), "```"]
    return "\n".join([*lines, ""])


def summary(outcomes: Sequence[Outcome]) -> str:
    """A table of all steps, and the verdict."""
    lines = ["", "## Together", "", "| step | verdict | s |", "|---|---|---:|"]
    lines += [
        f"| {outcome.step.title} | {outcome.verdict} | {outcome.seconds:.0f} |"
        for outcome in outcomes
    ]
    return "\n".join([*lines, "", verdict(outcomes), ""])


def verdict(outcomes: Sequence[Outcome]) -> str:
    """One line that says whether everything that was possible passed."""
    words = [outcome.verdict for outcome in outcomes]
    failed, skipped, passed = (words.count(word) for word in ("FAIL", "not possible", "pass"))
    counted = f"{passed} steps passed, {failed} failed, {skipped} not possible"
    return f"**{'pass' if passed and not failed else 'FAIL'}**: {counted}."


def last_json(output: str) -> Any:
    """The JSON object in the last line of an output.

    Raises:
        ValueError: the last line is no JSON object.
    """
    lines = output.strip().splitlines()
    if not lines:
        raise ValueError("no output")
    return json.loads(lines[-1])


def own_checks(status: int, output: str) -> list[Check]:
    """The checks that a step of first_gpu_steps printed as its last line.

    Raises:
        NotPossibleError: the line says why there are none.
    """
    found = last_json(output)
    if "not_possible" in found and not status:
        raise NotPossibleError(found["not_possible"])
    checks = [Check(**each) for each in found["checks"]]
    return [*checks, *(exit_status(status, output) if status else ())]


def exit_status(status: int, output: str) -> list[Check]:
    """The check of a step with nothing but an exit status to judge."""
    return [Check(EXIT_STATUS, status == 0, str(status), "0")]


def _write(report: Path, text: str, new: bool = False) -> None:
    with report.open("w" if new else "a", encoding="utf-8") as file:
        file.write(text)
