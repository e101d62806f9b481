"""When trees are given up and tried again, under a clock of our own."""

from __future__ import annotations

import pytest

from specexec_cli.core import StepResult
from specexec_cli.drafting.pauses import Pauses

PASSES = 600


def step(nodes: int, draft_s: float) -> StepResult:
    return StepResult(
        tokens=(0,), drafted=(False,), tree_nodes=nodes, tree_depth=1, draft_s=draft_s,
        verify_s=1.0, bytes_streamed=0, pending_rows=1,
    )  # fmt: skip


def session(pauses: Pauses, tokens: float, draft_s: float, *, doubted: bool) -> tuple[float, int]:
    """Tokens over those that plain decoding writes in the same time, and the trees grown.

    Args:
        tokens: of a pass with a tree.
        draft_s: of a tree; a pass takes one second.
        doubted: whether the cost model expects the trees to be slower than none.
    """
    written = seconds = 0.0
    trees = 0
    for _ in range(PASSES):
        without = pauses.goes_without(1.0)
        took = step(0, 0.0) if without else step(4, draft_s)
        pauses.observe(took, 1.0 if without else tokens, doubted and not without)
        written += 1.0 if without else tokens
        seconds += took.draft_s + took.verify_s
        trees += not without
    return written / seconds, trees


@pytest.mark.parametrize(("draft_s", "loss"), [(2.0, 0.02), (5.0, 0.06)])
def test_where_no_tree_can_pay_one_in_each_trial_tells(draft_s: float, loss: float) -> None:
    rate, trees = session(Pauses(), 1.5, draft_s, doubted=True)
    assert trees <= 8, "one behind each of the pauses of 8, 16, 32, 64 and 128 passes"
    assert rate > 1.0 - loss


def test_a_model_that_does_not_doubt_is_given_more_trees() -> None:
    _, trees = session(Pauses(), 1.5, 2.0, doubted=False)
    assert 16 < trees < 60


@pytest.mark.parametrize("doubted", [False, True])
def test_trees_that_pay_are_never_given_up(doubted: bool) -> None:
    assert session(Pauses(), 2.1, 1.0, doubted=doubted) == (pytest.approx(1.05), PASSES)


def test_trees_that_come_to_pay_later_are_taken_up_again() -> None:
    pauses = Pauses()
    session(pauses, 1.5, 2.0, doubted=True)
    _, trees = session(pauses, 3.0, 1.0, doubted=False)
    assert trees > PASSES / 2
