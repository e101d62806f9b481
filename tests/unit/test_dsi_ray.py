"""Ray actors as workers, on a local Ray instance.

The instance runs in a process of its own: Ray leaves its helpers' Popen objects to the garbage
collector, which warns, and warnings are errors here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from specexec_cli.config import DsiOptions
from specexec_cli.dsi.ray_workers import LOCAL, RayCluster
from specexec_cli.errors import ConfigError

SCRIPT = """
import json
from functools import partial
from dsi_toys import RandomDelay, ToyDrafter, ToyServer, autoregressive
from specexec_cli.config import SamplingConfig
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.dsi.ray_workers import LOCAL, RayCluster, RayWorkers
from specexec_cli.dsi.messages import DRAFTER, Score
from specexec_cli.errors import SpecexecError, WorkerError

cluster = RayCluster(LOCAL)
drafter = partial(ToyDrafter, 5, 0.8, RandomDelay(0.0, 0.002))
try:
    bad = partial(ToyServer, 5, no_such_option=1)
    RayWorkers(RayCluster("connected already"), [bad], [drafter], gpus=0, load_timeout_s=100)
except WorkerError as error:
    refused = str(error)
servers = [partial(ToyServer, 5, RandomDelay(0.0, 0.006, n)) for n in range(2)]
servers.append(partial(ToyServer, 5, RandomDelay(0.0, 0.006), exits_at=1))
workers = RayWorkers(cluster, servers, [drafter], gpus=0, load_timeout_s=100)
reports, equal = [], []
orchestrator = Orchestrator(workers, DsiConfig(lookahead=2), reports.append)
for seed in (0, 9):
    workers.configure(SamplingConfig(seed=seed))
    text = [t for c in orchestrator.generate([1, 2, 3], 40) for t in c.tokens]
    equal.append(text == autoregressive(5 + seed, [1, 2, 3], 40))
left = workers.servers
logits = [workers.score(1, Score((7, 8, 9, 10), 2), 100.0).tolist()]
workers.forget()
logits.append(workers.score(1, Score((7, 8, 9, 10), 2), 100.0).tolist())
unscored = []
for worker in (DRAFTER, 2):
    try:
        workers.score(worker, Score((7, 8), 1), 100.0)
    except SpecexecError as error:
        unscored.append(f"{error.exit_code} {error}")
workers.close()
print(json.dumps({"refused": refused, "reports": reports, "equal": equal, "left": left,
                  "logits": logits, "unscored": unscored}))
"""


@pytest.mark.skipif(find_spec("ray") is None, reason="the optional extra 'ray' is not installed")
def test_actors_generate_the_plain_text_although_one_dies():
    tests = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=400
    )
    if "timed out during startup" in done.stderr:
        pytest.skip("this machine is too busy: Ray gives itself 30 s to start")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"] == [True, True]
    assert result["left"] == [0, 1]
    assert result["logits"] == [[[2, 0], [3, 0]], [[2, 1], [3, 1]]]
    assert result["unscored"] == [
        "7 the draft model cannot be read",
        "9 DSI: target server 2 is lost: no logits come from it",
    ]
    assert len(result["reports"]) == 1
    assert result["reports"][0].startswith("DSI target server 2 is lost (The actor")
    assert result["refused"].startswith("DSI: target server 0 did not start: ")
    assert "no_such_option" in result["refused"]
    assert not [p for p in psutil.process_iter(["environ", "name"]) if _is_ours(p, environment)]


def _is_ours(process: psutil.Process, environment: dict[str, str]) -> bool:
    """A raylet that the script started."""
    theirs = process.info["environ"] or {}
    return (
        process.info["name"] == "raylet" and theirs.get("PYTHONPATH") == environment["PYTHONPATH"]
    )


def test_without_ray_the_mend_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install ray$"):
        RayCluster(LOCAL)


def test_ray_and_devices_exclude_each_other():
    with pytest.raises(ConfigError, match="`ray` and `devices` exclude each other"):
        DsiOptions(ray="auto", devices=("cuda:0",))
