"""Workers on a Ray cluster that is there already: which nodes get one, and a text over them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import ray_workers
from hosts_rig import free_port, until

from specexec_cli.errors import ConfigError, WorkerError
from specexec_cli.planning.hosts import read_hosts

_TOKEN = "a token of enough characters"
_MAIN = "import sys; from specexec_cli.cli.main import main; sys.exit(main())"


def node(name: str, at: str, alive: bool = True) -> dict[str, Any]:
    """A node as ray.nodes() tells of it."""
    return {"NodeManagerHostname": name, "NodeID": at, "Alive": alive}


def test_the_file_of_hosts_is_one(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(ray_workers.hosts_file("192.168.1.10", ["attic", "cellar"]))
    found = read_hosts(path)
    assert found.listen == "192.168.1.10"
    assert [entry.name for entry in found.hosts] == ["attic", "cellar"]


def test_every_other_node_that_is_there_has_a_worker_of_its_own_name() -> None:
    nodes = [node("first", "1"), node("attic", "2"), node("gone", "3", False), node("attic", "4")]
    assert ray_workers.other_nodes(nodes, "1") == {"attic": "2", "attic-2": "4"}


def test_a_cluster_of_one_node_is_one_line() -> None:
    with pytest.raises(WorkerError, match="no other node"):
        ray_workers.other_nodes([node("first", "1")], "1")


@pytest.mark.parametrize(
    ("mode", "token", "told"),
    [
        ("disabled", _TOKEN, "asks for no token"),
        ("", _TOKEN, "asks for no token"),
        ("token", "", "SPECEXEC_TOKEN is not set"),
    ],
)
def test_a_node_that_others_may_use_or_without_our_token_gets_none(
    mode: str, token: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("SPECEXEC_TOKEN", token)
    refusal = ray_workers.Node().start("attic", ["demo", "--join", "127.0.0.1"])
    assert refusal is not None
    assert told in refusal


def test_without_a_token_here_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECEXEC_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="SPECEXEC_TOKEN is not set"):
        ray_workers.run("demo", "192.168.1.10", Path("hosts.toml"))


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
        pytest.skip("ray is not installed, which only clusters of Ray need: `pip install ray`")
    address = f"127.0.0.1:{free_port()}"
    environment = {
        **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64,
        "SPECEXEC_TOKEN": _TOKEN, "RAY_ADDRESS": address, "RAY_USAGE_STATS_ENABLED": "0",
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
            if f"--join 127.0.0.1:{port} --name".encode().replace(b" ", b"\0") in path.read_bytes():
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
    script = subprocess.Popen(
        [sys.executable, ray_workers.__file__, "demo", "--join", f"127.0.0.1:{port}",
         "--hosts", str(path)],
        env=cluster, stdout=subprocess.PIPE, stderr=said.open("w"), text=True,
    )  # fmt: skip
    try:
        assert script.stdout is not None
        assert "wait for a session" in script.stdout.readline()
        path.write_text(path.read_text() + "layers = 4\n")
        assert text("--hosts", str(path)) == text() != ""
        (worker,) = workers_of(port)
        if ended == "with its actor":
            os.kill(int((worker.parent / "stat").read_text().split()[3]), signal.SIGKILL)
            assert script.wait(60) == 1
            assert "has ended, as Ray tells: " in said.read_text()
    finally:
        script.send_signal(signal.SIGKILL if ended == "killed" else signal.SIGINT)
        script.communicate(timeout=60)
    until(lambda: not workers_of(port), 60)
