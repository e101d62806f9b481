"""The rejection walk through a drawn tree, with which speculative decoding was published."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specexec_cli.core import DraftTree
from specexec_cli.sampling import Sampler
from specexec_cli.verify.accept import ROOT, Accepted
from specexec_cli.verify.rejection import Probs, settle


@dataclass(frozen=True, slots=True)
class Draws:
    """Children of one node, drawn one after another without replacement."""

    nodes: tuple[int, ...]  # in the order they were drawn
    draft_probs: Tensor  # (vocab,), what the first child was drawn from


def rejection_walk(
    tree: DraftTree,
    draws: Mapping[int, Draws],
    logits: Tensor,
    sampler: Sampler,
    context: Sequence[int],
    limit: int,
    eos_ids: Collection[int],
) -> Accepted:
    """Follows accepted draft tokens from the root, and ends with a token of the target's own.

    At each node its children are tested in the order they were drawn: a token x drawn from
    draft_probs is kept with probability min(1, target_probs[x] / draft_probs[x]); otherwise the
    test goes on with the residual, target_probs - draft_probs where positive, and with draft_probs
    without x. If none is kept, the token is drawn from the last residual. With one child per node
    this is the chain of Leviathan et al.

    The random numbers depend on (seed, position) alone, and no test uses those of a later
    position, so a second draft of that position may use them again.

    Args:
        draws: by node, ROOT included; a node without an entry has no children.
        logits: (1 + nodes, vocab), row 0 the root's, row i + 1 node i's.
        context, limit, eos_ids: as for accept().
    Source: Leviathan et al., arXiv:2211.17192, algorithm 1; multi-branch: Miao et al. (SpecInfer),
        arXiv:2305.09781, algorithm 2; without replacement: Jeon et al., arXiv:2402.14160.
    """
    nodes: list[int] = []
    tokens: list[int] = []
    drafted: list[bool] = []
    extended = list(context)
    node = ROOT
    while True:
        target_probs = sampler.probs(logits[node + 1], extended)
        token, kept = _settle(target_probs, draws.get(node), tree, sampler.config.seed, extended)
        tokens.append(token)
        extended.append(token)
        drafted.append(kept is not None)
        if len(tokens) == limit or token in eos_ids or kept is None:
            return Accepted(tuple(nodes), tuple(tokens), tuple(drafted))
        node = kept
        nodes.append(node)


def _settle(
    target_probs: Probs, draws: Draws | None, tree: DraftTree, seed: int, context: Sequence[int]
) -> tuple[int, int | None]:
    """The token of one position, and the draft node that was kept, if any."""
    position = len(context)
    if draws is None:
        return settle(target_probs, target_probs, (), seed, position)
    tokens = [int(tree.tokens[node]) for node in draws.nodes]
    proposal = draws.draft_probs.double().cpu().numpy()
    token, kept = settle(target_probs, proposal, tokens, seed, position)
    return token, None if kept is None else draws.nodes[kept]
