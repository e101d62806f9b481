"""Toy drafters that draw their trees, and a clock on which only model passes take time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from toys import NoisyCopy, ToyLM, ToyTarget, classifier

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.policies import NextTree
from specexec_cli.drafting.search import ROOT, Frontier, Search
from specexec_cli.lab.baselines.sampled import SampledChildren
from specexec_cli.lab.baselines.searches import grow_bundle
from specexec_cli.sampling import Sampler
from specexec_cli.verify.accept import Accepted


@dataclass
class Cached:
    """The same toy model, each context computed once."""

    model: ToyLM | NoisyCopy

    def __post_init__(self) -> None:
        self.vocab_size = self.model.vocab_size
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, context: Sequence[int]) -> np.ndarray:
        key = tuple(context)
        if key not in self._known:
            self._known[key] = self.model.logits(context)
        return self._known[key]


@dataclass
class Clock:
    """Virtual seconds."""

    now: float = 0.0


@dataclass
class TimedTarget(ToyTarget):
    """A target whose pass takes one second."""

    clock: Clock = field(default_factory=Clock)

    def verify(self, pending: Sequence[int], tree: DraftTree) -> torch.Tensor:
        self.clock.now += 1.0
        return super().verify(pending, tree)


@dataclass
class ToySampledDrafter:
    """Draws trees from a toy model; each of its passes takes `pass_s`."""

    model: ToyLM | NoisyCopy | Cached
    tree: TreeConfig
    sampler: Sampler
    search: Search
    clock: Clock = field(default_factory=Clock)
    pass_s: float = 0.0

    def __post_init__(self) -> None:
        # as the methods do: SpecInfer draws from the plain softmax, a chain as the target does
        self._sampled = SampledChildren(self.sampler, plain=self.search is grow_bundle)
        self._policy = Learned(classifier).policy(self.tree)

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        paths: dict[int, list[int]] = {ROOT: list(context)}

        def expand(frontier: Frontier, width: int) -> tuple[np.ndarray, np.ndarray]:
            self.clock.now += self.pass_s
            for node, token, parent in zip(
                frontier.ids.tolist(),
                frontier.tokens.tolist(),
                frontier.parents.tolist(),
                strict=True,
            ):
                if node != ROOT:
                    paths[node] = [*paths[parent], token]
            logits = np.stack([self.model.logits(paths[node]) for node in frontier.ids.tolist()])
            return self._sampled.children(frontier, torch.from_numpy(logits), context, width)

        self._sampled.reset()
        return self._policy.grow(
            NextTree(
                search=self.search, expand=expand, max_depth=max_depth,
                signals=self._sampled.signals, pending=pending,
            )
        ).tree  # fmt: skip

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        pass

    def observe(self, step: StepResult) -> None:
        self._policy.observe(step)

    def walk(
        self,
        tree: DraftTree,
        logits: torch.Tensor,
        sampler: Sampler,
        context: Sequence[int],
        limit: int,
        eos_ids: Collection[int],
    ) -> Accepted:
        return self._sampled.walk(tree, logits, sampler, context, limit, eos_ids)
