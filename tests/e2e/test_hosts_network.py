"""Two machines on a cable of 1 Gb/s: network namespaces of their own, where root may make them."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_rig import TOKEN, WorkerProcess

_HERE, _THERE = "10.43.7.1", "10.43.7.2"
_PORT = 7420


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def cable() -> Iterator[tuple[str, str]]:
    """The names of two namespaces with a cable of 1 Gb/s each way between them."""
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = f"specexec-{os.getpid()}-a", f"specexec-{os.getpid()}-b"
    made = [subprocess.run(["ip", "netns", "add", name], capture_output=True) for name in names]
    try:
        if any(each.returncode for each in made):
            pytest.skip("the kernel gives no network namespaces here")
        ends = "sxa", "sxb"
        _ip("-n", names[0], "link", "add", ends[0], "type", "veth", "peer", "name", ends[1],
            "netns", names[1])  # fmt: skip
        for name, end, address in zip(names, ends, (_HERE, _THERE), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            shaped = subprocess.run(
                ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf",
                 "rate", "1gbit", "burst", "128kb", "latency", "50ms"], capture_output=True,
            )  # fmt: skip
            if shaped.returncode:
                pytest.skip("the kernel limits no rates here (tc, tbf)")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _write(cable: tuple[str, str], *options: object) -> subprocess.Popen[str]:
    """A text on the first machine."""
    code = "import sys; from specexec_cli.cli.main import main; sys.exit(main())"
    return subprocess.Popen(
        ["ip", "netns", "exec", cable[0], sys.executable, "-c", code, "generate", "-m", "demo",
         "def read_lines(path):\n", "--raw", "--no-cache", *map(str, options)],
        env={**os.environ, "SPECEXEC_TOKEN": TOKEN},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _worker(cable: tuple[str, str]) -> WorkerProcess:
    before = "ip", "netns", "exec", cable[1]
    return WorkerProcess("demo", _PORT, "attic", host=_HERE, before=before)


def _hosts(folder: Path) -> Path:
    path = folder / "hosts.toml"
    path.write_text(f'listen = "{_HERE}"\n[[host]]\nname = "attic"\nlayers = 4\n')
    return path


def test_a_text_over_a_cable_is_the_text_of_one_machine(
    cable: tuple[str, str], tmp_path: Path
) -> None:
    with _worker(cable):
        over, said = _write(cable, "--hosts", _hosts(tmp_path), "--max-tokens", 48).communicate()
    assert "attic has layers 4 to 7" in said
    alone, _ = _write(cable, "--max-tokens", 48).communicate()
    assert alone
    assert over == alone


def test_a_worker_that_is_killed_again_and_again_changes_no_token(
    cable: tuple[str, str], tmp_path: Path
) -> None:
    length, rng = ("--max-tokens", 400, "--method", "autoregressive"), random.Random(43)
    alone, _ = _write(cable, *length).communicate()
    text = _write(cable, "--hosts", _hosts(tmp_path), *length)
    worker, kills = _worker(cable), 0
    while text.poll() is None and kills < 3:
        assert worker.process.stderr is not None
        for line in worker.process.stderr:  # until its span is open
            if "are open" in line:
                break
        time.sleep(rng.uniform(0.0, 0.5))
        if text.poll() is None:
            kills += 1
        worker.__exit__()
        worker = _worker(cable)
    over, said = text.communicate()
    worker.__exit__()
    assert kills, "the text ended before the first worker was killed"
    assert said.count("attic is lost") == kills
    assert over == alone
