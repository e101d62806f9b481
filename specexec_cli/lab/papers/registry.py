"""What a recipe is: one table, figure, algorithm or theorem of a paper, run here by one command.

A recipe is a function below the decorator `recipe` in a file that `papers/__init__.py` names. It is
given a Lab (papers/lab.py) and gives a Finding: tables, figures, and what of the paper's claims
holds here. The list of `specexec bench paper` and the test that runs every small form follow from
the registry. What a recipe computes with is imported inside it: the command line reads the names
before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specexec_cli.lab.papers.lab import Lab


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells as they are shown."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Claim:
    """A direction that the paper claims, and whether it is so here."""

    text: str
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a recipe came to."""

    tables: Sequence[Table]
    claims: Sequence[Claim]  # at least one: a recipe that cannot fail shows nothing
    notes: Sequence[str] = ()
    # by the end of the file's name, each a function that draws: matplotlib is an extra
    figures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a finding is of, beside its recipe."""

    full: bool
    seed: int
    target: str | None = None  # None where the recipe loads no model
    draft: str | None = None

    @property
    def form(self) -> str:
        """What the report calls it."""
        return "full" if self.full else "small"

    @property
    def models(self) -> tuple[str, ...]:
        """Those of the pair, the target first."""
        return tuple(name for name in (self.target, self.draft) if name is not None)


Run = Callable[["Lab"], Finding]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One table, figure, algorithm or theorem of a paper."""

    name: str  # as `specexec bench paper` takes it, such as specexec-figure-3
    printed: str  # what the paper says, in one line
    run: Run
    models: bool = True  # whether it loads any


_table: dict[str, Recipe] = {}
RECIPES: Mapping[str, Recipe] = MappingProxyType(_table)


def recipe(name: str, *, printed: str, models: bool = True) -> Callable[[Run], Run]:
    """Registers the function below as a recipe; see Recipe for the arguments.

    Raises:
        ValueError: the name is taken.
    """

    def register(run: Run) -> Run:
        if name in _table:
            raise ValueError(f"recipe '{name}' is registered twice")
        _table[name] = Recipe(name, printed, run, models)
        return run

    return register
