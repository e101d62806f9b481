"""The registry of policies: what a policy does, and how one is added.

A policy decides how large the next draft tree should be. That changes how many tokens a pass
settles and what the pass costs, never which tokens: those are the target's own draws.

Each policy is one file of this package with a class below the decorator `policy`. Help texts, the
values that the option takes, and the check of which methods it suits follow from that. The command
line reads these files before anything else is loaded. So they import numpy, and modules that import
it, inside functions or for type checking only.
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

    # Given the ids (n,) of expanded nodes, (n, 11): the ten highest probabilities of each node's
    # children, falling, and the entropy of all its children in nats.
    Signals = Callable[[Ints], Floats]

# What a policy is made with besides the TreeConfig: the pair's trained classifier, this machine's
# IterationCost, or the tokens of the target's text to come.
Need = Literal["classifier", "cost", "continuation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTree:
    """What a policy grows the next tree with, and facts about the pass that will verify it."""

    search: Search  # the method's search
    expand: Expand  # the draft model
    max_depth: int  # longest path that could still be committed, tokens
    signals: Signals | None = None  # of expanded nodes; None if several texts share the pass
    pending: int = 1  # committed rows that the pass carries besides the tree
    texts: int = 1  # texts of the pass; each of them gets a token even without a tree

    def found(self, tree: TreeConfig, worth: Worth | None = None) -> SearchResult:
        """Runs the search with these settings; `worth` may end it earlier."""
        return self.search(self.expand, tree, min(self.max_depth, tree.max_depth), worth)


class BudgetPolicy(Protocol):
    """Decides the size of each tree, and learns from the result."""

    def grow(self, next_tree: NextTree) -> SearchResult:
        """Grows the next tree, of at most the budget and depth that the policy was made with."""

    def observe(self, step: StepResult) -> None:
        """Learns from what the last tree brought and cost."""


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy as the command line and the checks know it.

    Attributes:
        name: as the setting `policy` has it.
        help: how much of the budget its trees use, in words that fit into brackets.
        methods: the methods it can size the trees of; None for all methods that draft.
        needs: what it is made with besides a TreeConfig.
        make: makes the policy from a TreeConfig and what it needs, if anything.
    """

    name: str
    help: str
    methods: tuple[str, ...] | None
    needs: Need | None
    make: Callable[..., BudgetPolicy]


_table: dict[str, PolicyEntry] = {}
POLICIES: Mapping[str, PolicyEntry] = MappingProxyType(_table)  # in the order of the help texts


def _place(entry: PolicyEntry) -> tuple[int, str]:
    """The key that sorts the table: by need, nothing first, then by name."""
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
