"""The registry of policies: what a policy does, and how one is added.

A policy decides how large the next draft tree should be. It changes how many tokens a pass settles
and what that costs, never which tokens: those are the target's own draws.

Each policy is one file of this package with a class below the decorator `policy`. Help texts, the
words that the option takes, and the checks of which method it suits follow from there. The command
line reads them before anything else is loaded, so the files import numpy, and rooms that do, inside
functions or for type checking alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from specexec_cli.drafting.sources import SOURCES

if TYPE_CHECKING:
    from specexec_cli.core import StepResult
    from specexec_cli.drafting.search import Expand, Floats, Ints, Search, SearchResult

    # ids of expanded nodes (n,) -> their children's 10 highest probabilities, falling, and the
    # entropy of all in nats (n, 11)
    Signals = Callable[[Ints], Floats]

# What a policy is made with besides the TreeConfig: the pair's trained classifier, the
# IterationCost of this machine, or the tokens that the target's text goes on with.
Need = Literal["classifier", "cost", "continuation"]


class BudgetPolicy(Protocol):
    """Grows each tree to the size it finds right, and learns from what became of it."""

    def grow(
        self, search: Search, expand: Expand, max_depth: int, signals: Signals, pending: int
    ) -> SearchResult:
        """The next tree, of at most the budget and depth that were given.

        Args:
            search: the method's own.
            expand: the draft model.
            max_depth: longest path that could still be committed.
            signals: what the draft model said of nodes that were expanded.
            pending: committed rows that the pass will carry besides the tree.
        """

    def observe(self, step: StepResult) -> None:
        """What the last tree brought and cost."""


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy as the command line and the checks know it."""

    name: str  # as a tree's settings name it
    help: str  # how much of the budget a tree uses, in words that fit into brackets
    methods: tuple[str, ...] | None  # whose trees it can size; None: of all that draft
    needs: Need | None
    make: Callable[..., BudgetPolicy]  # (TreeConfig, and what it needs, if anything) -> a policy


_table: dict[str, PolicyEntry] = {}
POLICIES: Mapping[str, PolicyEntry] = MappingProxyType(_table)

_Policy = TypeVar("_Policy", bound=type[Any])


def policy(
    name: str, *, help: str, methods: tuple[str, ...] | None = None, needs: Need | None = None
) -> Callable[[_Policy], _Policy]:
    """Registers the class below as a policy; see PolicyEntry for the arguments.

    The class is a BudgetPolicy that is made of a TreeConfig and of what it needs, if anything. One
    that needs the continuation or the classifier is made anew for each text; the others go on with
    what they have learned, one for each TreeConfig.

    Raises:
        ValueError: the name is taken.
    """

    def register(made: _Policy) -> _Policy:
        if name in _table:
            raise ValueError(f"policy '{name}' is registered twice")
        _table[name] = PolicyEntry(name, help, methods, needs, made)
        return made

    return register


def policies_for(method: str) -> tuple[str, ...]:
    """The names of the policies that can size a method's trees."""
    if method not in SOURCES:  # it drafts nothing
        return ()
    return tuple(
        entry.name
        for entry in POLICIES.values()
        if entry.methods is None or method in entry.methods
    )
