"""The registry of policies: what a policy does, and how one is added.

A policy decides how large the next draft tree should be. It changes how many tokens a pass settles
and what that costs, never which tokens: those are the target's own draws.

Each policy is one file of this package with a class below the decorator `policy`. Help texts, the
words that the option takes, and the checks of which method it suits follow from it. The command
line reads them before anything else is loaded, so the files import numpy, and rooms that do, inside
functions or for type checking alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

if TYPE_CHECKING:
    from specexec_cli.config import TreeConfig
    from specexec_cli.core import StepResult
    from specexec_cli.drafting.search import Expand, Floats, Ints, Search, SearchResult, Worth

    # ids of expanded nodes (n,) -> their children's 10 highest probabilities, falling, and the
    # entropy of all in nats (n, 11)
    Signals = Callable[[Ints], Floats]

# What a policy is made with besides the TreeConfig: the pair's trained classifier, the
# IterationCost of this machine, or the tokens that the target's text goes on with.
Need = Literal["classifier", "cost", "continuation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTree:
    """What a policy grows the next tree with, and the pass that is to verify it."""

    search: Search  # the method's own
    expand: Expand  # the draft model
    max_depth: int  # longest path that could still be committed, in tokens
    # What the draft model said of expanded nodes; None where several texts share the pass.
    signals: Signals | None = None
    pending: int = 1  # committed rows that the pass carries besides the tree
    texts: int = 1  # texts of the pass, each of which gets a token whatever the tree is

    def found(self, tree: TreeConfig, worth: Worth | None = None) -> SearchResult:
        """The tree of these settings at most; see search.Worth for what ends it before."""
        return self.search(self.expand, tree, min(self.max_depth, tree.max_depth), worth)


class BudgetPolicy(Protocol):
    """Grows each tree to the size it finds right, and learns from what became of it."""

    def grow(self, next_tree: NextTree) -> SearchResult:
        """The next tree, of at most the budget and depth that the policy was made with."""

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
POLICIES: Mapping[str, PolicyEntry] = MappingProxyType(_table)  # in the order of help texts


def _place(entry: PolicyEntry) -> tuple[int, str]:
    """Policies that need nothing come first; among those of one need, the name decides."""
    return (None, *get_args(Need)).index(entry.needs), entry.name


_Policy = TypeVar("_Policy", bound=type[Any])


def policy(
    name: str, *, help: str, methods: tuple[str, ...] | None = None, needs: Need | None = None
) -> Callable[[_Policy], _Policy]:
    """Registers the class below as a policy; see PolicyEntry for the arguments.

    The class is a BudgetPolicy that is made of a TreeConfig and of what it needs, if anything. One
    that needs the classifier is made anew for each text, and one that needs the continuation is
    made by whoever knows it (Learned.use); the others go on with what they have learned, one for
    each TreeConfig.

    Raises:
        ValueError: the name is taken.
    """

    def register(made: _Policy) -> _Policy:
        if name in _table:
            raise ValueError(f"policy '{name}' is registered twice")
        entry = PolicyEntry(name, help, methods, needs, made)
        entries = sorted((*_table.values(), entry), key=_place)
        _table.clear()
        _table.update({each.name: each for each in entries})
        return made

    return register
