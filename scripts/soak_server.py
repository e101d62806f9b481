"""Requests by the hundred, many of them broken: does the server leak, and is each text right?

    python scripts/soak_server.py --requests 1000

Clients finish, read slowly, vanish, send nonsense or break off in their own request. Afterwards no
text may be left, threads and memory are told before and after, and every finished text is generated
once more by the session alone. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the clients are the tests' own

from serve_soak import soak
from serving import served, wait_until_idle

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.session import Session


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="demo")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    process = psutil.Process(os.getpid())
    rounds = []
    with Session.open(pair=asked.pair) as session:
        threads = threading.active_count()
        started = time.perf_counter()
        with served(session, most_waiting=10_000) as server:
            outcomes = []
            for part in range(4):  # memory may grow in the first part, not from part to part
                run = soak(server.url, asked.requests // 4, asked.at_once, asked.seed + part)
                outcomes.append(asyncio.run(run))
                wait_until_idle(server.url, timeout_s=120)
                gc.collect()
                rounds.append(process.memory_info().rss)
            figures = server.service.engine.figures()
        seconds = time.perf_counter() - started
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
    print(
        json.dumps(
            {
                "requests": asked.requests, "seconds": round(seconds, 1),
                "kinds": dict(sum((one.kinds for one in outcomes), Counter())),
                "statuses": dict(sum((one.statuses for one in outcomes), Counter())),
                "texts": dict(figures.texts), "finished": len(finished), "wrong": wrong,
                "threads": [threads, threads_after],
                "rss_mb_by_quarter": [round(one / 1e6, 1) for one in rounds],
            }
        )
    )  # fmt: skip
    sys.exit(1 if wrong or threads_after > threads else 0)


if __name__ == "__main__":
    main()
