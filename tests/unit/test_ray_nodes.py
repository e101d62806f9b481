"""Workers on a Ray cluster that is there already: which nodes get one, and a text over them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from cli_runner import Ran, run_cli
from fake_ray import FakeRay, RayError
from hosts_rig import TOKEN, WorkerProcess, free_port, until

from specexec_cli.config import GenerationConfig
from specexec_cli.errors import ConfigError, WorkerError
from specexec_cli.hosts import ray_nodes
from specexec_cli.planning.hosts import read_hosts
from specexec_cli.session import Session

_MAIN = "import sys; from specexec_cli.cli.main import main; sys.exit(main())"


def node(name: str, at: str, alive: bool = True) -> dict[str, Any]:
    """A node as ray.nodes() tells of it."""
    return {"NodeManagerHostname": name, "NodeID": at, "Alive": alive}


NODES = [node("first", "1"), node("attic", "2")]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of nodes which were started as docs/hosts.md says."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("SPECEXEC_TOKEN", TOKEN)


def test_every_other_node_that_is_there_has_a_worker_of_its_own_name() -> None:
    nodes = [node("first", "1"), node("attic", "2"), node("gone", "3", False), node("attic", "4")]
    assert ray_nodes.other_nodes(nodes, "1") == {"attic": "2", "attic-2": "4"}


@pytest.mark.parametrize(
    ("mode", "token", "told"),
    [
        ("disabled", TOKEN, "asks for no token"),
        ("", TOKEN, "asks for no token"),
        ("token", "", "SPECEXEC_TOKEN is not set"),
    ],
)
def test_a_node_that_others_may_use_or_without_our_token_gets_none(
    mode: str, token: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("SPECEXEC_TOKEN", token)
    monkeypatch.setattr(ray_nodes.subprocess, "Popen", None)
    with FakeRay(NODES, "1").installed(), pytest.raises(WorkerError, match=told):
        ray_nodes.start_on_nodes(["demo", "--join=127.0.0.1", "--name"])


def worker_on(path: Path, *options: object, cluster: FakeRay | None = None) -> Ran:
    """`specexec worker --ray` on the first node, or where Ray is as the test left it."""
    with cluster.installed() if cluster else nullcontext():
        ran = run_cli("worker", "demo", "--join", "192.168.1.10", "--ray", path, *options)
    for actor in cluster.actors.values() if cluster else ():
        if process := vars(actor).get("_process"):
            process.communicate(timeout=60)  # as its actor ends it
    return ran


def test_what_ray_cannot_do_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hosts.toml"
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert "install the package ray" in worker_on(path).error
    assert "run `ray start`" in worker_on(path, cluster=FakeRay(NODES, None)).error
    assert "no other node" in worker_on(path, cluster=FakeRay(NODES[:1], "1")).error
    monkeypatch.setattr(ray_nodes.subprocess, "Popen", None)  # as if the node had no Python
    said = worker_on(path, cluster=FakeRay(NODES, "1")).error
    assert "Ray starts no worker: 'NoneType'" in said
    assert "--name is of one worker" in worker_on(path, "--name", "attic").error
    monkeypatch.delenv("SPECEXEC_TOKEN")
    assert "SPECEXEC_TOKEN is not set" in worker_on(path).error
    assert not path.exists()


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (
            RuntimeError(
                "Version mismatch: The cluster was started with:\n    Ray: 2.44.1\n"
                "    Python: 3.10.12\nThis process on node 192.0.2.63 was started with:\n"
                "    Ray: 2.44.1\n    Python: 3.12.13\n"
            ),
            "Version mismatch: The cluster was started with: Ray: 2.44.1 Python: 3.10.12 This ",
        ),
        (RayError("the token is missing\n\nSee a page."), "the token is missing"),
    ],
)
def test_a_cluster_that_does_not_take_this_process_is_one_line(
    refusal: Exception, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "hosts.toml"
    ran = worker_on(path, cluster=FakeRay(NODES, "1", refusal))
    assert ran.code == ConfigError.exit_code
    assert f"RAY_AUTH_TOKEN: {told}" in ran.error
    assert "\n" not in ran.error
    assert "See a page" not in ran.error
    assert not path.exists()


def test_the_command_ends_when_a_worker_does_and_has_written_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked, cluster = tmp_path / "hosts.toml", tmp_path / "asked", FakeRay(NODES, "1")
    monkeypatch.setenv("ASKED", str(asked))
    monkeypatch.setattr(
        ray_nodes, "_WORKER",
        "import os, sys; open(os.environ['ASKED'], 'w').write(' '.join(sys.argv[1:])); sys.exit(7)",
    )  # fmt: skip
    options = ("--device", "cpu", "--cache-gb", 2, "--offline", "--quiet", "--revision", "main")
    ran = worker_on(path, *options, cluster=cluster)
    assert ran.code == WorkerError.exit_code
    assert ran.out == f"attic wait for a session: open it with --hosts {path}\n"
    assert ran.error == "the worker on attic has ended, with code 7"
    assert list(cluster.actors) == ["2"]
    assert asked.read_text() == (
        "worker demo --join=192.168.1.10 --device=cpu --revision=main --cache-gb=2.0 "
        "--offline --quiet --name attic"
    )
    found = read_hosts(path)
    assert found.listen == "192.168.1.10"
    assert [entry.name for entry in found.hosts] == ["attic"]
    path.write_text(path.read_text() + "layers = 4\n")  # is its user's
    assert worker_on(path, "--no-cache", cluster=cluster).code == WorkerError.exit_code
    assert "--no-cache" in asked.read_text()
    assert read_hosts(path).hosts[0].layers == 4
    right = path.read_text()
    for wrong in (("attic", "cellar"), ("192.168.1.10", "192.168.1.11")):
        path.write_text(right.replace(*wrong))
        ran = worker_on(path, cluster=cluster)
        assert ran.code == ConfigError.exit_code
        assert "is of other machines" in ran.error


def test_a_worker_ends_with_its_actor() -> None:
    left = subprocess.Popen(
        [sys.executable, "-c", ray_nodes._WORKER, "worker", "demo", "--join", "127.0.0.1:9"],
        stdin=subprocess.PIPE,
    )
    left.communicate(timeout=60)
    assert left.returncode == 0


class ForkedWorker(WorkerProcess):
    """In place of the process that an actor starts."""

    def __init__(self, command: Sequence[str], *, stdin: int) -> None:
        assert (command[:3], stdin) == ([sys.executable, "-c", ray_nodes._WORKER], -1)
        _, model, join, _, name = command[3:]
        super().__init__(model, int(join.rpartition(":")[2]), name)

    def wait(self) -> int:
        return self.ended()[0]


def test_a_text_over_a_node_is_that_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes.subprocess, "Popen", ForkedWorker)
    path, join, cluster = tmp_path / "hosts.toml", f"127.0.0.1:{free_port()}", FakeRay(NODES, "1")

    def text(hosts: Path | None) -> list[int]:
        with closing(
            Session.open(model="demo", dtype="float32", cache=False, hosts=hosts)
        ) as session:
            limit = GenerationConfig(max_tokens=12)
            steps = session.generate("def read(path):\n", generation=limit)
            return [token for step in steps for token in step.tokens]

    alone = text(None)
    with cluster.installed():
        actors = ray_nodes.start_on_nodes(["demo", f"--join={join}", "--name"])
        worker = cluster.actors["2"]._process
        try:
            ray_nodes.write_hosts_file(path, join, [*actors])
            path.write_text(path.read_text() + "layers = 4\n")
            assert text(path) == alone != []
            worker.process.kill()
            with pytest.raises(WorkerError, match="the worker on attic has ended, with code -9"):
                ray_nodes.wait_for_one(actors)
        finally:
            worker.__exit__()


def ray_node(*options: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """`ray start` in a process of its own, which ends the node with itself."""
    started = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1",
         "--node-ip-address", "127.0.0.1", *options],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert started.stdout is not None
    assert any("Ray runtime started" in line for line in started.stdout)
    return started


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of a cluster of two nodes on this machine that asks for a token."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed, which only clusters of Ray need")
    address = f"127.0.0.1:{free_port()}"
    environment = {
        **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64,
        "SPECEXEC_TOKEN": TOKEN, "RAY_ADDRESS": address, "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    with ExitStack() as left:
        folder = left.enter_context(TemporaryDirectory(prefix="ray"))  # sockets want short names
        head = ("--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false")
        for options in ((*head, f"--temp-dir={folder}"), (f"--address={address}",)):
            started = ray_node(*options, environment=environment)
            left.callback(started.communicate, timeout=60)
            left.callback(started.terminate)
        yield environment


def workers_of(port: int) -> list[Path]:
    """The processes of workers that join at a port of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if f"--join=127.0.0.1:{port}\0".encode() in path.read_bytes():
                found.append(path)
    return found


@pytest.mark.parametrize("ended", ["by Ctrl-C", "killed", "with its actor"])
def test_a_text_over_nodes_of_ray_is_that_of_one_machine(
    ended: str, cluster: dict[str, str], tmp_path: Path
) -> None:
    port, path = free_port(), tmp_path / "hosts.toml"

    def text(*options: str) -> str:
        command = ("generate", "-m", "demo", "def read(path):\n", "--raw", "-q", "--no-cache")
        return subprocess.run(
            [sys.executable, "-c", _MAIN, *command, "--max-tokens", "24", *options],
            env=cluster, capture_output=True, text=True, check=True, timeout=300,
        ).stdout  # fmt: skip

    said = tmp_path / "said"
    with said.open("w") as errors:
        script = subprocess.Popen(
            [sys.executable, "-c", _MAIN, "worker", "demo", "--join", f"127.0.0.1:{port}",
             "--ray", str(path)],
            env=cluster, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    try:
        assert script.stdout is not None
        assert "wait for a session" in script.stdout.readline()
        path.write_text(path.read_text() + "layers = 4\n")
        assert text("--hosts", str(path)) == text() != ""
        (worker,) = workers_of(port)
        if ended == "with its actor":
            os.kill(int((worker.parent / "stat").read_text().split()[3]), signal.SIGKILL)
            assert script.wait(60) == WorkerError.exit_code
            assert "has ended, as Ray tells: " in said.read_text()
    finally:
        script.send_signal(signal.SIGKILL if ended == "killed" else signal.SIGINT)
        script.communicate(timeout=60)
    until(lambda: not workers_of(port), 60)
