"""Sessions over workers in processes of their own, which die, come back, or are not wanted."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from checkpoints import save_pair
from cli_runner import run_cli
from hosts_rig import TOKEN, WorkerProcess, free_port, in_waves_of_64
from test_chat_models import MESSAGES, chat_on

from specexec_cli.cli import doctor
from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.core import PassProgress
from specexec_cli.errors import ConfigError, WorkerError
from specexec_cli.hosts import joined
from specexec_cli.hosts.pool import HostPool
from specexec_cli.planning.hosts import HostEntry, HostsFile, WaveTimes
from specexec_cli.session import Session, TextSession

PROMPTS = ("def read_lines(path):\n", "def read_lines(name):\n    with", "class Stack:\n")
GREEDY, WARM = SamplingConfig(), SamplingConfig(temperature=1.0, seed=3)


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECEXEC_TOKEN", TOKEN)


def hosts_file(folder: Path, port: int, *layers: int, wait_s: float = 300) -> Path:
    """Machines called host-0, host-1, ... with so many layers each."""
    path = folder / "hosts.toml"
    entries = [f'[[host]]\nname = "host-{at}"\nlayers = {n}\n' for at, n in enumerate(layers)]
    path.write_text(f'listen = "127.0.0.1:{port}"\nwait_s = {wait_s}\n' + "".join(entries))
    return path


def tokens(session: TextSession, prompt: str, sampling: SamplingConfig) -> list[int]:
    steps = session.generate(prompt, sampling=sampling, generation=GenerationConfig(max_tokens=24))
    return [token for step in steps for token in step.tokens]


@pytest.fixture(scope="module")
def alone() -> Iterator[list[list[int]]]:
    """The texts of one machine."""
    with closing(Session.open(model="demo", dtype="float32", cache=False)) as session:
        yield [tokens(session, prompt, how) for how in (GREEDY, WARM) for prompt in PROMPTS]


def test_texts_over_three_machines_are_those_of_one(alone, tmp_path: Path) -> None:
    """One worker is started as by a user, with modules that it imports itself."""
    port, said = free_port(), list[str]()
    fresh = WorkerProcess("demo", port, "host-0", before=())
    with fresh, WorkerProcess("demo", port, "host-1"):
        opened = Session.open(
            model="demo", dtype="float32", hosts=hosts_file(tmp_path, port, 3, 2),
            notice=said.append,
        )  # fmt: skip
        with closing(opened) as session:
            found = [tokens(session, prompt, how) for how in (GREEDY, WARM) for prompt in PROMPTS]
            assert session.settings["hosts"] == "host-0 3-5, host-1 6-7"
        path = tmp_path / "hosts.toml"  # a session that is opened again has the same workers
        with closing(Session.open(model="demo", dtype="float32", hosts=path)) as session:
            assert tokens(session, PROMPTS[1], WARM) == alone[4]
    assert found == alone
    assert sum("has layers" in line for line in said) == 2


def conversation(session: TextSession, lose: Callable[[], None]) -> list[list[int]]:
    """The texts of a chat: a reply that is undone after Ctrl-C, and one in which a worker dies."""
    chat, view = chat_on(session, temperature=0.8, seed=3)
    chat.send(MESSAGES[0])
    found = [list(session.context)]
    view.interrupt_at = (2, 1)
    chat.send(MESSAGES[1])
    assert chat.interrupted
    view.interrupt_at = None
    chat.undo()
    passed = list[int]()

    def layer(progress: PassProgress) -> None:
        passed.append(progress.layer)
        if len(passed) == 12:
            lose()

    view.layer = layer  # type: ignore[method-assign]
    chat.send(MESSAGES[2])
    assert len(passed) > 12
    return [*found, list(session.context)]


def test_a_chat_over_two_machines_is_that_of_one(tmp_path: Path) -> None:
    with closing(Session.open(model="demo", dtype="float32", cache=False)) as session:
        alone = conversation(session, lambda: None)
    port, said = free_port(), list[str]()
    workers = [WorkerProcess("demo", port, "host-0")]

    def lose() -> None:
        workers[0].kill()
        workers.append(WorkerProcess("demo", port, "host-0"))

    with ExitStack() as left:
        left.callback(lambda: [worker.__exit__() for worker in workers])
        path = hosts_file(tmp_path, port, 5)
        session = Session.open(model="demo", dtype="float32", hosts=path, notice=said.append)
        left.enter_context(closing(session))
        assert conversation(session, lose) == alone
    assert said[-1] == "host-0 is back, and the text goes on"


@pytest.mark.parametrize("layer", [1, 8])
def test_a_worker_that_is_killed_in_a_pass_loses_nothing(layer: int, alone, tmp_path: Path) -> None:
    port, said = free_port(), list[str]()
    path = hosts_file(tmp_path, port, 5)
    workers = [WorkerProcess("demo", port, "host-0")]
    passed = list[int]()

    def kill(progress: PassProgress) -> None:
        passed.append(progress.layer)
        if len(workers) == 1 and len(passed) > 20 and progress.layer == layer:
            workers[0].kill()
            workers.append(WorkerProcess("demo", port, "host-0"))

    with ExitStack() as left:
        left.callback(lambda: [worker.__exit__() for worker in workers])
        session = Session.open(model="demo", dtype="float32", hosts=path, notice=said.append)
        left.enter_context(closing(session))
        session.on_layer(kill)
        assert [tokens(session, prompt, GREEDY) for prompt in PROMPTS] == alone[:3]
    assert workers[0].process.returncode == -signal.SIGKILL
    assert any("host-0 is lost" in line for line in said), said
    assert said[-1] == "host-0 is back, and the text goes on"


@pytest.mark.parametrize(("wave", "killed"), [(2, 0), (3, 1), (4, 0), (4, 1)])
def test_a_worker_that_is_killed_between_waves_of_a_prompt_loses_nothing(
    wave: int, killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first machine reads one part of the prompt, and the workers those before."""
    names = "abcdefghijklmnopqrstuvwx"  # over 256 tokens, so four waves however small the tree
    prompt = "".join(f"def read_{name}(path):\n    return open(path)\n" for name in names)
    with closing(Session.open(model="demo", dtype="float32", cache=False)) as session:
        alone = tokens(session, prompt, GREEDY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no rows of the prompt are on disk yet
    monkeypatch.setattr(WaveTimes, "fastest", lambda times, texts: in_waves_of_64(texts))
    port, began, said = free_port(), list[int](), list[str]()
    workers = [WorkerProcess("demo", port, f"host-{at}") for at in (0, 1)]

    def kill(progress: PassProgress) -> None:
        if progress.layer == 1:
            began.append(progress.number)
            if len(began) == wave:
                workers[killed].kill()
                workers.append(WorkerProcess("demo", port, f"host-{killed}"))

    with ExitStack() as left:
        left.callback(lambda: [worker.__exit__() for worker in workers])
        path = hosts_file(tmp_path, port, 3, 2)
        session = Session.open(model="demo", dtype="float32", hosts=path, notice=said.append)
        left.enter_context(closing(session))
        session.on_layer(kill)
        assert tokens(session, prompt, GREEDY) == alone
    assert began[:wave] == [1] * wave  # waves of the first pass
    assert any(f"host-{killed} is lost" in line for line in said), said


@pytest.mark.parametrize("layers", [(5, 0), (3, 2)])
def test_the_layers_of_a_worker_that_stays_away_are_opened_on_another(
    layers: tuple[int, int], alone, tmp_path: Path
) -> None:
    """Which had none so far, or then has two spans."""
    port, said = free_port(), list[str]()
    path = hosts_file(tmp_path, port, *layers, wait_s=8)
    passed = list[int]()
    with WorkerProcess("demo", port, "host-0") as lost, WorkerProcess("demo", port, "host-1") as by:
        for each in (lost, by):
            each.until_it_says("waiting")

        def kill(progress: PassProgress) -> None:
            passed.append(progress.layer)
            if len(passed) == 25:
                lost.kill()

        opened = Session.open(model="demo", dtype="float32", hosts=path, notice=said.append)
        with closing(opened) as session:
            session.on_layer(kill)
            assert [tokens(session, prompt, GREEDY) for prompt in PROMPTS] == alone[:3]
    assert len(passed) > 25
    assert said[-1] == "host-0 stays away, and the text goes on with host-1"
    assert any("host-1 has layers 3 to" in line for line in said), said


def test_a_worker_that_hangs_counts_as_lost_and_one_that_stays_away_ends_the_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(joined, "SILENCE_S", 3.0)
    port, said = free_port(), list[str]()
    path = hosts_file(tmp_path, port, 5, wait_s=8)
    with WorkerProcess("demo", port, "host-0") as worker:
        worker.until_it_says("waiting")
        opened = Session.open(model="demo", dtype="float32", hosts=path, notice=said.append)
        with closing(opened) as session:
            worker.process.send_signal(signal.SIGSTOP)
            with pytest.raises(WorkerError, match=r"'host-0' did not join .* within 8 s") as error:
                tokens(session, PROMPTS[0], GREEDY)
    assert error.value.exit_code == 9
    assert any("host-0 is lost (nothing came for 3 s)" in line for line in said), said


def test_texts_at_once_over_two_machines_are_those_of_one(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": prompt, "max_tokens": 12}) + "\n" for prompt in PROMPTS)
    (tmp_path / "prompts.jsonl").write_text(lines)
    common = ("generate", "-m", "demo", "--jsonl", "--raw", "-f", tmp_path / "prompts.jsonl", "-q")
    one = run_cli(*common, "-o", tmp_path / "one.jsonl")
    assert one.code == 0, one.err
    port = free_port()
    with WorkerProcess("demo", port, "host-0"):
        two = run_cli(
            *common, "-o", tmp_path / "two.jsonl", "--hosts", hosts_file(tmp_path, port, 4)
        )
        (link,) = doctor._links(tmp_path / "hosts.toml")
    assert link["name"] == "host-0"
    assert min(link["ram_bytes"], link["link_bytes_per_s"]) > 1e6
    assert 0 < link["delay_s"] < 1
    assert two.code == 0, two.err
    texts = [
        [json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("one.jsonl", "two.jsonl")
    ]
    assert len(texts[0]) == 3
    assert texts[0] == texts[1]


def test_without_a_token_nothing_listens_and_no_worker_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_port()
    for token, told in ((None, "is not set"), ("short", "has 5 characters")):
        monkeypatch.delenv("SPECEXEC_TOKEN")
        if token is not None:
            monkeypatch.setenv("SPECEXEC_TOKEN", token)
        path = hosts_file(tmp_path, port, 4)
        for command in (
            ("generate", "-m", "demo", "x", "--hosts", path),
            ("worker", "demo", "--join", f"127.0.0.1:{port}"),
        ):
            ran = run_cli(*command, "-q")
            assert ran.code == ConfigError.exit_code
            assert f"SPECEXEC_TOKEN {told}" in ran.error
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port))
        monkeypatch.setenv("SPECEXEC_TOKEN", TOKEN)


def test_a_worker_with_another_model_is_told_so(tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path)
    port = free_port()
    with (
        WorkerProcess(target, port, "host-0"),
        pytest.raises(WorkerError, match=r"host-0: .* another model, or another version"),
    ):
        Session.open(model="demo", hosts=hosts_file(tmp_path, port, 4))


def test_workers_that_are_not_wanted_say_why_and_leave() -> None:
    file = HostsFile(listen="127.0.0.1:0", wait_s=60, hosts=(HostEntry(name="host-0"),))
    with (
        closing(HostPool(file, TOKEN.encode(), lambda line: None)) as pool,
        WorkerProcess("demo", pool.port, "nobody") as nobody,
        WorkerProcess("demo", pool.port, "host-0", token="not the same " * 3) as stranger,
    ):
        code, said = nobody.ended()
        assert code == 9
        assert "no host is called 'nobody' there, but host-0" in said
        code, said = stranger.ended()
        assert code == 9
        assert "another token: check SPECEXEC_TOKEN on both" in said
