"""What a plan takes a pass to start on a GPU is what a pass of the running code starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_tokens
from fake_cuda import CUDA, Counts, counted, fake_cuda
from quantized_checkpoints import save_quantized

from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.pass_time import Launches, pass_launches

PREFIX = 8
LAYERS = 3
OFF = 0.25  # of what is counted: architectures differ, and rows by which experts they choose


def counts_of_a_pass(
    name: str, rows: int, folder: Path, *, drafts: bool = False, one_by_one: bool = False
) -> Counts:
    """Of a resident model in 4 bits, behind a pass that warms it up.

    Args:
        one_by_one: whether a mixture's experts are kept in slots, instead of with their layers.
    """
    _, packed = save_quantized(folder, name)
    extra: dict[str, Any] = {}
    if one_by_one:
        extra = {"expert_bytes": 1 << 22, "device_expert_bytes": 1 << 30, "copy_rows": 1}
    with fake_cuda(triton=True):
        model = ModelSpec(
            device=CUDA, dtype=torch.float16, tiers=None if drafts else "resident",
            own_rows=not drafts, **extra,
        ).open(read_checkpoint(packed))  # fmt: skip
        state = model.new_state()
        model.forward(PassRows.chain(random_tokens(PREFIX), 0), state, [PREFIX - 1])
        with counted() as counts:
            model.forward(PassRows.chain(random_tokens(rows), PREFIX), state, [rows - 1])
        model.close()
    return counts


@pytest.mark.parametrize(
    ("name", "rows", "asked_for"),
    [("llama", 1, None), ("llama", 128, None), ("qwen3-moe", 1, 0), ("qwen3-moe", 64, 0),
     ("qwen3-moe", 1, 2), ("qwen3-moe", 64, 3)],
)  # fmt: skip
def test_a_plan_counts_what_a_pass_starts(
    name: str, rows: int, asked_for: int | None, tmp_path: Path
) -> None:
    found = counts_of_a_pass(name, rows, tmp_path, one_by_one=bool(asked_for))
    planned = pass_launches(LAYERS, asked_for)
    hold(planned, found)


def test_a_plan_counts_what_a_draft_step_starts(tmp_path: Path) -> None:
    hold(
        pass_launches(LAYERS, None, drafts=True),
        counts_of_a_pass("llama", 16, tmp_path, drafts=True),
    )


def hold(planned: Launches, found: Counts) -> None:
    """The plan's figures against those that were counted."""
    for what in ("operations", "kernels", "waits"):
        assert getattr(planned, what) == pytest.approx(getattr(found, what), rel=OFF), (what, found)


def test_waits_are_what_the_host_waits_for() -> None:
    """Results that it reads and ordinary memory that is copied, not what is only started."""
    with fake_cuda(), counted() as counts:
        rows = torch.ones(4, device=CUDA)
        pinned = torch.ones(4).pin_memory()
        rows += pinned.to(CUDA, non_blocking=True)
        before = counts.waits
        rows.view(2, 2).sum()
        assert counts.waits == before
        rows.sum().item()
        rows += torch.ones(4).to(CUDA)
        rows[torch.tensor([1])]
        assert counts.waits == before + 3
