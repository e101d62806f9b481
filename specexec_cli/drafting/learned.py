"""What decoding teaches about a pair on this machine, kept from one generation to the next.

Nothing of it changes a token: it decides which trees are grown, and so how many passes a text
takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from specexec_cli.config import Policy, TreeConfig
from specexec_cli.drafting.disco import Classifier, Disco
from specexec_cli.drafting.policies import (
    BudgetPolicy,
    Cost,
    Fixed,
    Heuristic,
    IterationCost,
    Oracle,
)
from specexec_cli.drafting.scoring import Trust

SCHEMA = 1
_KEPT_ITERATIONS = 32  # few enough that a machine that has changed is soon known anew


def pair_folder(target: str, draft: str) -> Path:
    """Where a pair's calibration and classifier are kept."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{target}--{draft}")
    return user_cache_path("specexec", appauthor=False) / "pairs" / name.strip("-.")


class Learned:
    """Trust in the draft model by kind of scoring, cost of iterations, and the policies using them.

    Args:
        classifier: gives the one of --policy disco.
    """

    def __init__(self, classifier: Callable[[], Classifier] | None = None) -> None:
        self._classifier = classifier
        self._trusts: dict[str, Trust] = {}
        self._policies: dict[TreeConfig, BudgetPolicy] = {}
        self._cost = IterationCost()

    def trust(self, kind: str) -> Trust | None:
        """What is known of this kind (DraftScorer.kind); None at first."""
        return self._trusts.get(kind)

    def keep(self, kind: str, trust: Trust) -> None:
        """Goes on from `trust` next time."""
        self._trusts[kind] = trust

    def policy(self, tree: TreeConfig, continuation: Sequence[int] = ()) -> BudgetPolicy:
        """The policy that the settings name, as it was left.

        Args:
            continuation: the text to come, for the oracle.
        Raises:
            CheckpointError: disco, and its classifier cannot be used.
        """
        if tree.policy == "oracle":
            return Oracle(tree, continuation)
        if tree not in self._policies:
            new: dict[Policy, Callable[[], BudgetPolicy]] = {
                "fixed": lambda: Fixed(tree),
                "heuristic": lambda: Heuristic(tree),
                "disco": lambda: self._disco(tree),
                "cost": lambda: Cost(tree, self._cost),
            }
            self._policies[tree] = new[tree.policy]()
        return self._policies[tree]

    def _disco(self, tree: TreeConfig) -> Disco:
        assert self._classifier is not None, "a session knows its pair's"
        return Disco(tree, self._classifier())

    def save(self, path: Path, machine: str) -> None:
        """Keeps it for later sessions.

        Args:
            machine: how this session runs; costs of others stay as they are.
        Raises:
            OSError: the folder cannot be written.
        """
        costs = dict(_read(path).get("costs", {}))
        costs[machine] = self._cost.seen[-_KEPT_ITERATIONS:]
        trusts = {kind: trust.state() for kind, trust in self._trusts.items()}
        text = json.dumps({"schema": SCHEMA, "trusts": trusts, "costs": costs})
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(path)

    def load(self, path: Path, machine: str) -> None:
        """What an earlier session kept; nothing where there is none, or none that can be used."""
        kept = _read(path)
        try:
            trusts = {kind: Trust.restored(state) for kind, state in kept["trusts"].items()}
            seen = [
                (int(rows), int(steps), float(draft_s), float(total_s))
                for rows, steps, draft_s, total_s in kept["costs"].get(machine, [])
            ]
        except (ValueError, KeyError, TypeError, AttributeError):  # a cache: it is learned again
            return
        self._trusts = trusts
        for iteration in seen:
            self._cost.observe(*iteration)


def _read(path: Path) -> dict[str, Any]:
    """The file's object; an empty one where it cannot be used."""
    try:
        kept = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):  # a cache: what cannot be read is learned again
        return {}
    usable = isinstance(kept, dict) and kept.get("schema") == SCHEMA
    return kept if usable and isinstance(kept.get("costs"), dict) else {}
