"""Linear recurrences: the kernel is the equations, and a row's bits come of its ancestors alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specexec_kernels import cpu_jit, recurrence
from specexec_kernels.recurrence import Order
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5

from specexec_cli.errors import CheckpointError
from specexec_cli.models import recurrent
from specexec_cli.models.recurrent import Recurrence, SelectiveScan

_KEY_HEADS, _HEADS, _KEY_DIM = 2, 4, 16


def _inputs(rows: int, value_dim: int, *, decay_dims: int = 0, seed: int = 0) -> list[Tensor]:
    """A state, queries, keys, values, decays and betas.

    Args:
        decay_dims: 0 for a decay of each head, 1 of each key dimension, 2 of each element.
    """
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    decays = (rows, _HEADS, _KEY_DIM, value_dim)[: 2 + decay_dims]
    return [
        normal(_HEADS, _KEY_DIM, value_dim),
        recurrence.unit_length(normal(rows, _KEY_HEADS, _KEY_DIM)),
        recurrence.unit_length(normal(rows, _KEY_HEADS, _KEY_DIM)),
        normal(rows, _HEADS, value_dim),
        torch.rand(decays, generator=made),
        torch.rand((rows, _HEADS), generator=made),
    ]


def _path(parents: list[int], row: int) -> list[int]:
    path: list[int] = []
    while row >= 0:
        path.insert(0, row)
        row = parents[row]
    return path


_TREES = st.integers(1, 24).flatmap(
    lambda rows: st.tuples(*(st.integers(-1, row - 1) for row in range(rows)))
)


@settings(max_examples=60, deadline=None)
@given(
    parents=_TREES.map(list), corrects=st.booleans(), decay_dims=st.integers(0, 2),
    vectors=st.integers(1, 6), data=st.data(),
)  # fmt: skip
def test_a_row_has_the_bits_of_its_path_alone(
    parents: list[int], corrects: bool, decay_dims: int, vectors: int, data: Any
) -> None:
    inputs = _inputs(len(parents), vectors * cpu_jit.lanes(), decay_dims=decay_dims)
    wanted = data.draw(st.sets(st.sampled_from(range(len(parents))), min_size=1))
    order = Order.depth_first(parents, sorted(wanted))
    assert order.places <= 1 + len(parents)
    found, _ = recurrence.recurrence(*inputs, order, corrects=corrects)
    for row in wanted:
        path = _path(parents, row)
        alone = [inputs[0], *(each[path] for each in inputs[1:])]
        chain = Order.chain(len(path))
        expected, last = recurrence.recurrence(*alone, chain, corrects=corrects)
        assert torch.equal(found[row], expected[-1])
        whole = recurrence.recurrence(*alone[:1], *(each[:-1] for each in alone[1:]),
                                      Order.chain(len(path) - 1), corrects=corrects)[1]  # fmt: skip
        one = [whole, *(each[-1:] for each in alone[1:])]
        again, after = recurrence.recurrence(*one, Order.chain(1), corrects=corrects)
        assert torch.equal(again[0], expected[-1])
        assert torch.equal(after, last)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    inputs = _inputs(7, 4 * cpu_jit.lanes())
    expected = recurrence.recurrence(*inputs, Order.chain(7), corrects=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = recurrence.recurrence(*inputs, Order.chain(7), corrects=True)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("decay_dims", [0, 1, 2])
def test_other_devices_compute_the_same(corrects: bool, decay_dims: int) -> None:
    parents = [-1, -1, 0, 0, 1, 2, 2, 5, 4]
    inputs = _inputs(len(parents), 2 * cpu_jit.lanes(), decay_dims=decay_dims)
    order = Order.depth_first(parents, range(len(parents)))
    found = recurrence.recurrence(*inputs, order, corrects=corrects)
    expected = recurrence.by_rows(*inputs, order, corrects=corrects)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_delta_rule_is_that_of_transformers() -> None:
    _, _, _, values, decays, betas = _inputs(9, 2 * cpu_jit.lanes())
    queries, keys = torch.randn(2, 9, _HEADS, _KEY_DIM, generator=torch.Generator().manual_seed(1))
    expected, state = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
        queries[None], keys[None], values[None], g=decays.log()[None], beta=betas[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    found, last = recurrence.recurrence(
        torch.zeros(_HEADS, _KEY_DIM, values.shape[2]),
        recurrence.unit_length(queries) * _KEY_DIM**-0.5, recurrence.unit_length(keys),
        values, decays, betas, Order.chain(9), corrects=True,
    )  # fmt: skip
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last, state[0], rtol=1e-5, atol=1e-5)


def test_without_correction_it_is_mamba_2s() -> None:
    _, reads, writes, values, steps, _ = _inputs(9, 2 * cpu_jit.lanes())
    rates = -torch.rand(_HEADS) - 0.1
    expected, state = modeling_mamba2.mamba2_chunk_scan(
        values[None], steps[None], rates, writes[None], reads[None], chunk_size=4,
        return_final_states=True,
    )  # fmt: skip
    found, last = recurrence.recurrence(
        torch.zeros(_HEADS, _KEY_DIM, values.shape[2]), reads, writes, values,
        torch.exp(steps * rates), steps, Order.chain(9), corrects=False,
    )  # fmt: skip
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last, state[0].transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_a_scan_of_channels_is_mamba_1s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some channels at a time, of a number that fills no vector."""
    rows, channels, states = 9, 3 * cpu_jit.lanes() + 5, 6
    made = torch.Generator().manual_seed(0)
    values, reads, writes, steps, rates = (
        torch.randn(shape, generator=made)
        for shape in [(rows, channels), (rows, states), (rows, states), (rows, channels),
                      (channels, states)]
    )  # fmt: skip
    steps, rates = functional.softplus(steps), -torch.exp(rates)
    expected, _ = modeling_mamba.mamba_selective_scan(
        values.t()[None], steps.t()[None], rates, writes.t()[None], reads.t()[None],
        return_last_state=True,
    )  # fmt: skip
    inputs = (
        reads[None, :, None], writes[None, :, None], (values * steps)[None], steps[None],
        rates.t().expand(1, rows, -1, -1),
    )  # fmt: skip
    found = []
    for most in (1, 1 << 20):
        monkeypatch.setattr(recurrent, "_MOST_DECAYS", most)
        state = SelectiveScan()
        state.begin(np.arange(-1, rows - 1), rows)
        found.append(state.run(*inputs))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0][0], expected[0].t(), rtol=1e-5, atol=1e-5)


def test_a_chain_needs_one_place_and_a_tree_few() -> None:
    assert Order.depth_first([-1, 0, 1, 2], [3]).places == 1
    two = [-1] + [(row - 1) // 2 for row in range(1, 63)]  # two children each, six levels
    assert Order.depth_first(two, range(63)).places <= 6


def test_heads_that_share_no_keys_evenly_are_refused() -> None:
    inputs = _inputs(1, cpu_jit.lanes())
    three = torch.ones(1, 3, _KEY_DIM)
    with pytest.raises(ValueError, match="4 heads cannot share 3 key heads"):
        recurrence.recurrence(inputs[0], three, three, *inputs[3:], Order.chain(1), corrects=True)


@pytest.mark.parametrize(("key_heads", "key_dim"), [(3, 8), (2, 7)])
def test_a_config_with_such_heads_is_one_line(key_heads: int, key_dim: int) -> None:
    keys, values = torch.ones(1, 1, key_heads, key_dim), torch.ones(1, 1, 4, 8)
    state = Recurrence(corrects=True)
    state.begin(np.array([-1]), 1)
    with pytest.raises(
        CheckpointError, match=f"4 heads that share {key_heads} key heads of {key_dim}"
    ):
        state.run(keys, keys, values, torch.ones(1, 1, 4), torch.ones(1, 1, 4))


def test_a_config_with_an_odd_number_of_states_is_one_line() -> None:
    state, rows = SelectiveScan(), torch.ones(1, 1, 8)
    state.begin(np.array([-1]), 1)
    keys, rates = torch.ones(1, 1, 1, 3), -torch.ones(1, 1, 3, 8)
    with pytest.raises(CheckpointError, match="a channel of a recurrent layer 3 states"):
        state.run(keys, keys, rows, rows, rates)


def test_the_length_of_a_row_does_not_depend_on_the_others() -> None:
    rows = torch.randn(37, 12)
    together = recurrence.unit_length(rows)
    torch.testing.assert_close((together**2).sum(dim=1), torch.ones(37))
    for index, row in enumerate(rows):
        assert torch.equal(recurrence.unit_length(row[None])[0], together[index])
