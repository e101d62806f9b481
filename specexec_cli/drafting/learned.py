"""What decoding teaches about a pair on this machine, kept from one generation to the next.

It changes no token: it decides which trees are grown, and so how many passes a text takes.
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

SCHEMA = 4
_KEPT_ITERATIONS = 32  # few, so that new ones soon outweigh them on a machine that has changed
# Bounds of the numbers in a file (least seconds; most seconds or rows); others mean damage.
_LEAST_S, _MOST = 1e-9, 1e6


def pair_folder(target: str, draft: str) -> Path:
    """The folder of a pair's files: what was learned, and the classifier."""
    return user_cache_path("specexec", appauthor=False) / "pairs" / file_name(target, draft)


class Learned:
    """Trust in the draft model by kind of scoring, cost of iterations, and the policies.

    Args:
        classifier: loads the classifier of the policy disco.
        cost_prior: gives the cost model that the policy cost begins with; called once at most, if
            no iterations were kept.
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
        """The trust in scores of a kind (DraftScorer.kind); None if nothing is known yet."""
        return self._trusts.get(kind)

    def keep(self, kind: str, trust: Trust) -> None:
        """Keeps the trust of a kind, with which the next generation of that kind begins."""
        self._trusts[kind] = trust

    def use(self, tree: TreeConfig, policy: BudgetPolicy) -> None:
        """Sets the policy of trees with these settings to one that the caller has made."""
        self._policies[tree] = policy

    def policy(self, tree: TreeConfig) -> BudgetPolicy:
        """The policy that the settings name, with all that it has learned so far.

        Raises:
            CheckpointError: the policy is disco, and its classifier cannot be used.
            ConfigError: the policy must know the text to come, and was not given by `use`.
        """
        entry = POLICIES[tree.policy]
        if entry.needs == "classifier":  # made anew, since it counts the tokens of one generation
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
        """The cost of iterations on this machine."""
        if self._cost is None:
            self._cost = IterationCost(self._cost_prior())
        return self._cost

    def save(self, path: Path, machine: str, *, costs_too: bool = True) -> None:
        """Writes what was learned to a file, for later sessions.

        Args:
            path: of the file. Costs in it of other machines are kept.
            machine: names how this session runs.
            costs_too: whether this machine's costs are replaced too.
        Raises:
            OSError: the folder cannot be written.
        """
        try:
            _, costs = _read(path)
        except ValueError:  # there is no valid file, so it is replaced
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
        """Takes over what an earlier session saved, if the file is valid.

        Args:
            path: of the file.
            machine: as for `save`.
        """
        try:
            self._trusts, costs = _read(path)
        except ValueError:  # it will be learned again
            return
        self._cost = costs.get(machine)


def _cost_state(cost: IterationCost) -> dict[str, Any]:
    prior = list(astuple(cost.prior)) if cost.prior is not None else None
    return {"prior": prior, "iterations": cost.typical[-_KEPT_ITERATIONS:]}


def _read(path: Path) -> tuple[dict[str, Trust], dict[str, IterationCost]]:
    """The trusts by kind and the costs by machine of a file.

    Raises:
        ValueError: there is no such file, or it is damaged.
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
        ValueError, KeyError, TypeError: this is no valid state.
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
