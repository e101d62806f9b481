"""Hold the logits of a checkpoint that `specexec quantize` wrote against those of GPTQModel.

    pip install gptqmodel        # in an environment of its own, beside this program's packages
    python scripts/check_gptqmodel.py --target demo-target --bits 4

Both read the same folder, and both compute in float32: GPTQModel by its kernel in plain PyTorch.
Prints the largest difference beside the largest logit; ends with 1 where it is more than 0.1 % of
that, or where the most probable token of any position differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel

from specexec_cli.catalog.hub import fetch
from specexec_cli.catalog.registry import load_registry
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.quantize import plan_quantization, write_quantized
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.store import read_checkpoint

TEXT = "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n        return file"
GROUP_SIZE = 64
MOST = 1e-3  # of the largest logit


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4))
    asked = parser.parse_args()
    source = read_checkpoint(fetch(load_registry(None).resolve(asked.target), offline=True))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "quantized"
        write_quantized(plan_quantization(source, asked.bits, GROUP_SIZE), folder)
        tokens = load_tokenizer(folder).encode(TEXT)
        model = StreamedModel.open(
            read_checkpoint(folder), device=torch.device("cpu"), dtype=torch.float32, tiers=None
        )
        rows = PassRows.chain(tokens, 0)
        ours = model.forward(rows, model.new_cache(), range(len(tokens)))
        peer = GPTQModel.from_quantized(
            str(folder), device="cpu", backend=BACKEND.TORCH, dtype=torch.float32
        )
        with torch.no_grad():
            theirs = peer(input_ids=torch.tensor([tokens])).logits[0].float()
    off, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    same = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    print(
        f"{asked.target} in {asked.bits} bits, {len(tokens)} positions: largest difference "
        f"{off:.2g} beside a logit of {largest:.3g}; most probable token the same at {same}"
    )
    return 0 if off <= MOST * largest and same == len(tokens) else 1


if __name__ == "__main__":
    sys.exit(main())
