"""The best-first tree is the top of the exhaustive tree, whatever the batches and ties."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.drafting.search import ROOT, Frontier, grow_tree

Path = tuple[int, ...]
NEVER = -math.inf


class Toy:
    """log-probabilities by path, and a watch over how the search asks for them."""

    def __init__(self, seed: int, vocab: int, coarse: bool) -> None:
        self.seed, self.vocab, self.coarse = seed, vocab, coarse
        self.paths: dict[int, Path] = {ROOT: ()}
        self.calls = 0

    def log_probs(self, path: Path) -> np.ndarray:
        """(vocab,); `coarse` draws few values: many ties and impossible tokens."""
        rng = np.random.default_rng([self.seed, len(path), *path])
        if self.coarse:
            choices = np.array([0.0, -0.5, -1.0, -1.0, -2.0, NEVER])
            return rng.choice(choices, self.vocab)
        return np.log(rng.dirichlet(np.full(self.vocab, 0.5)))

    def expand(self, frontier: Frontier, width: int) -> tuple[np.ndarray, np.ndarray]:
        self.calls += 1
        values, tokens = [], []
        for node, token, parent, depth in zip(
            frontier.ids.tolist(), frontier.tokens.tolist(), frontier.parents.tolist(),
            frontier.depths.tolist(), strict=True,
        ):  # fmt: skip
            if node != ROOT:
                assert node not in self.paths, "a node is expanded once"
                self.paths[node] = (*self.paths[parent], token)
            assert len(self.paths[node]) == depth
            log_probs = self.log_probs(self.paths[node])
            best = np.argsort(-log_probs, kind="stable")[:width]
            values.append(log_probs[best])
            tokens.append(best)
        return np.stack(values), np.stack(tokens)

    def exhaustive(self, max_depth: int) -> dict[Path, float]:
        """Every possible continuation up to `max_depth` and its log-probability."""
        scores: dict[Path, float] = {}
        level: dict[Path, float] = {(): 0.0}
        for _ in range(max_depth):
            level = {
                (*path, token): score + float(log_prob)
                for path, score in level.items()
                for token, log_prob in enumerate(self.log_probs(path))
                if log_prob > NEVER
            }
            scores |= level
        return scores


def paths_of(tree: DraftTree) -> list[Path]:
    paths: list[Path] = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        assert -1 <= parent < node, "a parent precedes its child"
        paths.append((*(paths[parent] if parent >= 0 else ()), int(token)))
    return paths


@settings(max_examples=500, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 5),
    coarse=st.booleans(),
    budget=st.integers(1, 60),
    batch=st.integers(1, 9),
    max_depth=st.integers(1, 4),
)
def test_the_tree_is_the_top_of_the_exhaustive_tree(seed, vocab, coarse, budget, batch, max_depth):
    toy = Toy(seed, vocab, coarse)
    config = TreeConfig(budget=budget, max_depth=1, batch=batch)
    result = grow_tree(toy.expand, config, max_depth)
    tree, everything = result.tree, toy.exhaustive(max_depth)
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths), "no path twice"
    assert [len(path) for path in paths] == tree.depths.tolist()
    assert tree.log_probs.tolist() == [everything[path] for path in paths]
    best = sorted(everything.values(), reverse=True)[:budget]
    assert sorted(tree.log_probs.tolist(), reverse=True) == best
    expanded = {toy.paths[node] for node in result.ids.tolist() if node in toy.paths}
    assert expanded <= set(paths), "ids name the nodes by which expand knew them"
    assert all(
        toy.paths.get(node, path) == path
        for node, path in zip(result.ids.tolist(), paths, strict=True)
    )


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), budget=st.integers(1, 30), batch=st.integers(1, 30))
def test_a_larger_budget_only_adds_nodes(seed, budget, batch):
    """Without ties the trees are nested: what more budget buys never costs a node."""
    trees = [
        grow_tree(Toy(seed, 4, False).expand, TreeConfig(budget=k, max_depth=1, batch=batch), 5)
        for k in (budget, budget + 7)
    ]
    small, large = (set(paths_of(result.tree)) for result in trees)
    assert small <= large


def test_a_batch_never_exceeds_its_size_and_one_batch_serves_many():
    sizes = []

    def expand(frontier: Frontier, width: int) -> tuple[np.ndarray, np.ndarray]:
        sizes.append(len(frontier.ids))
        count = len(frontier.ids)
        return np.full((count, 2), math.log(0.5)), np.tile(np.arange(2), (count, 1))

    grow_tree(expand, TreeConfig(budget=62, max_depth=5, batch=8), 5)
    assert max(sizes) == 8
    assert sum(sizes) == 1 + 2 + 4 + 8 + 16, "every node above the last level, once"
    assert len(sizes) == 1 + 1 + 1 + 1 + 2, "full batches where there are nodes for them"


def test_a_chain_that_is_certain_goes_to_the_bottom():
    """log-probability 0 ties every node of the chain with its parent: none may be lost."""

    def expand(frontier: Frontier, width: int) -> tuple[np.ndarray, np.ndarray]:
        count = len(frontier.ids)
        return np.tile([0.0, NEVER], (count, 1)), np.tile(np.arange(2), (count, 1))

    tree = grow_tree(expand, TreeConfig(budget=16, max_depth=16, batch=4), 16).tree
    assert tree.depths.tolist() == list(itertools.accumulate([1] * 16))
    assert set(tree.tokens.tolist()) == {0}
