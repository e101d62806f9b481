"""Budget policies: tree sizes under a virtual clock, and the schedule of the heuristic one."""

from __future__ import annotations

import numpy as np
import pytest
from policy_toys import (
    HIDDEN,
    RESIDENT,
    STEEP,
    STREAMED,
    Seconds,
    Text,
    no_signals,
    outcome,
    tree_of,
)

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.drafting.classifier import FEATURES, Classifier
from specexec_cli.drafting.iteration_cost import CostModel, IterationCost
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.policies.cost import Cost
from specexec_cli.drafting.policies.disco import Disco
from specexec_cli.drafting.policies.fixed import Fixed
from specexec_cli.drafting.policies.heuristic import Heuristic
from specexec_cli.drafting.search import Search, grow_tree
from specexec_cli.errors import ConfigError
from specexec_cli.lab.baselines.oracle import Oracle
from specexec_cli.lab.baselines.searches import grow_chain


def tokens_per_s(
    config: TreeConfig, seconds: Seconds, iterations: int, warm_up: int, chances: list[float]
) -> float:
    """Of a policy on a stationary workload, under a clock that only `seconds` moves."""
    policy, text = Learned().policy(config), Text(chances, seed=1)
    tokens, clock = 0.0, 0.0
    for iteration in range(iterations):
        text.steps = 0
        tree = policy.grow(tree_of(text.expand, config.max_depth)).tree
        rows, steps = len(tree) + 1, text.steps
        policy.observe(outcome(tree, text.accepted(tree), 0.01 * steps, seconds(rows, steps)))
        if iteration >= warm_up:
            # what the tree promises, for the draft model is right about its chances: the luck
            # of the draws is left out of the comparison
            tokens += 1.0 + float(np.exp(tree.log_probs).sum())
            clock += seconds(rows, steps)
    return tokens / clock


@pytest.mark.parametrize("seconds", [STREAMED, HIDDEN, RESIDENT, STEEP])
@pytest.mark.parametrize("chances", [[0.8, 0.1, 0.05], [0.4, 0.2, 0.1, 0.1], [0.95]])
def test_cost_is_within_two_percent_of_the_best_fixed_budget(
    seconds: Seconds, chances: list[float]
) -> None:
    fixed = {
        (budget, depth): tokens_per_s(
            TreeConfig(budget=budget, max_depth=depth, batch=8), seconds, 1, 0, chances
        )
        for budget in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
        for depth in (1, 2, 4, 8, 16, 32)
        if depth <= budget
    }
    cost = TreeConfig(budget=256, max_depth=32, batch=8, policy="cost")
    assert tokens_per_s(cost, seconds, 160, 100, chances) >= 0.98 * max(fixed.values())


def test_the_fit_finds_the_knee_and_what_a_step_adds() -> None:
    cost, rng = IterationCost(), np.random.default_rng(0)
    for _ in range(64):
        rows, steps = int(rng.integers(2, 200)), int(rng.integers(1, 20))
        total_s = max(1.0, rows / 100) + 0.02 * steps + 0.005 * rng.standard_normal()
        cost.observe(rows, steps, 0.05 * steps, total_s)
    found = cost.seconds(np.array([10.0, 90.0, 150.0, 190.0]), 10)
    np.testing.assert_allclose(found, [1.2, 1.2, 1.7, 2.1], rtol=0.06)
    assert cost.seconds(np.array([50.0]), 20)[0] - found[0] == pytest.approx(0.2, abs=0.03)


def passes(cost: IterationCost, text: Text, seconds: Seconds, count: int) -> list[float]:
    """Tokens per second, expected, of each of the next iterations of a machine."""
    config = TreeConfig(budget=128, max_depth=32, batch=8, policy="cost")
    policy, rates = Cost(config, cost), []
    for _ in range(count):
        text.steps = 0
        tree = policy.grow(tree_of(text.expand, config.max_depth)).tree
        rows, steps = len(tree) + 1, text.steps
        policy.observe(outcome(tree, text.accepted(tree), 0.01 * steps, seconds(rows, steps)))
        rates.append((1.0 + float(np.exp(tree.log_probs).sum())) / STREAMED(rows, steps))
    return rates


@pytest.mark.parametrize("stall_s", [5.0, 60.0, 600.0])
def test_a_stall_is_an_outlier_and_not_a_price(stall_s: float) -> None:
    """Back within 10 % of the rate before it within five iterations."""
    cost, text = IterationCost(), Text([0.8, 0.1, 0.05], seed=2)
    before = passes(cost, text, STREAMED, 40)
    passes(cost, text, lambda rows, steps: stall_s + STREAMED(rows, steps), 1)
    after = passes(cost, text, STREAMED, 40)
    usual = float(np.mean(before[-20:]))
    assert np.mean(after[5:10]) > 0.9 * usual
    assert np.mean(after[10:]) > 0.95 * usual
    assert max(total_s for _, _, _, total_s in cost.typical) < stall_s


@pytest.mark.parametrize("slower", [0.5, 2.0, 5.0])
def test_a_machine_that_has_changed_is_believed_soon(slower: float) -> None:
    cost, text = IterationCost(), Text([0.8, 0.1], seed=3)
    passes(cost, text, STREAMED, 40)
    passes(cost, text, lambda rows, steps: slower * STREAMED(rows, steps), 12)
    told = cost.seconds(np.array([20.0]), 4)
    np.testing.assert_allclose(told, slower * STREAMED(20, 4), rtol=0.15)


def test_the_first_iterations_are_not_kept_as_usual() -> None:
    cost = IterationCost()
    cost.observe(60, 4, 0.05, 600.0)
    assert cost.typical == []


@pytest.mark.parametrize("noise", [0.05, 0.5])
@pytest.mark.parametrize(
    ("seconds", "prior"),
    [
        (STREAMED, CostModel(base_s=1.0, row_s=1 / 60, knee_rows=60.0, step_s=0.01)),
        (RESIDENT, CostModel(base_s=0.03, row_s=0.004, knee_rows=0.0, step_s=0.01)),
    ],
)
def test_with_a_measured_prior_the_first_text_is_near_the_best_fixed_budget(
    seconds: Seconds, prior: CostModel, noise: float
) -> None:
    """From an empty cache, on a quiet machine and on a busy one, over 64 tokens."""
    chances = [0.75, 0.1, 0.05]

    def clock(policy: str, budget: int) -> float:
        rng = np.random.default_rng(7)
        config = TreeConfig(budget=budget, max_depth=min(24, budget), batch=8, policy=policy)
        one, text = Learned(cost_prior=lambda: prior).policy(config), Text(chances, seed=5)
        tokens, total_s = 0.0, 0.0
        while tokens < 64:
            text.steps = 0
            tree = one.grow(tree_of(text.expand, config.max_depth)).tree
            rows, steps = len(tree) + 1, text.steps
            took = seconds(rows, steps) * float(rng.lognormal(0.0, noise))
            one.observe(outcome(tree, text.accepted(tree), 0.01 * steps, took))
            tokens += 1.0 + float(np.exp(tree.log_probs).sum())
            total_s += seconds(rows, steps)
        return total_s

    best = min(clock("fixed", budget) for budget in (1, 2, 4, 8, 16, 32, 64, 128))
    assert clock("cost", 128) <= 1.2 * best


def test_a_prompt_in_the_pass_leaves_less_room_below_the_knee() -> None:
    cost = IterationCost()
    for rows in (8, 16, 32, 64, 96, 128) * 4:
        cost.observe(rows, 2, 0.02, max(1.0, rows / 60))
    policy, text = Cost(TreeConfig(budget=128, policy="cost"), cost), Text([0.6, 0.3], seed=0)
    alone = policy.grow(tree_of(text.expand, 8)).tree
    beside = policy.grow(tree_of(text.expand, 8, pending=40)).tree
    assert len(alone) > 40
    assert len(beside) < 30


def test_the_heuristic_schedule() -> None:
    policy = Heuristic(TreeConfig(budget=64, max_depth=8))
    depths = []
    text = Text([0.9], seed=0)
    for reached in (True, True, False, False, True):
        tree = policy.grow(tree_of(text.expand, 8)).tree
        depth = int(tree.depths.max())
        depths.append(depth)
        policy.observe(outcome(tree, depth if reached else depth - 1, 0.0, 1.0))
    assert depths == [5, 7, 8, 7, 6]


def test_a_prompt_teaches_the_cost_nothing() -> None:
    cost = IterationCost()
    Cost(TreeConfig(policy="cost"), cost).observe(
        StepResult(
            tokens=(1,),
            drafted=(False,),
            tree_nodes=8,
            tree_depth=2,
            draft_s=1.0,
            verify_s=500.0,
            bytes_streamed=0,
            pending_rows=900,
        )
    )
    assert cost.most_rows == 0


@pytest.mark.parametrize("name", ["fixed", "heuristic", "cost"])
def test_trees_stay_within_budget_and_depth(name: str) -> None:
    policy = Learned().policy(TreeConfig(budget=20, max_depth=6, policy=name))
    text = Text([0.6, 0.3], seed=3)
    for limit in (9, 3, 1):
        tree = policy.grow(tree_of(text.expand, limit)).tree
        assert 1 <= len(tree) <= 20
        assert int(tree.depths.max()) <= min(limit, 6)


def eager(threshold: float, max_length: int = 32) -> Classifier:
    """Finds a token the more likely to be accepted the higher the first signal is."""
    weight = np.zeros((1, FEATURES))
    weight[0, 0] = 1.0
    return Classifier(
        {
            "norm.mean": np.zeros(FEATURES),
            "norm.scale": np.ones(FEATURES),
            "hidden.weight": weight,
            "hidden.bias": np.zeros(1),
            "out.weight": np.full((1, 1), 10.0),
            "out.bias": np.full(1, -5.0),
        },
        threshold,
        max_length,
    )


@pytest.mark.parametrize("search", [grow_chain, grow_tree])
def test_disco_drafts_until_the_classifier_doubts(search: Search) -> None:
    text = Text([0.7], seed=0)

    def signals(ids: np.ndarray) -> np.ndarray:
        found = no_signals(ids)
        found[:, 0] = ids < 3  # sure of the children of the root and of nodes 0, 1 and 2
        return found

    def depth(classifier: Classifier, max_depth: int = 20, of_tree: int = 20) -> int:
        tree = TreeConfig(budget=20, max_depth=of_tree, policy="disco")
        policy = Learned(lambda: classifier).policy(tree)
        return int(
            policy.grow(
                tree_of(text.expand, max_depth, search=search, signals=signals)
            ).tree.depths.max()
        )

    # the doubtful token has been drafted when it is found doubtful
    assert depth(eager(0.5)) == 5
    assert depth(eager(0.5, max_length=3)) == 3
    assert depth(eager(0.5), max_depth=2) == 2
    assert depth(eager(0.5), of_tree=3) == 3
    assert depth(eager(0.0)) == 20
    assert depth(eager(1.0)) == 1


def test_disco_goes_on_at_its_threshold() -> None:
    text = Text([0.7], seed=0)
    policy = Disco(TreeConfig(budget=4, max_depth=4, policy="disco"), eager(0.5))

    def signals(ids: np.ndarray) -> np.ndarray:
        found = no_signals(ids)
        found[:, 0] = 0.5  # where this classifier's chance is one half
        return found

    assert len(policy.grow(tree_of(text.expand, 4, search=grow_chain, signals=signals)).tree) == 4


def test_the_oracle_drafts_to_the_first_wrong_token() -> None:
    text = Text([0.9], seed=0)  # drafts token 0 and nothing else
    tree = TreeConfig(budget=8, max_depth=8, policy="oracle")
    learned = Learned()
    with pytest.raises(ConfigError, match="`policy='oracle'` must know the text to come"):
        learned.policy(tree)
    learned.use(tree, Oracle(tree, [0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0]))
    policy = learned.policy(tree)
    lengths = []
    for accepted in (2, 8):
        grown = policy.grow(tree_of(text.expand, 8, search=grow_chain)).tree
        lengths.append(len(grown))
        policy.observe(outcome(grown, accepted, 0.0, 1.0))
    assert lengths == [3, 8]


def test_a_fixed_tree_is_as_large_as_it_may_be() -> None:
    text = Text([0.9], seed=0)  # drafts token 0 and nothing else
    policy = Fixed(TreeConfig(budget=9, max_depth=4))
    lengths = [
        len(policy.grow(tree_of(text.expand, limit, search=grow_chain)).tree) for limit in (9, 2, 9)
    ]
    assert lengths == [4, 2, 4]


def test_a_heuristic_tree_has_its_depth_s_share_of_the_budget() -> None:
    policy, text = Heuristic(TreeConfig(budget=64, max_depth=8)), Text([0.3, 0.3, 0.3], seed=0)
    sizes = []
    for reached in (True, True, False, False):
        tree = policy.grow(tree_of(text.expand, 8)).tree
        sizes.append(len(tree))
        policy.observe(outcome(tree, int(tree.depths.max()) if reached else 0, 0.0, 1.0))
    assert sizes == [40, 56, 64, 56], "of depths 5, 7, 8 and 7 of 8"
    narrow = Heuristic(TreeConfig(budget=9, max_depth=8))
    assert len(narrow.grow(tree_of(text.expand, 8)).tree) == 5, "room for one path"


def test_the_heuristic_depth_stays_between_one_and_the_tree_s() -> None:
    policy, text = Heuristic(TreeConfig(budget=9, max_depth=9)), Text([0.9], seed=0)
    depths = []
    for reached in [False] * 6 + [True] * 6:
        tree = policy.grow(tree_of(text.expand, 9, search=grow_chain)).tree
        depths.append(len(tree))
        policy.observe(outcome(tree, len(tree) if reached else 0, 0.0, 1.0))
        policy.observe(outcome(DraftTree.empty(), 0, 0.0, 1.0))  # nothing was drafted: no news
    assert depths == [5, 4, 3, 2, 1, 1, 1, 3, 5, 7, 9, 9]
    assert len(policy.grow(tree_of(text.expand, 9, search=grow_chain)).tree) == 9
    assert len(policy.grow(tree_of(text.expand, 4, search=grow_chain)).tree) == 4, (
        "no room for more"
    )
    small = Heuristic(TreeConfig(budget=3, max_depth=3))
    assert len(small.grow(tree_of(text.expand, 9, search=grow_chain)).tree) == 3


def test_the_oracle_keeps_to_depth_and_text() -> None:
    text = Text([0.9], seed=0)  # drafts token 0 and nothing else
    policy = Oracle(TreeConfig(budget=8, max_depth=4, policy="oracle"), [0] * 6)
    lengths = []
    for limit in (9, 2, 9):
        grown = policy.grow(tree_of(text.expand, limit, search=grow_chain)).tree
        lengths.append(len(grown))
        policy.observe(outcome(grown, 1, 0.0, 1.0))
    assert lengths == [4, 2, 3], "the third ends at its first wrong token"
    assert policy.size(np.zeros(3)) == 3


def clock_of(config: TreeConfig, seconds: Seconds, chances: list[float], count: int):
    """Tokens and seconds of so many iterations, and which of them had a tree."""
    policy, text = Learned().policy(config), Text(chances, seed=1)
    tokens, clock, drafted = 0, 0.0, []
    for _ in range(count):
        text.steps = 0
        tree = policy.grow(tree_of(text.expand, config.max_depth)).tree
        accepted = text.accepted(tree)
        draft_s = seconds(len(tree) + 1, text.steps) - seconds(len(tree) + 1, 0)
        spent = seconds(len(tree) + 1, text.steps)
        policy.observe(outcome(tree, accepted, draft_s, spent))
        tokens, clock = tokens + accepted + 1, clock + spent
        drafted.append(len(tree) > 0)
    return tokens, clock, drafted


COST = TreeConfig(budget=64, max_depth=16, batch=8, policy="cost")


def test_drafting_stops_where_plain_decoding_is_faster_and_is_tried_again() -> None:
    """A draft step as slow as two passes: no tree can pay."""
    tokens, clock, drafted = clock_of(COST, lambda rows, steps: 1.0 + 2.0 * steps, [0.5, 0.2], 400)
    assert clock / tokens < 1.25, "a plain pass takes one second and brings one token"
    assert any(drafted[:8])
    assert sum(drafted[8:]) < 60
    assert any(drafted[200:]), "it is tried again"


def test_drafting_goes_on_again_where_the_machine_has_changed() -> None:
    steps_s = 2.0

    def seconds(rows: int, steps: int) -> float:
        return 1.0 + steps_s * steps

    policy, text = Learned().policy(COST), Text([0.8, 0.1], seed=1)
    drafted = []
    for iteration in range(500):
        steps_s = 2.0 if iteration < 100 else 0.01
        text.steps = 0
        tree = policy.grow(tree_of(text.expand, COST.max_depth)).tree
        spent = seconds(len(tree) + 1, text.steps)
        policy.observe(outcome(tree, text.accepted(tree), steps_s * text.steps, spent))
        drafted.append(len(tree) > 0)
    assert sum(drafted[20:100]) < 30
    assert sum(drafted[300:]) > 150


@pytest.mark.parametrize("seconds", [STREAMED, HIDDEN, RESIDENT])
def test_drafting_never_stops_where_it_pays(seconds: Seconds) -> None:
    _, _, drafted = clock_of(COST, seconds, [0.8, 0.1, 0.05], 200)
    assert all(drafted)


def test_a_wrong_guess_of_the_plain_pass_costs_a_few_passes_at_most() -> None:
    """Passes below 64 rows take the same; a fit that extrapolates to one row may say otherwise."""
    _, _, drafted = clock_of(
        COST, lambda rows, steps: 1.0 + 0.05 * max(0, rows - 64) + 0.05 * steps, [0.6, 0.2], 300
    )
    assert sum(drafted) > 270


def test_trees_fill_the_blocks_that_a_gpu_multiplies() -> None:
    """Rows beyond a full block are paid for a block at a time, the root among them."""
    block_s, rows = 0.2, []
    prior = CostModel(base_s=0.1, row_s=block_s / 128, knee_rows=64.0, step_s=0.001, block_rows=128)
    tree_config = TreeConfig(budget=600, max_depth=32, policy="cost")
    policy, text = Cost(tree_config, IterationCost(prior)), Text([0.7, 0.2], seed=6)
    for _ in range(40):
        text.steps = 0
        tree = policy.grow(tree_of(text.expand, 32)).tree
        rows.append(len(tree) + 1)
        draft_s = 0.001 * text.steps
        total_s = block_s * -(-rows[-1] // 128) + draft_s
        policy.observe(outcome(tree, text.accepted(tree), draft_s, total_s))
    full = [count for count in rows if count % 128 == 0]
    assert len(full) > 0.8 * len(rows), rows


@pytest.mark.parametrize(
    ("row_s", "chances", "most"),
    [
        (0.9, [0.3, 0.2], 0.1),  # a row costs nearly a pass, and brings a third of a token
        (0.0, [0.3, 0.2], 1.0),  # rows are free
        (0.1, [0.8, 0.1], 1.0),
    ],
)
def test_where_no_tree_pays_there_is_none(row_s: float, chances: list[float], most: float) -> None:
    """As on a sparse mixture, whose rows each read experts of their own."""
    prior = CostModel(base_s=1.0, row_s=row_s, knee_rows=1.0, step_s=0.01)
    cost, text = IterationCost(prior), Text(chances, seed=4)
    policy = Cost(TreeConfig(budget=64, max_depth=16, batch=8, policy="cost"), cost)
    trees, spent_s, tokens = 0, 0.0, 0
    for _ in range(200):
        text.steps = 0
        tree = policy.grow(tree_of(text.expand, 16)).tree
        accepted = text.accepted(tree)
        total_s = 1.0 + row_s * len(tree) + 0.01 * text.steps
        policy.observe(outcome(tree, accepted, 0.01 * text.steps, total_s))
        trees += len(tree) > 0
        spent_s, tokens = spent_s + total_s, tokens + 1 + accepted
    if most < 1.0:
        assert trees < most * 200
        assert tokens / spent_s > 0.96  # passes without a tree give one token a second
    else:
        assert trees > 0.95 * 200
        assert tokens / spent_s > 1.1
