"""Experts beside a GPU: copied to it, kept there, or computed by the CPU where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import architecture, open_float32, random_tokens, save_checkpoint
from fake_cuda import CUDA, fake_cuda
from quantized_checkpoints import save_quantized
from test_experts import MIXTURES, logits_of_a_text, slot_bytes
from torch import Tensor

from specexec_cli.errors import StreamError
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.expert_device import DeviceExperts
from specexec_cli.offload.reader import DirectFile
from specexec_cli.offload.slabs import PASSING_SLOTS
from specexec_cli.offload.store import read_checkpoint

SLOT_MORE = 16  # bytes of a slot on the device beyond one in RAM


def on_device(
    folder: Path, in_ram: int, in_vram: int, copy_rows: int | None, dtype: torch.dtype
) -> StreamedModel:
    """With slots for so many experts in each memory."""
    each = slot_bytes(folder)
    return StreamedModel.open(
        read_checkpoint(folder), device=CUDA, dtype=dtype, tiers=["resident", "ram", "ssd"],
        expert_bytes=in_ram * each, device_expert_bytes=in_vram * (each + SLOT_MORE),
        copy_rows=copy_rows,
    )  # fmt: skip


def experts_of(model: StreamedModel) -> DeviceExperts:
    found = model.source._experts  # type: ignore[union-attr]
    assert isinstance(found, DeviceExperts)
    return found


def on_cpu(logits: list[Tensor]) -> Tensor:
    return torch.cat([each.cpu() for each in logits])


def expected_of(folder: Path) -> Tensor:
    model = open_float32(folder)
    found = on_cpu(logits_of_a_text(model))
    model.close()
    return found


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copy_rows", [None, 1, 3])
@pytest.mark.parametrize("name", MIXTURES)
def test_every_place_computes_what_the_cpu_does(
    name: str, copy_rows: int | None, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, architecture(name))
    expected = expected_of(tmp_path)
    for in_ram, in_vram in ((1, 1), (2, 4), (99, 99)):
        with fake_cuda():
            model = on_device(tmp_path, in_ram, in_vram, copy_rows, torch.float32)
            for _ in range(2):  # with empty slots, and with what the first text left in them
                assert_close(on_cpu(logits_of_a_text(model)), expected)
            experts = experts_of(model)
            assert (experts.bytes_copied == 0) == (copy_rows is None)
            assert (experts.hits > 0) == (copy_rows is not None and in_vram > 1)
            model.close()


def test_packed_experts(tmp_path: Path) -> None:
    _, packed = save_quantized(tmp_path, "mixtral")
    expected = expected_of(packed)
    for copy_rows in (None, 1):
        with fake_cuda():
            model = on_device(packed, 3, 3, copy_rows, torch.float32)
            assert_close(on_cpu(logits_of_a_text(model)), expected)
            model.close()


@pytest.mark.parametrize("copy_rows", [None, 1, 2])
def test_two_bytes_are_near_float32(copy_rows: int | None, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("qwen3-moe"), dtype=torch.bfloat16)
    expected = expected_of(tmp_path)
    with fake_cuda():
        model = on_device(tmp_path, 3, 4, copy_rows, torch.bfloat16)
        found = on_cpu(logits_of_a_text(model))
        model.close()
    assert float((found - expected).norm() / expected.norm()) < 0.05


def test_what_is_worth_most_stays_on_the_device(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("qwen3-moe"))
    with fake_cuda():
        model = on_device(tmp_path, 99, 7, 1, torch.float32)
        logits_of_a_text(model)
        experts = experts_of(model)
        held = dict(experts._slot_of)
        assert len(held) == 7 - PASSING_SLOTS, "the others are for those that are not kept"
        worth = experts.store.scores.worth.ravel()
        least, other = min(held), next(key for key in range(len(worth)) if key not in held)
        worth[:] = 1.0
        worth[least], worth[other] = 0.5, 0.4
        assert experts._slot_for(other) is None
        assert experts._slot_of == held
        worth[other] = 0.6
        assert experts._slot_for(other) == held[least]
        assert set(experts._slot_of) == set(held) - {least}
        model.close()


@pytest.mark.parametrize("copy_rows", [1, 2])
def test_an_aborted_pass_leaves_every_slot_right(
    copy_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every read that may fail: an expert whose copy did not happen is not on the device."""
    save_checkpoint(tmp_path, architecture("qwen3-moe"))
    expected = expected_of(tmp_path)
    real = DirectFile.scatter
    left = [0]

    def scatter(file: DirectFile, targets: list[memoryview], start: int, stop: int) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise StreamError(f"reading {file.path} failed at byte {start}: bad")
        return real(file, targets, start, stop)

    monkeypatch.setattr(DirectFile, "scatter", scatter)
    with fake_cuda():
        model = on_device(tmp_path, 2, 4, copy_rows, torch.float32)
        failed = number = 0
        # a read that nobody waited for fails unseen, and is tried again
        while number < 11 or failed < 3:
            left[0] = 1 + number % 11
            number += 1
            assert number < 200, "a pass never sees a failure"
            try:
                model.forward(PassRows.chain(random_tokens(9), 0), model.new_cache(), [0])
            except StreamError:
                failed += 1
                assert model.source is not None
                model.source.restart()
            left[0] = 0
        assert model.source is not None
        if model.source.failed:  # what the last pass read ahead for the next one
            model.source.restart()
        assert_close(on_cpu(logits_of_a_text(model)), expected)
        model.close()
