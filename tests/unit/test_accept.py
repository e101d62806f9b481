"""The acceptance walk: the target's own tokens, followed through the tree as far as it goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specexec_cli.config import SamplingConfig
from specexec_cli.core import DraftTree
from specexec_cli.errors import NonFiniteLogitsError
from specexec_cli.sampling import Sampler
from specexec_cli.verify.accept import accept

GREEDY = Sampler(SamplingConfig())
#        root
#       /    \
#     0:5    1:6
#    /  \      \
#  2:7  3:8    4:5
#        |
#       5:9
TREE = DraftTree(
    np.array([5, 6, 7, 8, 5, 9]),
    np.array([-1, -1, 0, 0, 1, 3]),
    np.array([1, 1, 2, 2, 2, 3]),
    np.zeros(6),
)


def logits_for(choices: list[int]) -> torch.Tensor:
    """(1 + nodes, 10): the target's token behind the root and behind each node."""
    return torch.nn.functional.one_hot(torch.tensor(choices), 10).float()


@pytest.mark.parametrize(
    ("choices", "nodes", "tokens"),
    [
        ([5, 8, 0, 0, 9, 0, 3], (0, 3, 5), (5, 8, 9, 3)),  # to the bottom, and the bonus token
        ([5, 8, 0, 0, 1, 0, 0], (0, 3), (5, 8, 1)),  # node 3's own choice is no child
        ([6, 0, 5, 0, 0, 2, 0], (1, 4), (6, 5, 2)),  # the same token as elsewhere in the tree
        ([7, 0, 0, 0, 0, 0, 0], (), (7,)),  # 7 is in the tree, but not below the root
        ([5, 5, 0, 0, 0, 0, 0], (0,), (5, 5)),  # 5 below the root is not 5 below node 0
    ],
)
def test_the_walk(choices, nodes, tokens):
    accepted = accept(TREE, logits_for(choices), GREEDY, [1], 100, ())
    assert accepted.nodes == nodes
    assert accepted.tokens == tokens
    assert accepted.drafted == (*[True] * len(nodes), False)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_the_limit_counts_the_bonus_token(limit):
    accepted = accept(TREE, logits_for([5, 8, 0, 0, 9, 0, 3]), GREEDY, [1], limit, ())
    assert accepted.tokens == (5, 8, 9, 3)[:limit]
    # the last token is always run again, so its node is not kept
    assert accepted.nodes == (0, 3, 5)[: min(limit, 4) - 1]
    assert accepted.drafted == (True, True, True, False)[:limit]


@pytest.mark.parametrize(("eos", "kept"), [(5, 1), (8, 2), (9, 3), (3, 4), (7, 4)])
def test_nothing_is_committed_behind_an_eos(eos, kept):
    accepted = accept(TREE, logits_for([5, 8, 0, 0, 9, 0, 3]), GREEDY, [1], 100, {eos, 2})
    assert accepted.tokens == (5, 8, 9, 3)[:kept]
    assert len(accepted.nodes) == min(kept, 4) - 1


def test_an_empty_tree_gives_the_bonus_token():
    accepted = accept(DraftTree.empty(), logits_for([4]), GREEDY, [1], 100, ())
    assert accepted == type(accepted)((), (4,), (False,))


def test_positions_and_penalties_follow_the_path():
    """A repetition penalty sees the tokens of the path, not those of the tree."""
    logits = torch.full((7, 10), -5.0)
    logits[0, 5], logits[0, 6] = 2.0, 1.9
    logits[1, 5], logits[1, 8] = 2.0, 1.9  # behind node 0, 5 is a repetition
    penalised = Sampler(SamplingConfig(repetition_penalty=1.5))
    accepted = accept(TREE, logits, penalised, [1], 2, ())
    assert accepted.tokens == (5, 8)


def test_damaged_logits_behind_a_rejected_node_do_not_matter():
    logits = logits_for([5, 1, 0, 0, 0, 0, 0])
    logits[3:] = torch.nan
    assert accept(TREE, logits, GREEDY, [1], 100, ()).tokens == (5, 1)
    logits[1] = torch.inf
    with pytest.raises(NonFiniteLogitsError, match="position 2"):
        accept(TREE, logits, GREEDY, [1], 100, ())
