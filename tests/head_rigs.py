"""Trained heads beside their targets, and what they make of a small tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from toys import HEAD_STEPS

from specexec_cli.core import DraftTree
from specexec_cli.drafting.head_rows import HeadRows
from specexec_cli.drafting.mtp_rows import head_rows
from specexec_cli.drafting.search import Frontier
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.verify.verifier import LocalTarget

CPU = torch.device("cpu")


def open_head(
    target: Path, made: Callable[[Checkpoint], Checkpoint], device: torch.device = CPU, **more: Any
) -> tuple[LocalTarget, StreamedModel]:
    """A target and its head, in float32.

    Args:
        made: makes the head's checkpoint of the target's.
        more: of the target's ModelSpec.
    """
    checkpoint = read_checkpoint(target)
    found = made(checkpoint)
    assert found.head is not None
    model = ModelSpec(device=device, dtype=torch.float32, tiers="ssd", **more).open(checkpoint)
    model.kept_features = found.head.features
    spec = ModelSpec(device=device, dtype=torch.float32, tiers=None, own_rows=False)
    return LocalTarget(model), spec.open(found, shared=model.ends)


def begun(
    local: LocalTarget, drafts: StreamedModel, tokens: list[int], rows: HeadRows | None = None
) -> HeadRows:
    """The head's rows of a text that the target has read but for its last token."""
    local.crop(0)
    local.verify(tokens[:-1], DraftTree.empty())
    local.commit([])
    rows = rows or head_rows(drafts, local)
    assert rows.begin(tokens) > 0
    return rows


def grown(rows: HeadRows, steps: Sequence[Frontier] = HEAD_STEPS) -> torch.Tensor:
    """(nodes, vocab) the logits behind the root and the nodes of some steps."""
    found = []
    for step in steps:
        found.append(rows.run(step))
        rows.ran(step)
    return torch.cat(found)
