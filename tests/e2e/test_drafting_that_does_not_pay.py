"""A session whose drafts cost more than they bring: it stops drafting, and says so and why."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from cli_runner import run_cli

from specexec_cli.decoding import loop
from specexec_cli.drafting.drafter import ModelDrafter

GENERATE = ("generate", "def quicksort(items):", "--max-tokens", 64, "--offload", "none")


class SlowDrafts:
    """A clock on which every step of the draft model takes a second more than it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._late_s = 0.0
        self.steps = 0
        expand = ModelDrafter._expand

        def slow(drafter: ModelDrafter, *arguments: Any) -> Any:
            self._late_s += 1.0
            self.steps += 1
            return expand(drafter, *arguments)

        monkeypatch.setattr(ModelDrafter, "_expand", slow)
        monkeypatch.setattr(loop, "time", self)

    def perf_counter(self) -> float:
        return time.perf_counter() + self._late_s


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
