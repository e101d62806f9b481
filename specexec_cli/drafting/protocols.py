"""The protocols of a drafter: grow a tree, commit its accepted nodes, observe the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree, StepResult

if TYPE_CHECKING:
    from specexec_cli.drafting.learned import Learned
    from specexec_cli.models.layer_state import ModelState
    from specexec_cli.sampling import Sampler
    from specexec_cli.verify.accept import Walk


class Drafter(Protocol):
    """A drafter as the decoding loops need it."""

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        """Grows a tree of likely continuations.

        Args:
            context: every committed token, at least one; the last is the root.
            max_depth: longest path, tokens.
            pending: committed rows that the target's pass will carry besides the tree.
        """

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes over what the target's pass settled.

        Args:
            nodes: accepted nodes of the last tree, from the root down.
            tokens: every token committed, the bonus token last.
        """

    def observe(self, step: StepResult) -> None:
        """Learns from what the iteration brought and cost."""


class Committed(Protocol):
    """The target, for a draft model that is part or copy of it and reads what its layers keep."""

    tokens: list[int]  # the tokens with rows in the cache

    @property
    def state(self) -> ModelState:
        """What the target's layers keep of its committed tokens."""


class SessionDrafter(Drafter, Protocol):
    """A drafter as a session needs it, which keeps it from one generation to the next."""

    paused: bool  # whether the policy wanted no tree where there was room for one

    def configure(self, sampler: Sampler, tree: TreeConfig, learned: Learned | None = None) -> None:
        """Sets up the next generation; caches and what was learned stay.

        Args:
            sampler: the target's sampler.
            tree: the tree's settings.
            learned: what was learned about the pair; the present one is kept if not given.
        Raises:
            CheckpointError, ConfigError: the policy cannot be used, see Learned.policy.
        """

    def forget(self) -> None:
        """Empties the caches; what was learned stays."""


@runtime_checkable
class DrawingDrafter(SessionDrafter, Protocol):
    """A drafter that draws its trees, and verifies them by what it drew from."""

    @property
    def walk(self) -> Walk:
        """Verifies the last tree by rejection sampling; replaces verify.accept.accept()."""
