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
    """transformers' logits: row 0 after the context, row i + 1 after the path to node i."""
    rows = [own(input_ids=torch.tensor([list(context)])).logits[0, -1]]
    for node in range(len(tree)):
        path: list[int] = []
        while node >= 0:
            path.insert(0, int(tree.tokens[node]))
            node = int(tree.parents[node])
        rows.append(own(input_ids=torch.tensor([[*context, *path]])).logits[0, -1])
    return torch.stack(rows)


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
