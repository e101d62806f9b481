"""The registry of draft sources: every way to make draft trees, under its method's name.

A source is a function below the decorator `draft_source` that makes a drafter. Every file of this
package is read; the methods that SpecExec is measured against join from lab/baselines. The methods
that `bench` knows, their help and checks, and the policies that suit them follow from the registry.
The command line reads the names before anything is loaded, so a source imports what it needs inside
the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from specexec_cli.drafting.policies import POLICIES

if TYPE_CHECKING:
    from specexec_cli.config import TreeConfig
    from specexec_cli.drafting.learned import Learned
    from specexec_cli.drafting.protocols import Committed, SessionDrafter
    from specexec_cli.models.streamed import StreamedModel
    from specexec_cli.sampling import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetup:
    """What a drafter may be made from."""

    model: StreamedModel | None  # the draft model, where there is one
    sampler: Sampler  # settings of the first generation; configure() brings later ones
    tree: TreeConfig
    target_vocab_size: int
    learned: Learned  # what all generations so far taught about the pair
    shared: Committed | None = None  # the target, where the draft model reads what it keeps
    slots: int = 0  # cache rows that memory is planned for
    window: int | None = None  # most tokens of a text that a draft model is to see


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """One way to make draft trees.

    Attributes:
        name: name of the method.
        make: makes the drafter.
        one_path: whether trees are chains, sized by a speculation length instead of budget and
            depth.
        drawn: whether children are drawn from the draft model's distribution, and verified by
            rejection sampling. The text then has the target's distribution, but differs from
            autoregressive decoding with the same seed.
        needs_model: whether it needs a draft model.
    """

    name: str
    make: Callable[[DraftSetup], SessionDrafter]
    one_path: bool
    drawn: bool
    needs_model: bool


_table: dict[str, DraftSource] = {}
SOURCES: Mapping[str, DraftSource] = MappingProxyType(_table)

_Make = Callable[[DraftSetup], "SessionDrafter"]


def draft_source(
    name: str, *, one_path: bool = False, drawn: bool = False, needs_model: bool = True
) -> Callable[[_Make], _Make]:
    """Registers the function below as a source; see DraftSource for the arguments.

    Raises:
        ValueError: the name is taken.
    """

    def register(make: _Make) -> _Make:
        if name in _table:
            raise ValueError(f"draft source '{name}' is registered twice")
        _table[name] = DraftSource(
            name=name, make=make, one_path=one_path, drawn=drawn, needs_model=needs_model
        )
        return make

    return register


def policies_for(method: str) -> tuple[str, ...]:
    """The names of the policies that can size a method's trees."""
    if method not in SOURCES:  # the method drafts nothing
        return ()
    return tuple(
        entry.name
        for entry in POLICIES.values()
        if entry.methods is None or method in entry.methods
    )
