"""Send a server thousands of requests, many broken or hostile: it must not leak, hang or break.

    python scripts/soak_server.py
    python scripts/soak_server.py --fuzzed 500 --half-open 1100 --only fuzz,half-open

There are four parts:
- Clients that finish, read slowly, vanish, send nonsense or break off. Every finished text is
  generated again by the session alone, and must be equal.
- Request bodies made from the server's own schema; some clients leave before the answer.
- Connections that send half a request, more than the server may open.
- Bodies of 8 MB in every shape that may be slow to read, while the waits of other clients are
  measured; also for a model with a window of 131,072 tokens.
The last three run against `specexec serve` in a process of its own that may open 1,024 files; its
log must have no traceback. The last line is one JSON object; the exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the clients are the tests' own

from serve_soak import soak
from serve_strangers import JSON, Waits, fuzz, half_open, large_bodies
from serving import served, wait_until_idle

import specexec_cli
from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.session import Session

DEMO = Path(specexec_cli.__file__).parent / "demo"
PARTS = ("clients", "fuzz", "half-open", "large")
DESCRIPTORS = 1024
WIDE_TOKENS = 131_072
MOST_WAIT_S = 0.3
MOST_ANSWER_S = 10


def clients(asked: argparse.Namespace) -> dict[str, Any]:
    """Part 1: clients of every kind, on a session in this process; their texts are compared."""
    process, rounds = psutil.Process(os.getpid()), []
    with Session.open(model=asked.model) as session:
        next(iter(session.generate("x")))  # the first text starts the kernels' threads, which stay
        threads = threading.active_count()
        with served(session, most_waiting=10_000) as server:
            outcomes = []
            for part in range(4):  # memory may grow in the first part, not from part to part
                run = soak(server.url, asked.requests // 4, asked.at_once, asked.seed + part)
                outcomes.append(asyncio.run(run))
                wait_until_idle(server.url, timeout_s=120)
                gc.collect()
                rounds.append(process.memory_info().rss)
            figures = server.service.engine.figures()
        time.sleep(1)
        threads_after = threading.active_count()
        finished = [one for outcome in outcomes for one in outcome.finished]
        wrong = 0
        for one in finished:
            steps = session.generate(
                one.body["prompt"],
                sampling=SamplingConfig(temperature=one.body["temperature"], seed=one.body["seed"]),
                generation=GenerationConfig(
                    max_tokens=one.body["max_tokens"], stop=tuple(one.body.get("stop", ()))
                ),
            )
            wrong += "".join(step.text for step in steps) != one.text
    return {
        "kinds": dict(sum((one.kinds for one in outcomes), Counter())),
        "statuses": dict(sum((one.statuses for one in outcomes), Counter())),
        "texts": dict(figures.texts), "finished": len(finished), "wrong": wrong,
        "threads": [threads, threads_after],
        "rss_mb_by_quarter": [round(one / 1e6, 1) for one in rounds],
        "good": not wrong and threads_after <= threads,
    }  # fmt: skip


class Program:
    """`specexec serve` in a process of its own, seen from outside."""

    def __init__(self, process: subprocess.Popen[str], log: Path, url: str) -> None:
        self.url, self.port = url, int(url.rpartition(":")[2])
        self._process, self._log = psutil.Process(process.pid), log

    def held(self) -> dict[str, float]:
        """The resources that the process holds now."""
        now = self._process
        return {"fds": now.num_fds(), "threads": now.num_threads(),
                "rss_mb": round(now.memory_info().rss / 1e6, 1)}  # fmt: skip

    def complaints(self) -> str:
        """All that the process has written, except its first line."""
        return self._log.read_text().partition("\n")[2]


@contextmanager
def program(*options: str) -> Iterator[Program]:
    """Runs the program, which must end without complaints."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as written:
            running = subprocess.Popen(
                [sys.executable, "-m", "specexec_cli.cli.main", "serve", "--offline", "--port", "0",
                 *options],
                stderr=written, text=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS,) * 2),
            )  # fmt: skip
        try:
            while "http://" not in log.read_text():
                assert running.poll() is None, log.read_text()
                time.sleep(0.1)
            found = Program(running, log, next(w for w in log.read_text().split() if "http:" in w))
            yield found
            running.send_signal(signal.SIGTERM)
            assert running.wait(30) == 0
            assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            running.kill()
            running.wait()


def fill(url: str) -> None:
    """Fills every slot with a text as long as the window.

    Caches grow to the longest text, and their memory is planned for. Filled first, they do not
    count as growth.
    """
    facts = httpx.get(f"{url}/v1/models").json()["data"][0]["specexec"]
    slots = httpx.get(f"{url}/health").json()["slots"]

    def one(number: int) -> None:
        prompt = [5 + (number + place) % 90 for place in range(facts["context_length"] - 4)]
        body = {"prompt": prompt, "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(slots) as pool:
        list(pool.map(one, range(2 * slots)))  # twice, since what was outgrown leaves gaps


def fuzzed(asked: argparse.Namespace) -> dict[str, Any]:
    """Part 2: bodies made from the schema. Growth is counted after the caches are full and a first
    part of the bodies was sent."""
    # a request without a length, or for several texts, must not look like one that hangs
    with program(asked.model, "--max-tokens", "16") as server:
        told: Counter[str] = Counter()
        held, slowest, opened = [], 0.0, server.held()
        fill(server.url)
        filled = server.held()
        for part in range(5):
            run = fuzz(server.url, asked.fuzzed // 5, asked.seed + part, asked.at_once)
            statuses, took = asyncio.run(run)
            told += statuses
            slowest = max(slowest, took)
            wait_until_idle(server.url, timeout_s=60)
            time.sleep(6)  # idle connections are kept for five
            held.append(server.held())
        complaints = server.complaints()
    grown = {name: held[-1][name] - held[0][name] for name in held[0]}
    good = not complaints and grown["fds"] <= 2 and grown["threads"] <= 2 and grown["rss_mb"] < 60
    return {"statuses": dict(told), "slowest_s": round(slowest, 2), "opened": opened,
            "filled": filled, "held": held, "log": complaints[:500],
            "good": good and slowest < MOST_ANSWER_S}  # fmt: skip


def half_opened(asked: argparse.Namespace) -> dict[str, Any]:
    """Part 3: half requests, more than there are descriptors; /health must answer in a second."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with program(asked.model, "--method", "autoregressive") as server:
        before, waits = server.held(), []
        # one client, which reads the system's certificates once, and a connection for each request
        lone = httpx.Limits(max_keepalive_connections=0)
        with half_open(server.port, asked.half_open), httpx.Client(limits=lone) as client:
            for _ in range(20):
                began = time.perf_counter()
                assert client.get(f"{server.url}/health", timeout=30).status_code == 200
                waits.append(round(time.perf_counter() - began, 3))
                time.sleep(0.2)
            during = server.held()
        complaints = server.complaints()
    good = max(waits) < 1 and not complaints
    return {"health_s": waits, "before": before, "during": during, "log": complaints[:500],
            "good": good}  # fmt: skip


def large(asked: argparse.Namespace) -> dict[str, Any]:
    """Part 4: bodies of 8 MB, several rounds, while other clients ask; memory after each round."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = {"demo": (asked.model,), "wide": _wide(Path(folder))}
        for name, model in options.items():
            with program(*model, "--method", "autoregressive", "--slots", "1") as server:
                bodies = large_bodies()
                if name == "wide":
                    del bodies["fewer messages"]  # which fit, and are answered as any others
                found[name] = _large(server, bodies)
    found["good"] = all(
        max(worst.values()) < MOST_WAIT_S
        for each in found.values()
        for worst in each["waits_s"].values()
    )
    return found


def _large(server: Program, bodies: dict[str, tuple[str, bytes]]) -> dict[str, Any]:
    waits, statuses, memory = {}, {}, []
    with Waits(server.url):
        time.sleep(1)  # the first requests make what is kept
    for turn in range(3):
        for name, (path, body) in bodies.items():
            with Waits(server.url) as others:
                answer = httpx.post(f"{server.url}/v1/{path}", content=body, headers=JSON,
                                    timeout=120)  # fmt: skip
            statuses[name] = answer.status_code
            assert answer.status_code in (200, 400, 404, 413), (name, answer.text[:300])
            worst = {what: round(took, 3) for what, took in others.longest.items()}
            if turn:
                waits[name] = {
                    what: max(worst[what], waits.get(name, worst)[what]) for what in worst
                }
        memory.append(server.held()["rss_mb"])
    return {"waits_s": waits, "statuses": statuses, "rss_mb_by_round": memory,
            "log": server.complaints()[:500]}  # fmt: skip


def _wide(folder: Path) -> tuple[str, ...]:
    """Options for the demo's target with a context window that a body of 8 MB may fit into."""
    for file in (DEMO / "target").iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    config["max_position_embeddings"] = WIDE_TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    return (str(folder),)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    parser.add_argument("--requests", type=int, default=1000, help="of the clients")
    parser.add_argument("--fuzzed", type=int, default=5000)
    parser.add_argument("--half-open", type=int, default=1100)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    runs = dict(zip(PARTS, (clients, fuzzed, half_opened, large), strict=True))
    told = {}
    for name in asked.only.split(","):
        began = time.perf_counter()
        told[name] = runs[name](asked) | {"seconds": round(time.perf_counter() - began, 1)}
        print(name, json.dumps(told[name]), file=sys.stderr, flush=True)
    print(json.dumps(told))
    sys.exit(0 if all(one["good"] for one in told.values()) else 1)


if __name__ == "__main__":
    main()
