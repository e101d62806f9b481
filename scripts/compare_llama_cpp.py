"""Compare logits with llama.cpp's on the same GGUF files: largest difference, and same best token.

    python compare_llama_cpp.py --reference PYTHON FILE.gguf... [--rows N]

PYTHON is an interpreter that has llama-cpp-python. llama.cpp rounds rows to 8 bits (Q8_0, Q8_K)
before it multiplies them by packed weights. On a float32 file it does not, so its logits there show
all other differences. Prompts are token ids of the demo's held-out texts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

_REFERENCE = """
import sys
import numpy as np
from llama_cpp import Llama
path, tokens, out = sys.argv[1:]
ids = np.load(tokens).tolist()
model = Llama(path, n_ctx=len(ids) + 8, n_batch=512, logits_all=True, verbose=False, n_threads=2)
model.eval(ids)
np.save(out, np.array(model.scores[: len(ids)]))
"""


def reference(python: str, path: Path, tokens: list[int]) -> np.ndarray:
    """llama.cpp's logits (tokens, vocab), computed by another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        ids, out = Path(folder, "ids.npy"), Path(folder, "logits.npy")
        np.save(ids, np.array(tokens))
        command = [python, "-c", _REFERENCE, str(path), str(ids), str(out)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return np.load(out)


def ours(path: Path, tokens: list[int]) -> np.ndarray:
    """specexec's logits (tokens, vocab) in float32."""
    import torch

    from specexec_cli.models.model_spec import ModelSpec
    from specexec_cli.models.pass_rows import PassRows
    from specexec_cli.offload.store import read_checkpoint

    model = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers="ram").open(
        read_checkpoint(path)
    )
    rows = PassRows.chain(tokens, 0)
    return model.forward(rows, model.new_state(), range(len(tokens))).numpy()


def prompt(path: Path, rows: int) -> list[int]:
    """Token ids of held-out texts, by the file's own tokenizer."""
    import specexec_cli.demo
    from specexec_cli.models.tokenizer import load_tokenizer

    assert specexec_cli.demo.__file__ is not None
    held_out = Path(specexec_cli.demo.__file__).parent / "heldout_prompts.json"
    texts = [item["prompt"] for item in json.loads(held_out.read_text())]
    return load_tokenizer(path).encode("\n".join(texts))[:rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--reference", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--rows", type=int, default=256)
    args = parser.parse_args()
    for path in args.files:
        tokens = prompt(path, args.rows)
        expected, found = reference(args.reference, path, tokens), ours(path, tokens)
        difference = np.abs(found - expected)
        spread = float(expected.std())
        same = float((found.argmax(-1) == expected.argmax(-1)).mean())
        # where the best tokens differ, how far apart their logits are: it should be a near-tie
        rows = np.arange(len(found))
        gap = found.max(-1) - found[rows, expected.argmax(-1)]
        print(
            json.dumps(
                {
                    "file": path.name,
                    "rows": len(tokens),
                    "same_best": round(same, 4),
                    "largest_gap_where_not": round(float(gap.max()), 4),
                    "mean_difference": round(float(difference.mean()), 6),
                    "largest_difference": round(float(difference.max()), 5),
                    "standard_deviation_of_logits": round(spread, 3),
                }
            )
        )


if __name__ == "__main__":
    main()
