"""The cost model of iterations: exact machines are found, and stalls told from changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specexec_cli.drafting.iteration_cost import CostModel, IterationCost

PRIOR = CostModel(base_s=0.5, row_s=0.004, knee_rows=20.0, step_s=0.03)
ROWS = np.array([1.0, 8.0, 20.0, 33.0, 100.0, 256.0])


def seconds(model: CostModel, rows: int, steps: int) -> float:
    return float(model.seconds(np.array([float(rows)]), steps)[0])


def observe(cost: IterationCost, model: CostModel, rows: int, steps: int, times: float = 1.0):
    """One iteration of a machine that is exactly so; every draft second counts."""
    cost.observe(rows, steps, times * model.step_s * steps, times * seconds(model, rows, steps))


def fed(prior: CostModel | None, model: CostModel, count: int) -> IterationCost:
    cost, rng = IterationCost(prior), np.random.default_rng(5)
    for _ in range(count):
        observe(cost, model, int(rng.integers(1, 200)), int(rng.integers(1, 12)))
    return cost


def fields(model: CostModel) -> list[float]:
    return [model.base_s, model.row_s, model.knee_rows, model.step_s]


@pytest.mark.parametrize("count", [6, 24, 25, 60])
def test_a_machine_with_the_prior_s_knee_is_found_exactly(count: int) -> None:
    """Faster than the prior by some factor, which its level takes in."""
    machine = CostModel(base_s=0.2, row_s=0.0016, knee_rows=20.0, step_s=0.012)
    cost = fed(PRIOR, machine, count)
    assert cost.prior == PRIOR
    np.testing.assert_allclose(cost.seconds(ROWS, 0), machine.seconds(ROWS, 0), rtol=0.02)
    if count >= 24:  # the prior has had its say, and its steps with it
        np.testing.assert_allclose(fields(cost.model), fields(machine), rtol=1e-6)


@pytest.mark.parametrize("count", [2, 6])
def test_a_prior_that_is_right_stays_as_it_is(count: int) -> None:
    dear_steps = CostModel(base_s=0.5, row_s=0.004, knee_rows=20.0, step_s=0.3)
    found = fed(dear_steps, dear_steps, count).model
    np.testing.assert_allclose(fields(found), fields(dear_steps), rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_noise_makes_no_knee(seed: int) -> None:
    cost, rng = IterationCost(), np.random.default_rng(seed)
    for _ in range(24):
        rows, steps = int(rng.integers(1, 160)), int(rng.integers(1, 9))
        exact = 0.3 + 0.01 * rows + 0.02 * steps
        cost.observe(rows, steps, 0.02 * steps, exact * float(rng.lognormal(0.0, 0.1)))
    assert cost.model.knee_rows == 0.0


def test_nothing_costs_less_than_nothing_nor_a_step_more_than_it_takes() -> None:
    """Whatever the fit would like: fewer seconds for more rows, none for a pass, dearer steps."""
    falling, free, dear = IterationCost(), IterationCost(), IterationCost()
    for rows in range(10, 60, 5):
        steps = 1 + rows % 4
        falling.observe(rows, steps, 0.01, 2.0 - 0.01 * rows)
        free.observe(10, steps, 0.5 * steps, 0.5 * steps - 0.2)
        dear.observe(rows, steps, 0.01 * steps, 1.0 + 0.1 * steps)
    assert falling.model.row_s == 0.0
    assert free.model.base_s == 1e-9
    assert dear.model.step_s == pytest.approx(0.01)


def test_iterations_without_steps_tell_of_rows_alone() -> None:
    cost = IterationCost()
    for rows in (10, 20, 30, 40):
        cost.observe(rows, 0, 0.0, 1.0 + 0.01 * rows)
    np.testing.assert_allclose(fields(cost.model), [1.0, 0.01, 0.0, 0.0], atol=1e-9)


def test_a_step_is_taken_to_cost_what_it_takes_until_the_fit_knows_better() -> None:
    one = IterationCost(PRIOR)
    one.observe(8, 1, 0.2, 0.9)
    assert 0.1 < one.model.step_s <= 0.2, "the prior's level takes a part"
    cost = IterationCost()
    for rows, steps in ((10, 0), (20, 1), (30, 0), (40, 1)):
        cost.observe(rows, steps, 0.1 * steps, 1.0 + 0.01 * rows + 0.05 * steps)
    # the normal equations, solved: the four iterations, and half an iteration of one step for 0.1 s
    np.testing.assert_allclose(fields(cost.model), [1.0, 1 / 104, 0.0, 0.9 / 13], atol=1e-9)


def test_a_level_that_rises_slowly_is_no_change() -> None:
    """The last ones are told by those before them, not by the first."""
    cost = steady(5)
    for rows in (12, 150, 30, 100, 64) * 3:
        observe(cost, PRIOR, rows, 4, times=1.4)
    for rows in (12, 150, 30, 100, 64):
        observe(cost, PRIOR, rows, 4, times=1.9)
    assert cost.iterations == 25


def test_a_machine_without_a_knee_is_found_exactly() -> None:
    machine = CostModel(base_s=0.2, row_s=0.002, knee_rows=0.0, step_s=0.012)
    np.testing.assert_allclose(fields(fed(None, machine, 12).model), fields(machine), atol=1e-9)


def test_one_slow_iteration_tells_of_arithmetic_and_those_of_fewer_rows_of_the_stream() -> None:
    cost = IterationCost(PRIOR)
    assert cost.model == PRIOR
    observe(cost, PRIOR, 64, 4, times=3.0)
    arithmetic = 3.0 * (PRIOR.base_s + PRIOR.row_s * (ROWS - PRIOR.knee_rows))
    np.testing.assert_allclose(cost.seconds(ROWS, 0), arithmetic, rtol=0.02)
    assert cost.model.step_s == pytest.approx(3.0 * PRIOR.step_s)
    for rows in (20, 8, 2):
        observe(cost, PRIOR, rows, 4, times=3.0)
    np.testing.assert_allclose(cost.seconds(ROWS, 0), 3.0 * PRIOR.seconds(ROWS, 0), rtol=0.1)
    nothing = IterationCost()
    nothing.observe(64, 4, 0.1, 7.0)
    np.testing.assert_array_equal(nothing.seconds(ROWS, 3), 1.0)  # of one there is nothing to tell


def test_what_the_ssd_took_tells_where_the_knee_is() -> None:
    """A pass of 64 rows as slow as expected, over a link that is twice as fast as expected."""
    cost = IterationCost(PRIOR)
    expected_s = seconds(PRIOR, 64, 4)
    cost.observe(64, 4, 4 * PRIOR.step_s, expected_s, read_s=PRIOR.base_s / 2)
    arithmetic = PRIOR.base_s + PRIOR.row_s * (ROWS - PRIOR.knee_rows)
    wanted = np.maximum(PRIOR.base_s / 2, arithmetic)
    np.testing.assert_allclose(cost.seconds(ROWS, 0), wanted, rtol=0.03)


def test_a_slower_stream_hides_more_rows() -> None:
    """Its arithmetic is as fast as the prior says, so what took twice as long is the link."""
    cost = IterationCost(PRIOR)
    slow_link = replace(PRIOR, base_s=2 * PRIOR.base_s, knee_rows=145.0)
    for rows in (10, 40, 2, 80, 20, 60):
        observe(cost, slow_link, rows, 4)
    assert cost.model.knee_rows == pytest.approx(145.0, rel=0.1)
    np.testing.assert_allclose(cost.seconds(ROWS, 0), slow_link.seconds(ROWS, 0), rtol=0.1)


# A machine unlike the prior, with noise: base, row, knee and step by iterations seen, as the fit
# gave them when its trees were measured to be good (tests/unit/test_policies.py). Another fit may
# be as good; it is to be meant.
PINNED = {
    (False, 2): [0.9436980919963669, 0.002418895450336375, 0.0, 0.04],
    (False, 4): [1.0634918749227058, 0.016079295433005156, 77.77892950005776, 0.013028545361311749],
    (False, 9): [1.091018753193603, 0.014630317825819377, 73.20621889561885, 0.0],
    (False, 24): [
        0.9458655284761972,
        0.014572677789161196,
        66.41285871144875,
        0.006325655183183867,
    ],
    (False, 60): [
        0.9760251164250265,
        0.015582391276891316,
        65.84843391617754,
        0.001319803189920267,
    ],
    (False, 200): [
        0.9219973871073835,
        0.015434401878739148,
        65.50612979607408,
        0.01673523745245448,
    ],
    (True, 2): [0.9851475808266023, 0.0059469301808762936, 59.93848884661178, 0.038302026939204335],
    (True, 4): [0.9865357229881797, 0.005960271515448653, 59.938488846611776, 0.03585679724920705],
    (True, 24): [0.9458655284761972, 0.014572677789161196, 66.41285871144875, 0.006325655183183867],
    (True, 9): [0.7949886486346562, 0.006548791418519846, 0.0, 0.0012973312089076443],
}


@pytest.mark.parametrize(("has_prior", "count"), PINNED)
def test_a_noisy_machine_is_fitted_as_when_it_was_measured(has_prior: bool, count: int) -> None:
    model = noisy(PRIOR if has_prior else None, count)
    np.testing.assert_allclose(fields(model), PINNED[has_prior, count], rtol=1e-6, atol=1e-9)


def noisy(prior: CostModel | None, count: int) -> CostModel:
    cost, rng = IterationCost(prior), np.random.default_rng(11)
    for _ in range(count):
        rows, steps = int(rng.integers(1, 160)), int(rng.integers(1, 9))
        exact = max(0.9, rows / 70) + 0.02 * steps
        cost.observe(rows, steps, 0.04 * steps, exact * float(rng.lognormal(0.0, 0.1)))
    return cost.model


def test_passes_larger_than_any_seen_take_longer_where_the_prior_says_so() -> None:
    """Passes of up to 40 rows all take the same; the prior knows of a rise, at another level."""
    cost, rng = IterationCost(PRIOR), np.random.default_rng(0)
    for _ in range(20):
        rows, steps = int(rng.integers(1, 40)), int(rng.integers(1, 9))
        cost.observe(rows, steps, 0.04 * steps, (0.9 + 0.02 * steps) * rng.lognormal(0.0, 0.1))
    few_s, many_s = cost.seconds(np.array([40.0, 256.0]), 0)
    assert many_s > 1.2 * few_s


def steady(count: int) -> IterationCost:
    return fed(None, PRIOR, count)


@pytest.mark.parametrize(("times", "usual"), [(2.9, True), (3.1, False)])
def test_three_times_what_it_should_take_is_a_stall(times: float, usual: bool) -> None:
    cost = steady(20)
    observe(cost, PRIOR, 64, 4, times)
    assert len(cost.typical) == 20 + usual
    assert cost.iterations == 21
    if not usual:
        np.testing.assert_allclose(fields(cost.model), fields(PRIOR), rtol=0.05)


def test_of_fewer_than_three_none_is_typical() -> None:
    assert steady(2).typical == []
    cost = IterationCost()
    seen = [(4, 1, 0.01, 1.0), (8, 2, 0.02, 1.1), (5, 3, 0.03, 1.2)]
    for each in seen:
        cost.observe(*each)
    assert cost.typical == seen


@pytest.mark.parametrize(
    ("times", "before", "changed"),
    [(1.9, 20, True), (1.4, 20, False), (0.5, 20, True), (0.75, 20, False), (2.5, 5, True),
     (2.5, 4, False)],
)  # fmt: skip
def test_five_in_a_row_to_one_side_are_another_machine(
    times: float, before: int, changed: bool
) -> None:
    cost = steady(before)
    for rows in (12, 190, 30, 14):
        observe(cost, PRIOR, rows, 4, times)
    assert cost.iterations == before + 4
    observe(cost, PRIOR, 16, 4, times)
    assert cost.iterations == (5 if changed else before + 5)
    if changed:
        assert len(cost.typical) == 5, "of the new machine none is a stall"
        assert cost.prior == steady(before - 1).model, "the run itself had no part in it"
        np.testing.assert_allclose(cost.seconds(ROWS, 4), times * PRIOR.seconds(ROWS, 4), rtol=0.1)


def test_up_and_down_is_no_other_machine() -> None:
    cost = steady(20)
    for times in (1.8, 0.5, 1.8, 1.8, 1.8, 1.8, 0.5):
        observe(cost, PRIOR, 64, 4, times)
    assert cost.iterations == 27


def test_the_last_128_are_remembered_and_the_most_rows_of_all() -> None:
    cost = IterationCost()
    observe(cost, PRIOR, 500, 4)
    for _ in range(140):
        observe(cost, PRIOR, 20, 4)
    assert cost.iterations == 128
    assert cost.most_rows == 500
    assert {rows for rows, *_ in cost.typical} == {20}
    for _ in range(140):  # on another machine
        observe(cost, PRIOR, 20, 4, times=2.0)
    assert cost.iterations == 128


def test_what_an_earlier_session_saw_is_learned_at_once() -> None:
    first = steady(12)
    later = IterationCost()
    later.remember([])
    assert (later.iterations, later.most_rows) == (0, 0)
    later.remember(first.typical)
    assert later.typical == first.typical
    assert later.most_rows == first.most_rows == max(rows for rows, *_ in first.typical)
    np.testing.assert_allclose(fields(later.model), fields(first.model), atol=1e-9)
    observe(later, PRIOR, 4, 1)
    assert later.iterations == 13


@pytest.mark.parametrize("read_s", [0.0, 4.0])
def test_where_rows_cost_nothing_a_pass_takes_what_it_took(read_s: float) -> None:
    """Whether its arithmetic was slow or its stream."""
    cost = IterationCost(CostModel(base_s=2.0, row_s=0.0, knee_rows=0.0, step_s=0.0))
    cost.observe(8, 1, 0.0, 4.0, read_s)
    np.testing.assert_allclose(cost.seconds(ROWS, 0), 4.0, rtol=0.02)


def test_arithmetic_may_take_longer_than_the_stream_for_any_number_of_rows() -> None:
    cost = IterationCost(CostModel(base_s=1.0, row_s=0.1, knee_rows=5.0, step_s=0.0))
    machine = CostModel(base_s=1.5, row_s=0.3, knee_rows=0.0, step_s=0.0)
    for rows in (2, 5, 9):
        observe(cost, machine, rows, 0)
    np.testing.assert_allclose(cost.seconds(ROWS, 0), machine.seconds(ROWS, 0), rtol=1e-3)


def test_the_ssd_is_taken_to_be_as_fast_as_in_the_last_five_passes() -> None:
    cost = IterationCost(CostModel(base_s=1.0, row_s=0.1, knee_rows=5.0, step_s=0.0))
    for pass_s in [1.0] * 10 + [3.0] * 5:
        cost.observe(1, 0, 0.0, pass_s, read_s=pass_s)
    # 25 rows are hidden behind 3 seconds of stream
    assert cost.seconds(np.array([60.0]), 0) == pytest.approx(3.0 + 0.1 * 35, rel=0.1)


def test_rows_are_counted_in_whole_blocks_before_and_after_a_fit() -> None:
    model = CostModel(base_s=1.0, row_s=0.01, knee_rows=16.0, step_s=0.0, block_rows=16)
    assert model.seconds(np.array([1.0, 17.0, 32.0]), 0).tolist() == [1.0, 1.16, 1.16]
    assert fed(model, model, 3).model.block_rows == 16


def test_a_pass_that_took_no_time_at_all_is_learned_from() -> None:
    cost = IterationCost(PRIOR)
    cost.observe(8, 1, 0.02, 0.02)
    assert np.isfinite(cost.seconds(ROWS, 1)).all()
