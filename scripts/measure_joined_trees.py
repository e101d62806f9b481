"""Tokens a pass of trees of a trained head, of a draft model, of both, and of the past.

    python scripts/measure_joined_trees.py OUT/mtp --draft specexec_cli/demo/draft --head OUT/eagle

OUT is what train_demo_heads.py writes; without ``--head`` the head is the target's MTP layer. A
tree of two models has the most probable nodes of two trees of the whole budget, merged as
repetitions of the text's past are. Every text must be that of the first case; nothing is timed.
Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from named_options import named

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.search import SearchResult
from specexec_cli.drafting.suffix import merged
from specexec_cli.lab.bench.datasets import BUILT_IN, load_dataset
from specexec_cli.lab.bench.metrics import ratio_and_error
from specexec_cli.lab.bench.runner import encode_prompts
from specexec_cli.lab.bench.tables import aligned
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.block_heads import block_checkpoint, is_block_head
from specexec_cli.offload.eagle import eagle_checkpoint
from specexec_cli.offload.mtp import mtp_checkpoint
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.request import Request
from specexec_cli.sampling import Sampler
from specexec_cli.session import open_session
from specexec_cli.verify.verifier import LocalTarget

CASES = ("head", "head, past", "draft", "draft, past", "head, draft", "head, draft, past")


class Joined:
    """Grows one tree of several drafters'; a Drafter."""

    def __init__(self, drafters: Sequence[ModelDrafter], budget: int) -> None:
        self.drafters, self.budget = drafters, budget

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        """See Drafter."""
        first, *others = (each.grow(context, max_depth, pending) for each in self.drafters)
        found = SearchResult(first, np.arange(len(first)))
        for tree in others:
            found = merged(found, tree, -np.inf, self.budget)
        return found.tree

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """See Drafter."""
        for each in self.drafters:
            each.commit(nodes, tokens)

    def observe(self, step: StepResult) -> None:
        """See Drafter."""


def joined(
    case: str, models: dict[str, StreamedModel], target: LocalTarget, budget: int, vocab: int
) -> Joined:
    """The drafters of a case, for a new text."""
    drafters = []
    for name, model in models.items():
        if name in case:
            tree = TreeConfig(
                budget=budget, max_depth=min(budget, 32), batch=8, policy="fixed",
                past="past" in case,
            )  # fmt: skip
            shared = target if name == "head" else None
            drafters.append(
                ModelDrafter(model, Sampler(SamplingConfig()), tree, vocab, shared=shared)
            )
    return Joined(drafters, budget)


def main() -> None:
    """Runs every case with every budget over all prompts, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--budgets", default="16,64")
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    cases = named("--cases", options.cases, CASES, ";")
    dataset = load_dataset(BUILT_IN, data_folder=Path(), count=options.prompts)
    with open_session(Request(model=str(options.target), draft="suffix", device="cpu")) as session:
        prompts, _ = encode_prompts(session, dataset, options.max_tokens)
    spec = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers=None)
    checkpoint = read_checkpoint(options.target)
    if options.head is None:
        head = mtp_checkpoint(checkpoint)
    else:
        stored = read_checkpoint(options.head)
        made = block_checkpoint if is_block_head(stored.config) else eagle_checkpoint
        head = made(stored, checkpoint.config)
    assert head.head is not None
    model = spec.open(checkpoint)
    model.kept_features = head.head.features
    models = {
        "head": spec.open(head, shared=model.ends),
        "draft": spec.open(read_checkpoint(options.draft)),
    }
    rows, results, expected = [], [], dict[str, list[int]]()
    for budget in map(int, options.budgets.split(",")):
        for case in cases:
            counts: dict[str, list[tuple[int, int]]] = {"raw": [], "chat": []}
            for prompt in prompts:
                target = LocalTarget(model)
                drafter = joined(case, models, target, budget, model.vocab_size)
                given = Sampler(SamplingConfig()), prompt.tokens, options.max_tokens, ()
                steps = list(specexec(target, drafter, *given))
                text = [token for step in steps for token in step.tokens]
                assert text == expected.setdefault(prompt.id, text), "a draft changed the text"
                counts[prompt.form].append((len(text), len(steps)))
            found = [ratio_and_error(*zip(*each, strict=True)) for each in counts.values()]
            rows.append([str(budget), case, *(f"{tau:.2f} +-{error:.2f}" for tau, error in found)])
            results.append({"budget": budget, "case": case, "tokens_per_pass": found})
            print(rows[-1], flush=True)
    print(*aligned(["nodes", "tree of", "code", "chats"], rows), sep="\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
