"""A session with drafts that cost more than they save stops drafting, and says so and why."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cli_runner import run_cli

from specexec_cli.decoding import loop
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.verify.verifier import LocalTarget

GENERATE = (
    "generate", "--raw", "def quicksort(items):", "--max-tokens", 64, "--offload", "none",
    "--temperature", 1, "--seed", 3,
)  # fmt: skip


class SlowDrafts:
    """A clock on which a step of the draft model takes a second, and a pass a tenth of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s = 0.0
        self.steps = 0
        expand, verify = ModelDrafter._expand, LocalTarget.verify

        def slow_expand(drafter: ModelDrafter, *arguments: Any) -> Any:
            self._now_s += 1.0
            self.steps += 1
            return expand(drafter, *arguments)

        def quick_verify(target: LocalTarget, *arguments: Any) -> Any:
            self._now_s += 0.1
            return verify(target, *arguments)

        monkeypatch.setattr(ModelDrafter, "_expand", slow_expand)
        monkeypatch.setattr(LocalTarget, "verify", quick_verify)
        monkeypatch.setattr(loop, "time", self)

    def perf_counter(self) -> float:
        return self._now_s


def test_the_policy_goes_without_trees_and_the_stats_say_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = run_cli(*GENERATE, "--method", "autoregressive", "--stats")
    assert "does not pay" not in plain.err
    clock = SlowDrafts(monkeypatch)
    ran = run_cli(*GENERATE, "--stats")
    assert ran.code == 0
    assert ran.out == plain.out
    told = re.search(
        r"drafting does not pay here: a token took (\d+) ms with trees and (\d+) ms without, "
        r"so (\d+) passes went without",
        ran.err,
    )
    assert told, ran.err
    with_ms, without_ms, passes = map(int, told.groups())
    assert with_ms > without_ms
    assert passes >= 8
    fixed_steps, clock.steps = clock.steps, 0
    assert "does not pay" not in run_cli(*GENERATE, "--stats", "--policy", "fixed").err
    assert clock.steps > fixed_steps, "the policy has stopped drafting"
