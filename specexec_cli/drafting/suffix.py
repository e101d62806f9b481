"""Drafts from the text's own past: what followed the last tokens where they occurred before.

Text repeats itself in edits, retrieval and tool calls, and finding a repetition takes no model. The
earlier places of the last tokens are looked up, and what follows there is the draft. Several places
make a tree, which the best-first search grows like any other. How likely a continuation is depends
on how many tokens before it match, and is learned as the target settles tokens.

Source: SuffixDecoding, arXiv:2411.04975. It keeps a suffix tree; here every pair of neighbouring
tokens is indexed, and longer matches are found by comparing backwards from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specexec_cli.config import TreeConfig
from specexec_cli.core import DraftTree, StepResult, common_prefix
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.policies import NextTree
from specexec_cli.drafting.search import ROOT, Floats, Frontier, Ints, SearchResult, grow_tree
from specexec_cli.sampling import Sampler

_LONGEST = 32  # the longest match that is counted, tokens
_PLACES = 64  # the most places that are considered, the latest ones
# Tokens that are remembered, which take about 33 MB; beyond, earlier texts are forgotten.
_MOST_TOKENS = 1 << 17
_BREAK = -1  # stands between texts; not a token
# Lengths of matches are put into classes, which learn together: 2 tokens, 3, 4, 5 to 6, and so on.
_LENGTHS = np.array([2, 3, 4, 6, 8, 12, 16, 24, 32])
# The starting probabilities of the classes, and how many trials they count as.
_PRIOR_TRIALS = 4.0
_PRIOR_CHANCES = np.array([0.25, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85])
_MEMORY = 0.98  # decay per trial: about the last fifty of a class count
_TOP = 10  # number of probabilities among the signals, see policies.Signals
_NOWHERE = -2  # an id that no node of a search has


@dataclass(frozen=True, slots=True)
class Places:
    """Places in the past that match the end of a path."""

    at: tuple[int, ...]  # positions in the remembered tokens, of the token after each match
    lengths: tuple[int, ...]  # length of each match, tokens


class Past:
    """The tokens of this text and of earlier ones, with an index of all pairs of neighbours."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, int], list[int]] = {}  # by pair, positions after it, rising
        self._context: list[int] = []

    def follow(self, context: Sequence[int]) -> None:
        """Adds `context`, which may continue the last one or differ from it; earlier texts stay."""
        shared = common_prefix(self._context, context)
        if len(self._tokens) + len(context) - shared > max(_MOST_TOKENS, 2 * len(context)):
            self.forget()
            shared = 0
        if shared < len(self._context):  # another text; its shared part is repeated for matches
            self._append([_BREAK, *context[max(0, shared - _LONGEST) : shared]])
        self._append(context[shared:])
        self._context = list(context)

    def forget(self) -> None:
        """Empties it."""
        self._tokens.clear()
        self._after.clear()
        self._context.clear()

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(int(token))
            pair = tuple(self._tokens[-2:])
            if len(pair) == 2 and _BREAK not in pair:
                self._after.setdefault(pair, []).append(len(self._tokens))

    def matches(self) -> Places:
        """The earlier places of the context's last tokens, the latest first."""
        tokens, end = self._tokens, len(self._tokens)
        found = self._after.get((tokens[-2], tokens[-1]), ()) if len(self._context) > 1 else ()
        at = [place for place in reversed(found[-_PLACES - 1 :]) if place < end][:_PLACES]
        return Places(tuple(at), tuple(self._length(place) for place in at))

    def _length(self, place: int) -> int:
        """How many tokens before `place` equal the context's last ones."""
        most = min(_LONGEST, place, len(self._context))
        length = 2
        while length < most and self._tokens[place - length - 1] == self._context[-length - 1]:
            length += 1
        return length

    def continuations(self, places: Places) -> dict[int, Places]:
        """The places after each next token, by token; the end of a text has no next token."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for place, length in zip(places.at, places.lengths, strict=True):
            if place < len(self._tokens) and self._tokens[place] != _BREAK:
                at, lengths = found.setdefault(self._tokens[place], ([], []))
                at.append(place + 1)
                lengths.append(min(length + 1, _LONGEST))
        return {token: Places(tuple(at), tuple(ls)) for token, (at, ls) in found.items()}


class MatchTrust:
    """Learns how often the target continues as the past did, by the length of the match."""

    def __init__(self) -> None:
        self._trials = np.full(len(_LENGTHS), _PRIOR_TRIALS)
        self._hits = _PRIOR_TRIALS * _PRIOR_CHANCES

    def chances(self, places: Places, children: dict[int, Places]) -> Floats:
        """The probability of each child, (children,).

        They sum to the learned probability of the longest match. Each child gets a share by its
        places, each of which counts twice as much with every further token that matches.

        Args:
            places: of the parent.
            children: places of each child, by token.
        """
        longest = max(places.lengths)
        weights = np.array(
            [
                sum(2.0 ** (length - 1 - longest) for length in child.lengths)
                for child in children.values()
            ]
        )
        bucket = self._bucket(longest)
        chances: Floats = weights * self._hits[bucket] / self._trials[bucket] / weights.sum()
        return chances

    def learn(self, places: Places, hit: bool) -> None:
        """Learns whether the target's token was among the continuations (`hit`)."""
        bucket = self._bucket(max(places.lengths))
        self._trials[bucket] = _MEMORY * self._trials[bucket] + 1.0
        self._hits[bucket] = _MEMORY * self._hits[bucket] + hit

    @staticmethod
    def _bucket(length: int) -> int:
        return min(int(np.searchsorted(_LENGTHS, length)), len(_LENGTHS) - 1)


class Repetitions:
    """Finds the children of nodes in the past, for a search."""

    def __init__(self) -> None:
        self._past = Past()
        self._trust = MatchTrust()
        self._begin(Places((), ()))

    def follow(self, context: Sequence[int]) -> bool:
        """Begins a tree after `context`; returns whether its last tokens occurred before."""
        self._past.follow(context)
        self._begin(self._past.matches())
        return bool(self._places[ROOT].at)

    def learn(self, tokens: Sequence[int]) -> None:
        """Learns from the tokens that the target settled after the context."""
        node = ROOT
        for token in tokens:
            children = self._children.get(node)
            if children:
                self._trust.learn(self._places[node], token in children)
            node = self._ids.get((node, token), _NOWHERE)

    def forget(self) -> None:
        """Empties the past; what was learned of matches stays."""
        self._past.forget()
        self._begin(Places((), ()))

    def _begin(self, places: Places) -> None:
        self._places = {ROOT: places}  # by id, the places of a node's path
        self._ids: dict[tuple[int, int], int] = {}  # by parent's id and token, an expanded node
        # by id of an expanded node: its children's places by token, and their falling probabilities
        self._children: dict[int, dict[int, Places]] = {}
        self._chances: dict[int, Floats] = {}

    def expand(self, frontier: Frontier, width: int) -> tuple[Floats, Ints]:
        """What came next where each node's path stands; see search.Expand."""
        found = [
            self._expand_node(node, parent, token, width)
            for node, parent, token in zip(
                frontier.ids.tolist(), frontier.parents.tolist(), frontier.tokens.tolist(),
                strict=True,
            )
        ]  # fmt: skip
        most = max(len(chances) for chances, _ in found)
        log_probs = np.full((len(found), most), -np.inf)
        tokens = np.zeros((len(found), most), dtype=np.int64)
        for row, (chances, best) in enumerate(found):
            log_probs[row, : len(chances)] = np.log(chances)
            tokens[row, : len(best)] = best
        return log_probs, tokens

    def _expand_node(self, node: int, parent: int, token: int, width: int) -> tuple[Floats, Ints]:
        if node != ROOT:
            self._places[node] = self._children[parent][token]
            self._ids[parent, token] = node
        places = self._places[node]
        children = self._past.continuations(places)
        self._children[node] = children
        if not children:
            self._chances[node] = np.zeros(0)
            return np.zeros(0), np.zeros(0, dtype=np.int64)
        chances = self._trust.chances(places, children)
        order = np.argsort(-chances, kind="stable")[:width]
        self._chances[node] = chances[order]
        return chances[order], np.fromiter(children, dtype=np.int64)[order]

    def signals(self, ids: Ints) -> Floats:
        """The signals of expanded nodes; see policies.Signals."""
        found = np.zeros((len(ids), _TOP + 1))
        for row, node in enumerate(ids.tolist()):
            chances = self._chances[node]
            found[row, : len(chances[:_TOP])] = chances[:_TOP]
            found[row, _TOP] = -(chances * np.log(chances)).sum() if len(chances) else 0.0
        return found


class SuffixDrafter:
    """Grows trees of continuations from the text's past; a SessionDrafter."""

    def __init__(self, sampler: Sampler, tree: TreeConfig, learned: Learned | None = None) -> None:
        self._repetitions = Repetitions()
        self._learned = learned or Learned()
        self.paused = False
        self.configure(sampler, tree)

    def configure(self, sampler: Sampler, tree: TreeConfig, learned: Learned | None = None) -> None:
        """See SessionDrafter. The sampler is not used: the past gives no logits to add noise to."""
        self._learned = learned or self._learned
        self._policy = self._learned.policy(tree)

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        """See Drafter. The tree is empty if the end of `context` did not occur before."""
        self.paused = False
        if not self._repetitions.follow(context) or max_depth < 1:
            return DraftTree.empty()
        past = self._repetitions
        tree = self._policy.grow(
            NextTree(
                search=grow_tree, expand=past.expand, max_depth=max_depth, signals=past.signals,
                pending=pending,
            )
        ).tree  # fmt: skip
        self.paused = not len(tree)
        return tree

    def begin(self, context: Sequence[int], max_depth: int) -> int:
        """See ModelDrafter.begin; 0 if the end of `context` did not occur before."""
        self.paused = False
        return max_depth if self._repetitions.follow(context) else 0

    def expand(self, frontier: Frontier, width: int) -> tuple[Floats, Ints]:
        """What came next where each node's path stands; see search.Expand."""
        return self._repetitions.expand(frontier, width)

    def take(self, found: SearchResult | None, budget: int, paused: bool) -> DraftTree:
        """See ModelDrafter.take; nothing is added to the search's tree."""
        self.paused = paused
        return found.tree if found is not None else DraftTree.empty()

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Learns from the tokens that the target settled."""
        self._repetitions.learn(tokens)

    def observe(self, step: StepResult) -> None:
        """Lets the policy learn from what the iteration brought and cost."""
        self._policy.observe(step)

    def forget(self) -> None:
        """See SessionDrafter."""
        self._repetitions.forget()


def merged(found: SearchResult, other: DraftTree, least: float, budget: int) -> SearchResult:
    """Merges two trees, and keeps the `budget` most probable nodes.

    A node that is in both gets the higher of its two log-probabilities. Nodes of `other` alone get
    ids below -1, which no search uses.

    Args:
        found: a search's result.
        other: a tree to merge into it.
        least: nodes of `other` with a lower log-probability are left out.
        budget: most nodes of the result.
    """
    tree = found.tree
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    depths, log_probs = tree.depths.tolist(), tree.log_probs.tolist()
    ids = found.ids.tolist()
    known = {key: at for at, key in enumerate(zip(parents, tokens, strict=True))}
    places = {ROOT: ROOT}  # by node of `other`, its node in the merged tree
    for node in np.flatnonzero(other.log_probs >= least).tolist():  # parents before children
        key = places[int(other.parents[node])], int(other.tokens[node])
        if key not in known:
            known[key] = len(tokens)
            parents.append(key[0])
            tokens.append(key[1])
            depths.append(int(other.depths[node]))
            log_probs.append(-np.inf)
            ids.append(_NOWHERE - node)
        places[node] = known[key]
        log_probs[places[node]] = max(log_probs[places[node]], float(other.log_probs[node]))
    scores = np.array(log_probs, dtype=np.float64)
    kept = np.sort(np.argsort(-scores, kind="stable")[:budget])
    renumbered = np.full(len(tokens) + 1, ROOT, dtype=np.int64)  # the last entry is the root's
    renumbered[kept] = np.arange(len(kept))
    both = DraftTree(
        np.array(tokens, dtype=np.int64)[kept],
        renumbered[np.array(parents, dtype=np.int64)[kept]],
        np.array(depths, dtype=np.int64)[kept],
        scores[kept],
    )
    return SearchResult(both, np.array(ids, dtype=np.int64)[kept])
