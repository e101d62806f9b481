"""Computes logits by transformers' own forward, and compares specexec's with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specexec_cli.core import DraftTree

TOLERANCE = 1e-4  # largest difference, as a share of the largest logit
RULED_OUT = -1e30  # lower logits belong to tokens that the architecture never generates


class NotConforming(Exception):
    """What specexec computes is not what it should be."""


@torch.no_grad()
def expected_logits(own: PreTrainedModel, context: Sequence[int], tree: DraftTree) -> Tensor:
    """transformers' logits: row 0 after the context, row i + 1 after the path to node i.

    In one pass over the whole paths, of which each token sees those before it alone.
    """
    inner = {int(parent) for parent in tree.parents}
    paths = [_path(tree, leaf) for leaf in range(len(tree)) if leaf not in inner] or [[]]
    longest = max(map(len, paths))
    texts = [
        [*context, *tree.tokens[path].tolist(), *[context[0]] * (longest - len(path))]
        for path in paths
    ]
    logits = own(input_ids=torch.tensor(texts)).logits[:, len(context) - 1 :]
    rows = {-1: logits[0, 0]}
    for found, path in zip(logits, paths, strict=True):
        rows |= zip(path, found[1 : len(path) + 1], strict=True)
    return torch.stack([rows[node] for node in range(-1, len(tree))])


def _path(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the root to this one."""
    found: list[int] = []
    while node >= 0:
        found.insert(0, node)
        node = int(tree.parents[node])
    return found


def compare(when: str, ours: Tensor, expected: Tensor) -> None:
    """Compares logits with the expected ones.

    Args:
        when: describes the pass, for the message.
        ours: (rows, vocabulary) float32, as `expected` is.
    Raises:
        NotConforming: they differ by more than TOLERANCE, or `expected` proves nothing.
    """
    if not torch.isfinite(expected).all():
        raise NotConforming("transformers' own logits are not finite")
    possible = expected > RULED_OUT
    if not torch.equal(possible, ours > RULED_OUT):
        raise NotConforming(f"other tokens are ruled out {when}")
    ours, expected = ours.masked_fill(~possible, 0.0), expected.masked_fill(~possible, 0.0)
    scale = float(expected.abs().max())
    if len(expected) > 1 and float(expected.std(dim=0).max()) < 1e-3 * scale:
        raise NotConforming("transformers' own logits do not depend on the text")
    error = float((ours - expected).abs().max()) / scale
    if not error <= TOLERANCE:
        raise NotConforming(f"logits {when} differ by {error:.1e} of the largest")
