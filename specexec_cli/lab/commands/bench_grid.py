"""Options of `specexec bench` that take comma lists; each combination of items is a case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from specexec_cli.cli import option_groups, options
from specexec_cli.cli.options import option
from specexec_cli.cli.panels import TREE_LISTS
from specexec_cli.config import DraftScoring, SamplingConfig
from specexec_cli.errors import ConfigError
from specexec_cli.lab.baselines import POLICIES, policies_for
from specexec_cli.lab.bench.cases import methods

if TYPE_CHECKING:
    from specexec_cli.lab.bench.cases import Grid

_GRID = "Cross-product (comma lists)"
_METHOD_HELP = (
    f"{', '.join(methods())}. Default: specexec, or suffix where there is no draft model."
)
_USUAL_POLICIES = policies_for("specexec")
_OTHER_POLICIES = [entry for name, entry in POLICIES.items() if name not in _USUAL_POLICIES]
_POLICY_HELP = "; ".join(
    [
        f"{', '.join(_USUAL_POLICIES)}: how much of the budget a tree uses",
        *(f"{entry.name}: {entry.help}" for entry in _OTHER_POLICIES),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridOptions:
    """Options that say which combinations of method, tree and temperature to measure."""

    method: Annotated[str, option(_GRID, _METHOD_HELP)] = ""
    budget: Annotated[str, option(_GRID, "Tree nodes. Default: the pair's.")] = ""
    depth: Annotated[str, option(_GRID, "Longest path. Default: the pair's.")] = ""
    speculation_length: Annotated[str, option(_GRID, "Draft tokens per iteration of chains.")] = (
        "4,8"
    )
    temperature: Annotated[str, option(_GRID, "0 is greedy.")] = "0"
    batch: option_groups.Batch = None
    draft_scoring: Annotated[
        str,
        option(
            TREE_LISTS,
            "noise, probs: rank draft tokens by the target's own sampling noise, or not.",
        ),
    ] = "noise"
    policy: Annotated[str, option(TREE_LISTS, _POLICY_HELP + ".")] = "fixed"
    calibration: Annotated[
        str,
        option(
            TREE_LISTS,
            "on, off: draft probabilities corrected by how often tokens were accepted.",
        ),
    ] = "on"
    past: Annotated[
        str,
        typer.Option(
            help="on, off: specexec's trees with what the text's own past suggests, or without.",
            rich_help_panel=TREE_LISTS,
        ),
    ] = "off"

    def grid(
        self, sampling: SamplingConfig, *, max_tokens: int, baseline_tokens: int | None
    ) -> Grid:
        """The grid of these lists, with the settings that all cases share.

        Raises:
            ConfigError: an item is not a word that its option takes, or not a number.
        """
        from specexec_cli.lab.bench.cases import Grid

        return Grid(
            methods=words(self.method, "--method") if self.method else (),
            budgets=numbers(self.budget, "--budget", int),
            depths=numbers(self.depth, "--depth", int),
            lengths=numbers(self.speculation_length, "--speculation-length", int),
            scorings=cast(
                list[DraftScoring],
                _chosen(self.draft_scoring, "--draft-scoring", get_args(DraftScoring)),
            ),
            policies=_chosen(self.policy, "--policy", tuple(POLICIES)),
            calibrated=[
                word == "on" for word in _chosen(self.calibration, "--calibration", ("on", "off"))
            ],
            past=[word == "on" for word in _chosen(self.past, "--past", ("on", "off"))],
            sampling=[
                replace(sampling, temperature=value)
                for value in numbers(self.temperature, "--temperature", float)
            ],
            max_tokens=max_tokens,
            baseline_tokens=max_tokens if baseline_tokens is None else baseline_tokens,
        )


def words(value: str, flag: str) -> list[str]:
    """Splits a comma-separated option such as `demo,humaneval` into its items.

    Raises:
        ConfigError: the option has no item.
    """
    found = [word.strip() for word in value.split(",") if word.strip()]
    if not found:
        raise ConfigError(f"{flag} is empty")
    return found


def _chosen(value: str, flag: str, allowed: tuple[str, ...]) -> list[str]:
    return [options.one_of(word, flag, allowed) for word in words(value, flag)]


def numbers(value: str, flag: str, kind: type) -> list[Any]:
    """Splits a comma-separated option such as `1,16,64` into numbers of type `kind`.

    Raises:
        ConfigError: an item is not a number.
    """
    found = []
    for word in value.split(","):
        try:
            found += [kind(word)] if word.strip() else []
        except ValueError as error:
            raise ConfigError(
                f"{flag} takes numbers separated by commas, not '{word.strip()}'"
            ) from error
    return found
