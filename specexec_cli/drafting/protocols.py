"""The protocols of a drafter: grow a tree, commit its accepted nodes, observe the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree, StepResult

if TYPE_CHECKING:
    from specexec_cli.drafting.learned import Learned
    from specexec_cli.models.layer_state import ModelState
    from specexec_cli.sampling import Sampler


class Drafter(Protocol):
    """What decoding needs of a drafter."""

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        """A tree of likely continuations of `context`, paths of at most `max_depth` tokens.

        Args:
            pending: committed rows that the target's pass will carry besides the tree.
        """

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Tells which nodes of the last tree were accepted, and every token committed."""

    def observe(self, step: StepResult) -> None:
        """Tells what the iteration brought and cost."""


class Committed(Protocol):
    """The target, as the owner of rows that a draft model of its own layers may read."""

    tokens: list[int]  # whose rows are in the cache

    @property
    def state(self) -> ModelState:
        """What the target's layers keep of its committed tokens."""


class SessionDrafter(Drafter, Protocol):
    """What a session needs of a drafter, which it keeps from one generation to the next."""

    paused: bool  # whether the policy wanted no tree where there was room for one

    def configure(self, sampler: Sampler, tree: TreeConfig, learned: Learned | None = None) -> None:
        """Settings of the next generation; caches and what was learned stay.

        Args:
            learned: about the pair, by all generations so far; what it had unless told.
        Raises:
            CheckpointError, ConfigError: the policy cannot be used, see Learned.policy.
        """

    def forget(self) -> None:
        """Empties its caches; what was learned stays."""
