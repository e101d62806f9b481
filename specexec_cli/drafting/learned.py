"""What decoding teaches about a pair on this machine, kept from one generation to the next.

Nothing of it changes a token: it decides which trees are grown, and so how many passes a text
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from specexec_cli.config import TreeConfig
from specexec_cli.drafting.classifier import Classifier
from specexec_cli.drafting.iteration_cost import CostModel, IterationCost
from specexec_cli.drafting.policies import POLICIES, BudgetPolicy
from specexec_cli.drafting.scoring import Trust
from specexec_cli.errors import ConfigError
from specexec_cli.kept import file_name, numbers, read_json, write_json

SCHEMA = 3
_KEPT_ITERATIONS = 32  # few enough that a machine that has changed is soon known anew
# What a file may say; beyond, it is damaged.
_LEAST_S, _MOST = 1e-9, 1e6  # seconds, and rows


def pair_folder(target: str, draft: str) -> Path:
    """Where a pair's calibration and classifier are kept."""
    return user_cache_path("specexec", appauthor=False) / "pairs" / file_name(target, draft)


class Learned:
    """Trust in the draft model by kind of scoring, cost of iterations, and the policies using them.

    Args:
        classifier: gives the one of the policy disco.
        cost_prior: gives what the policy cost begins with; asked once, where nothing was kept.
    """

    def __init__(
        self,
        classifier: Callable[[], Classifier] | None = None,
        cost_prior: Callable[[], CostModel | None] = lambda: None,
    ) -> None:
        self._classifier = classifier
        self._cost_prior = cost_prior
        self._trusts: dict[str, Trust] = {}
        self._policies: dict[TreeConfig, BudgetPolicy] = {}
        self._cost: IterationCost | None = None

    def trust(self, kind: str) -> Trust | None:
        """What is known of this kind (DraftScorer.kind); None at first."""
        return self._trusts.get(kind)

    def keep(self, kind: str, trust: Trust) -> None:
        """Remembers `trust`: the next generation of this kind goes on from it."""
        self._trusts[kind] = trust

    def use(self, tree: TreeConfig, policy: BudgetPolicy) -> None:
        """Gives the trees of these settings a policy that the caller has made."""
        self._policies[tree] = policy

    def policy(self, tree: TreeConfig) -> BudgetPolicy:
        """The policy that the settings name, as it was left.

        Raises:
            CheckpointError: disco, and its classifier cannot be used.
            ConfigError: the policy must know the text to come, and was not given by `use`.
        """
        entry = POLICIES[tree.policy]
        if entry.needs == "classifier":  # it counts the tokens of one generation
            assert self._classifier is not None, "a session knows its pair's"
            return entry.make(tree, self._classifier())
        if tree not in self._policies:
            if entry.needs == "continuation":
                raise ConfigError(
                    f"`policy='{tree.policy}'` must know the text to come, as `specexec bench` "
                    "alone does: use another policy"
                )
            needed = (self.cost,) if entry.needs == "cost" else ()
            self._policies[tree] = entry.make(tree, *needed)
        return self._policies[tree]

    @property
    def cost(self) -> IterationCost:
        """What iterations cost on this machine."""
        if self._cost is None:
            self._cost = IterationCost(self._cost_prior())
        return self._cost

    def save(self, path: Path, machine: str, *, costs_too: bool = True) -> None:
        """Writes what was learned to a file, for later sessions.

        Args:
            machine: how this session runs; costs of others stay as they are.
            costs_too: otherwise those of this machine stay as well.
        Raises:
            OSError: the folder cannot be written.
        """
        try:
            _, costs = _read(path)
        except ValueError:  # it is replaced
            costs = {}
        if self._cost is not None and costs_too:
            costs[machine] = self._cost
        value = {
            "schema": SCHEMA,
            "trusts": {kind: trust.state() for kind, trust in self._trusts.items()},
            "costs": {name: _cost_state(cost) for name, cost in costs.items()},
        }
        write_json(path, value)

    def load(self, path: Path, machine: str) -> None:
        """Takes over what an earlier session saved, where there is a file that can be used."""
        try:
            self._trusts, costs = _read(path)
        except ValueError:  # a cache: it is learned again
            return
        self._cost = costs.get(machine)


def _cost_state(cost: IterationCost) -> dict[str, Any]:
    prior = list(astuple(cost.prior)) if cost.prior is not None else None
    return {"prior": prior, "iterations": cost.typical[-_KEPT_ITERATIONS:]}


def _read(path: Path) -> tuple[dict[str, Trust], dict[str, IterationCost]]:
    """The trusts by kind and the costs by machine of a file.

    Raises:
        ValueError: there is none, or something in it is not as it is written.
    """
    kept = read_json(path)
    try:
        if kept["schema"] != SCHEMA:
            raise ValueError(f"schema {kept['schema']}, not {SCHEMA}")
        trusts = {kind: Trust.restored(state) for kind, state in kept["trusts"].items()}
        return trusts, {name: _cost(state) for name, state in kept["costs"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _cost(state: Mapping[str, Any]) -> IterationCost:
    """The costs that _cost_state described.

    Raises:
        ValueError, KeyError, TypeError: it is not one.
    """
    prior = None
    if state["prior"] is not None:
        values = numbers(state["prior"], (5,), 0.0, _MOST).tolist()
        base_s, row_s, knee_rows, step_s, block_rows = values
        prior = CostModel(
            base_s=base_s, row_s=row_s, knee_rows=knee_rows, step_s=step_s,
            block_rows=int(block_rows),
        )  # fmt: skip
        if base_s < _LEAST_S or block_rows < 1:
            raise ValueError("no pass takes this")
    seen = numbers(state["iterations"], (-1, 4), 0.0, _MOST)
    rows, _, drafts_s, totals_s = seen.T
    whole = (seen[:, :2] % 1 == 0).all() and (rows >= 1).all()
    if not whole or (totals_s < _LEAST_S).any() or (drafts_s > totals_s).any():
        raise ValueError("no iterations have taken this")
    found = IterationCost(prior)
    found.remember(
        [
            (int(count), int(steps), draft_s, total_s)
            for count, steps, draft_s, total_s in seen.tolist()
        ]
    )
    return found
