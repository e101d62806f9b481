"""Tree attention against dense masked attention: random trees, prefixes, head sizes, groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from specexec_kernels.tree_attention import TreeMask, tree_attention_ref, tree_mask

FirstOf = Callable[[np.ndarray], np.ndarray | int]  # the first positions seen, by rows' own


def window_of(size: int) -> FirstOf:
    return lambda own: np.maximum(own - size + 1, 0)


def random_tree(nodes: int, seed: int, chains: float = 0.0) -> torch.Tensor:
    """(nodes, nodes) bool: each node sees itself and its ancestors.

    Args:
        chains: share of the nodes whose parent is the node before them.
    """
    rng = torch.Generator().manual_seed(seed)
    mask = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(torch.randint(-1, node, (1,), generator=rng))
        if torch.rand(1, generator=rng) < chains:
            parent = node - 1
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def mask_of(tree: torch.Tensor, prefix: int, first: torch.Tensor | int = 0) -> TreeMask:
    """The mask of nodes that see the prefix (from `first` on) and what `tree` marks."""
    return tree_mask(np.arange(0), tree.numpy(), prefix, np.asarray(first))


def chain_of(start: int, stop: int, first_of: FirstOf) -> TreeMask:
    """The mask of rows in their places."""
    own = np.arange(start, stop)
    return tree_mask(own, np.zeros((0, 0), dtype=bool), stop, first_of(own))


def to(device: torch.device, mask: TreeMask) -> TreeMask:
    return dataclasses.replace(mask, table=mask.table.to(device))


def inputs(
    nodes: int, prefix: int, head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(nodes + prefix)
    queries = torch.randn(nodes, heads, head_dim, generator=rng)
    cache = torch.randn(2, kv_heads, prefix + nodes + 3, head_dim, generator=rng)
    keys, values = cache[:, :, : prefix + nodes]  # views of a larger cache
    return queries.to(dtype), keys.to(dtype), values.to(dtype)


def test_reference_is_scaled_dot_product_attention() -> None:
    queries, keys, values = inputs(9, 20, 64, 4, 2, torch.float32)
    tree = random_tree(9, 0)
    mask = torch.cat([torch.ones(9, 20, dtype=torch.bool), tree], 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True
    )
    found = tree_attention_ref(queries, keys, values, mask_of(tree, 20))
    torch.testing.assert_close(found, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "prefix", "head_dim", "heads", "kv_heads"),
    [
        (1, 0, 64, 2, 2), (5, 0, 80, 2, 1), (40, 0, 128, 4, 2), (33, 1, 64, 4, 4),
        (7, 63, 96, 6, 2), (20, 65, 80, 8, 1), (70, 300, 128, 4, 4), (3, 1025, 96, 2, 2),
        (17, 4096, 64, 2, 1), (4, 4096, 128, 2, 1), (40, 70, 512, 4, 2),
    ],
)  # fmt: skip
def test_kernel_equals_dense_attention(
    nodes: int, prefix: int, head_dim: int, heads: int, kv_heads: int, device: torch.device
) -> None:
    from specexec_kernels.triton_tree_attention import tree_attention

    tensors = inputs(nodes, prefix, head_dim, heads, kv_heads, torch.float32)
    mask = mask_of(random_tree(nodes, prefix), prefix)
    found = tree_attention(*(t.to(device) for t in tensors), to(device, mask))
    expected = tree_attention_ref(*tensors, mask)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_pending_rows_are_a_chain_in_the_same_mask(device: torch.device) -> None:
    """A prompt's rows attend causally: a path is a tree too."""
    from specexec_kernels.triton_tree_attention import tree_attention

    tensors = inputs(50, 10, 64, 2, 2, torch.float32)
    mask = mask_of(torch.ones(50, 50, dtype=torch.bool).tril(), 10)
    assert not mask.levels, "all slots are in place"
    found = tree_attention(*(t.to(device) for t in tensors), to(device, mask)).cpu()
    torch.testing.assert_close(found, tree_attention_ref(*tensors, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [0, 33])
def test_rows_that_have_no_slots_see_the_prefix_alone(first: int, device: torch.device) -> None:
    """As those of a model that attends to another's keys."""
    from specexec_kernels.triton_tree_attention import tree_attention

    queries, keys, values = inputs(5, 40, 64, 4, 2, torch.float32)
    tensors = queries, keys[:, :40], values[:, :40]
    mask = mask_of(torch.ones(5, 0, dtype=torch.bool), 40, torch.full((5,), first))
    found = tree_attention(*(t.to(device) for t in tensors), to(device, mask)).cpu()
    seen = (torch.arange(40) >= first).expand(5, 40)
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1), *tensors[1:], attn_mask=seen, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128, 512])
@pytest.mark.parametrize("window", [None, 24])
def test_a_committed_row_has_the_same_bits_in_any_company(
    window: int | None, head_dim: int, device: torch.device, matrix_units: None
) -> None:
    """Row by row, and as parts of one prompt that begin and end where no block does."""
    from specexec_kernels.triton_tree_attention import tree_attention

    total = 65 + 7
    queries, keys, values = inputs(total, 0, head_dim, 4, 2, torch.float16)

    def attended(start: int, stop: int) -> torch.Tensor:
        mask = chain_of(start, stop, (lambda own: 0) if window is None else window_of(window))
        tensors = queries[start:stop], keys[:, :stop], values[:, :stop]
        return tree_attention(*(t.to(device) for t in tensors), to(device, mask)).cpu()

    for start, stop in ((0, 1), (3, 20), (31, 33), (7, total)):
        alone = torch.cat([attended(row, row + 1) for row in range(start, stop)])
        assert torch.equal(attended(start, stop), alone), (start, stop)


@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize("prefix", [3, 31, 60])
@pytest.mark.parametrize(
    "first_of", [window_of(1000), window_of(24), lambda own: own // 20 * 20],
    ids=["all", "window", "chunks"],
)  # fmt: skip
def test_a_node_has_the_bits_that_it_will_have_once_committed(
    first_of: FirstOf, prefix: int, head_dim: int, device: torch.device, matrix_units: None
) -> None:
    """Its path is moved to the slots behind the prefix, and run as a chain, all and row by row."""
    from specexec_kernels.triton_tree_attention import tree_attention

    tree = random_tree(40, prefix, chains=0.7)
    queries, keys, values = inputs(40, prefix, head_dim, 4, 2, torch.float16)

    def attended(kept: list[int], mask: TreeMask) -> torch.Tensor:
        slots = [*range(prefix), *(prefix + node for node in kept)]
        own = queries[kept[-len(mask.table) :]], keys[:, slots], values[:, slots]
        return tree_attention(*(t.to(device) for t in own), to(device, mask)).cpu()

    first = torch.from_numpy(np.asarray(first_of(prefix - 1 + tree.sum(1).numpy())))
    nodes = attended(list(range(40)), mask_of(tree, prefix, first))
    for leaf in (5, 18, 30, 39):
        path = tree[leaf].nonzero()[:, 0].tolist()
        stop = prefix + len(path)
        assert torch.equal(attended(path, chain_of(prefix, stop, first_of)), nodes[path])
        alone = attended(path, chain_of(stop - 1, stop, first_of))
        assert torch.equal(alone[0], nodes[leaf])


def test_half_precision(device: torch.device) -> None:
    """Error against float32 is at most twice that of PyTorch in the same dtype."""
    from specexec_kernels.triton_tree_attention import tree_attention

    tensors = inputs(20, 40, 64, 4, 2, torch.float16)
    mask = mask_of(random_tree(20, 1), 40)
    exact = tree_attention_ref(*(t.float() for t in tensors), mask)
    allowed = 2 * (tree_attention_ref(*tensors, mask) - exact).abs().max()
    found = tree_attention(*(t.to(device) for t in tensors), to(device, mask)).cpu()
    assert (found - exact).abs().max() <= allowed


def test_rows_that_do_not_lie_one_behind_the_other(device: torch.device) -> None:
    from specexec_kernels.triton_tree_attention import tree_attention

    tensors = inputs(2, 4, 64, 2, 2, torch.float32)
    mask = mask_of(random_tree(2, 0), 4)
    queries, keys, values = (t.to(device) for t in tensors)
    keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    values = torch.cat([values, values], 2)[..., 64:]
    found = tree_attention(queries, keys, values, to(device, mask)).cpu()
    torch.testing.assert_close(found, tree_attention_ref(*tensors, mask), rtol=1e-5, atol=1e-5)


OPTIONS = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([3.0, -2.0, 0.5, 6.0])},
    "window": {"first_seen": torch.arange(20, 60, dtype=torch.int32).clamp(max=50)},
    "all": {
        "softcap": 30.0,
        "sinks": torch.tensor([1.0, -1e4, 0.5, 2.0]).bfloat16(),
        "first_seen": torch.arange(40, dtype=torch.int32) // 16 * 16,
        "scale": 0.3,
    },
}


@pytest.mark.parametrize("value_dim", [64, 40])
@pytest.mark.parametrize("options", OPTIONS)
def test_sinks_softcaps_windows_and_values_of_another_size(
    options: str, value_dim: int, device: torch.device
) -> None:
    """The reference is itself held against the softmax over scores that are written out."""
    from specexec_kernels.triton_tree_attention import tree_attention

    prefix, chosen = 50, dict(OPTIONS[options])
    first = chosen.pop("first_seen", torch.zeros(40, dtype=torch.int32))
    queries, keys, _ = inputs(40, prefix, 64, 4, 2, torch.float32)
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(2, prefix + 40, value_dim, generator=rng)
    tree = random_tree(40, 2)
    mask = mask_of(tree, prefix, first)
    expected = tree_attention_ref(queries, keys, values, mask, **chosen)
    on_device = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in chosen.items()}
    arguments = (t.to(device) for t in (queries, keys, values))
    found = tree_attention(*arguments, to(device, mask), **on_device).cpu()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-5)

    row, head = 33, 3  # one query head of one row, by definition
    seen = torch.cat([torch.ones(prefix, dtype=torch.bool), tree[row]])
    seen[: min(prefix, int(first[row]))] = False
    scores = keys[1, seen] @ queries[row, head] * chosen.get("scale", 64**-0.5)
    if "softcap" in chosen:
        scores = chosen["softcap"] * torch.tanh(scores / chosen["softcap"])
    weights = scores.exp()
    total = weights.sum() + (chosen["sinks"][head].float().exp() if "sinks" in chosen else 0.0)
    own = weights @ values[1, seen] / total
    torch.testing.assert_close(expected[row, head], own, rtol=1e-4, atol=1e-5)
