"""Measures the inputs that a calibration text gives a model's linears: their second moments.

One pass runs over the plain weights, which are streamed, so the model may be larger than memory.
Only one layer's moments and keys are in memory at a time. The default text is Python's standard
library: it contains code and English, and every machine that runs this program has it.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specexec_cli.device import free_ram_bytes
from specexec_cli.errors import ConfigError
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows, embeddable
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PIECE_TOKENS = 512
_PIECES = 16  # most pieces of a text, evenly spaced: 8,192 rows for each linear
_FILE_CHARACTERS = 4_000  # taken from each library file: its head is mostly English
_MATRICES = 5  # (inputs, inputs) matrices in memory while a linear is quantized

# called with a layer's index and, by weight name, the second moments of the weight's inputs
Done = Callable[[int, Mapping[str, Tensor]], None]


def calibration_pieces(folder: Path, path: Path) -> list[list[int]]:
    """Pieces of a text file, as tokens of the model in `folder`.

    Raises:
        ConfigError: the file cannot be read as UTF-8 text, or is too short.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the calibration text {path}: {reason}") from error
    found = _pieces(load_tokenizer(folder), text)
    if not found:
        raise ConfigError(
            f"the calibration text {path} has less than the {_PIECE_TOKENS} tokens that are "
            "needed: give a longer one"
        )
    return found


def standard_pieces(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Pieces of Python's standard library, as tokens; empty where it is not installed as files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::4]  # a mix of subjects
    heads = [file.read_text("utf-8", errors="replace")[:_FILE_CHARACTERS] for file in files]
    return _pieces(tokenizer, "\n\n".join(heads))


def _pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[list[int]]:
    # verbose=False: the warning about texts too long for one pass does not apply to pieces
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    whole = len(tokens) // _PIECE_TOKENS
    count = min(whole, _PIECES)
    starts = [number * whole // count * _PIECE_TOKENS for number in range(count)]
    return [tokens[start : start + _PIECE_TOKENS] for start in starts]


def run_calibration(checkpoint: Checkpoint, pieces: Sequence[Sequence[int]], done: Done) -> None:
    """Runs the pieces through the model in float32 and reports the moments of each layer's inputs.

    Args:
        pieces: tokens of each piece; pieces do not attend to each other.
        done: called after each layer with the second moments of its linears' inputs: sums of x x^T,
            (inputs, inputs) float32 each. Routed experts are left out, and so are linears so wide
            that _MATRICES matrices of their moments would take more than half of the free memory.
    Raises:
        StreamError, OutOfMemoryError, CheckpointError: as for any pass.
    """
    model = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers="ssd").open(checkpoint)
    longest = model.context_length
    widest = (free_ram_bytes() / 2 / (_MATRICES * 4)) ** 0.5  # inputs
    moments: dict[str, Tensor] = {}
    first = [model.new_state() for _ in "12"]
    states = [model.new_state() for _ in pieces]

    def watch(name: str) -> Callable[..., None]:
        def hook(module: object, args: tuple[Any, ...]) -> None:
            rows = args[0].reshape(-1, args[0].shape[-1]).float()
            moments[name] = moments.get(name, torch.zeros(())) + rows.T @ rows

        return hook

    def release(states: Sequence[ModelState], index: int) -> None:
        for state in states:
            if len(state.layers) == len(stored):  # else later layers still read these keys
                state.layers[index].release()

    def behind(index: int) -> None:
        done(index, moments)
        moments.clear()
        release(states, index)

    stored = model.skeleton.layer_tensors
    try:
        # The first pass of several texts may start over in the middle, so a short one goes first.
        model.on_layer = partial(release, first)
        model.forward_together([(PassRows.chain([0], 0), state, [0]) for state in first])
        for layer, tensors in zip(model.skeleton.layers, stored, strict=True):
            for path, module in layer.layer.named_modules():  # type: ignore[union-attr]
                if isinstance(module, MixedLinear) and module.in_features <= widest:
                    module.register_forward_pre_hook(watch(tensors[f"{path}.weight"].name))
        model.on_layer = behind
        model.forward_together(
            [
                (PassRows.chain(embeddable(piece[:longest], model.vocab_size), 0), state, [0])
                for piece, state in zip(pieces, states, strict=True)
            ]
        )
    finally:
        model.close()
