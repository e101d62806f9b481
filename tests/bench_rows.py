"""Result rows with chosen numbers, for tests that measure nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import GenerationStats, StepResult
from specexec_cli.drafting.calibration import Reliability
from specexec_cli.lab.bench.cases import Case
from specexec_cli.lab.bench.metrics import TIMING, run_metrics
from specexec_cli.lab.bench.results import row_key
from specexec_cli.lab.bench.schema import SCHEMA

ENVIRONMENT = {
    "commit": "0" * 40,
    "versions": {"specexec": "0"},
    "hardware": {"cpu": "a CPU", "cores": 2, "ram_bytes": 10**9, "gpus": []},
}


def case(method: str, budget: int | None = None, depth: int = 1, temperature: float = 0.0) -> Case:
    tree = None if budget is None else TreeConfig(budget=budget, max_depth=depth)
    return Case(method, tree, SamplingConfig(temperature=temperature), 16)  # type: ignore[arg-type]


def step(tokens: int, nodes: int, *, draft_s: float = 0.0, verify_s: float = 1.0) -> StepResult:
    """`tokens` committed, all but the last from a chain of `nodes`."""
    return StepResult(
        tokens=tuple(range(tokens)),
        drafted=(True,) * (tokens - 1) + (False,),
        tree_nodes=nodes,
        tree_depth=nodes,
        draft_s=draft_s,
        verify_s=verify_s,
        bytes_streamed=1000,
        pending_rows=1,
    )


def stats_of(steps: Sequence[StepResult], total_s: float) -> GenerationStats:
    stats = GenerationStats(prompt_tokens=3, ttft_s=1.0, first_tokens=len(steps[0].tokens))
    for one in steps:
        stats.add(one)
    stats.total_s = total_s
    return stats


def row(
    of: Case,
    steps: Sequence[StepResult],
    total_s: float,
    *,
    prompt: str = "a",
    tokens: Sequence[int] | None = None,
    target: str = "package:demo/target",
    link: float | None = 2000.0,
) -> dict[str, Any]:
    """A row as the runner writes it."""
    generated = [t for one in steps for t in one.tokens] if tokens is None else list(tokens)
    config = {
        "pair": "demo", "target": target, "draft": "package:demo/draft", "offload": "ssd",
        "device": "cpu", "dtype": "float32", "dataset": "demo", "prompts_sha256": "0",
    }  # fmt: skip
    return {
        "schema": SCHEMA,
        "kind": "run",
        "key": row_key({"case": of.settings(), "prompt": prompt, "target": target}),
        "label": of.label,
        "config": config,
        "case": of.settings(),
        "seed": 0,
        "repeat": 0,
        "prompt": {"id": prompt, "sha256": prompt, "tokens": 3, "form": "raw"},
        "link": {"io": "from SSD", "link_bytes_per_s": link},
        "started": "2026-01-01T00:00:00+00:00",
        "finish_reason": "length",
        "tokens_sha256": "0",
        "tokens": generated,
        "metrics": run_metrics(
            steps,
            stats_of(steps, total_s),
            link_bytes_per_s=link,
            is_chain=of.method.startswith("chain"),
        ),
        "passes": {
            "tokens": [len(one.tokens) for one in steps],
            "tree_nodes": [one.tree_nodes for one in steps],
            "draft_s": [one.draft_s for one in steps],
            "verify_s": [one.verify_s for one in steps],
        },
        "calibration": Reliability().bins,
        "timing": dict(TIMING),
        "environment": ENVIRONMENT,
    }
