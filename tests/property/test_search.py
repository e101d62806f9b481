"""The best-first tree is the top of the exhaustive tree, whatever the batches and ties."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.drafting.search import ROOT, Frontier, grow_tree
from specexec_cli.lab.baselines.searches import grow_in_rounds

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
        arrays = (frontier.ids, frontier.tokens, frontier.parents, frontier.depths)
        assert all(array.dtype == np.int64 for array in arrays)
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
    arrays = (tree.tokens, tree.parents, tree.depths, result.ids)
    assert all(array.dtype == np.int64 for array in arrays)
    assert tree.log_probs.dtype == np.float64
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


class Stops:
    """A Worth that lets `steps` frontiers pass, keeps `size` nodes and remembers what it saw."""

    def __init__(self, steps: int, size: int) -> None:
        self.steps, self.kept = steps, size
        self.seen: list[tuple[list[float], list[int]]] = []  # log-probabilities, frontier's ids
        self.sized: list[list[float]] = []

    def goes_on(self, log_probs: np.ndarray, frontier: Frontier) -> bool:
        self.seen.append((log_probs.tolist(), frontier.ids.tolist()))
        return len(self.seen) <= self.steps

    def size(self, log_probs: np.ndarray) -> int:
        self.sized.append(log_probs.tolist())
        return self.kept


def pairs(frontier: Frontier, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Every node has two children: token 4 at -0.25 and token 9 at -0.5, exact in binary."""
    count = len(frontier.ids)
    return np.tile([-0.25, -0.5], (count, 1)), np.tile([4, 9], (count, 1))


def test_worth_ends_the_search_and_trims_the_tree():
    worth = Stops(steps=2, size=3)
    result = grow_tree(pairs, TreeConfig(budget=8, max_depth=1, batch=2), 6, worth)
    level_1, level_2, level_3 = [-0.25, -0.5], [-0.5, -0.75, -0.75, -1.0], [-0.75, -1.0, -1.0]
    assert worth.seen == [
        (level_1, [0, 1]),
        (level_1 + level_2, [2, 3]),  # the best two of four; 4 is as good as 3 and younger
        (level_1 + level_2 + [*level_3, -1.25], [4, 6]),
    ]
    assert worth.sized == [worth.seen[-1][0]]
    assert result.ids.tolist() == [0, 1, 2]
    assert result.tree.log_probs.tolist() == [-0.25, -0.5, -0.5]
    assert result.tree.tokens.tolist() == [4, 9, 4]
    assert result.tree.parents.tolist() == [ROOT, ROOT, 0]


def test_worth_cannot_exceed_the_budget():
    worth = Stops(steps=9, size=99)
    assert len(grow_tree(pairs, TreeConfig(budget=5, max_depth=1, batch=2), 6, worth).tree) == 5


def test_no_possible_token_is_an_empty_tree():
    """A draft model whose logits are not numbers; nobody asks how much of nothing to keep."""

    def nothing(frontier: Frontier, width: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full((1, 3), NEVER), np.arange(3)[None]

    worth = Stops(steps=9, size=1)
    result = grow_tree(nothing, TreeConfig(budget=4, max_depth=1), 4, worth)
    assert len(result.tree) == len(result.ids) == 0
    assert (worth.seen, worth.sized) == ([], [])


@pytest.mark.parametrize(("budget", "width"), [(1, 1), (5, 5), (1024, 1024), (1025, 1024)])
def test_no_more_children_are_asked_for_than_a_tree_can_hold(budget: int, width: int):
    widths = []

    def expand(frontier: Frontier, width: int) -> tuple[np.ndarray, np.ndarray]:
        widths.append(width)
        return pairs(frontier, width)

    grow_tree(expand, TreeConfig(budget=budget, max_depth=1), 3)
    assert set(widths) == {width}
    assert len(widths) > 1 or budget == 1


def test_what_cannot_enter_the_tree_is_neither_run_nor_remembered():
    """Two nodes fit. -0.25 then -0.5 is as good as the second of them: it comes too late."""
    worth = Stops(steps=9, size=2)
    result = grow_tree(pairs, TreeConfig(budget=2, max_depth=1, batch=4), 6, worth)
    # node 1 is at the threshold: its children would be below it
    assert worth.seen == [([-0.25, -0.5], [0])]
    assert worth.sized == [[-0.25, -0.5]]
    assert result.ids.tolist() == [0, 1]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), budget=st.integers(1, 30), coarse=st.booleans())
def test_one_at_a_time_only_nodes_of_the_tree_are_run(seed, budget, coarse):
    """Dijkstra's order: the best open node first, so none is run in vain."""
    toy = Toy(seed, 4, coarse)
    result = grow_tree(toy.expand, TreeConfig(budget=budget, max_depth=1, batch=1), 5)
    assert set(toy.paths) - {ROOT} <= set(result.ids.tolist())


def test_ties_go_to_the_older_node():
    """Hundreds of them, and an order that a sort which is not stable would not keep."""
    first = np.where(np.arange(300) % 3 == 0, -1.0, -2.0)
    batches = []

    def expand(frontier: Frontier, width: int) -> tuple[np.ndarray, np.ndarray]:
        batches.append(frontier.ids.tolist())
        if frontier.ids[0] == ROOT:
            return first[None, :width], np.arange(300)[None, :width]
        return np.full((len(frontier.ids), 1), -5.0), np.zeros((len(frontier.ids), 1), np.int64)

    result = grow_tree(expand, TreeConfig(budget=400, max_depth=1, batch=30), 2)
    likelier, others = list(range(0, 300, 3)), [n for n in range(300) if n % 3]
    assert [node for batch in batches[1:] for node in batch] == likelier + others
    # children in the order of their parents, the first hundred of them within the budget
    assert result.ids.tolist() == list(range(400))
    assert result.tree.parents.tolist() == [ROOT] * 300 + likelier


def _same_children(asked: list[int]):
    """Every node's children are tokens 0, 1, 2 of probabilities .6, .3 and .1."""

    def expand(frontier: Frontier, width: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append(len(frontier.ids))
        shape = (len(frontier.ids), 1)
        log_probs = np.tile(np.log([0.6, 0.3, 0.1]), shape)[:, :width]
        return log_probs, np.tile(np.arange(3), shape)[:, :width]

    return expand


def test_algorithm_2_of_specexec_by_hand():
    """K, D, B = 4, 4, 2, in the words of the printed algorithm.

    Round 1 takes the root. Round 2 takes 0 (.6) and 1 (.3). Round 3 takes 00 (.36) and 01 (.18, as
    10, which is younger); the tree has K nodes, so T is .18. Round 4 takes 000 (.216), but not
    10, which is not beyond T. Trimmed to K: 0, 00, 1 and 000.
    """
    asked: list[int] = []
    config = TreeConfig(budget=4, max_depth=4, batch=2)
    tree = grow_in_rounds(_same_children(asked), config, 64).tree
    assert sorted(paths_of(tree)) == [(0,), (0, 0), (0, 0, 0), (1,)]
    assert np.exp(np.sort(tree.log_probs)) == pytest.approx([0.216, 0.3, 0.36, 0.6])
    assert asked == [1, 2, 2], "one pass a round, but for round 4, of which nothing is read"


def _rounds_as_printed(toy: Toy, config: TreeConfig, longest: int) -> dict[Path, float]:
    """Algorithm 2 in plain lists, a queue of (path, score) in which older nodes come first."""

    def children(path: Path, score: float) -> list[tuple[Path, float]]:
        values = toy.log_probs(path)
        best = np.argsort(-values, kind="stable")[: config.budget]
        return [((*path, int(token)), score + values[token]) for token in best
                if values[token] > NEVER]  # fmt: skip

    queue, tree = children((), 0.0), []
    for last in range(2, config.max_depth + 1):
        scores = sorted((score for _, score in tree), reverse=True)
        threshold = scores[config.budget - 1] if len(scores) >= config.budget else NEVER
        beyond = [node for node in queue if node[1] > threshold]
        chosen = sorted(beyond, key=lambda node: -node[1])[: config.batch]
        if not chosen:
            break
        queue = [node for node in queue if node not in chosen]
        tree += chosen
        if last < config.max_depth:
            queue += [child for path, score in chosen if len(path) < longest
                      for child in children(path, score)]  # fmt: skip
            kept = sorted(queue, key=lambda node: -node[1])[: config.budget]
            queue = [node for node in queue if node in kept]
    return dict(tree)


@given(
    seed=st.integers(0, 1000), vocab=st.integers(1, 6), coarse=st.booleans(),
    budget=st.integers(1, 24), depth=st.integers(1, 8), batch=st.integers(1, 8),
    longest=st.integers(1, 8),
)  # fmt: skip
def test_rounds_take_what_the_printed_algorithm_takes(
    seed, vocab, coarse, budget, depth, batch, longest
):
    """The same nodes with the same scores, the worst left out where there are more than K."""
    config = TreeConfig(budget=budget, max_depth=min(depth, budget), batch=batch)
    found = grow_in_rounds(Toy(seed, vocab, coarse).expand, config, longest).tree
    printed = _rounds_as_printed(Toy(seed, vocab, coarse), config, longest)
    assert len(found) == min(len(printed), budget)
    scores = dict(zip(paths_of(found), found.log_probs.tolist(), strict=True))
    assert {path: printed[path] for path in scores} == pytest.approx(scores)
    left = [score for path, score in printed.items() if path not in scores]
    assert max(left, default=NEVER) <= min(scores.values(), default=0.0) + 1e-12


def test_rounds_bound_the_tree_where_the_default_fills_its_budget():
    """K, D, B = 8, 4, 2: (D - 1) B = 6 nodes, those that were taken; and 10 is one of them."""
    asked: list[int] = []
    config = TreeConfig(budget=8, max_depth=4, batch=2)
    tree = grow_in_rounds(_same_children(asked), config, 64).tree
    assert sorted(paths_of(tree)) == [(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0)]
    assert len(asked) == 3
    assert len(grow_tree(_same_children([]), config, 4).tree) == 8


def test_rounds_never_pass_what_could_be_committed():
    config = TreeConfig(budget=64, max_depth=12, batch=4)
    tree = grow_in_rounds(_same_children([]), config, 2).tree
    assert tree.depths.max() == 2
    alone = TreeConfig(budget=1, max_depth=1, batch=1)
    assert len(grow_in_rounds(_same_children([]), alone, 5).tree) == 0, "the root was the round"
