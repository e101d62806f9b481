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
from typing import TYPE_CHECKING

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
_PIECES = 8  # most pieces of a text, evenly spaced: twice as many are no better (docs/tried.md)
_FILE_CHARACTERS = 4_000  # taken from each library file: its head is mostly English
_MATRICES = 5  # (inputs, inputs) matrices in memory while a linear is quantized

_BLOCK = 256  # least inputs of a block of moments: smaller products are slower than what they save

_NORM_EPSILON = 1e-6  # of RMSNorms; keeps a row of zeros finite
_NOTHING = torch.empty(0)

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


def run_calibration(
    checkpoint: Checkpoint,
    pieces: Sequence[Sequence[int]],
    done: Done,
    dtype: torch.dtype = torch.float32,
    by_residual: bool = False,
    begun: int = 0,
) -> None:
    """Runs the pieces through the model and reports the moments of each layer's inputs.

    Args:
        pieces: tokens of each piece; pieces do not attend to each other.
        done: called after each layer with the second moments of its linears' inputs: weighted sums
            of x x^T, (inputs, inputs) float32 each, see _Moments. Routed experts are left out, and
            so are linears so wide that _MATRICES matrices of their moments would take more than
            half of the free memory.
        dtype: of the rows that go through the layers.
        by_residual: whether rows are weighed by their residual streams, see _Moments; else alike.
        begun: layers at the beginning whose moments nobody needs any more.
    Raises:
        StreamError, OutOfMemoryError, CheckpointError: as for any pass.
    """
    model = ModelSpec(device=torch.device("cpu"), dtype=dtype, tiers="ssd").open(checkpoint)
    longest = model.context_length
    widest = (free_ram_bytes() / 2 / (_MATRICES * 4)) ** 0.5  # inputs
    moments = _Moments(by_residual)
    first = [model.new_state() for _ in "12"]
    states = [model.new_state() for _ in pieces]

    def release(states: Sequence[ModelState], index: int) -> None:
        for state in states:
            if len(state.layers) == len(stored):  # else later layers still read these keys
                state.layers[index].release()

    def behind(index: int) -> None:
        done(index, moments.taken())
        release(states, index)

    stored = model.skeleton.layer_tensors
    try:
        # The first pass of several texts may start over in the middle, so a short one goes first.
        model.on_layer = partial(release, first)
        model.forward_together([(PassRows.chain([0], 0), state, [0]) for state in first])
        for layer, tensors in list(zip(model.skeleton.layers, stored, strict=True))[begun:]:
            for path, module in layer.layer.named_modules():  # type: ignore[union-attr]
                if isinstance(module, MixedLinear) and module.in_features <= widest:
                    module.register_forward_pre_hook(moments.of(tensors[f"{path}.weight"].name))
            layer.layer.register_forward_hook(moments.behind)  # type: ignore[union-attr]
        model.on_layer = behind
        model.forward_together(
            [
                (PassRows.chain(embeddable(piece[:longest], model.vocab_size), 0), state, [0])
                for piece, state in zip(pieces, states, strict=True)
            ]
        )
    finally:
        model.close()


class _Moments:
    """The second moments of linears' inputs, while a text goes through their layer.

    Args:
        by_residual: whether a row counts by how little its residual stream is behind the layer,
            1 / (mean square + 1e-6): by so much an RMSNorm, as the next layers have it, makes an
            error of that row larger than one of another. Rows that count alike are right for a
            model that stands alone, where every later row attends to the giant activations of a
            text's first token. They are nearly all that the moments of a down projection then
            hold, and a copy that drafts never computes that token: its target's keys are there.
    """

    def __init__(self, by_residual: bool) -> None:
        self._by_residual = by_residual
        self._by_name: dict[str, Tensor] = {}
        self._inputs: list[tuple[str, Tensor]] = []  # of rows that are in the layer now

    def taken(self) -> dict[str, Tensor]:
        """The moments, (inputs, inputs) float32, by the name of the weight; they are forgotten."""
        found, self._by_name = self._by_name, {}
        return found

    def of(self, name: str) -> Callable[..., None]:
        """A hook that is called before a linear, and remembers its input."""

        def hook(module: object, args: tuple[Tensor, ...]) -> None:
            self._inputs.append((name, args[0]))

        return hook

    def behind(self, module: object, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        """A hook that is called behind a layer, and adds the moments of the inputs in it."""
        rows = output[0] if isinstance(output, tuple) else output
        shares = torch.ones(rows.shape[-2], 1)
        if self._by_residual:
            squares = rows.float().square().mean(-1).reshape(-1, rows.shape[-2]).mean(0)
            shares = (squares + _NORM_EPSILON).rsqrt()[:, None]
        last, moments = _NOTHING, _NOTHING
        for name, given in self._inputs:
            if given is not last:  # else the linear before it had the same input
                flat = given.reshape(-1, given.shape[-1]).float()
                # a linear that sees other rows than its layer has them count alike
                moments = _products(flat * shares if len(flat) == len(shares) else flat)
                last = given
            self._by_name[name] = self._by_name.get(name, torch.zeros(())) + moments
        self._inputs.clear()


def _products(rows: Tensor) -> Tensor:
    """The sum of x x^T over rows x (rows, inputs): its upper blocks, and their mirror images."""
    inputs = rows.shape[1]
    width = max(_BLOCK, -(-inputs // 4))
    found = torch.empty(inputs, inputs)
    for first in range(0, inputs, width):
        block = rows[:, first : first + width].T @ rows[:, first:]
        found[first : first + width, first:] = block
        found[first:, first : first + width] = block.T
    return found
