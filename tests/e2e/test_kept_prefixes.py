"""Sessions, servers and commands begin with rows that earlier ones kept on disk, unasked."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count as numbers
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_llama, save_byte_tokenizer, save_pair
from cli_runner import run_cli
from fake_cuda import fake_cuda
from forked import Forked
from gguf_toys import TOYS, save_toy
from test_waiting_rows import ROOMY_BYTES, USUAL, save_long_pair, tight_bytes

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.engine.factory import open_engine
from specexec_cli.engine.text import TextRequest
from specexec_cli.models.side_by_side import SideBySide
from specexec_cli.prefixes import kept_file
from specexec_cli.prefixes.folder import Bound, kept_prefixes, prefixes_folder
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession
from specexec_cli.session.text_session import TextSession

SYSTEM = [
    *b"You are a careful assistant, who answers in few words, and says where they stand. " * 3
]
PROMPT = [*SYSTEM, *b"What is a tree?"]
COUNT = 30  # tokens of each of several texts
NEW_ROWS = 64 + len(SYSTEM) % 64  # more than a text reads whose beginning is kept


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    config = byte_llama(hidden_size=64, intermediate_size=128, max_position_embeddings=1024)
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), target=config)
    return {"model": str(target), "draft": str(draft)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def session(pair: dict[str, Any], **more: Any) -> Iterator[TextSession]:
    """Of `pair["free_bytes"]` of a GPU, where there is one, some keys and values wait in RAM."""
    asked = {"dtype": "float32", "offload": "ssd", "remember": True, **pair, **more}
    free_bytes = asked.pop("free_bytes", None)
    with fake_cuda(bare=True) if free_bytes else nullcontext() as runtime:
        if runtime is not None:
            runtime.free_bytes = free_bytes
        with Session.open(**asked) as opened:
            if runtime is not None:
                assert isinstance(opened, LocalSession)
                assert bool(opened.decision.plan.kv_layers) == (free_bytes < ROOMY_BYTES)
            yield opened


def text(session: TextSession, prompt: list[int], count: int = 90, **more: Any) -> list[int]:
    steps = session.generate(prompt, generation=GenerationConfig(max_tokens=count), **more)
    return [token for step in steps for token in step.tokens]


def texts(
    session: TextSession, prompts: list[list[int]], slots: int | None = None, count: int = COUNT
) -> tuple[list[list[int]], int]:
    """What an engine, or for one prompt the session, writes behind each of them, and the most rows
    that it read of one."""
    if len(prompts) == 1:  # the GPU's stand-in is seen by this thread alone
        return [text(session, prompts[0], count)], rows_read(session)
    engine = open_engine(session, slots=slots or len(prompts), most_waiting=9)
    generation = GenerationConfig(max_tokens=count)
    running = [
        engine.submit(
            TextRequest(prompt=tuple(prompt), sampling=SamplingConfig(), generation=generation)
        )
        for prompt in prompts
    ]
    found = [[token for step in each for token in step.tokens] for each in running]
    engine.close()
    return found, max(each.stats.prompt_rows for each in running)


def waiting(folder: Path) -> dict[str, Any]:
    """What is opened, on a GPU that has no room for all of its keys and values."""
    asked = {**USUAL, **save_long_pair(folder), "method": "autoregressive"}
    with fake_cuda(bare=True) as runtime:
        return asked | {"free_bytes": tight_bytes(runtime, asked)}


@pytest.fixture(params=["trees", "bfloat16", "recurrent"])
def kind(
    request: pytest.FixtureRequest, pair: dict[str, str], tmp_path: Path
) -> tuple[dict[str, Any], list[list[int]], list[list[int]]]:
    """What is opened, its prompts, and their texts: one with trees; several, in bfloat16, with
    keys and values in 8 bits or over recurrent layers as well; and one whose rows wait in RAM."""
    asked: dict[str, Any] = dict(pair)
    prompts = [[*SYSTEM, *f"Question {number}?".encode()] for number in range(3)]
    if request.param in ("trees", "waiting"):
        prompts = prompts[:1]
    else:
        asked["dtype"] = "bfloat16"
    if request.param == "recurrent":
        save_toy(TOYS["qwen3_5"], tmp_path / "hybrid")
        save_byte_tokenizer(tmp_path / "hybrid")
        asked |= {"model": str(tmp_path / "hybrid"), "draft": "suffix"}
        prompts = [[3 + each % 40 for each in prompt] for prompt in prompts]
    if request.param == "8bit":
        asked["kv"] = "8bit"
    alone, length = {"cache": False}, COUNT
    if request.param == "waiting":
        asked, alone = waiting(tmp_path), alone | {"free_bytes": ROOMY_BYTES}
        length = 4  # the stand-in is slow
    with session(asked, **alone) as plain:
        expected = [text(plain, prompt, length, method="autoregressive") for prompt in prompts]
    return asked, prompts, expected


def rows_read(session: TextSession) -> int:
    return session.stats.prompt_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["draft", "self", "suffix"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_second_session_writes_the_same_and_reads_the_new_alone(
    pair: dict[str, str], dtype: str, draft: str, temperature: float
) -> None:
    asked = {**pair, "dtype": dtype, "draft": pair["draft"] if draft == "draft" else draft}
    sampling = SamplingConfig(temperature=temperature, seed=5)
    more = [*b" And a forest?"]
    with session(asked, cache=False) as plain:
        first = text(plain, PROMPT, sampling=sampling)
        second = text(plain, [*PROMPT, *first, *more], sampling=sampling)
        plain.forget()
        assert text(plain, [*PROMPT, *first, *more], sampling=sampling) == second
    assert kept_prefixes() == []
    with session(asked) as one:
        assert text(one, PROMPT, sampling=sampling) == first
        assert rows_read(one) == len(PROMPT)
    with session(asked) as two:
        assert text(two, [*PROMPT, *first, *more], sampling=sampling) == second
        assert rows_read(two) < 64 + len(more) + 2


@pytest.mark.parametrize("slots", [1, 2])
def test_of_many_prompts_only_what_they_begin_with_is_kept(
    slots: int, pair: dict[str, str]
) -> None:
    generation = GenerationConfig(max_tokens=8)
    asked = {**pair, "draft": "suffix"}
    for _ in range(2):
        with session(asked, slots=slots) as opened:
            opened.keep_beginnings_alone()
            engine = open_engine(opened, slots=slots, most_waiting=9)
            running = [
                engine.submit(
                    TextRequest(
                        prompt=(*SYSTEM, *f"Question {at} of many? ".encode() * 6),
                        sampling=SamplingConfig(), generation=generation,
                    )
                )
                for at in range(4)
            ]  # fmt: skip
            for each in running:
                assert list(each)
            engine.close()
        [found] = kept_prefixes()
        assert found.files == (len(SYSTEM) + len("Question ")) // 64
    assert running[0].stats.prompt_rows <= 200


@pytest.mark.parametrize("slots", [1, 2])
def test_the_draft_model_reads_the_new_alone_too(
    slots: int, pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = GenerationConfig(max_tokens=20)
    read: list[int] = []
    found = []
    for _ in range(2):
        with session(pair, slots=slots) as opened:
            assert isinstance(opened, LocalSession)
            draft = opened.draft
            assert draft is not None
            begin = draft.context.begin

            def counted(rows: SideBySide, begin: Any = begin) -> None:
                read.append(sum(len(part.tokens) for part in rows.parts))
                begin(rows)

            monkeypatch.setattr(draft.context, "begin", counted)
            read.clear()
            engine = open_engine(opened, slots=slots, most_waiting=9)
            asked = TextRequest(
                prompt=tuple(PROMPT), sampling=SamplingConfig(), generation=generation
            )
            found.append([token for step in engine.submit(asked) for token in step.tokens])
            engine.close()
    assert found[0] == found[1]
    assert max(read) < 64, "its prompt is a few tokens and its steps are a tree's"
    assert len(kept_prefixes()) == 2, "each model has its folder"


def test_nothing_is_kept_by_a_session_that_is_not_to_remember(pair: dict[str, str]) -> None:
    with session(pair, remember=False) as one:
        text(one, PROMPT)
    assert kept_prefixes() == []


@pytest.mark.parametrize(
    ("slots", "dtype", "hybrid"),
    [(1, "float32", False), (3, "float32", False), (3, "bfloat16", False), (3, "bfloat16", True)],
)
def test_texts_of_an_engine(
    pair: dict[str, str], slots: int, dtype: str, hybrid: bool, tmp_path: Path
) -> None:
    """Trees of several texts, over recurrent layers too."""
    prompts = [[*SYSTEM, *f"Question {number}?".encode()] for number in range(5)]
    if hybrid:
        save_toy(TOYS["qwen3_5"], tmp_path / "hybrid")
        save_byte_tokenizer(tmp_path / "hybrid")
        pair = {"model": str(tmp_path / "hybrid"), "draft": "suffix"}
        prompts = [[3 + each % 40 for each in prompt] for prompt in prompts]
    with session(pair, cache=False, dtype=dtype) as plain:
        expected = [text(plain, prompt, COUNT, method="autoregressive") for prompt in prompts]
    for _ in range(2):
        with session(pair, slots=slots, dtype=dtype) as opened:
            found, rows = texts(opened, prompts, slots)
        assert found == expected
    assert rows < NEW_ROWS, "the second time no text reads what is in a whole file"


@pytest.mark.parametrize("apart", [False, True], ids=["one session", "a session for each"])
def test_a_third_text_begins_where_the_first_two_part(apart: bool, tmp_path: Path) -> None:
    """A recurrent layer has no state there before the second text has passed."""
    save_toy(TOYS["qwen3_5"], tmp_path)
    save_byte_tokenizer(tmp_path)
    asked = {"model": str(tmp_path), "method": "autoregressive"}
    system = [3 + each % 40 for each in range(7, 300)]
    prompts = [[*system, *[5 + at, 6, 7, 9] * 10] for at in range(3)]
    with session(asked, cache=False) as plain:
        expected = []
        for prompt in prompts:
            plain.forget()
            expected.append(text(plain, prompt, 20))
    if apart:
        for prompt, written in zip(prompts, expected, strict=True):
            with session(asked) as opened:
                assert text(opened, prompt, 20) == written
                rows = rows_read(opened)
        assert rows <= 40 + len(system) % 64, "files have rows of whole segments"
    else:
        with session(asked, cache=False) as opened:
            assert [text(opened, prompt, 20) for prompt in prompts] == expected
            assert rows_read(opened) == 40


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_a_turn_whose_thoughts_are_left_out(name: str, tmp_path: Path) -> None:
    """A recurrent layer goes on from the state that it had where the turn began."""
    save_toy(TOYS[name], tmp_path)
    save_byte_tokenizer(tmp_path)
    asked = {"model": str(tmp_path), "method": "autoregressive"}
    prompt = [3 + each % 40 for each in range(7, 300)]
    with session(asked, cache=False) as plain:
        first = text(plain, prompt, 80)
        turn = [*prompt, *first[-10:], 5, 6, 7]  # the beginning of the reply is left out
        second = text(plain, turn, 20)
    with session(asked) as one:
        assert text(one, prompt, 80) == first
    with session(asked) as two:
        assert text(two, turn, 20) == second
        assert rows_read(two) < 40
    with session(asked) as three:
        assert text(three, [*prompt, *first, 9, 9], 1)
        assert rows_read(three) < 70


def test_another_dtype_and_other_weights_have_rows_of_their_own(
    pair: dict[str, str], tmp_path: Path
) -> None:
    for asked in ({"dtype": "float32"}, {"dtype": "bfloat16"}):
        with session(pair, **asked) as one:
            text(one, PROMPT)
            assert rows_read(one) == len(PROMPT)
    copy = shutil.copytree(pair["model"], tmp_path / "target")  # other files, by their times
    os.utime(copy / "model.safetensors", (1, 1))
    with session({**pair, "model": str(copy)}) as other:
        text(other, PROMPT)
        assert rows_read(other) == len(PROMPT)
    names = [each.name for each in kept_prefixes()]
    assert sum("-target-" in name for name in names) == 3
    assert sum("-draft-" in name for name in names) == 2  # of the draft model in both dtypes


@pytest.mark.parametrize("kind", ["waiting", "8bit", "recurrent"], indirect=True)
def test_a_full_disk_ends_the_keeping_with_one_line(
    kind: tuple[dict[str, Any], list[list[int]], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, prompts, expected = kind
    told: list[str] = []

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept_file.os, "pwrite", full)
    with session(asked, notice=told.append, slots=len(prompts)) as one:
        assert texts(one, prompts, count=len(expected[0]))[0] == expected
        one.forget()
        assert texts(one, prompts, count=len(expected[0]))[0] == expected
    (line,) = [each for each in told if "cannot be kept" in each]
    assert "No space left on device" in line
    assert [*prefixes_folder().rglob("*.*")] == []


def test_a_folder_that_cannot_be_written_is_one_line(pair: dict[str, str]) -> None:
    prefixes_folder().parent.mkdir(parents=True)
    prefixes_folder().write_text("a file")
    told: list[str] = []
    with session(pair, notice=told.append) as one:
        text(one, PROMPT)
    assert len([each for each in told if "cannot be kept" in each]) == 1


def write(asked: dict[str, Any], prompts: list[list[int]], count: int, at: int) -> None:
    """Writes texts, and stands still in the midst of writing number `at` to the disk."""
    writes, pwrite = numbers(1), os.pwrite

    def counted(file: int, view: memoryview, start: int) -> int:
        if next(writes) == at:
            pwrite(file, view[: len(view) // 2 // 4096 * 4096], start)
            print("half", flush=True)
            time.sleep(600)
        return pwrite(file, view, start)

    kept_file.os.pwrite = counted  # type: ignore[assignment]
    with session(asked, slots=len(prompts)) as one:
        texts(one, prompts, count=count)
    print("whole", flush=True)


@pytest.mark.parametrize(
    ("kind", "at"),
    [("trees", 1), ("waiting", 2), ("8bit", 5), ("bfloat16", 2), ("recurrent", 2)],
    indirect=["kind"],
)
def test_a_process_that_is_killed_while_it_writes(
    kind: tuple[dict[str, Any], list[list[int]], list[list[int]]], at: int
) -> None:
    asked, prompts, expected = kind
    process = Forked(write, asked, prompts, len(expected[0]), at)
    with process.heard as heard:
        assert heard.readline() == "half\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL
    left = [path for path in prefixes_folder().rglob("*") if path.suffix == ".partial"]
    assert 1 <= len(left) <= 2, "of the target, of the draft model, or of both"
    for _ in range(2):
        with session(asked, slots=len(prompts)) as one:
            found, rows = texts(one, prompts, count=len(expected[0]))
        assert found == expected
    assert rows < NEW_ROWS
    for path in left:
        os.utime(path, (1, 1))
    Bound(10**9).make_room(1, list)
    assert not any(path.exists() for path in left)


def test_two_processes_keep_the_same_text(
    kind: tuple[dict[str, Any], list[list[int]], list[list[int]]],
) -> None:
    asked, prompts, expected = kind
    both = [Forked(write, asked, prompts, len(expected[0]), 0) for _ in range(2)]
    for process in both:
        with process.heard as heard:
            assert heard.read() == "whole\n"
        assert process.wait() == 0
    with session(asked, slots=len(prompts)) as one:
        found, rows = texts(one, prompts, count=len(expected[0]))
    assert found == expected
    assert rows < NEW_ROWS
    assert not [*prefixes_folder().rglob("*.partial")]


def test_files_that_leave_while_they_are_used(pair: dict[str, str]) -> None:
    with session(pair, cache=False) as plain:
        expected = text(plain, PROMPT)
    stopped = threading.Event()

    def clear() -> None:
        while not stopped.wait(0.002):  # again and again, and most of the time others' turn
            shutil.rmtree(prefixes_folder(), ignore_errors=True)

    clearing = threading.Thread(target=clear)
    clearing.start()
    told: list[str] = []
    try:
        for _ in range(4):
            with session(pair, notice=told.append) as one:
                assert text(one, PROMPT) == expected
    finally:
        stopped.set()
        clearing.join()
    assert told == []


def test_the_command_lists_and_clears(pair: dict[str, str]) -> None:
    empty = run_cli("cache")
    assert (empty.code, empty.out) == (0, "")
    assert "0 B of at most" in empty.err
    for dtype in ("float32", "bfloat16"):
        with session(pair, dtype=dtype) as one:
            text(one, PROMPT)
    names = [each.name for each in kept_prefixes()]
    assert all(name in run_cli("cache").out for name in names)
    assert run_cli("cache", names[0]).out.count("\n") == 1
    refused = run_cli("cache", "--clear", stdin=b"")
    assert (refused.code, refused.error.endswith("agree with --yes")) == (10, True)
    cleared = run_cli("cache", "--clear", "--yes", names[0])
    assert (cleared.code, f"deleted {names[0]}" in cleared.err) == (0, True)
    assert [each.name for each in kept_prefixes()] == names[1:]
    assert run_cli("cache", "--clear", "--yes").code == 0
    assert kept_prefixes() == []
    unknown = run_cli("cache", names[0])
    assert (unknown.code, f"begins with '{names[0]}'" in unknown.error) == (3, True)


def test_generate_goes_on_and_can_be_told_not_to(pair: dict[str, str]) -> None:
    words = ["generate", "--model", pair["model"], "--draft", pair["draft"], "--max-tokens", "9",
             "--stats", "--raw", "--dtype", "float32", bytes(PROMPT).decode()]  # fmt: skip
    without = run_cli(*words, "--no-cache")
    assert kept_prefixes() == []
    first, second = run_cli(*words), run_cli(*words)
    assert without.out == first.out == second.out
    assert "new)" not in first.err
    assert "new)" in second.err
    wrong = run_cli(*words, "--cache-gb", "0")
    assert (wrong.code, wrong.error) == (2, "--cache-gb must be above 0, not 0.0")
