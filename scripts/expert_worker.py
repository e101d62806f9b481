"""Runs a mixture in one way under a memory cap, in a process of its own, for bench_experts.py.

    python expert_worker.py TASK.json

A task may be run with an earlier version of specexec, so only what that had as well is used. Prints
the result as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from specexec_cli import device

Counts = Counter[str]
_STEP_BYTES = 64 << 20  # memory is raised by this until whole layers fit


def _opened(task: dict[str, Any], ram_bytes: int) -> tuple[Any, int]:
    """A session with `ram_bytes` of memory, or with the least that it needs if that is more."""
    from specexec_cli.errors import OutOfMemoryError

    free = [ram_bytes]
    device.free_ram_bytes = lambda: free[0]  # before anything else has imported it
    from specexec_cli.session import Session

    if task["whole_layers"]:
        _move_whole_layers()
    while True:
        try:
            found = Session.open(
                model=task["rig"], draft=task["draft"], dtype=task["dtype"], offload="auto"
            )
        except OutOfMemoryError:
            free[0] += _STEP_BYTES
        else:
            return found, free[0]


def _move_whole_layers() -> None:
    """Has this version's planner move a mixture's whole layers, as it does for other models."""
    from specexec_cli.planning import placement

    placement.mixture_plan = lambda mode, *sizes_and_machine: placement.make_plan(
        *sizes_and_machine
    )


def _text(session: Any, task: dict[str, Any], method: str, prompt: str, tokens: int) -> Counts:
    """The counts of one text's passes after the first."""
    from specexec_cli.config import GenerationConfig, SamplingConfig, TreeConfig

    steps = session.generate(
        prompt, method=method, sampling=SamplingConfig(temperature=0.0),
        tree=TreeConfig(**task["tree"], policy="cost"),
        generation=GenerationConfig(max_tokens=tokens),
    )  # fmt: skip
    first = next(steps)
    text, before, started = list(first.tokens), _counted(session), time.perf_counter()
    found = Counts(passes=0, tokens=0, bytes=0, tree_nodes=0)
    for step in steps:
        text += step.tokens
        found.update(
            passes=1, tokens=len(step.tokens), bytes=step.bytes_streamed, tree_nodes=step.tree_nodes
        )
    found["seconds"] = time.perf_counter() - started
    found.update({name: now - before[name] for name, now in _counted(session).items()})
    print(f"{method} {found}", file=sys.stderr, flush=True)
    task.setdefault("texts", {}).setdefault(method, []).append(text)
    return found


def _counted(session: Any) -> dict[str, float]:
    """The counts of the store of experts so far; empty if there is none.

    Versions that read each expert by itself do not count reads.
    """
    store = getattr(session.target.model, "experts", None)
    names = ("touched", "hits", "bytes_read", "reads", "reading_s", "wait_s")
    return {name: getattr(store, name) for name in names if hasattr(store, name)}


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Warms up with the first prompt, then counts the other prompts' passes after the first."""
    session, ram_bytes = _opened(task, task["ram_bytes"])
    warm, *prompts = task["prompts"]
    methods: dict[str, Counts] = {}
    for method in task["methods"]:
        _text(session, task, method, warm, task["warm_tokens"])
        methods[method] = Counts()
        for prompt in prompts:
            methods[method].update(_text(session, task, method, prompt, task["tokens"][method]))
    session.close()
    return {"ram_bytes": ram_bytes, "methods": methods, "texts": task["texts"]}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text("utf-8")))))
