"""Count the texts that differ from plain decoding in a dtype, and say how near the ties were.

    python scripts/count_dtype_differences.py --dtype bfloat16
    python scripts/count_dtype_differences.py --dtype bfloat16 --native
    python scripts/count_dtype_differences.py --dtype bfloat16 --dataset demo,humaneval \
        --data data/prompts --prompts 200 --budget 48

In float32 SpecExec writes the tokens of plain decoding. In two bytes a row of a pass may round
differently when the pass has more rows, and where two candidates nearly tie the token is another
one; from there on the texts have little in common. So texts are counted, not tokens. Each text is
written by plain decoding and by SpecExec with each budget; the text of plain decoding then goes
through the target in one pass, whose logits say how often the two best are exactly equal and how
far apart the two tokens were at the first difference. With --native a CPU without arithmetic in
the dtype takes PyTorch's own kernels for it, as one that has it does. Nothing is timed: a busy
machine will do. Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from specexec_kernels import cpu_jit
from torch import Tensor

from specexec_cli.config import DtypeName, GenerationConfig, SamplingConfig, TreeConfig
from specexec_cli.errors import SpecexecError
from specexec_cli.lab.bench.datasets import load_dataset
from specexec_cli.lab.bench.environment import environment
from specexec_cli.lab.bench.runner import encode_prompts
from specexec_cli.sampling import Sampler, gumbel_noise
from specexec_cli.session import Session, TextSession

MAX_DEPTH = 24  # of the trees, less where the budget is


@dataclass(frozen=True, slots=True)
class Comparison:
    """One text beside the text of plain decoding."""

    prompt: str
    temperature: float
    budget: int
    tokens: int  # of the text of plain decoding
    differs_at: int | None  # tokens that are equal before the first difference
    gap: float | None  # there, by how much plain decoding's token led or trailed, in logits


@dataclass(frozen=True, slots=True)
class Ties:
    """Positions at which the target's two highest logits are equal."""

    positions: int
    tied: int


def write(
    session: TextSession,
    prompt: Sequence[int],
    sampling: SamplingConfig,
    max_tokens: int,
    tree: TreeConfig | None,
) -> list[int]:
    """The tokens of one text from empty caches; by plain decoding where there is no tree."""
    session.forget()
    steps = session.generate(
        prompt,
        sampling=sampling,
        tree=tree,
        generation=GenerationConfig(max_tokens=max_tokens),
        method="autoregressive" if tree is None else "specexec",
    )
    return [token for step in steps for token in step.tokens]


def first_difference(text: Sequence[int], other: Sequence[int]) -> int | None:
    """Tokens before the first that differs; None where the texts are equal."""
    for index, (ours, theirs) in enumerate(itertools.zip_longest(text, other)):
        if ours != theirs:
            return index
    return None


def tree_of(budget: int) -> TreeConfig:
    """The trees of SpecExec with a fixed budget."""
    return TreeConfig(budget=budget, max_depth=min(MAX_DEPTH, budget), policy="fixed")


def compare(
    session: TextSession,
    name: str,
    prompt: Sequence[int],
    sampling: SamplingConfig,
    max_tokens: int,
    budgets: Iterable[int],
) -> tuple[Ties, list[Comparison]]:
    """One prompt's text with each budget beside that of plain decoding."""
    plain = write(session, prompt, sampling, max_tokens, None)
    logits, _ = session.score([*prompt, *plain], len(prompt))
    best = logits.float().topk(2, dim=-1).values
    ties = Ties(len(plain), int((best[:, 0] == best[:, 1]).sum()))
    compared = []
    for budget in budgets:
        text = write(session, prompt, sampling, max_tokens, tree_of(budget))
        at, gap = first_difference(plain, text), None
        # one may only end before the other if a token differed first
        if at is not None:
            tokens = plain[at], text[at]
            gap = token_gap(logits[at], sampling, [*prompt, *plain[:at]], tokens)
        compared.append(Comparison(name, sampling.temperature, budget, len(plain), at, gap))
    return ties, compared


def token_gap(
    logits: Tensor, sampling: SamplingConfig, context: Sequence[int], tokens: tuple[int, int]
) -> float:
    """By how much two candidates differ in what the sampler maximises, in logits.

    Args:
        logits: (vocab,) of the position behind `context`.
        tokens: the candidates.
    """
    scores = Sampler(sampling).filtered(logits[None], context)[0]
    scale = 1.0
    if sampling.temperature > 0:
        scores = scores + gumbel_noise(sampling.seed, len(context), len(scores)).to(scores.device)
        scale = sampling.temperature  # scores are logits divided by it
    return scale * abs(float(scores[tokens[0]] - scores[tokens[1]]))


def summary(compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Counts for each temperature and budget."""
    groups: dict[tuple[float, int], list[Comparison]] = {}
    for each in compared:
        groups.setdefault((each.temperature, each.budget), []).append(each)
    return [
        {
            "temperature": temperature,
            "budget": budget,
            "texts": len(group),
            "tokens": sum(each.tokens for each in group),
            "differing": sum(each.differs_at is not None for each in group),
            "first_difference": min(
                (each.differs_at for each in group if each.differs_at is not None), default=None
            ),
            "largest_gap": max((each.gap for each in group if each.gap is not None), default=None),
        }
        for (temperature, budget), group in groups.items()
    ]


def _numbers(kind: Any) -> Any:
    return lambda text: [kind(item) for item in text.split(",")]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", default="demo")
    parser.add_argument("--dtype", choices=get_args(DtypeName), default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dataset", default="demo", help="names or files, as in specexec bench")
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="where names are looked for"
    )
    parser.add_argument("--prompts", type=int, default=100, help="most prompts, of all datasets")
    parser.add_argument("--temperature", type=_numbers(float), default=[0.0, 0.8])
    parser.add_argument("--budget", type=_numbers(int), default=[48])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--native", action="store_true", help="PyTorch's kernels on any CPU")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, as one JSON object.

    Raises:
        SpecexecError: whatever is wrong, in one line.
    """
    compared: list[Comparison] = []
    positions = tied = 0
    if args.native:
        cpu_jit.has_matmul = lambda dtype: True
    with Session.open(pair=args.pair, dtype=args.dtype, device=args.device) as session:
        prompts = []
        for name in args.dataset.split(","):
            dataset = load_dataset(name, data_folder=args.data, count=args.prompts - len(prompts))
            prompts += encode_prompts(session, dataset, args.max_tokens)[0]
            if len(prompts) >= args.prompts:
                break
        for number, prompt in enumerate(prompts):
            for temperature in args.temperature:
                sampling = SamplingConfig(temperature=temperature, seed=args.seed + number)
                ties, texts = compare(
                    session, prompt.id, prompt.tokens, sampling, args.max_tokens, args.budget
                )
                positions, tied = positions + ties.positions, tied + ties.tied
                compared += texts
            so_far = ", ".join(
                f"{row['differing']} of {row['texts']} at T={row['temperature']:g}, "
                f"budget {row['budget']}"
                for row in summary(compared)
            )
            print(f"prompt {number + 1}/{len(prompts)}: differing {so_far}", file=sys.stderr)
        settings = dict(session.settings)
    return {
        "schema": 1,
        "config": {
            **{name: getattr(args, name) for name in (
                "pair", "dataset", "temperature", "budget", "max_tokens", "native")},
            **settings,
            "prompts": len(prompts),
            "threads": torch.get_num_threads(),
        },
        "seed": args.seed,
        **environment(),
        "positions": positions,
        "tied_positions": tied,
        "counts": summary(compared),
        "differing_texts": [asdict(each) for each in compared if each.differs_at is not None],
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    """The counts as a table, then everything as one line of JSON."""
    print("temperature  budget  texts  differing  first difference  largest gap (logits)")
    for row in result["counts"]:
        at, gap = row["first_difference"], row["largest_gap"]
        print(
            f"{row['temperature']:11g}  {row['budget']:6}  {row['texts']:5}  "
            f"{row['differing']:9}  {'-' if at is None else at:>16}  "
            f"{'-' if gap is None else format(gap, '.4f'):>20}"
        )
    share = 100 * result["tied_positions"] / max(result["positions"], 1)
    print(f"two highest logits equal at {share:.2f} % of {result['positions']} positions")
    print(json.dumps(result))


def main(argv: Sequence[str] | None = None) -> int:
    try:
        show(run(_arguments(argv)))
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
