"""The acceptance walk: follow the target's own tokens from the root while the tree has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from specexec_cli.core import DraftTree
from specexec_cli.sampling import Sampler

ROOT = -1


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one verification commits."""

    nodes: tuple[int, ...]  # accepted draft nodes, from the root down, so rising
    tokens: tuple[int, ...]  # the accepted nodes' tokens, then the bonus token
    drafted: tuple[bool, ...]  # for each token: whether it was in the tree


# accept() or a walk in its place, with the arguments of accept() in their order.
Walk = Callable[[DraftTree, Tensor, Sampler, Sequence[int], int, Collection[int]], Accepted]


def accept(
    tree: DraftTree,
    logits: Tensor,
    sampler: Sampler,
    context: Sequence[int],
    limit: int,
    eos_ids: Collection[int],
) -> Accepted:
    """Draws the target's token at each position and follows it through the tree.

    Every token is the target's own draw at its position, so the committed tokens do not depend on
    the tree; the tree only decides how many positions one pass settles.

    Args:
        logits: (1 + nodes, vocab), row 0 the root's, row i + 1 node i's.
        context: committed tokens, the root last.
        limit: most tokens to commit, at least 1.
        eos_ids: tokens that end the text; nothing is committed behind one.
    Source: SpecExec, arXiv:2406.02532, algorithm 1, with drafter-invariant sampling (Daliri et
        al., arXiv:2408.07978) in place of sampling and looking up.
    """
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(
            zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        )
    }
    depths = [0, *tree.depths.tolist()]
    together = sampler.tokens(logits, depths, context) if sampler.draws_rows(logits) else None
    nodes: list[int] = []
    tokens: list[int] = []
    drafted: list[bool] = []
    extended = list(context)
    node: int | None = ROOT
    while node is not None:
        token = together[node + 1] if together is not None else None
        if token is None:
            token = sampler.token(logits[node + 1], extended)
        node = children.get((node, token))
        tokens.append(token)
        extended.append(token)
        drafted.append(node is not None)
        if len(tokens) == limit or token in eos_ids:
            break
        if node is not None:
            nodes.append(node)
    return Accepted(tuple(nodes), tuple(tokens), tuple(drafted))
