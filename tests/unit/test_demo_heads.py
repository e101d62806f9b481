"""The heads that train_demo_heads.py trains draft as they were trained to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specexec_cli.core import DraftTree
from specexec_cli.drafting.head_rows import HeadRows
from specexec_cli.drafting.search import ROOT, Frontier
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.offload.eagle import eagle_checkpoint
from specexec_cli.offload.mtp import mtp_checkpoint
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.verify.verifier import LocalTarget

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from demo_model import Llama
from train_demo_heads import DEMO, Eagle, Mtp, Seen, export
from train_demo_pair import TARGET

_TOKENS = [0, *range(300, 4000, 331)]


class _Kept(Seen):
    """Keeps the logits whose loss a head is trained by."""

    def __init__(self, target: Llama, ids: Tensor) -> None:
        super().__init__(target, ids)
        self.logits: list[Tensor] = []

    def loss(self, logits: Tensor, step: int) -> Tensor:
        self.logits.append(logits[0].detach())
        return super().loss(logits, step)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with both heads, random ones, and what trains them."""
    torch.manual_seed(1)
    made = {"mtp": Mtp(TARGET), "eagle": Eagle(TARGET)}
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


def _drafted(folder: Path, name: str, context: list[int], own_steps: int) -> Tensor:
    """(vocab,) a head's logits behind a chain of the next tokens, which follow the context."""
    stored = read_checkpoint(folder / "mtp")
    if name == "mtp":
        checkpoint = mtp_checkpoint(stored)
    else:
        checkpoint = eagle_checkpoint(read_checkpoint(folder / "eagle"), stored.config)
    assert checkpoint.head is not None
    spec = {"device": torch.device("cpu"), "dtype": torch.float32}
    model = ModelSpec(**spec, tiers="ssd").open(stored)
    model.kept_features = checkpoint.head.features
    local = LocalTarget(model)
    local.verify(context[:-1], DraftTree.empty())
    local.commit([])
    drafts = ModelSpec(**spec, tiers=None, own_rows=False).open(checkpoint, shared=model.ends)
    rows = HeadRows(drafts, local)
    assert rows.begin(context) > 0
    for depth in range(own_steps + 1):
        node = [ROOT] if not depth else [depth - 1]
        token = [ROOT] if not depth else [_TOKENS[len(context) + depth - 1]]
        parent = [ROOT] if depth < 2 else [depth - 2]
        frontier = Frontier(*(np.array(each) for each in (node, token, parent, [depth])))
        found = rows.run(frontier)
        rows.ran(frontier)
    local.close()
    return found[0]
