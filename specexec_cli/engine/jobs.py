"""Jobs: prompts from one file, their texts into another. A run that was ended can be resumed.

A prompt is one line, {"prompt": ...} or {"messages": [...]}. An "id" is optional, the line's number
by default, and so are max_tokens, stop and the sampling settings. A text is one line too. Lines are
appended as texts end, in any order, so that nothing that was computed is lost; when all are there,
the file is put in the order of the prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from specexec_cli.config import GenerationConfig, SamplingChoice, SamplingConfig
from specexec_cli.core import StepResult
from specexec_cli.engine.text import Engine, Running, TextRequest
from specexec_cli.errors import ConfigError, SpecexecError, StreamError
from specexec_cli.guarded import parse_json
from specexec_cli.kept import replacing
from specexec_cli.models.makers_sampling import MakersSampling
from specexec_cli.session.encoding import PromptEncoder

_KEYS = {"id", "prompt", "messages"}
_KEYS |= {field.name for config in (SamplingConfig, GenerationConfig) for field in fields(config)}
_BEGINNING = b'{"id": '  # how each line of a text begins
_AHEAD = 2  # texts submitted for each seat, so that a seat that becomes free never waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt of a file."""

    id: str | int
    prompt: str | tuple[Mapping[str, str], ...]  # text, or the messages of a conversation
    choice: SamplingChoice  # the line's own sampling, and the options' where it has none
    sampling: SamplingConfig
    generation: GenerationConfig

    def with_makers(self, makers: MakersSampling) -> Job:
        """The job with the makers' sampling where neither its line nor an option says otherwise.

        Raises:
            CheckpointError: the makers' file has an impossible value.
        """
        return replace(self, sampling=makers.with_choice(self.choice))

    def tokens(self, encoder: PromptEncoder) -> list[int]:
        """The prompt as the target's tokens.

        Raises:
            ConfigError: the model has no chat template, or it refuses the conversation.
        """
        if isinstance(self.prompt, str):
            return encoder.encode(self.prompt)
        return encoder.encode_chat(self.prompt)

    def made_of(self, models: str) -> str:
        """A digest of all that the text depends on: with an equal digest, the text is equal.

        Args:
            models: the models and arithmetic that compute it, see session/identity.py.
        """
        parts = [self.prompt, asdict(self.sampling), asdict(self.generation), models]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def read_jobs(
    text: str, where: str, choice: SamplingChoice, generation: GenerationConfig
) -> list[Job]:
    """The jobs of a file.

    Args:
        text: the file's content.
        where: the file's name, for errors.
        choice, generation: settings that a line's own replace.
    Raises:
        ConfigError: a line is no valid job; says which and why.
    """
    jobs: dict[str | int, Job] = {}
    choice = SamplingChoice(**choice.given)  # a line's temperature replaces `greedy` as well
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold other line breaks
        if not line.strip():
            continue
        at = f"{where}, line {number}"
        try:
            job = _job(parse_json(line), number, choice, generation)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{at}: not JSON: {error}") from error
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{at}: {error}") from error
        if job.id in jobs:
            raise ConfigError(
                f"{at}: id {job.id!r} stands in an earlier line: ids tell texts apart"
            )
        jobs[job.id] = job
    if not jobs:
        raise ConfigError(f"{where} has no prompts: one JSON object per line, with a 'prompt'")
    return list(jobs.values())


def _job(value: Any, number: int, choice: SamplingChoice, generation: GenerationConfig) -> Job:
    if not isinstance(value, dict):
        raise ConfigError("a line must be a JSON object with a 'prompt' or 'messages'")
    if unknown := sorted(value.keys() - _KEYS):
        raise ConfigError(f"unknown key '{unknown[0]}': known are {', '.join(sorted(_KEYS))}")
    own_id = value.get("id", number)
    if type(own_id) not in (str, int):
        raise ConfigError("an 'id' must be a string or a whole number")
    stop = value.get("stop", generation.stop)
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
    if not isinstance(stop, tuple) or not all(isinstance(each, str) for each in stop):
        raise ConfigError("'stop' must be a string or a list of strings")
    generation = replace(generation, **_numbers(value, GenerationConfig), stop=stop)
    choice = replace(choice, **_numbers(value, SamplingConfig))
    return Job(
        id=own_id,
        prompt=_prompt(value),
        choice=choice,
        sampling=SamplingConfig(**choice.given),
        generation=generation,
    )


def _prompt(value: Mapping[str, Any]) -> str | tuple[Mapping[str, str], ...]:
    prompt, messages = value.get("prompt"), value.get("messages")
    if (prompt is None) == (messages is None):
        raise ConfigError("a line needs either a 'prompt' or 'messages'")
    if messages is None:
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError("a 'prompt' must be a text that is not empty")
        return prompt
    if not isinstance(messages, list) or not messages:
        raise ConfigError("'messages' must be a list that is not empty")
    for each in messages:
        if not isinstance(each, dict) or not all(
            isinstance(each.get(name), str) for name in ("role", "content")
        ):
            raise ConfigError("each of 'messages' needs a 'role' and a 'content', both text")
    return tuple(messages)


def _numbers(value: Mapping[str, Any], config: type) -> dict[str, Any]:
    """The numbers of a config that a line has values for.

    Raises:
        ConfigError: a value is no number, or not a whole one where the config has one.
    """
    given = {}
    for field in fields(config):
        name, kind = field.name, type(field.default)
        if kind in (int, float) and name in value:
            if type(value[name]) not in (int, kind):
                raise ConfigError(f"'{name}' must be a {'whole ' * (kind is int)}number")
            given[name] = value[name]
    return given


def _tell(running: Running, ended: queue.SimpleQueue[Running]) -> None:
    if running.done:
        ended.put(running)


def place_of_texts(path: Path) -> Path:
    """The file that a path leads to, links followed, so that the file is replaced and never a link.

    Raises:
        ConfigError: it is a device, a pipe or a folder.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return path.resolve()  # a link may lead to a file that is not there yet
    except OSError as error:
        raise ConfigError(f"cannot write texts to {path}: {error.strerror}") from error
    if stat.S_ISREG(mode):
        return path.resolve()
    kind = "a folder" if stat.S_ISDIR(mode) else "no file but a device or a pipe"
    raise ConfigError(
        f"cannot write texts to {path}: it is {kind}. Name a file, or leave out `--output` and "
        "send standard output there"
    )


class ResultFile:
    """The file of texts. Texts that it holds already, from an earlier run, count as done.

    Args:
        path: of the file, see place_of_texts.
        made_of: by job id, `Job.made_of`.
    Raises:
        ConfigError: the file cannot be used, or holds texts of other prompts or settings.
    """

    def __init__(self, path: Path, made_of: Mapping[str | int, str]) -> None:
        self._path = path = place_of_texts(path)
        self._ids = list(made_of)
        self._lines: dict[str | int, str] = {}
        try:
            kept = path.read_bytes() if path.exists() else b""
            whole = kept.rfind(b"\n") + 1
            for line in kept[:whole].decode("utf-8").split("\n")[:-1]:
                self._take(parse_json(line), line, made_of)
            cut = kept[whole:]  # the last line, if a crash cut it short; it is removed
            if cut[: len(_BEGINNING)] != _BEGINNING[: len(cut)]:
                raise ValueError("it ends in something else than the beginning of a line")
            if cut:
                os.truncate(path, whole)
            self._arrange()
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write texts to {path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} holds something else than texts of such a job: name another file"
            ) from error

    def _take(self, value: Any, line: str, made_of: Mapping[str | int, str]) -> None:
        known = made_of.get(value["id"])
        if known is None or known != value["made_of"]:
            raise ConfigError(
                f"{self._path} holds the text of id {value['id']!r} with another prompt or other "
                "settings: name another file, or remove that one"
            )
        self._lines[value["id"]] = line

    @property
    def done(self) -> set[str | int]:
        """The ids of the texts in the file."""
        return set(self._lines)

    def add(self, result: Mapping[str, Any]) -> None:
        """Appends a text's line.

        Raises:
            ConfigError: it cannot be written.
        """
        line = json.dumps(result)
        with self._refusals():
            self._file.write(line + "\n")
            self._file.flush()
        self._lines[result["id"]] = line

    def close(self) -> None:
        """Closes the file, and puts its lines in the order of the prompts.

        Raises:
            ConfigError: it cannot be written; its lines stay in the order of writing.
        """
        with self._refusals():
            self._file.close()
            self._arrange()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write texts to {self._path}: {error.strerror}. Once that is mended, the "
                "same command goes on"
            ) from error

    def _arrange(self) -> None:
        if not self._lines:
            return
        ordered = [self._lines[each] for each in self._ids if each in self._lines]
        with replacing(self._path) as partial:
            partial.write_text("".join(line + "\n" for line in ordered), encoding="utf-8")
            with suppress(FileNotFoundError):  # the user removed the file meanwhile
                shutil.copymode(self._path, partial)


def run_jobs(
    engine: Engine, jobs: Sequence[Job], encoder: PromptEncoder
) -> Iterator[tuple[Job, list[StepResult] | SpecexecError]]:
    """Runs jobs through an engine; yields each job as it ends, with its steps or its error.

    Raises:
        StreamError: weights cannot be read, so no text can go on.
    """
    slots = engine.figures().slots
    ended: queue.SimpleQueue[Running] = queue.SimpleQueue()
    waiting = iter(jobs)
    under_way: dict[Running, Job] = {}
    more = True
    while more or under_way:
        while more and len(under_way) < _AHEAD * slots:
            job = next(waiting, None)
            if job is None:
                more = False
                break
            try:
                running = engine.submit(
                    TextRequest(
                        prompt=tuple(job.tokens(encoder)),
                        sampling=job.sampling,
                        generation=job.generation,
                    )
                )
            except ConfigError as error:
                yield job, error
                continue
            under_way[running] = job
            running.listen(partial(_tell, running, ended))
        if not under_way:
            continue
        running = ended.get()
        job = under_way.pop(running, None)
        if job is None:  # the end of a text may be reported twice
            continue
        if isinstance(running.error, StreamError) or (
            running.error is not None and not isinstance(running.error, SpecexecError)
        ):
            raise running.error
        yield job, running.error or running.take()
