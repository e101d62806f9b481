"""The mask equals ancestry: prefix, pending rows and tree, with windows and chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specexec_cli.core import DraftTree
from specexec_cli.models.attention import tree_mask
from specexec_cli.models.pass_rows import Chunks, PassRows, Span
from specexec_cli.verify.masks import ancestor_matrix, verification_rows


@st.composite
def parent_lists(draw: st.DrawFn, most: int = 24) -> np.ndarray:
    nodes = draw(st.integers(0, most))
    return np.array([draw(st.integers(-1, node - 1)) for node in range(nodes)], dtype=np.int64)


def path_to(parents: np.ndarray, node: int) -> list[int]:
    """The node and its ancestors, leaf first."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path


def tree_of(parents: np.ndarray) -> DraftTree:
    depths = np.array([len(path_to(parents, node)) for node in range(len(parents))], dtype=np.int64)
    return DraftTree(np.arange(len(parents)), parents, depths, np.zeros(len(parents)))


def attended(
    parents: np.ndarray, prefix_len: int, pending: int, row: int, span: Span | None
) -> set[int]:
    """The slots a row of a verification pass may look at, by definition.

    Slots are: prefix, pending rows, nodes. Rows are: pending rows, nodes.
    """
    root_position = prefix_len + pending - 1
    if row < pending:
        slots = {slot: slot for slot in range(prefix_len + row + 1)}  # slot -> position
        own = prefix_len + row
    else:
        path = path_to(parents, row - pending)[::-1]
        slots = {slot: slot for slot in range(prefix_len + pending)}
        first_node = prefix_len + pending
        slots |= {first_node + n: root_position + d for d, n in enumerate(path, start=1)}
        own = root_position + len(path)
    if isinstance(span, Chunks):
        return {slot for slot, at in slots.items() if at // span.size == own // span.size}
    return {slot for slot, at in slots.items() if span is None or at > own - span}


spans = st.none() | st.integers(1, 12) | st.builds(Chunks, st.integers(1, 12))


@settings(max_examples=400, deadline=None)
@given(
    parents=parent_lists(),
    prefix_len=st.integers(0, 9),
    pending=st.integers(1, 9),
    chunk=st.integers(1, 40),
    span=spans,
)
def test_a_verification_mask_is_ancestry(parents, prefix_len, pending, chunk, span):
    tree = tree_of(parents)
    rows = verification_rows(list(range(pending)), tree, prefix_len)
    for start in range(0, len(rows.tokens), chunk):
        stop = min(start + chunk, len(rows.tokens))
        mask = rows.mask(start, stop, span)
        assert mask.shape == (1, 1, stop - start, prefix_len + stop), "slots filled by now"
        for row in range(start, stop):
            found = set(np.flatnonzero(mask[0, 0, row - start].numpy()).tolist())
            assert found == attended(parents, prefix_len, pending, row, span)


@settings(max_examples=300, deadline=None)
@given(
    parents=parent_lists(),
    prefix_len=st.integers(1, 9),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    chunk=st.integers(1, 40),
    span=spans,
)
def test_a_tree_that_comes_in_several_passes(parents, prefix_len, steps, chunk, span):
    """As the drafter runs it: each pass adds nodes behind the slots of the earlier ones."""
    tree, matrix = tree_of(parents), ancestor_matrix(parents)
    positions = prefix_len - 1 + tree.depths
    old = 0
    for step in steps:
        new = min(old + step, len(tree))
        if new == old:
            break
        rows = PassRows(
            tokens=tree.tokens[old:new].tolist(), positions=positions[old:new].tolist(),
            prefix_len=prefix_len, pending=0, tree_mask=matrix[old:new, :new],
            tree_positions=positions[:new], parents=prefix_len + parents[old:new],
        )  # fmt: skip
        for start in range(0, new - old, chunk):
            stop = min(start + chunk, new - old)
            mask = rows.mask(start, stop, span)[0, 0].numpy()
            assert mask.shape == (stop - start, prefix_len + old + stop)
            for row in range(start, stop):
                # the prefix stands for pending rows that came in an earlier pass
                expected = attended(parents, 0, prefix_len, prefix_len + old + row, span)
                assert set(np.flatnonzero(mask[row - start]).tolist()) == expected
        old = new


@settings(max_examples=200, deadline=None)
@given(
    parents=parent_lists(), prefix_len=st.integers(0, 9), pending=st.integers(1, 9),
    chunk=st.integers(1, 40), span=spans,
)  # fmt: skip
@example(np.zeros(0, dtype=np.int64), 4, 1, 1, 4)  # the row's position is the window
def test_a_mask_of_paths_is_the_same_mask(parents, prefix_len, pending, chunk, span):
    """What the kernel of a GPU takes: what is in place, and the slots of each node's path."""
    rows = verification_rows(list(range(pending)), tree_of(parents), prefix_len)
    for start in range(0, len(rows.tokens), chunk):
        stop = min(start + chunk, len(rows.tokens))
        dense = rows.mask(start, stop, span)[0, 0]
        mask = tree_mask(rows, start, stop, span, torch.device("cpu"))
        for more in (0, 40):  # slots of later rows, which layers without keys of their own see
            found = mask.seen(dense.shape[1] + more)
            assert torch.equal(found, torch.nn.functional.pad(dense, (0, more)))
        chains = all(parent == node - 1 for node, parent in enumerate(parents))
        assert mask.levels == 0 or not chains, "a chain needs no slots"


@given(parents=parent_lists())
def test_ancestor_matrix(parents):
    matrix = ancestor_matrix(parents)
    for node in range(len(parents)):
        assert set(np.flatnonzero(matrix[node]).tolist()) == set(path_to(parents, node))


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 2, 0], [-2]])
def test_a_parent_behind_its_child_is_refused(parents):
    with pytest.raises(ValueError, match="a parent does not precede its child"):
        ancestor_matrix(np.array(parents))


@given(parents=parent_lists(), prefix_len=st.integers(0, 9), pending=st.integers(1, 9))
def test_positions_follow_depth_not_slot(parents, prefix_len, pending):
    tree = tree_of(parents)
    rows = verification_rows(list(range(100, 100 + pending)), tree, prefix_len)
    assert list(rows.tokens) == [*range(100, 100 + pending), *range(len(tree))]
    last = prefix_len + pending - 1
    assert list(rows.positions) == [
        *range(prefix_len, last + 1),
        *(last + len(path_to(parents, node)) for node in range(len(tree))),
    ]
    slots = range(prefix_len - 1, prefix_len + pending - 1)
    assert rows.parents[:pending].tolist() == [*slots], "each pending row follows the one before it"
    root = prefix_len + pending - 1
    nodes = [root if parent < 0 else root + 1 + parent for parent in tree.parents.tolist()]
    assert rows.parents[pending:].tolist() == nodes


def test_a_chain_is_causal_at_any_length():
    """Sums of mask rows in float16 would go wrong past 2048; nothing here is summed."""
    rows = PassRows.chain(list(range(2100)), 3)
    mask = rows.mask(2040, 2100, None)[0, 0]
    assert mask.sum(-1).tolist() == list(range(2044, 2104))
    assert rows.mask(2040, 2100, 5)[0, 0].sum(-1).tolist() == [5] * 60


def test_a_chain_has_no_tree():
    rows = PassRows.chain([7, 8, 9], 4)
    assert list(rows.positions) == [4, 5, 6]
    assert (rows.prefix_len, rows.pending) == (4, 3)
    assert rows.tree_mask.shape == (0, 0)
    assert rows.tree_mask.dtype == np.bool_
    assert rows.tree_positions.shape == (0,)
    assert rows.tree_positions.dtype == np.int64
    assert rows.parents.tolist() == [3, 4, 5]
    assert PassRows.chain([7, 8], 0).parents.tolist() == [-1, 0], "the first token follows nothing"


def test_a_window_wider_than_the_text_begins_at_its_first_token():
    assert PassRows.chain([7, 8, 9], 0).first_seen(0, 3, 2).tolist() == [0, 0, 1]
