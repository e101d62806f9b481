"""Counts the bytes and reads of a mixture's experts by passes of different sizes, not seconds.

    python scripts/count_expert_reads.py --model RIG --share 0.25 --rows 1,16,64,250

For each size, `--passes` passes go through one store, each over the next rows of the held-out
prompts. The first pass of a size fills the slots and is not counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from specexec_cli.device import format_bytes
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import checkpoint_bytes

TEXTS = Path(__file__).parents[1] / "specexec_cli" / "demo" / "heldout_prompts.json"
COUNTS = ("touched", "hits", "reads", "bytes_read")


def opened(folder: Path, share: float) -> StreamedModel:
    """The model with slots for a share of its experts' bytes."""
    checkpoint = read_checkpoint(folder)
    experts = checkpoint_bytes(checkpoint).experts
    assert experts is not None, f"{folder} is no mixture"
    return ModelSpec(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        tiers="ram",
        expert_bytes=int(share * sum(experts.layers)),
    ).open(checkpoint)


def counted(model: StreamedModel, ids: list[int], rows: int, passes: int) -> dict[str, float]:
    """The means over the passes after the first; each pass is a text of its own."""
    store = model.experts
    assert store is not None
    before = dict.fromkeys(COUNTS, 0)
    for number in range(passes):
        if number == 1:
            before = {name: getattr(store, name, 0) for name in COUNTS}
        start = number * rows % (len(ids) - rows)
        model.forward(PassRows.chain(ids[start : start + rows], 0), model.new_state(), [0])
    after = {name: getattr(store, name, 0) for name in COUNTS}
    return {name: (after[name] - before[name]) / (passes - 1) for name in COUNTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts' bytes")
    parser.add_argument("--rows", default="1,16,64,250", metavar="N,N", help="of a pass")
    parser.add_argument("--passes", type=int, default=4, metavar="N", help="of a size")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    texts = json.loads(TEXTS.read_text("utf-8"))
    ids = [token for text in texts for token in tokenizer.encode(text["prompt"])]
    model = opened(args.model, args.share)
    found = {}
    for rows in map(int, args.rows.split(",")):
        found[rows] = row = counted(model, ids, rows, args.passes)
        told = f"{row['touched']:7.1f} experts asked for, {row['hits']:7.1f} there, "
        told += f"{row['reads']:6.1f} reads of {format_bytes(row['bytes_read'])}"
        print(f"{rows:5} rows: {told}", flush=True)
    model.close()
    print(json.dumps({"share": args.share, "slots": model.experts and model.experts.slots,
                      "passes": found}))  # fmt: skip


if __name__ == "__main__":
    main()
