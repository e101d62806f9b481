"""Perplexity on a text, and KL divergence from full precision: of formats, copies and llama.cpp.

    python scripts/quality.py REFERENCE [MODEL ...] [--copies 4,3,2] [--dtype float32,bfloat16]
        [--activations full,8bit] [--kv full,8bit] [--llama-cpp PYTHON]
        [--dataset wikitext2 --data FOLDER] [--windows 8] [--rows 512]

REFERENCE and each MODEL is a folder or a GGUF file, all of one vocabulary. The reference is
computed in float32; each MODEL in each --dtype, with each --activations and with keys and values
kept as each --kv says, and so are the copies of the reference that `--draft self` makes. These
stand alone here, although they are made to draft behind the reference's own keys and values:
`specexec bench` says what they are worth there.
PYTHON is an interpreter that has the package xllamacpp, in which llama.cpp is compiled: with it,
llama.cpp computes each GGUF file too (it rounds rows to 8 bits before it multiplies them by packed
weights). The text is read in windows, each of which begins anew; the first half of a window is
context, and the tokens of the second are counted. Errors are those of the mean over windows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from specexec_cli.errors import ConfigError, SpecexecError
from specexec_cli.gguf.container import is_gguf
from specexec_cli.lab.bench.datasets import load_dataset
from specexec_cli.lab.bench.tables import aligned
from specexec_cli.models.calibration_text import standard_pieces
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.own_copy import own_copy
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.store import read_checkpoint

# llama.cpp's C interface by its default settings: of the structures that it takes by value, only
# the first numbers are written, so that their further fields need not be known here.
_LLAMA_CPP = """
import ctypes, importlib.util, os, sys
import numpy as np

windows, path, out = np.load(sys.argv[1]), sys.argv[2], sys.argv[3]
api = ctypes.CDLL(importlib.util.find_spec("xllamacpp.xllamacpp").origin)


class Params(ctypes.Structure):
    _fields_ = [("n_ctx", ctypes.c_uint32), ("n_batch", ctypes.c_uint32),
                ("n_ubatch", ctypes.c_uint32), ("further", ctypes.c_uint8 * 2036)]


class Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)),
                ("embd", ctypes.c_void_p), ("pos", ctypes.POINTER(ctypes.c_int32)),
                ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
                ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
                ("logits", ctypes.POINTER(ctypes.c_int8))]


pointer = ctypes.c_void_p
for name, result, arguments in (
    ("llama_model_default_params", Params, []),
    ("llama_model_load_from_file", pointer, [ctypes.c_char_p, Params]),
    ("llama_context_default_params", Params, []),
    ("llama_init_from_model", pointer, [pointer, Params]),
    ("llama_model_get_vocab", pointer, [pointer]),
    ("llama_vocab_n_tokens", ctypes.c_int32, [pointer]),
    ("llama_batch_init", Batch, [ctypes.c_int32] * 3),
    ("llama_decode", ctypes.c_int32, [pointer, Batch]),
    ("llama_get_logits", ctypes.POINTER(ctypes.c_float), [pointer]),
    ("llama_get_memory", pointer, [pointer]),
    ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
    ("llama_set_n_threads", None, [pointer, ctypes.c_int32, ctypes.c_int32]),
):
    function = getattr(api, name)
    function.restype, function.argtypes = result, arguments

rows = windows.shape[1]
model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
params = api.llama_context_default_params()
params.n_ctx = params.n_batch = params.n_ubatch = rows
context = api.llama_init_from_model(model, params)
cores = len(os.sched_getaffinity(0))
api.llama_set_n_threads(context, cores, cores)
words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
batch = api.llama_batch_init(rows, 0, 1)
for number, window in enumerate(windows):
    api.llama_memory_clear(api.llama_get_memory(context), True)
    batch.n_tokens = rows
    for row, token in enumerate(window.tolist()):
        batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, row, 1
        batch.seq_id[row][0], batch.logits[row] = 0, row >= rows // 2
    if code := api.llama_decode(context, batch):
        sys.exit(f"llama_decode: {code}")
    counted = rows - rows // 2
    logits = np.ctypeslib.as_array(api.llama_get_logits(context), (counted, words))
    np.save(f"{out}/{number}.npy", logits)
"""


@dataclass(frozen=True, slots=True)
class Computed:
    """A model as one program computes it.

    Attributes:
        name: what the table calls it.
        path: the folder or GGUF file.
        dtype: of specexec's rows; None is llama.cpp.
        rounds: whether specexec rounds rows to 8 bits.
        eight_bit_kv: whether it keeps keys and values in 8 bits.
    """

    name: str
    path: Path
    dtype: torch.dtype | None
    rounds: bool = False
    eight_bit_kv: bool = False


def logits(
    model: Computed, windows: Sequence[Sequence[int]], llama_cpp: str
) -> Iterator[torch.Tensor]:
    """Log-probabilities (rows of a window's second half, words) of each window, float32.

    Args:
        llama_cpp: the interpreter that has llama.cpp.
    Raises:
        ConfigError: llama.cpp could not compute the file.
    """
    if model.dtype is None:
        yield from _of_llama_cpp(model.path, windows, llama_cpp)
        return
    spec = ModelSpec(
        device=torch.device("cpu"), dtype=model.dtype, tiers="ram", eight_bit_rows=model.rounds,
        eight_bit_kv=model.eight_bit_kv,
    )  # fmt: skip
    opened = spec.open(read_checkpoint(model.path))
    for window in windows:
        counted = range(len(window) // 2, len(window))
        found = opened.forward(PassRows.chain(window, 0), opened.new_state(), counted)
        yield found.float().log_softmax(-1)


def _of_llama_cpp(
    path: Path, windows: Sequence[Sequence[int]], python: str
) -> Iterator[torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens.npy")
        np.save(tokens, np.array(windows))
        command = [python, "-c", _LLAMA_CPP, str(tokens), str(path), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            told = (done.stderr.strip() or "it ended without a word").splitlines()[-1]
            raise ConfigError(f"llama.cpp cannot compute {path}: {told}")
        for number in range(len(windows)):
            file = Path(folder, f"{number}.npy")
            yield torch.from_numpy(np.load(file)).log_softmax(-1)
            file.unlink()


@dataclass(slots=True)
class Window:
    """Of one window: the mean negative log-likelihood, the mean KL divergence, and the share of
    rows with the reference's best token."""

    loss: float
    divergence: float
    same_best: float

    @staticmethod
    def of(found: torch.Tensor, reference: torch.Tensor, window: Sequence[int]) -> Window:
        """Compares log-probabilities (rows, words) of a window's second half."""
        following = torch.tensor(window[len(window) // 2 + 1 :])
        # llama.cpp's rows may have more words than the tokenizer, and a model fewer
        words = min(found.shape[-1], reference.shape[-1])
        wanted, given = reference[:, :words], found[:, :words]
        return Window(
            loss=-float(found[:-1].gather(-1, following[:, None]).mean()),
            divergence=float((wanted.exp() * (wanted - given)).sum(-1).mean()),
            same_best=float((wanted.argmax(-1) == given.argmax(-1)).float().mean()),
        )


def row_of(name: str, windows: Sequence[Window]) -> dict[str, float | str]:
    """A model's row: perplexity and KL divergence with their standard errors, same best tokens."""
    losses, divergences = ([getattr(w, each) for w in windows] for each in ("loss", "divergence"))
    perplexity = float(np.exp(np.mean(losses)))
    return {
        "model": name,
        "perplexity": perplexity,
        "perplexity_error": perplexity * _error(losses),
        "kl": float(np.mean(divergences)),
        "kl_error": _error(divergences),
        "same_best": float(np.mean([w.same_best for w in windows])),
    }


def _error(values: Sequence[float]) -> float:
    """The standard error of a mean; 0 of a single value."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def windows_of(args: argparse.Namespace) -> list[list[int]]:
    """The text's tokens in windows of --rows.

    Raises:
        ConfigError: the text is too short.
    """
    texts = load_dataset(args.dataset, data_folder=args.data, count=args.texts).prompts
    tokens = load_tokenizer(args.reference).encode("\n\n".join(prompt.text for prompt in texts))
    if len(tokens) < args.windows * args.rows:
        raise ConfigError(
            f"{args.dataset} has {len(tokens)} tokens in {args.texts} texts, and "
            f"{args.windows * args.rows} are asked for: give fewer --windows, or more --texts"
        )
    return [tokens[at * args.rows : (at + 1) * args.rows] for at in range(args.windows)]


def computed(args: argparse.Namespace) -> Iterator[Computed]:
    """Everything that is compared with the reference."""
    dtypes = [getattr(torch, name) for name in args.dtype.split(",")]
    models = [(path.name, path) for path in args.models]
    if args.copies:
        target = read_checkpoint(args.reference)
        for bits in map(int, args.copies.split(",")):
            copy = own_copy(
                target,
                bits,
                lambda text: print(text, file=sys.stderr),
                pieces=lambda: standard_pieces(load_tokenizer(args.reference)),
            )
            models.append((f"copy in {bits} bits", copy.folder))
    for name, path in models:
        ways = product(dtypes, args.activations.split(","), args.kv.split(","))
        for dtype, rows, kv in ways:
            told = f"{name}, {str(dtype).removeprefix('torch.')}"
            told += ", 8-bit rows" * (rows == "8bit") + ", 8-bit keys and values" * (kv == "8bit")
            yield Computed(told, path, dtype, rows == "8bit", kv == "8bit")
        if args.llama_cpp and path.is_file() and is_gguf(path):
            yield Computed(f"{name}, llama.cpp", path, None)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reference", type=Path)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--copies", default="", help="bits of the reference's copies, as 4,3,2")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, or both")
    parser.add_argument("--activations", default="full", help="full, 8bit, or both")
    parser.add_argument("--kv", default="full", help="full, 8bit, or both")
    parser.add_argument("--llama-cpp", default="", metavar="PYTHON")
    parser.add_argument("--dataset", default="demo", help="as for `specexec bench`")
    parser.add_argument("--data", type=Path, default=Path())
    for name, value in (("--texts", 40), ("--windows", 8), ("--rows", 512)):
        parser.add_argument(name, type=int, default=value)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Prints a table, and the rows as JSON in the last line."""
    args = parse(arguments)
    windows = windows_of(args)
    given = Computed("reference, float32", args.reference, torch.float32)
    reference = list(logits(given, windows, args.llama_cpp))
    rows = []
    for model in [given, *computed(args)]:
        found = logits(model, windows, args.llama_cpp)
        measured = [
            Window.of(each, wanted, window)
            for each, wanted, window in zip(found, reference, windows, strict=True)
        ]
        rows.append(row_of(model.name, measured))
        print(rows[-1], file=sys.stderr)
    header = ["model", "perplexity", "KL", "same best"]
    body = [[
        str(row["model"]), f"{row['perplexity']:.3f} +-{row['perplexity_error']:.3f}",
        f"{row['kl']:.5f} +-{row['kl_error']:.5f}", f"{row['same_best']:.2%}",
    ] for row in rows]  # fmt: skip
    print("\n".join(aligned(header, body)))
    print(json.dumps({"config": {name: str(value) for name, value in vars(args).items()},
                      "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
