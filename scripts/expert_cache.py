"""Compare rules for a cache of experts with Belady's optimum, on a mixture's own routing.

    python scripts/expert_cache.py --model RIG --tokens 2000
    python scripts/expert_cache.py --model RIG --tokens 480 --decode 60

The model runs each held-out prompt in one pass; the rows' choices count as those of decoding, one
row a pass. With `--decode` the model continues each prompt by so many tokens, and only the hits of
those count. Every rule of expert_rules.py is tried with room for 10, 25 and 50 % of the experts;
hits are counted after the first quarter of the texts. Then follow the rules that know the future
(expert_oracles.py), also for the same rows in random order, where nothing but shares can be
learned. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from expert_oracles import oracles
from expert_rules import Ints, Rules, Trace, hit_rate, possible_rules
from rig_routing import routing_of

from specexec_cli.models.experts import StreamedExperts
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import checkpoint_bytes

TEXTS = Path(__file__).parents[1] / "specexec_cli" / "demo" / "heldout_prompts.json"
SHARES = (0.1, 0.25, 0.5)


def recorded(folder: Path, tokens: int, decode: int) -> Trace:
    """Records the experts that a model's rows choose.

    Args:
        folder: of the model.
        tokens: how many tokens of held-out prompts to run, or to decode, in all.
        decode: tokens to decode after each prompt, which alone count; 0 counts the prompts'.
    """
    checkpoint = read_checkpoint(folder)
    experts = checkpoint_bytes(checkpoint).experts
    assert experts is not None, f"{folder} is no mixture"
    model = ModelSpec(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        tiers="ssd",
        expert_bytes=sum(experts.layers) // 4,
    ).open(checkpoint)
    seen: list[list[Ints]] = []
    for module in model.skeleton.model.modules():
        if isinstance(module, StreamedExperts):
            seen.append([])
            module.register_forward_pre_hook(
                lambda _, args, choices=seen[-1]: choices.append(args[1].numpy())
            )
    tokenizer, texts = load_tokenizer(folder), []  # rows of each prompt, and tokens behind it
    for prompt in json.loads(TEXTS.read_text("utf-8")):
        done = sum(more if decode else rows for rows, more in texts)
        ids = tokenizer.encode(prompt["prompt"])
        ids = ids if decode else ids[: tokens - done]
        if done >= tokens:
            break
        cache = model.new_state()
        logits = model.forward(PassRows.chain(ids, 0), cache, [len(ids) - 1])
        for place in range(len(ids), len(ids) + decode):
            logits = model.forward(PassRows.chain([int(logits.argmax())], place), cache, [0])
        texts.append((len(ids), decode))
    model.close()
    by_layer = np.stack([np.concatenate(choices) for choices in seen], axis=1)
    firsts = experts.count * np.arange(len(seen))
    return Trace(by_layer + firsts[None, :, None], experts.count, _counted(texts), _begins(texts))


def _counted(texts: list[tuple[int, int]]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Marks the rows of texts after the first quarter that count: decoded ones, or else all."""
    warm = len(texts) // 4
    parts = [
        np.arange(rows + more) >= (rows if more else 0) if index >= warm
        else np.zeros(rows + more, dtype=np.bool_)
        for index, (rows, more) in enumerate(texts)
    ]  # fmt: skip
    return np.concatenate(parts)


def _begins(texts: list[tuple[int, int]]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Marks the first row of each text."""
    return np.concatenate([np.arange(rows + more) == 0 for rows, more in texts])


def table_of(trace: Trace, rules: Rules) -> dict[str, list[float]]:
    """Prints and returns the hit rates of rules, for each share of the experts that is held."""
    table = {}
    for name, new in rules.items():
        rates = [hit_rate(trace, int(share * trace.experts), new(trace)) for share in SHARES]
        table[name] = rates
        print(f"{name:30}" + "".join(f"{rate:8.1%}" for rate in rates), flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--tokens", type=int, default=2000, metavar="N")
    parser.add_argument("--decode", type=int, default=0, metavar="N")
    args = parser.parse_args()
    trace = recorded(args.model, args.tokens, args.decode)
    rows = trace.chosen[trace.counted]
    layers = [
        routing_of([rows[:, index] % trace.per_layer], trace.per_layer)
        for index in range(rows.shape[1])
    ]
    skew = float(np.mean([layer.skew for layer in layers]))
    locality = float(np.mean([layer.locality for layer in layers]))
    print(f"{len(rows)} rows, {skew:.0%} of the experts hold 80 % of the choices, "
          f"{locality:.0%} are used again by the next row")  # fmt: skip
    table = table_of(trace, {**possible_rules(), **oracles()})
    print("in random order:")
    shuffled = table_of(trace.shuffled(0), oracles())
    print(json.dumps({"skew": skew, "locality": locality, "shares": SHARES, "hits": table,
                      "in_random_order": shuffled}))  # fmt: skip


if __name__ == "__main__":
    main()
