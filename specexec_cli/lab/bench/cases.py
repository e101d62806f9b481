"""The cases of a bench: all combinations of methods, trees and temperatures. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specexec_cli.config import (
    DSI_REJECTION,
    BenchMethod,
    DraftScoring,
    SamplingConfig,
    TreeConfig,
)
from specexec_cli.errors import ConfigError, nearest
from specexec_cli.lab.baselines import SOURCES, policies_for

BASELINE: BenchMethod = "autoregressive"
DISTRIBUTED: tuple[BenchMethod, ...] = ("dsi", DSI_REJECTION)  # methods that need workers


def methods() -> tuple[BenchMethod, ...]:
    """All methods that can be measured: the baseline, those that draft, those with workers."""
    drafting = sorted(SOURCES, key=lambda name: not SOURCES[name].needs_model)
    return (BASELINE, *drafting, *DISTRIBUTED)


def is_chain(method: BenchMethod) -> bool:
    """Whether a method drafts one path, sized by the speculation length."""
    return method in SOURCES and SOURCES[method].one_path


def same_distribution(method: BenchMethod) -> bool:
    """Whether a method's text only shares the target's distribution, not the baseline's tokens."""
    return method == DSI_REJECTION or (method in SOURCES and SOURCES[method].drawn)


@dataclass(frozen=True, slots=True)
class Workers:
    """The settings of an open session of the method dsi."""

    sp: int  # SP degree: target servers at once
    lookahead: int
    place: str  # the workers' devices
    more_drafts: tuple[str, ...] = ()  # draft models besides the pair's own


@dataclass(frozen=True, slots=True)
class Case:
    """One combination of method, tree and sampling."""

    method: BenchMethod
    tree: TreeConfig | None  # None for the baseline, and for dsi
    sampling: SamplingConfig
    max_tokens: int
    workers: Workers | None = None  # only for dsi

    @property
    def label(self) -> str:
        """A name for tables: 'specexec 64/16', 'chain 8', 'specexec cost 128/32', 'dsi 5 sp 2'."""
        if self.workers is not None:
            drafts = len(self.workers.more_drafts)
            more = f" +{drafts} draft{'s' * (drafts > 1)}" if drafts else ""
            return f"{self.method} {self.workers.lookahead} sp {self.workers.sp}{more}"
        if self.tree is None:
            return self.method
        size = "" if is_chain(self.method) else f"/{self.tree.max_depth}"
        return f"{variant(self.settings())} {self.tree.budget}{size}"

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, for the row and its key, except the row's seed."""
        sampling = asdict(self.sampling)
        del sampling["seed"]
        drafts = self.tree or self.workers
        size = asdict(drafts) if drafts is not None else {}
        return {"method": self.method, **size, **sampling, "max_tokens": self.max_tokens}


def variant(settings: Mapping[str, Any]) -> str:
    """The method's name and all of its tree's settings that are not the default.

    Args:
        settings: the result of Case.settings().
    """
    words = [settings["method"]]
    if settings.get("policy", "fixed") != "fixed":
        words.append(settings["policy"])
    if settings.get("scoring", "noise") != "noise":
        words.append(settings["scoring"])
    if not settings.get("calibrated", True):
        words.append("uncalibrated")
    if settings.get("past", False):
        words.append("past")
    return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values that a bench combines, one list per option."""

    methods: Sequence[str]  # empty: `usual_method`
    budgets: Sequence[int]  # empty: the recommended tree's budget
    depths: Sequence[int]  # empty: the recommended tree's depth
    lengths: Sequence[int]  # speculation lengths of chains
    scorings: Sequence[DraftScoring] = ("noise",)
    policies: Sequence[str] = ("fixed",)  # a method skips policies that cannot size its trees
    calibrated: Sequence[bool] = (True,)
    past: Sequence[bool] = (False,)  # only for specexec
    sampling: Sequence[SamplingConfig]
    max_tokens: int
    baseline_tokens: int

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in methods():
                raise ConfigError(
                    f"`method` '{method}' is not one of {', '.join(methods())}."
                    f"{nearest(method, list(methods()))}"
                )
        self._check_policies(self.methods or ("specexec", "suffix"))
        if any(length < 1 for length in self.lengths):
            raise ConfigError("`speculation_length` must be 1 or more")
        if min(self.max_tokens, self.baseline_tokens) < 1:
            raise ConfigError("`max_tokens` and `baseline_tokens` must be 1 or more")

    def _check_policies(self, measured: Iterable[str]) -> None:
        drafting = {*measured} - {BASELINE, *DISTRIBUTED}
        for policy in self.policies if drafting else ():
            able = [method for method in methods() if policy in policies_for(method)]
            if not set(able) & drafting:
                raise ConfigError(f"`policy='{policy}'` needs the method {' or '.join(able)}")

    def cases(
        self,
        recommended: TreeConfig,
        workers: Workers | None = None,
        usual_method: BenchMethod = "specexec",
    ) -> list[Case]:
        """Every combination once, with each sampling's baseline first.

        Args:
            usual_method: measured where no method is named.
            workers: the settings of dsi, if it is among the methods.
        Raises:
            ConfigError: a combination is no possible tree, or no method has a policy.
        """
        self._check_policies(self.methods or (usual_method,))
        found: dict[Case, None] = {}
        for sampling in self.sampling:
            found[Case(BASELINE, None, sampling, self.baseline_tokens)] = None
            for method in dict.fromkeys(self.methods or (usual_method,)):
                if method in DISTRIBUTED:
                    found[Case(method, None, sampling, self.max_tokens, workers)] = None
                elif method != BASELINE:
                    for tree in self._trees(method, recommended):
                        for varied in self._variants(method, tree):
                            found[Case(method, varied, sampling, self.max_tokens)] = None
        return list(found)

    def _variants(self, method: BenchMethod, tree: TreeConfig) -> list[TreeConfig]:
        return [
            replace(tree, scoring=scoring, policy=policy, calibrated=calibrated, past=past)
            for policy in self.policies
            if policy in policies_for(method)
            for scoring in self.scorings
            for calibrated in self.calibrated
            for past in (self.past if method == "specexec" else (False,))
        ]

    def _trees(self, method: BenchMethod, recommended: TreeConfig) -> list[TreeConfig]:
        if is_chain(method):
            return [
                replace(recommended, budget=length, max_depth=length) for length in self.lengths
            ]
        trees = []
        for budget in self.budgets or (recommended.budget,):
            # a recommended depth is cut to the budget, as in `generate`
            depths = self.depths or (min(recommended.max_depth, max(budget, 1)),)
            trees += [replace(recommended, budget=budget, max_depth=depth) for depth in depths]
        return trees
