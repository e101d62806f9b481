"""Checks on a CPU that a row has the same bits whatever other rows its pass carries.

The models are tiny, with heads of 64 and 128, since the heads of still smaller models are no whole
vectors. A text is run with one row a pass. Then it is run in passes of many rows, with other
numbers of threads, with other branches of a draft tree in between, and beside another text. All
logits must be equal, in float32 and in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from conformance_logits import NotConforming
from torch import Tensor

from specexec_cli.core import DraftTree
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.verify.verifier import LocalTarget, verify_together

WIDENED = (8, 16)  # factors that make heads of 64 and of 128
DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 64
_LONG = 131  # rows; PyTorch's shares for three threads then end within a vector
_THREADS = (1, 2, 3)
_PATH = [0, 2, 5, 7]  # the deepest path of the tree below
_PARENTS = [-1, -1, 0, 0, 1, 2, 2, 5, 4]
_DEPTHS = [1, 1, 2, 2, 2, 3, 3, 4, 3]
_BESIDE = 5  # rows of the other text


def check_bits(folder: Path, words: range, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Checks a saved model.

    Args:
        folder: of the model.
        words: token ids that are plain words.
        dtypes: to check.
    Raises:
        NotConforming: some row's logits depend on what else was computed.
    """
    rng = np.random.default_rng(4)
    text = rng.integers(words.start, words.stop, _LONG).tolist()
    nodes = rng.integers(words.start, words.stop, len(_PARENTS))
    tree = DraftTree(nodes, np.array(_PARENTS), np.array(_DEPTHS), np.zeros(len(nodes)))
    for dtype in dtypes:
        model = ModelSpec(device=torch.device("cpu"), dtype=dtype, tiers="ram").open(
            read_checkpoint(folder)
        )
        try:
            with on_threads(1):
                alone = _row_by_row(model, [*text[:_ROWS], *nodes[_PATH].tolist()])
                long = model.forward(PassRows.chain(text, 0), model.new_state(), range(_LONG))
            for threads in _THREADS:
                told = f"in {str(dtype).removeprefix('torch.')} with {threads} threads"
                with on_threads(threads):
                    _check_long(model, told, text, long, alone)
                    _check_tree(model, told, text[:_ROWS], tree, alone)
        finally:
            model.close()


def _check_long(
    model: StreamedModel, told: str, text: list[int], long: Tensor, alone: Tensor
) -> None:
    """Checks a pass of many rows, and one row after it."""
    state = model.new_state()
    found = model.forward(PassRows.chain(text, 0), state, range(_LONG))
    _same(f"among {_LONG} rows {told}", found[:_ROWS], alone[:_ROWS])
    _same(f"among {_LONG} rows {told}", found, long)
    _crop(model, state, text)
    many = model.forward(PassRows.chain(text[_ROWS - 1 : -1], _ROWS - 1), state, [0])
    _same(f"among {_LONG - _ROWS} rows behind others {told}", many, alone[_ROWS - 1 : _ROWS])
    _crop(model, state, text)
    one = model.forward(PassRows.chain(text[_ROWS - 1 : _ROWS], _ROWS - 1), state, [0])
    _same(f"behind {_ROWS} rows {told}", one, alone[_ROWS - 1 : _ROWS])


def _crop(model: StreamedModel, state: ModelState, text: list[int]) -> None:
    """Leaves one row fewer than _ROWS, which recurrent layers may have to read again."""
    left = state.crop(_ROWS - 1)
    if left < _ROWS - 1:
        model.forward(PassRows.chain(text[left : _ROWS - 1], left), state, [])


def _check_tree(
    model: StreamedModel, told: str, prompt: list[int], tree: DraftTree, alone: Tensor
) -> None:
    """Checks a path in a tree with other branches in between, alone and beside another text."""
    rows, expected = [0, *(node + 1 for node in _PATH)], alone[_ROWS - 1 :]
    target = LocalTarget(model)
    target.verify(prompt[:-2], DraftTree.empty())
    target.commit([])
    _same(f"in a tree {told}", target.verify(prompt[-2:], tree)[rows], expected)
    texts = [(prompt, tree), (prompt[:_BESIDE], DraftTree.empty())]
    found = verify_together([(LocalTarget(model), *text) for text in texts])
    _same(f"beside another text {told}", found[0][rows], expected)


def _row_by_row(model: StreamedModel, tokens: list[int]) -> Tensor:
    """The logits of a text that is run with one row a pass."""
    state = model.new_state()
    return torch.cat(
        [model.forward(PassRows.chain([token], at), state, [0]) for at, token in enumerate(tokens)]
    )


def _same(when: str, found: Tensor, alone: Tensor) -> None:
    if not torch.isfinite(alone).all():
        raise NotConforming("logits of heads of a real size are not finite")
    rows = int((found != alone).any(dim=1).sum())
    if rows:
        most = float((found - alone).abs().max())
        raise NotConforming(
            f"{rows} of {len(found)} rows have other bits {when} than in passes of one row "
            f"(by up to {most:.1e})"
        )


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """PyTorch computes with so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
