"""What a drafter would gain that drafts on while other machines have their turns (docs/hosts.md).

    python scripts/count_drafting_on.py --budget 16 --tokens 96

Along texts that the demo pair writes, a search goes on from each tree to twice and four times its
budget, with all the time it wants. Counted are the rows of the next tree, its root included, that
the larger tree has already: those a draft step would be spared for; and the roots alone, each of
which is one guess that a whole tree could be drafted below ahead of time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.core import DraftTree
from specexec_cli.drafting.protocols import SessionDrafter
from specexec_cli.planning.request import TreeRequest
from specexec_cli.sampling import Sampler
from specexec_cli.session import Session

_PROMPTS = (
    "def read_lines(path):\n", "class Stack:\n    def __init__(self):\n",
    "import json\n\n\ndef load(path):\n", "for name in sorted(names):\n",
)  # fmt: skip
_FURTHER = (2, 4)  # times the budget that a search goes on to
_DEPTH = 16


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def accepted(tree: DraftTree, coming: Sequence[int]) -> list[int]:
    """The nodes on the path that a text takes through a tree."""
    by_path = {path: node for node, path in enumerate(paths(tree))}
    nodes: list[int] = []
    while (node := by_path.get(tuple(coming[: len(nodes) + 1]))) is not None:
        nodes.append(node)
        if len(nodes) >= len(coming) - 1:
            break
    return nodes


def counted(
    drafters: Sequence[SessionDrafter], text: Sequence[int], start: int
) -> tuple[list[int], list[int]]:
    """Rows of all trees but the first of a text, and how many of them each larger search has; and
    the same of their roots."""
    found, roots = [0] * len(drafters), [0] * len(drafters)
    known = [set[tuple[int, ...]]() for _ in drafters[1:]]
    before, at = tuple[int, ...](), start  # tokens of the iteration before, none at first
    while len(text) - at > 1:
        trees = [drafter.grow(text[:at], _DEPTH) for drafter in drafters]
        nodes = accepted(trees[0], text[at:])
        tokens = list(text[at : at + len(nodes) + 1])
        rows = [(), *paths(trees[0])]
        if before:
            found[0] += len(rows)
            roots[0] += 1
            for number, having in enumerate(known, 1):
                found[number] += sum((*before, *row) in having for row in rows)
                roots[number] += before in having
        for drafter, tree in zip(drafters, trees, strict=True):
            drafter.commit(accepted(tree, tokens), tokens)
        known, before = [set(paths(tree)) for tree in trees[1:]], tuple(tokens)
        at += len(tokens)
    return found, roots


def shares_of(counts: Sequence[int]) -> dict[int, float]:
    """What each larger search has of what there is, by the times of the budget."""
    return {times: n / counts[0] for times, n in zip(_FURTHER, counts[1:], strict=True)}


def main() -> None:
    """Counts, and prints a line for each temperature."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    told, depth = {}, min(args.budget, _DEPTH)
    with ExitStack() as left:
        sessions = [
            left.enter_context(closing(Session.open(
                model="demo", cache=False, device="cpu",
                tree=TreeRequest(budget=times * args.budget, depth=depth, policy="fixed"),
            )))
            for times in (1, *_FURTHER)
        ]  # fmt: skip
        for temperature in (0.0, 0.7):
            sampling = SamplingConfig(temperature=temperature)
            rows, roots = [0] * len(sessions), [0] * len(sessions)
            for prompt in _PROMPTS:
                limit = GenerationConfig(max_tokens=args.tokens)
                texts = [
                    [token for step in session.generate(prompt, sampling=sampling, generation=limit)
                     for token in step.tokens]
                    for session in sessions
                ]  # fmt: skip
                drafters = [session.drafter for session in sessions]
                for drafter, session in zip(drafters, sessions, strict=True):
                    drafter.forget()
                    drafter.configure(Sampler(sampling), session.pair.tree)
                start = sessions[0].tokenizer.encode(prompt)
                found = counted(drafters, [*start, *texts[0]], len(start))
                rows = [sum(both) for both in zip(rows, found[0], strict=True)]
                roots = [sum(both) for both in zip(roots, found[1], strict=True)]
            told[temperature] = {
                "rows": rows[0], "spared": shares_of(rows),
                "roots": roots[0], "guessed": shares_of(roots),
            }  # fmt: skip
            for kind, counts in (("rows", rows), ("roots", roots)):
                shares = shares_of(counts).items()
                words = ", ".join(f"{share:.1%} at {times}" for times, share in shares)
                print(f"temperature {temperature}: of {counts[0]} {kind} {words} times the budget")
    print(json.dumps({"schema": 1, "count": "drafting on", "budget": args.budget, "at": told}))


if __name__ == "__main__":
    main()
