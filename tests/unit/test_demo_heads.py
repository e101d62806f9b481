"""The heads that train_demo_heads.py trains draft as they were trained to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_rigs import begun, open_head
from safetensors.torch import load_file
from torch import Tensor

from specexec_cli.drafting.head_rows import BlockRows, HeadRows
from specexec_cli.drafting.search import ROOT, Frontier
from specexec_cli.offload.block_heads import block_checkpoint
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.eagle import eagle_checkpoint
from specexec_cli.offload.mtp import mtp_checkpoint
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.verify.verifier import LocalTarget

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from demo_model import Llama
from train_demo_heads import BLOCK, DEMO, HEADS, STRIDE, Seen, export
from train_demo_pair import TARGET

_TOKENS = [0, *range(300, 4000, 331)]


class _Kept(Seen):
    """Keeps the logits whose loss a head is trained by."""

    def __init__(self, target: Llama, ids: Tensor) -> None:
        super().__init__(target, ids)
        self.logits: list[Tensor] = []

    def loss(self, logits: Tensor, at: int | Tensor, weights: Tensor | None = None) -> Tensor:
        self.logits.append(logits[0].detach())
        return super().loss(logits, at, weights)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with all heads, random ones, and what trains them."""
    torch.manual_seed(1)
    made = {name: head(TARGET) for name, head in HEADS.items()}
    for head in made.values():  # as exact as they are stored
        for weight in head.parameters():
            weight.data = weight.data.bfloat16().float()
    folder = tmp_path_factory.mktemp("heads")
    export(made, folder)
    return folder, made


@pytest.mark.parametrize(("name", "own_steps"), [("mtp", 0), ("eagle", 0), ("eagle", 2)])
def test_what_was_trained_is_what_drafts(
    heads: tuple[Path, dict[str, Any]], name: str, own_steps: int
) -> None:
    """Behind the target's rows, and behind so many of the head's own."""
    folder, made = heads
    target = Llama(TARGET)
    target.load_state_dict(load_file(DEMO / "target" / "model.safetensors"))
    kept = _Kept(target, torch.tensor([_TOKENS]))
    made[name].losses(kept)
    found = _drafted(folder, name, _TOKENS[: len(_TOKENS) - own_steps], own_steps)
    expected = kept.logits[own_steps][-1]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["jetspec", "dflash"])
def test_a_block_drafts_as_it_was_trained_to(heads: tuple[Path, dict[str, Any]], name: str) -> None:
    """Behind the first token of the second block, a few tokens behind that of the first."""
    folder, made = heads
    target = Llama(TARGET)
    target.load_state_dict(load_file(DEMO / "target" / "model.safetensors"))
    text = [*_TOKENS, *range(1, 2 * BLOCK - len(_TOKENS) + 1)]
    kept = _Kept(target, torch.tensor([text]))
    made[name].losses(kept)
    expected = kept.logits[0][BLOCK - 1 : 2 * (BLOCK - 1)]  # those of the second block's masks
    local, rows = _begun(folder, name, text[: STRIDE + 1])
    rows.run(Frontier.root())
    assert isinstance(rows, BlockRows)
    assert rows._made is not None
    torch.testing.assert_close(
        rows._made, expected, rtol=0, atol=2e-3 * float(expected.abs().max())
    )
    local.close()


def _begun(folder: Path, name: str, context: list[int]) -> tuple[LocalTarget, HeadRows]:
    """The target, which has read the context but for its last token, and a head's rows there."""

    def made(target: Checkpoint) -> Checkpoint:
        if name == "mtp":
            return mtp_checkpoint(target)
        of_files = eagle_checkpoint if name == "eagle" else block_checkpoint
        return of_files(read_checkpoint(folder / name), target.config)

    local, drafts = open_head(folder / "mtp", made)
    return local, begun(local, drafts, context)


def _drafted(folder: Path, name: str, context: list[int], own_steps: int) -> Tensor:
    """(vocab,) a head's logits behind a chain of the next tokens, which follow the context."""
    local, rows = _begun(folder, name, context)
    for depth in range(own_steps + 1):
        node = [ROOT] if not depth else [depth - 1]
        token = [ROOT] if not depth else [_TOKENS[len(context) + depth - 1]]
        parent = [ROOT] if depth < 2 else [depth - 2]
        frontier = Frontier(*(np.array(each) for each in (node, token, parent, [depth])))
        found = rows.run(frontier)
        rows.ran(frontier)
    local.close()
    return found[0]
