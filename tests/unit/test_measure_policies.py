"""scripts/measure_policies.py: policies on real trees under the clock of another machine."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import architecture, open_float32, random_tokens, save_checkpoint
from policy_toys import outcome

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import measure_policies  # noqa: E402
from measure_policies import MACHINES, Outcome, Texts, compared, ratio  # noqa: E402

from specexec_cli.config import SamplingConfig, TreeConfig  # noqa: E402
from specexec_cli.core import DraftTree  # noqa: E402
from specexec_cli.sampling import Sampler  # noqa: E402

SSD = MACHINES["ssd"]


def test_a_policy_is_told_the_seconds_of_the_machine_and_not_those_that_passed() -> None:
    told = []

    class Drafter:
        class rows:
            @staticmethod
            def run(frontier: object) -> torch.Tensor:
                return torch.zeros(1)

        def grow(self, context: object, max_depth: int, pending: int) -> DraftTree:
            for _ in range(3):
                self.rows.run(None)
            return DraftTree.chain([1, 2])

        def observe(self, step: object) -> None:
            told.append(step)

    tree = DraftTree.chain([1, 2])
    priced = measure_policies.Priced(Drafter(), SSD, np.random.default_rng(0))  # type: ignore[arg-type]
    priced.grow([5], 8)
    priced.observe(outcome(tree, 1, 100.0, 200.0))
    assert priced.steps == 3, "one for each run of the draft model"
    (step,) = told
    expected = float(SSD.seconds(np.array([3.0]), 3)[0])
    assert step.draft_s + step.verify_s == pytest.approx(expected, rel=0.3)
    assert step.draft_s == pytest.approx(3 * SSD.step_s)


def test_every_tree_writes_the_same_text_and_is_priced_by_its_rows_and_steps(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path, architecture("llama"), std=0.3)
    model = open_float32(tmp_path)
    prompt, texts = random_tokens(12), []
    for policy, machine in (("fixed", None), ("cost", SSD)):
        tree = TreeConfig(budget=8, max_depth=4, batch=2, policy=policy)
        runs = Texts(model, model, Sampler(SamplingConfig()), tree, machine)
        texts.append(runs.decode(prompt, 10, []))
    fixed, cost = texts
    assert fixed.tokens == cost.tokens
    assert len(fixed.tokens) == 10
    rows, steps = fixed.passes[0]
    assert rows > len(prompt), "the first pass has the prompt and a tree"
    assert steps >= 1
    model.close()


def test_a_ratio_is_that_of_all_seconds_and_its_error_comes_from_the_prompts() -> None:
    assert ratio([2.0, 2.0], [1.0, 3.0])[0] == 1.0
    assert ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]) == (0.5, 0.0)
    assert ratio([1.0, 1.0, 1.0], [1.0, 2.0, 1.5])[1] > 0.1


def test_the_best_fixed_budget_is_the_fastest_on_that_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def one(rows: int, passes: int) -> Outcome:
        return Outcome([0] * 12, [(rows, 2)] * passes)

    found = {"fixed 4": [one(5, 6)], "fixed 64": [one(65, 3)], "fixed 256": [one(257, 2)],
             "cost on ssd": [one(80, 3)], "cost on ram": [one(5, 6)]}  # fmt: skip
    ssd, ram = (
        compared({**found, **_twice(found)}, name, MACHINES[name]) for name in ("ssd", "ram")
    )
    assert ssd["fixed 64"][0] == 1.0, "256 nodes take arithmetic, 4 too many passes"
    assert ssd["cost on ssd"][0] == pytest.approx(1.0)
    assert "cost on ram" not in ssd
    assert ram["fixed 4"][0] == 1.0
    assert "ssd: best is fixed 64" in capsys.readouterr().out


def _twice(found: dict[str, list[Outcome]]) -> dict[str, list[Outcome]]:
    return {name: [*one, *one] for name, one in found.items()}
