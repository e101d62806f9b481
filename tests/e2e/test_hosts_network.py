"""Two machines on a cable of 1 Gb/s: network namespaces of their own, where root may make them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hosts_rig import TOKEN, WorkerProcess, until

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from network_cable import Cable, NoCableError, cable, lost_packets

_PORT = 7420
_PATIENCE_S = 240.0  # for a text


@pytest.fixture(scope="module")
def ends() -> Iterator[Cable]:
    """A cable of 1 Gb/s between two network namespaces."""
    with ExitStack() as left:
        try:
            made = left.enter_context(cable())
        except NoCableError as error:
            pytest.skip(str(error))
        yield made


def _write(ends: Cable, *options: object) -> subprocess.Popen[str]:
    """A text on the first machine."""
    code = "import sys; from specexec_cli.cli.main import main; sys.exit(main())"
    return subprocess.Popen(
        [*ends.inside(0), sys.executable, "-c", code, "generate", "-m", "demo",
         "def read_lines(path):\n", "--raw", "--no-cache", *map(str, options)],
        env={**os.environ, "SPECEXEC_TOKEN": TOKEN},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _worker(ends: Cable) -> WorkerProcess:
    here = ends.addresses[0]
    return WorkerProcess("demo", _PORT, "attic", host=here, before=ends.inside(1))


def _hosts(folder: Path, ends: Cable) -> Path:
    path = folder / "hosts.toml"
    path.write_text(f'listen = "{ends.addresses[0]}"\n[[host]]\nname = "attic"\nlayers = 4\n')
    return path


def test_a_text_over_a_cable_is_the_text_of_one_machine(ends: Cable, tmp_path: Path) -> None:
    with _worker(ends):
        over, said = _write(
            ends, "--hosts", _hosts(tmp_path, ends), "--max-tokens", 48
        ).communicate(timeout=_PATIENCE_S)
    assert "attic has layers 4 to 7" in said
    alone, _ = _write(ends, "--max-tokens", 48).communicate(timeout=_PATIENCE_S)
    assert alone
    assert over == alone


def test_a_text_over_a_slow_link_that_loses_packets_is_the_text_of_one_machine(
    tmp_path: Path,
) -> None:
    """40 Mb/s, as Wi-Fi behind a wall gives, with little room for what waits, and of what goes
    either way one packet in 33 lost at random."""
    with ExitStack() as left:
        try:
            ends = left.enter_context(cable("40mbit", loss=0.03))
        except NoCableError as error:
            pytest.skip(str(error))
        alone, _ = _write(ends, "--max-tokens", 48).communicate(timeout=_PATIENCE_S)
        left.enter_context(_worker(ends))
        over, said = _write(
            ends, "--hosts", _hosts(tmp_path, ends), "--max-tokens", 48
        ).communicate(timeout=_PATIENCE_S)
        assert "attic has layers 4 to 7" in said
        without_room, on_the_way = lost_packets(ends)
        assert without_room > 10
        assert on_the_way > 10
    assert alone
    assert over == alone


def test_a_worker_that_is_killed_again_and_again_changes_no_token(
    ends: Cable, tmp_path: Path
) -> None:
    length, rng = ("--max-tokens", 400, "--method", "autoregressive"), random.Random(43)
    alone, _ = _write(ends, *length).communicate(timeout=_PATIENCE_S)
    text = _write(ends, "--hosts", _hosts(tmp_path, ends), *length)
    worker, kills = _worker(ends), 0
    while text.poll() is None and kills < 3:
        until(
            lambda at=worker: at.says("are open") or text.poll() is not None, timeout_s=_PATIENCE_S
        )
        time.sleep(rng.uniform(0.0, 0.5))
        if text.poll() is None:
            kills += 1
        worker.__exit__()
        worker = _worker(ends)
    over, said = text.communicate(timeout=_PATIENCE_S)
    worker.__exit__()
    assert text.returncode == 0, said
    assert kills, "the text ended before the first worker was killed"
    assert said.count("attic is lost") == kills
    assert over == alone
