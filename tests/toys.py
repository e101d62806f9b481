"""Toy language models: pure functions of the context, fast enough for thousands of examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.drafting.classifier import FEATURES, Classifier
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.policies import NextTree
from specexec_cli.drafting.scoring import DraftScorer, signals
from specexec_cli.drafting.search import ROOT, Frontier, Search, grow_tree
from specexec_cli.sampling import Sampler


@lru_cache(maxsize=1 << 14)  # a target, its oracle and a draft of it ask for the same
def _noise(key: tuple[int, ...], size: int) -> np.ndarray:
    """(size,) float64, not to be written to."""
    return np.random.default_rng(key).standard_normal(size)


@dataclass(frozen=True)
class ToyLM:
    """Logits depend on the last `order` tokens through a seeded table."""

    seed: int
    vocab_size: int = 8
    order: int = 3
    scale: float = 2.0

    def logits(self, context: Sequence[int]) -> np.ndarray:
        """(vocab,) float32."""
        noise = _noise((self.seed, len(context), *context[-self.order :]), self.vocab_size)
        return (noise * self.scale).astype(np.float32)


@dataclass(frozen=True)
class NoisyCopy:
    """A draft that agrees with `target` up to noise."""

    target: ToyLM
    seed: int
    noise: float

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def logits(self, context: Sequence[int]) -> np.ndarray:
        own = ToyLM(self.seed, self.vocab_size).logits(context)
        return self.target.logits(context) + self.noise * own


@dataclass
class ToyTarget:
    """A TargetServer over a ToyLM that checks what a KV cache would need."""

    model: ToyLM
    tokens: list[int] = field(default_factory=list)
    bytes_streamed: int = 0
    read_s: float = 0.0
    passes: int = 0

    def verify(self, pending: Sequence[int], tree: DraftTree) -> torch.Tensor:
        assert pending, "a pass needs the root among its rows"
        self.passes += 1
        self._pending, self._tree = list(pending), tree
        root = [*self.tokens, *pending]
        rows = [self.model.logits(root)]
        paths: list[list[int]] = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            paths.append([*(paths[parent] if parent >= 0 else root), token])
            rows.append(self.model.logits(paths[-1]))
        return torch.from_numpy(np.stack(rows))

    def commit(self, nodes: Sequence[int]) -> None:
        parent = -1
        for node in nodes:
            assert self._tree.parents[node] == parent, "accepted nodes form one path"
            parent = node
        self.tokens += [*self._pending, *(int(self._tree.tokens[node]) for node in nodes)]

    def crop(self, length: int) -> None:
        del self.tokens[length:]


def classifier(seed: int = 4) -> Classifier:
    """Random weights: it ends drafts anywhere."""
    rng = np.random.default_rng(seed)
    return Classifier(
        {
            "norm.mean": np.zeros(FEATURES),
            "norm.scale": np.ones(FEATURES),
            "hidden.weight": rng.normal(size=(8, FEATURES)),
            "hidden.bias": rng.normal(size=8),
            "out.weight": rng.normal(size=(1, 8)),
            "out.bias": rng.normal(size=1),
        },
        threshold=0.5,
        max_length=12,
    )


@dataclass
class ToyDrafter:
    """A Drafter over any toy model, with the real search and scoring."""

    model: ToyLM | NoisyCopy
    tree: TreeConfig
    sampler: Sampler = field(default_factory=lambda: Sampler(SamplingConfig()))
    search: Search = grow_tree

    def __post_init__(self) -> None:
        self.policy = Learned(classifier).policy(self.tree)
        self._scorer = DraftScorer(self.sampler, self.tree.scoring, self.tree.calibrated)
        self._utilities: dict[tuple[int, ...], torch.Tensor] = {}

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        self._context = list(context)
        if max_depth < 1:
            return DraftTree.empty()
        paths: dict[int, list[int]] = {ROOT: list(context)}

        def expand(frontier: Frontier, width: int) -> tuple[np.ndarray, np.ndarray]:
            log_probs, tokens = [], []
            for node, token, parent in zip(
                frontier.ids.tolist(),
                frontier.tokens.tolist(),
                frontier.parents.tolist(),
                strict=True,
            ):
                if node != ROOT:
                    paths[node] = [*paths[parent], token]
                path = paths[node]
                logits = torch.from_numpy(self.model.logits(path))[None]
                utilities = self._scorer.utilities(logits, [len(path)], context)
                self._utilities[tuple(path)] = utilities[0]
                depth = np.array([len(path) - len(context) + 1])
                best, found = self._scorer.best(utilities, width, depth)
                log_probs.append(best[0])
                tokens.append(found[0])
            return np.stack(log_probs), np.stack(tokens)

        def signals_of(ids: np.ndarray) -> np.ndarray:
            return signals(torch.stack([self._utilities[tuple(paths[i])] for i in ids.tolist()]))

        return self.policy.grow(
            NextTree(
                search=self.search, expand=expand, max_depth=max_depth, signals=signals_of,
                pending=pending,
            )
        ).tree  # fmt: skip

    def observe(self, step: StepResult) -> None:
        self.policy.observe(step)

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        path = tuple(self._context)
        settled = []
        for depth, token in enumerate(tokens, 1):
            if path in self._utilities:
                settled.append((self._utilities[path], depth, token))
            path = (*path, token)
        self._scorer.observe(settled)
        self._utilities.clear()


def _frontier(
    ids: Sequence[int], tokens: Sequence[int], parents: Sequence[int], depths: Sequence[int]
) -> Frontier:
    return Frontier(*(np.array(each, dtype=np.int64) for each in (ids, tokens, parents, depths)))


# What a trained head is asked for, step by step: nodes 0 and 1 below the root, 2 below 1 and 3
# below 0; and the tokens from the root to the root, to node 0, 1, 2, 3.
HEAD_STEPS = (
    _frontier([ROOT], [ROOT], [ROOT], [0]),
    _frontier([0, 1], [7, 9], [ROOT, ROOT], [1, 1]),
    _frontier([2, 3], [5, 6], [1, 0], [2, 2]),
)
HEAD_PATHS = ([], [7], [9], [9, 5], [7, 6])


def commit_a_path(local: Any, rows: Any, tokens: Sequence[int]) -> list[int]:
    """Has a target verify a tree behind the tokens, and both sides commit its second branch.

    Args:
        local: the target, a LocalTarget.
        rows: a trained head's, which has grown HEAD_STEPS behind the tokens.
    Returns:
        the text with the path and a bonus token.
    """
    nodes = np.array([7, 9, 5, 6]), np.array([-1, -1, 1, 0]), np.array([1, 1, 2, 2]), np.zeros(4)
    local.verify(tokens[-1:], DraftTree(*nodes))
    local.commit([1, 2])
    rows.commit(rows.tree.walk([9, 5]), [9, 5, 11])
    return [*tokens, 9, 5, 11]
