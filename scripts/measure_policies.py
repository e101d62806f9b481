"""The policies' trees on real text, priced as machines that stream a large target.

    python scripts/measure_policies.py --target FOLDER --data DATA
    python scripts/measure_policies.py --target FOLDER --data DATA --draft self-3 --machines ssd

The target drafts with its own low-bit copy and commits what it commits; only the clock is made up.
Each pass and each draft step takes the seconds that a machine below needs for so many rows, with 5
per cent of noise, and the policy learns from these. So a small model that people trained says what
a policy would reach on large ones, and a busy machine measures as well as a quiet one. All trees
must write the same texts. `cost` begins with a prior whose rows and draft steps are 1.3 times as
dear as they are, as a probe may be wrong; what it learns goes on from text to text. Tokens per
second are all tokens over all seconds, prompts included; their ratio to the best fixed budget has a
jackknife error over prompts. Ctrl-C ends the run with the prompts so far. Prints a table for each
machine; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree, StepResult
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.iteration_cost import CostModel
from specexec_cli.drafting.learned import Learned
from specexec_cli.lab.bench.datasets import load_dataset
from specexec_cli.lab.bench.tables import aligned
from specexec_cli.models.calibration_text import standard_pieces
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.own_copy import own_copy
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.chosen_models import own_bits
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget

# Seconds of a pass up to the knee, of each further row, and of a draft step.
MACHINES: Mapping[str, CostModel] = {
    # Llama-2-7B in bfloat16 from an SSD, two cores (docs/measured.md, "Streaming")
    "ssd": CostModel(base_s=6.4, row_s=0.073, knee_rows=95.0, step_s=0.15),
    # a 70B in 4 bits over 25 GB/s, draft steps of 6.5 ms ("What plans say of GPUs")
    "gpu": CostModel(base_s=0.86, row_s=0.0014, knee_rows=600.0, step_s=0.0065),
    # 4 bits from an SSD on two cores, whose arithmetic soon outlasts it
    "4bit": CostModel(base_s=1.4, row_s=0.009, knee_rows=120.0, step_s=0.035),
    # all in RAM, where each row costs and drafting pays little
    "ram": CostModel(base_s=0.3, row_s=0.012, knee_rows=1.0, step_s=0.06),
}
_DEEPEST = 32  # longest path of the largest trees
_FEW_NODES, _LESS_DEEP = 64, 24  # and that of trees of up to so many nodes
_PRIOR_ERROR, _NOISE = 1.3, 0.05


@dataclass
class Priced:
    """A drafter whose policy is told the seconds of a machine; see drafting.protocols.Drafter."""

    drafter: ModelDrafter
    machine: CostModel | None  # None tells the policy what really passed
    rng: np.random.Generator
    steps: int = 0  # draft steps of the present tree

    def __post_init__(self) -> None:
        run = self.drafter.rows.run

        def counted(*args: object) -> torch.Tensor:
            self.steps += 1
            return run(*args)  # type: ignore[arg-type]

        self.drafter.rows.run = counted  # type: ignore[method-assign, assignment]

    def grow(self, context: Sequence[int], max_depth: int, pending: int = 1) -> DraftTree:
        """Grows the next tree, and counts its draft steps."""
        self.steps = 0
        return self.drafter.grow(context, max_depth, pending)

    def commit(self, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """See Drafter."""
        self.drafter.commit(nodes, tokens)

    def observe(self, step: StepResult) -> None:
        """Tells the policy of the iteration, with the machine's seconds as those that passed."""
        if self.machine is not None:
            draft_s = self.machine.step_s * self.steps
            rows = np.array([float(step.tree_nodes + step.pending_rows)])
            total_s = float(self.machine.seconds(rows, self.steps)[0])
            total_s *= float(self.rng.lognormal(0.0, _NOISE))
            draft_s = min(draft_s, total_s)
            step = replace(step, draft_s=draft_s, verify_s=total_s - draft_s, read_s=0.0)
        self.drafter.observe(step)


@dataclass
class Outcome:
    """One text: its tokens, and rows and draft steps of each pass."""

    tokens: list[int] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=list)

    def seconds(self, machine: CostModel) -> float:
        """What all passes and draft steps take on a machine."""
        rows, steps = np.array(self.passes, dtype=np.float64).T
        return float(machine.seconds(rows, steps).sum())


class Texts:
    """Decodes prompts with one policy, which goes on learning."""

    def __init__(
        self, model: StreamedModel, draft: StreamedModel, sampler: Sampler, tree: TreeConfig,
        machine: CostModel | None,
    ) -> None:  # fmt: skip
        self._model, self._draft, self._sampler = model, draft, sampler
        self._tree, self._machine = tree, machine
        prior = machine and replace(
            machine, row_s=_PRIOR_ERROR * machine.row_s, step_s=_PRIOR_ERROR * machine.step_s
        )
        self._learned = Learned(cost_prior=lambda: prior)
        self._rng = np.random.default_rng(7)

    def decode(self, prompt: Sequence[int], count: int, eos_ids: Sequence[int]) -> Outcome:
        """Decodes up to `count` tokens behind a prompt, from empty caches."""
        target = LocalTarget(self._model)
        drafter = ModelDrafter(
            self._draft, self._sampler, self._tree, self._model.vocab_size,
            learned=self._learned, shared=target,
        )  # fmt: skip
        priced, found = Priced(drafter, self._machine, self._rng), Outcome()
        for step in specexec(target, priced, self._sampler, prompt, count, eos_ids):
            found.tokens += step.tokens
            found.passes.append((step.tree_nodes + step.pending_rows, priced.steps))
        return found


def ratio(ours: Sequence[float], best: Sequence[float]) -> tuple[float, float]:
    """How much faster one policy wrote the same texts than another, and the jackknife error.

    Args:
        ours, best: seconds of each text.
    """
    mine, other = np.array(ours), np.array(best)
    left = (other.sum() - other) / (mine.sum() - mine)
    error = np.sqrt((len(left) - 1) * left.var())
    return float(other.sum() / mine.sum()), float(error)


def prompts(
    target: Path, data: Path, names: Sequence[str], skip: int, count: int
) -> Iterator[list[int]]:
    """Tokens of `count` prompts of each dataset, behind the first `skip`, one of each in turn."""
    tokenizer = load_tokenizer(target)
    found = [load_dataset(name, data_folder=data, count=skip + count) for name in names]
    for turn in zip(*(dataset.prompts[skip:] for dataset in found), strict=True):
        for prompt in turn:
            text, whole = prompt.text, True
            if prompt.chat and getattr(tokenizer, "chat_template", None):
                messages = [{"role": role, "content": said} for role, said in prompt.messages]
                text, whole = str(tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )), False  # fmt: skip
            yield tokenizer.encode(text, add_special_tokens=whole)


def main() -> None:
    """Decodes every prompt with every policy, and prints a table for each machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draft", default="self")
    parser.add_argument("--datasets", default="mt-bench,humaneval,oasst,c4,wikitext2")
    parser.add_argument("--skip", type=int, default=0, help="prompts of each dataset left out")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--budgets", default="4,8,16,32,64,128,256", help="of the fixed trees")
    parser.add_argument("--machines", default=",".join(MACHINES))
    options = parser.parse_args()
    bits = own_bits(options.draft)
    if bits is None:
        parser.error(f"--draft {options.draft}: self, self-3 or self-2")
    checkpoint = read_checkpoint(options.target)
    tokenizer = load_tokenizer(options.target)
    spec = ModelSpec(device=torch.device("cpu"), dtype=torch.bfloat16, tiers=None)
    model = spec.open(checkpoint)
    draft = spec.open(own_copy(checkpoint, bits, pieces=lambda: standard_pieces(tokenizer)))
    sampler = Sampler(SamplingConfig(temperature=options.temperature))
    machines = {name: MACHINES[name] for name in options.machines.split(",")}

    def texts(policy: str, budget: int, depth: int, machine: CostModel | None = None) -> Texts:
        tree = TreeConfig(budget=budget, max_depth=depth, batch=8, policy=policy)
        return Texts(model, draft, sampler, tree, machine)

    runs = {
        f"fixed {budget}": texts(
            "fixed", budget, min(budget, _LESS_DEEP if budget <= _FEW_NODES else _DEEPEST)
        )
        for budget in map(int, options.budgets.split(","))
    }
    runs["heuristic"] = texts("heuristic", _FEW_NODES, _LESS_DEEP)
    runs |= {f"cost on {name}": texts("cost", 256, _DEEPEST, one) for name, one in machines.items()}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in runs}
    names = options.datasets.split(",")
    with suppress(KeyboardInterrupt):  # what is there is worth telling
        for prompt in prompts(options.target, options.data, names, options.skip, options.prompts):
            found = {
                name: one.decode(prompt, options.max_tokens, [tokenizer.eos_token_id])
                for name, one in runs.items()
            }
            assert len({tuple(one.tokens) for one in found.values()}) == 1, (
                "a policy changed a text"
            )
            for name, one in found.items():
                outcomes[name].append(one)
    told = {name: compared(outcomes, name, machine) for name, machine in machines.items()}
    count = len(outcomes["heuristic"])
    given = {name: str(value) for name, value in vars(options).items()}
    print(json.dumps({"schema": 1, **given, "prompts": count, "machines": told}))


def compared(
    outcomes: Mapping[str, Sequence[Outcome]], name: str, machine: CostModel
) -> dict[str, list[float]]:
    """Prints a machine's table.

    Returns:
        for each policy, the ratio to the best fixed budget and its error.
    """
    plain_s = float(machine.seconds(np.ones(1), 0)[0])
    times = {
        run: [one.seconds(machine) for one in found]
        for run, found in outcomes.items()
        if " on " not in run or run == f"cost on {name}"
    }
    fixed = [run for run in times if run.startswith("fixed")]
    best = min(fixed, key=lambda run: sum(times[run]))
    rows, told = [], {}
    for run, seconds in times.items():
        told[run] = list(ratio(seconds, times[best]))
        tokens = sum(len(one.tokens) for one in outcomes[run])
        count = sum(len(one.passes) for one in outcomes[run])
        rows.append([
            run, f"{tokens / count:.2f}", f"{plain_s * tokens / sum(seconds):.2f}",
            *(f"{number:.3f}" for number in told[run]),
        ])  # fmt: skip
    print(f"{name}: best is {best}")
    header = ["policy", "tokens a pass", "over plain", "of the best fixed", "error"]
    print(*aligned(header, rows), sep="\n")
    return told


if __name__ == "__main__":
    main()
