"""Which experts a cache should keep: rules beside Belady's optimum, on a mixture's own routing.

    python scripts/expert_cache.py --model RIG --tokens 2000

The model reads the held-out prompts in one pass each, and what its rows choose is taken as the
passes of one row each that decoding would make; with `--decode 40` it goes on so many tokens behind
each prompt, and these passes are the trace. Every rule then runs over it with room for 10, 25 and
50 % of the experts. Hits are counted behind the first quarter of the trace. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rig_routing import routing_of

from specexec_cli.models.experts import StreamedExperts
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import checkpoint_bytes

TEXTS = Path(__file__).parents[1] / "specexec_cli" / "demo" / "heldout_prompts.json"
SHARES = (0.1, 0.25, 0.5)
Trace = NDArray[np.int64]  # (tokens, layers, chosen): numbers of experts, of all layers
Floats = NDArray[np.float64]


class Worth:
    """What every expert is worth keeping, after each visit of a layer."""

    def __init__(self, experts: int) -> None:
        self.worth: Floats = np.zeros(experts)

    def visit(self, time: int, layer: slice, chosen: NDArray[np.int64]) -> None:
        """A row chose these experts of a layer."""


class Lru(Worth):
    """The time of the last use."""

    def visit(self, time: int, layer: slice, chosen: NDArray[np.int64]) -> None:
        self.worth[chosen] = time


class Decayed(Worth):
    """Counts that decay with each visit of the layer, as the sum of several rates of decay."""

    def __init__(self, experts: int, *rates: float) -> None:
        super().__init__(experts)
        self._rates = rates
        self._counts = np.zeros((len(rates), experts))

    def visit(self, time: int, layer: slice, chosen: NDArray[np.int64]) -> None:
        for counts, rate in zip(self._counts, self._rates, strict=True):
            counts[layer] *= rate
            counts[chosen] += 1.0
        self.worth[layer] = self._counts[:, layer].sum(0)


class Belady(Worth):
    """Minus the time of the next use, which no cache can know."""

    def __init__(self, experts: int, trace: Trace) -> None:
        super().__init__(experts)
        self._next: list[NDArray[np.int64]] = []
        upcoming = np.full(experts, np.iinfo(np.int64).max // 2)
        visits = trace.reshape(-1, trace.shape[2])
        for time in range(len(visits) - 1, -1, -1):
            self._next.append(upcoming[visits[time]])
            upcoming[visits[time]] = time
        self._next.reverse()

    def visit(self, time: int, layer: slice, chosen: NDArray[np.int64]) -> None:
        self.worth[chosen] = -self._next[time]


def hit_rate(trace: Trace, per_layer: int, slots: int, worth: Worth) -> float:
    """The share of choices that are in a cache of so many slots, which keeps the worthiest."""
    held = np.zeros(len(worth.worth), dtype=np.bool_)
    hits = asked = 0
    tokens, layers, _ = trace.shape
    for time, chosen in enumerate(trace.reshape(-1, trace.shape[2])):
        first = time % layers * per_layer
        if time >= tokens * layers // 4:
            asked += len(chosen)
            hits += int(held[chosen].sum())
        worth.visit(time, slice(first, first + per_layer), chosen)
        held[chosen] = True
        over = int(held.sum()) - slots
        if over > 0:
            others = np.flatnonzero(held)
            others = others[~np.isin(others, chosen)]
            held[others[np.argsort(worth.worth[others], kind="stable")[:over]]] = False
    return hits / asked


def recorded(folder: Path, tokens: int, decode: int) -> tuple[Trace, int]:
    """The choices of a model's rows, and the experts of a layer.

    Args:
        tokens: of the held-out prompts in all, or that are decoded in all.
        decode: tokens behind each prompt, which are then the rows; 0 for the prompts' own.
    """
    checkpoint = read_checkpoint(folder)
    experts = checkpoint_bytes(checkpoint).experts
    assert experts is not None, f"{folder} is no mixture"
    model = StreamedModel.open(
        checkpoint, device=torch.device("cpu"), dtype=torch.bfloat16, tiers="ssd",
        expert_bytes=sum(experts.layers) // 4,
    )  # fmt: skip
    seen: list[list[NDArray[np.int64]]] = []
    for module in model.skeleton.model.modules():
        if isinstance(module, StreamedExperts):
            seen.append([])
            module.register_forward_pre_hook(
                lambda _, args, choices=seen[-1]: choices.append(args[1].numpy())
            )
    tokenizer, done = load_tokenizer(folder), 0
    for prompt in json.loads(TEXTS.read_text("utf-8")):
        ids = tokenizer.encode(prompt["prompt"])
        ids = (ids if decode else ids[: tokens - done]) if done < tokens else []
        if not ids:
            continue
        cache, before = model.new_cache(), len(seen[0])
        logits = model.forward(PassRows.chain(ids, 0), cache, [len(ids) - 1])
        if not decode:
            done += len(ids)
            continue
        for choices in seen:
            del choices[before:]
        for place in range(len(ids), len(ids) + decode):
            logits = model.forward(PassRows.chain([int(logits.argmax())], place), cache, [0])
        done += decode
    model.close()
    by_layer = np.stack([np.concatenate(choices) for choices in seen], axis=1)
    firsts = experts.count * np.arange(len(seen))
    return by_layer + firsts[None, :, None], experts.count


def rules(trace: Trace) -> dict[str, Callable[[int], Worth]]:
    """By name; each makes a new cache's rule for so many experts."""
    found: dict[str, Callable[[int], Worth]] = {"lru": Lru}
    for rate in (0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0):
        found[f"decay {rate}"] = lambda experts, rate=rate: Decayed(experts, rate)
    found["decay 0.5 + 0.98"] = lambda experts: Decayed(experts, 0.5, 0.98)
    found["decay 0.8 + 0.99"] = lambda experts: Decayed(experts, 0.8, 0.99)
    found["belady"] = lambda experts: Belady(experts, trace)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--tokens", type=int, default=2000, metavar="N")
    parser.add_argument("--decode", type=int, default=0, metavar="N")
    args = parser.parse_args()
    trace, per_layer = recorded(args.model, args.tokens, args.decode)
    experts = per_layer * trace.shape[1]
    layers = [
        routing_of([trace[:, index] % per_layer], per_layer) for index in range(trace.shape[1])
    ]
    skew = float(np.mean([layer.skew for layer in layers]))
    locality = float(np.mean([layer.locality for layer in layers]))
    print(f"{trace.shape[0]} tokens, {skew:.0%} of the experts hold 80 % of the choices, "
          f"{locality:.0%} are used again by the next token")  # fmt: skip
    table: dict[str, Any] = {}
    for name, new in rules(trace).items():
        rates = [hit_rate(trace, per_layer, int(share * experts), new(experts)) for share in SHARES]
        table[name] = rates
        print(f"{name:20}" + "".join(f"{rate:8.1%}" for rate in rates), flush=True)
    print(json.dumps({"skew": skew, "locality": locality, "shares": SHARES, "hits": table}))


if __name__ == "__main__":
    main()
