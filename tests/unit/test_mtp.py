"""A target's layer that predicts further tokens (MTP) drafts as transformers' own layer does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import open_float32, random_tokens
from mtp_toys import BEHIND, QWEN, hidden_rows, reference, save_mtp_toy

from specexec_cli.core import DraftTree
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.mtp import mtp_checkpoint
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.verify.verifier import LocalTarget
from specexec_cli.drafting.mtp_rows import MtpRows
from specexec_cli.drafting.search import ROOT, Frontier
import numpy as np


def _opened(folder: Path) -> tuple[LocalTarget, StreamedModel]:
    model = open_float32(folder)
    model.keeps_hidden_rows = True
    spec = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers=None, own_rows=False)
    return LocalTarget(model), spec.open(mtp_checkpoint(read_checkpoint(folder)), shared=model.ends)


def _frontier(ids, tokens, parents, depths):
    return Frontier(*(np.array(each, dtype=np.int64) for each in (ids, tokens, parents, depths)))


@pytest.mark.parametrize("model_type", [*QWEN, *BEHIND])
def test_a_tree_is_drafted_as_by_transformers_own_layer(tmp_path: Path, model_type: str) -> None:
    target, layer = save_mtp_toy(model_type, tmp_path)
    local, drafts = _opened(tmp_path)
    tokens = [3 + each % 45 for each in random_tokens(12)]
    local.verify(tokens[:-1], DraftTree.empty())
    local.commit([])
    rows = MtpRows(drafts, local)
    assert rows.begin(tokens) > 0
    root = rows.run(_frontier([ROOT], [ROOT], [ROOT], [0]))
    rows.ran(_frontier([ROOT], [ROOT], [ROOT], [0]))
    first = rows.run(_frontier([0, 1], [7, 9], [ROOT, ROOT], [1, 1]))
    second = rows.run(_frontier([2, 3], [5, 6], [1, 0], [2, 2]))

    hidden = hidden_rows(target, tokens[:-1])
    count = len(tokens) - 1
    mask = torch.ones(count, count).tril().bool()
    logits, made = reference(target, layer, tokens[1:], hidden, mask)
    torch.testing.assert_close(root[0], logits[-1], rtol=0, atol=2e-4)
    for path, found in (([7], first[0]), ([9], first[1]), ([9, 5], second[0]), ([7, 6], second[1])):
        own, text = hidden, tokens[1:]
        made_now = made
        for token in path:
            own, text = torch.cat([own, made_now[-1:]]), [*text, token]
            mask = torch.ones(len(text), len(text)).tril().bool()
            logits, made_now = reference(target, layer, text, own, mask)
        torch.testing.assert_close(found, logits[-1], rtol=0, atol=2e-4)
