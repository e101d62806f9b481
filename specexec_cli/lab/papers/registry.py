"""The registry of recipes: each reproduces one table, figure, algorithm or theorem of a paper.

A recipe is a function with the decorator `recipe`, in a file that `papers/__init__.py` lists. It
takes a Lab (papers/lab.py) and returns a Finding: tables, figures, and whether the paper's claims
hold here. The list of `specexec bench paper` and the test of every small form are made from the
registry. Recipes import heavy modules inside the function, because the command line reads their
names at start.
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
    """A table of cells, as it is shown."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the paper, such as that one number is greater, and whether it holds here."""

    text: str
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a recipe."""

    tables: Sequence[Table]
    claims: Sequence[Claim]  # at least one: a recipe that cannot fail shows nothing
    notes: Sequence[str] = ()
    # end of the file's name -> function that draws the figure, since matplotlib is an extra
    figures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """The circumstances of a finding, besides its recipe."""

    full: bool
    seed: int
    target: str | None = None  # None if the recipe loads no model
    draft: str | None = None

    @property
    def form(self) -> str:
        """The form's name in reports."""
        return "full" if self.full else "small"

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the pair's models, the target first."""
        return tuple(name for name in (self.target, self.draft) if name is not None)


Run = Callable[["Lab"], Finding]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One table, figure, algorithm or theorem of a paper."""

    name: str  # the name for `specexec bench paper`, such as specexec-figure-3
    printed: str  # the paper's statement, in one line
    run: Run
    models: bool = True  # whether the recipe loads models


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
