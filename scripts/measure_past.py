"""Tokens per pass on edits and summaries, with the text's own past drafting and without.

    python scripts/measure_past.py
    python scripts/measure_past.py --draft FOLDER --prompts FILE.json

A small target can neither edit nor summarize, so this one is given the text to generate: for each
of twenty prompts (past_prompts.json, from this repository's code and docs) an edited text, made by
replacing words, or a summary, written by hand. Its logits are highest at the next token of that
text; trees, drafts, walk and loop are those of decoding at temperature 0. So the figures say what a
target that can edit would gain, however good it is. Nothing is timed. Prints a table; the last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import specexec_cli
from specexec_cli.config import BenchMethod, SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.sources import SOURCES, DraftSetup
from specexec_cli.lab.bench.metrics import ratio_and_error
from specexec_cli.lab.bench.tables import aligned
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.sampling import Sampler

# a name of the column, the method, and whether what stood before drafts too
_DRAFTS: Sequence[tuple[str, BenchMethod, bool]] = (
    ("draft model", "specexec", False),
    ("with the past", "specexec", True),
    ("past alone", "suffix", True),
)


class KnownText:
    """A target that generates a given text; see verify.verifier.TargetServer.

    Args:
        text: prompt and answer.
    """

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        self.tokens: list[int] = []
        self.bytes_streamed = 0
        self.read_s = 0.0
        self._text, self._vocab_size = text, vocab_size
        self._pending: list[int] = []
        self._tree = DraftTree.empty()

    def verify(self, pending: Sequence[int], tree: DraftTree) -> Tensor:
        """Logits that are highest at the text's next token; rows after a wrong node are unused."""
        self._pending, self._tree = list(pending), tree
        root = len(self.tokens) + len(pending)
        positions = [root, *(root + tree.depths).tolist()]
        # a node at the last position has nothing behind it; the walk ends there
        following = [self._text[min(position, len(self._text) - 1)] for position in positions]
        logits = torch.zeros(len(positions), self._vocab_size)
        logits[range(len(positions)), following] = 1.0
        return logits

    def commit(self, nodes: Sequence[int]) -> None:
        """Keeps the accepted nodes of the last verification."""
        self.tokens += [*self._pending, *(int(self._tree.tokens[node]) for node in nodes)]

    def crop(self, length: int) -> None:
        """Forgets every committed token from `length` on."""
        del self.tokens[length:]


def passes_of(
    model: StreamedModel | None,
    method: BenchMethod,
    tree: TreeConfig,
    prompt: Sequence[int],
    answer: Sequence[int],
    vocab_size: int,
) -> int:
    """How many target passes the answer takes.

    Args:
        model: the draft model, where the method needs one.
    """
    sampler = Sampler(SamplingConfig())
    setup = DraftSetup(
        model=model, sampler=sampler, tree=tree, target_vocab_size=vocab_size, learned=Learned()
    )
    drafter = SOURCES[method].make(setup)
    target = KnownText([*prompt, *answer], vocab_size)
    steps = list(specexec(target, drafter, sampler, prompt, len(answer), ()))
    assert [token for step in steps for token in step.tokens] == list(answer)
    return len(steps)


def main() -> None:
    """Runs every prompt with every draft, and prints the table."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prompts", type=Path, default=here / "past_prompts.json")
    parser.add_argument(
        "--draft", type=Path, default=Path(specexec_cli.__file__).parent / "demo" / "draft"
    )
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--depth", type=int, default=24)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.draft)
    model = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers=None).open(
        read_checkpoint(options.draft)
    )
    rows: list[list[str]] = []
    told: dict[str, dict[str, float]] = {}
    records = json.loads(options.prompts.read_text(encoding="utf-8"))
    for kind in dict.fromkeys(record["kind"] for record in records):
        texts = [
            (tokenizer.encode(one["prompt"]), tokenizer.encode(one["answer"]))
            for one in records
            if one["kind"] == kind
        ]
        lengths = [len(answer) for _, answer in texts]
        told[kind] = {"prompts": len(texts), "tokens": sum(lengths)}
        cells = []
        for name, method, past in _DRAFTS:
            tree = TreeConfig(budget=options.budget, max_depth=options.depth, past=past)
            passes = [
                passes_of(model, method, tree, prompt, answer, model.vocab_size)
                for prompt, answer in texts
            ]
            rate, error = ratio_and_error(lengths, passes)
            told[kind] |= {name: rate, f"{name}, standard error": error}
            cells.append(f"{rate:.2f} ±{error:.2f}")
        gain = told[kind]["with the past"] / told[kind]["draft model"]
        rows.append([kind, str(len(texts)), str(sum(lengths)), *cells, f"{gain:.2f}x"])
    header = ["kind", "prompts", "tokens", *(name for name, _, _ in _DRAFTS), "gain"]
    print("\n".join(aligned(header, rows)))
    print(json.dumps({"schema": 1, "budget": options.budget, "depth": options.depth, **told}))


if __name__ == "__main__":
    main()
