"""Tokens per pass of a target's own low-bit copy, by how many layers it takes from the target.

    python scripts/measure_shared_layers.py
    python scripts/measure_shared_layers.py --target FOLDER --bits 2 --shares 0,0.5 --prompts 4

On a GPU, resident layers of the target draft in place of their low-bit copies. Here the same is
done on a CPU, to count tokens per pass. Texts continue prompts, greedily or sampled with a fixed
seed; each must equal the text that was drafted without shared layers. Nothing is timed. Prints a
table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import specexec_cli
from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.lab.bench.datasets import BUILT_IN, load_dataset
from specexec_cli.lab.bench.metrics import ratio_and_error
from specexec_cli.lab.bench.tables import aligned
from specexec_cli.models.calibration_text import standard_pieces
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.own_copy import own_copy
from specexec_cli.models.resident_parts import SharedParts
from specexec_cli.models.skeleton import build_skeleton
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.resident import read_tensors
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.tiers import spread_order
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget

_CPU = torch.device("cpu")


def copy_with(target: Checkpoint, copy: Checkpoint, share: float) -> StreamedModel:
    """The copy with this share of its layers replaced by the target's, chosen as a plan does."""
    skeleton = build_skeleton(target)
    order = spread_order(len(skeleton.layers))
    chosen = order[: round(share * len(order))]
    layers = {i: read_tensors(list(skeleton.layer_tensors[i].values())) for i in chosen}
    return ModelSpec(device=_CPU, dtype=torch.float32, tiers=None).open(
        copy, shared=SharedParts(layers=layers, skeleton=skeleton)
    )


def main() -> None:
    """Runs every copy at every share over all prompts, and prints the table."""
    demo = Path(specexec_cli.__file__).parent / "demo" / "target"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", type=Path, default=demo)
    parser.add_argument("--bits", default="4,3,2")
    parser.add_argument("--shares", default="0,0.25,0.5,0.75")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--depth", type=int, default=24)
    options = parser.parse_args()
    checkpoint = read_checkpoint(options.target)
    tokenizer = load_tokenizer(options.target)
    found = load_dataset(BUILT_IN, data_folder=Path(), count=1 << 20)
    texts = [prompt.text for prompt in found.prompts if not prompt.chat][: options.prompts]
    prompts = [tokenizer.encode(text) for text in texts]
    tree = TreeConfig(budget=options.budget, max_depth=options.depth, batch=8, policy="fixed")
    model = ModelSpec(device=_CPU, dtype=torch.float32, tiers=None).open(checkpoint)
    rows, results = [], []
    for temperature in map(float, options.temperatures.split(",")):
        sampler = Sampler(SamplingConfig(temperature=temperature))
        for bits in map(int, options.bits.split(",")):
            copy = own_copy(checkpoint, bits, pieces=lambda: standard_pieces(tokenizer))
            expected: list[list[int]] = []
            for share in map(float, options.shares.split(",")):
                draft = copy_with(checkpoint, copy, share)
                tokens, passes, written = [], [], []
                for prompt in prompts:
                    target = LocalTarget(model)
                    drafter = ModelDrafter(draft, sampler, tree, model.vocab_size, shared=target)
                    steps = list(specexec(target, drafter, sampler, prompt, options.max_tokens, ()))
                    written.append([token for step in steps for token in step.tokens])
                    tokens.append(len(written[-1]))
                    passes.append(len(steps))
                expected = expected or written
                assert written == expected, "a draft changed the text"
                tau, error = ratio_and_error(tokens, passes)
                rows.append(
                    [f"{temperature:g}", str(bits), f"{share:.0%}", f"{tau:.2f}", f"{error:.2f}"]
                )
                results.append({"temperature": temperature, "bits": bits, "share": share,
                                "tokens_per_pass": tau, "error": error})  # fmt: skip
    print(*aligned(["temperature", "bits", "shared", "tokens per pass", "error"], rows), sep="\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
