"""Every machine keeps the rows of its own layers on disk, and reads them back at the next start."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
from checkpoints import byte_llama, save_byte_tokenizer, save_pair
from gguf_toys import TOYS, save_toy
from hosts_rig import TOKEN, WorkerProcess, free_port, joins, offer_of, workers_at

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.engine.factory import open_engine
from specexec_cli.engine.text import TextRequest
from specexec_cli.hosts import worker
from specexec_cli.hosts.kept_span import KeptSpan
from specexec_cli.hosts.kept_there import KeptThere
from specexec_cli.hosts.messages import PassOrder
from specexec_cli.hosts.open_span import OpenSpan
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.request import TreeRequest
from specexec_cli.prefixes import kept_file
from specexec_cli.prefixes.folder import Bound, kept_prefixes, prefixes_folder
from specexec_cli.session import Session
from specexec_cli.session.text_session import TextSession

SYSTEM = [
    *b"You are a careful assistant, who answers in few words, and says where they stand. " * 3
]
PROMPT = [*SYSTEM, *b"What is a tree?"]
USUAL = {"dtype": "float32", "tree": TreeRequest(budget=8), "device": "cpu"}
LIMIT = Bound(10**9)
HYBRIDS = {"qwen3_5": "bfloat16", "falcon_h1": "float32", "nemotron_h": "bfloat16"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    config = byte_llama(
        hidden_size=64, intermediate_size=128, max_position_embeddings=1024, num_hidden_layers=4
    )
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), target=config)
    return {"model": str(target), "draft": str(draft)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECEXEC_TOKEN", TOKEN)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of committed tokens that a worker computed, in each pass."""
    run, found = OpenSpan.run, list[int]()

    def noted(span: OpenSpan, order: PassOrder) -> torch.Tensor:
        found.append(sum(part.pending for _, part in order.texts))
        return run(span, order)

    monkeypatch.setattr(OpenSpan, "run", noted)
    return found


def hosts_file(folder: Path, port: int, layers: Sequence[int]) -> Path:
    """Machines called host-0, host-1, ... with so many layers each."""
    path = folder / "hosts.toml"
    entries = [f'[[host]]\nname = "host-{at}"\nlayers = {n}\n' for at, n in enumerate(layers)]
    path.write_text(f'listen = "127.0.0.1:{port}"\nwait_s = 60\n' + "".join(entries))
    return path


@contextmanager
def session(
    pair: dict[str, str],
    folder: Path,
    layers: Sequence[int] = (1, 1),
    kept: Sequence[Bound | None] = (LIMIT, LIMIT),
    notice: Callable[[str], None] = lambda line: None,
    worker_notice: Callable[[str], None] = lambda line: None,
    **asked: Any,
) -> Iterator[TextSession]:
    """A session over as many workers as `layers` has items, which end with it."""
    port = free_port()
    path = hosts_file(folder, port, layers)
    usual = {"remember": True, "hosts": path, "notice": notice, **USUAL}
    with workers_at(port, Path(pair["model"]), len(layers), kept, worker_notice):
        opened = Session.open(**{**usual, **pair, **asked})
        with closing(opened):
            yield opened


def alone(pair: dict[str, str], **asked: Any) -> TextSession:
    return Session.open(**{**USUAL, "cache": False, **pair, **asked})


def text(session: TextSession, prompt: list[int], count: int = 40, **more: Any) -> list[int]:
    steps = session.generate(prompt, generation=GenerationConfig(max_tokens=count), **more)
    return [token for step in steps for token in step.tokens]


def theirs(at: str = "*") -> list[Path]:
    """The files of spans of these layers."""
    return sorted(prefixes_folder().glob(f"*-layers-{at}/*"))


@pytest.mark.parametrize(
    ("dtype", "draft", "temperature"),
    [("float32", "draft", 0.0), ("bfloat16", "draft", 0.0), ("bfloat16", "suffix", 0.8)],
)
def test_a_second_start_reads_the_new_alone_on_every_machine(
    dtype: str, draft: str, temperature: float, pair: dict[str, str], tmp_path: Path,
    rows: list[int],
) -> None:  # fmt: skip
    asked = {**pair, "dtype": dtype, "draft": pair["draft"] if draft == "draft" else draft}
    sampling = SamplingConfig(temperature=temperature, seed=5)
    more = [*b" And a forest?"]
    with alone(asked) as plain:
        first = text(plain, PROMPT, sampling=sampling)
        second = text(plain, [*PROMPT, *first, *more], sampling=sampling)
    with session(asked, tmp_path) as one:
        assert text(one, PROMPT, sampling=sampling) == first
    assert sum(rows) >= 2 * len(PROMPT)
    rows.clear()
    with session(asked, tmp_path) as two:
        assert text(two, [*PROMPT, *first, *more], sampling=sampling) == second
        assert two.stats.prompt_rows < 64 + len(more) + 2
    assert max(rows) < 64 + len(more) + 2
    whole = len([*PROMPT, *first]) // 64
    assert min(len(theirs("2-2")), len(theirs("3-3"))) >= whole
    assert not [*prefixes_folder().rglob("*.partial")]


@pytest.mark.parametrize(("name", "dtype"), HYBRIDS.items())
def test_recurrent_layers_go_on_from_a_state_on_every_machine(
    name: str, dtype: str, tmp_path: Path, rows: list[int]
) -> None:
    save_toy(TOYS[name], tmp_path / "model")
    save_byte_tokenizer(tmp_path / "model")
    asked = {"model": str(tmp_path / "model"), "method": "autoregressive", "dtype": dtype}
    prompt = [3 + each % 40 for each in range(7, 300)]
    with alone(asked) as plain:
        first = text(plain, prompt, 40)
        turn = [*prompt, *first, 5, 6, 7]
        second = text(plain, turn, 20)
        layers = len(plain.target.model.layers)
    split = (1,) * min(2, layers - 1)
    with session(asked, tmp_path, split) as one:
        assert text(one, prompt, 40) == first
    rows.clear()
    with session(asked, tmp_path, split) as two:
        assert text(two, turn, 20) == second
        assert two.stats.prompt_rows < 64
    assert max(rows) < 64


def test_texts_of_an_engine(pair: dict[str, str], tmp_path: Path) -> None:
    prompts = [[*SYSTEM, *f"Question {number}?".encode()] for number in range(4)]
    with alone(pair) as plain:
        expected = [text(plain, prompt, 30, method="autoregressive") for prompt in prompts]
    for _ in range(2):
        with session(pair, tmp_path, slots=3) as opened:
            engine = open_engine(opened, slots=3, most_waiting=9)
            running = [
                engine.submit(
                    TextRequest(
                        prompt=tuple(prompt), sampling=SamplingConfig(),
                        generation=GenerationConfig(max_tokens=30),
                    )
                )
                for prompt in prompts
            ]  # fmt: skip
            found = [[token for step in each for token in step.tokens] for each in running]
            engine.close()
        assert found == expected
    assert all(each.stats.prompt_rows < 64 + len(SYSTEM) % 64 for each in running)


def _gone(path: Path, chance: random.Random) -> None:
    path.unlink()


def _cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _other_bytes(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    used = 4096 + chance.randrange(len(data) - 8192) if chance.random() < 0.5 else 0
    for _ in range(3):
        data[used + chance.randrange(30)] ^= 1 + chance.randrange(255)
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_damaged_file_on_one_worker_is_not_believed(
    kind: str, pair: dict[str, str], tmp_path: Path
) -> None:
    """Fuzzed: any damage to any file leaves the text as it is, and is mended by the next start."""
    prompt = PROMPT
    if kind == "qwen3_5":
        save_toy(TOYS[kind], tmp_path / "model")
        save_byte_tokenizer(tmp_path / "model")
        pair = {"model": str(tmp_path / "model"), "method": "autoregressive"}
        prompt = [3 + each % 40 for each in PROMPT]
    with alone(pair) as plain:
        expected = text(plain, prompt, 24)
    with session(pair, tmp_path) as one:
        assert text(one, prompt, 24) == expected
    chance, read = random.Random(7), list[int]()
    for damage, layers in ((_other_bytes, "2-2"), (_cut, "3-3"), (_gone, "2-2"), (None, "")):
        with session(pair, tmp_path) as again:
            assert text(again, prompt, 24) == expected
            read.append(again.stats.prompt_rows)
        if damage is not None:
            damage(chance.choice(theirs(layers)), chance)
    assert read[0] < 64
    assert min(read[1:]) >= 64


def test_what_one_worker_has_lost_is_computed_by_all(pair: dict[str, str], tmp_path: Path) -> None:
    with session(pair, tmp_path) as one:
        expected = text(one, PROMPT)
    shutil.rmtree(theirs("3-3")[0].parent)
    for computed in (len(PROMPT), len(PROMPT) % 64 + 64):
        with session(pair, tmp_path) as again:
            assert text(again, PROMPT) == expected
            assert again.stats.prompt_rows <= computed
            assert (again.stats.prompt_rows == len(PROMPT)) == (computed == len(PROMPT))


def test_a_full_disk_on_one_worker_costs_the_text_nothing(
    pair: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone(pair) as plain:
        expected = text(plain, PROMPT)
    pwrite = os.pwrite

    def full(file: int, view: memoryview, start: int) -> int:
        if "-layers-2-2/" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, view, start)

    monkeypatch.setattr(kept_file.os, "pwrite", full)
    told = list[str]()
    for _ in range(2):
        with session(pair, tmp_path, worker_notice=told.append) as one:
            assert text(one, PROMPT) == expected
            assert one.stats.prompt_rows == len(PROMPT)
    assert sum("No space left on device" in line for line in told) == 2
    assert theirs("2-2") == []
    monkeypatch.undo()


_HALF = """
import os, sys, time
from specexec_cli.prefixes import kept_file
writes, pwrite = [0], os.pwrite
def counted(file, view, start):
    writes[0] += 1
    if writes[0] == {at}:
        pwrite(file, view[: len(view) // 2 // 4096 * 4096], start)
        print("half", file=sys.stderr, flush=True)
        time.sleep(600)
    return pwrite(file, view, start)
kept_file.os.pwrite = counted
"""


@pytest.mark.parametrize("at", [1, 4])
def test_a_worker_that_is_killed_while_it_writes(
    at: int, pair: dict[str, str], tmp_path: Path
) -> None:
    with alone(pair) as plain:
        expected = text(plain, PROMPT)
    port, model = free_port(), pair["model"]
    path = hosts_file(tmp_path, port, [1])
    with (
        WorkerProcess(model, port, "host-0", first=_HALF.format(at=at)) as killed,
        ExitStack() as left,
        closing(Session.open(**{**USUAL, **pair, "remember": True, "hosts": path})) as one,
    ):
        steps = one.generate(PROMPT, generation=GenerationConfig(max_tokens=40))
        found = [token for step in islice(steps, 2) for token in step.tokens]
        killed.until_it_says("half")
        killed.kill()
        left.enter_context(WorkerProcess(model, port, "host-0"))
        found += [token for step in steps for token in step.tokens]
        assert found == expected
        assert [each.parent.name[-11:] for each in prefixes_folder().rglob("*.partial")] == [
            "-layers-3-3"
        ]
    for most in (len(PROMPT), 63):
        with session(pair, tmp_path, (1,)) as again:
            assert text(again, PROMPT) == expected
            assert again.stats.prompt_rows <= most


def test_two_workers_keep_the_same_text(pair: dict[str, str], tmp_path: Path) -> None:
    """In processes of their own, at once, in one folder."""
    with alone(pair) as plain:
        expected = text(plain, PROMPT)
    with ExitStack() as left:
        opened = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            port = free_port()
            left.enter_context(WorkerProcess(pair["model"], port, "host-0"))
            path = hosts_file(tmp_path / name, port, [1])
            asked = {**USUAL, **pair, "remember": True, "hosts": path}
            opened.append(left.enter_context(closing(Session.open(**asked))))
        with ThreadPoolExecutor(2) as both:
            assert [*both.map(partial(text, prompt=PROMPT), opened)] == [expected] * 2
    with session(pair, tmp_path, (1,)) as again:
        assert text(again, PROMPT) == expected
        assert again.stats.prompt_rows < 64
    assert not [*prefixes_folder().rglob("*.partial")]


@pytest.mark.parametrize("who", ["first", "worker"])
def test_where_one_machine_keeps_nothing_none_does(
    who: str, pair: dict[str, str], tmp_path: Path
) -> None:
    told = list[str]()
    asked: dict[str, Any] = {"cache": False} if who == "first" else {"kept": (LIMIT, None)}
    for _ in range(2):
        with session(pair, tmp_path, notice=told.append, **asked) as one:
            text(one, PROMPT, 30)
            assert one.stats.prompt_rows == len(PROMPT)
    assert kept_prefixes() == []
    assert [line for line in told if "keeps no rows" in line] == [
        "host-1 keeps no rows of texts on disk, so no machine does: start the worker there without "
        "`cache=False`"
    ] * (2 if who == "worker" else 0)


def test_rows_of_a_worker_that_comes_back_with_other_arithmetic_are_not_kept(
    pair: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows behind it have other bits than those of the name under which files are."""
    other = [*b"Where is the tree? " * 12]
    with alone(pair) as plain:
        expected = [text(plain, each) for each in (PROMPT, other)]
    with monkeypatch.context() as patch, session(pair, tmp_path, (1,)) as one:
        assert text(one, PROMPT) == expected[0]
        pool = one.target.model.others
        passage = pool.passages[0]
        KeptThere(pool.passages, print).flush(20)
        before = {*theirs()}
        assert len(before) == (len(PROMPT) + len(expected[0])) // 64
        passage.joined.close()
        patch.setattr(worker, "arithmetic_of", lambda device: "0" * 64)
        back = joins(pool, offer_of(read_checkpoint(Path(pair["model"])), "host-0", kept=LIMIT))
        assert text(one, other) == expected[1]
        assert not passage.keeps
        patch.setattr(KeptThere, "begin_reading", lambda *given: pytest.fail("it is read"))
        assert text(one, PROMPT) == expected[0]
    back.join(60)
    assert {*theirs()} == before
    for prompt, found, read in ((other, expected[1], False), (PROMPT, expected[0], True)):
        with session(pair, tmp_path, (1,)) as two:
            assert text(two, prompt) == found
            assert (two.stats.prompt_rows < len(prompt)) == read


def test_a_worker_that_looks_for_files_is_not_waited_for_once_nobody_reads(
    pair: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session(pair, tmp_path, (1,)) as one:
        expected = text(one, PROMPT)
    usable, goes_on = KeptSpan.usable, Event()

    def waits(kept: KeptSpan, names: Sequence[str]) -> list[str]:
        goes_on.wait(60)
        return usable(kept, names)

    monkeypatch.setattr(KeptSpan, "usable", waits)
    with session(pair, tmp_path, (1,)) as two, ThreadPoolExecutor(1) as reader:
        reading = reader.submit(two.kept.bring_back, two.target, None, PROMPT)
        late = Timer(30, goes_on.set)
        late.start()
        two.kept.stop_reading(reading)
        assert not goes_on.is_set()
        goes_on.set()
        late.cancel()
        assert text(two, PROMPT) == expected


def test_other_layers_on_a_machine_have_rows_of_their_own(
    pair: dict[str, str], tmp_path: Path
) -> None:
    with alone(pair) as plain:
        expected = text(plain, PROMPT, 30)
    for split in ((1, 1), (2, 1)):
        with session(pair, tmp_path, split) as one:
            assert text(one, PROMPT, 30) == expected
            assert one.stats.prompt_rows == len(PROMPT)
    with session(pair, tmp_path) as again:
        assert text(again, PROMPT, 30) == expected
        assert again.stats.prompt_rows < 64 + len(PROMPT) % 64
