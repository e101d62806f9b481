"""Experts beside a GPU: copied to it, kept there, or computed by the CPU where they lie."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import architecture, open_float32, random_tokens, save_checkpoint
from disk import Disk
from fake_cuda import CUDA, fake_cuda
from quantized_checkpoints import save_quantized
from test_experts import MIXTURES, logits_of_a_text, slot_bytes
from torch import Tensor

from specexec_cli.errors import StreamError
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.expert_device import DeviceExperts
from specexec_cli.offload.slabs import PASSING_SLOTS
from specexec_cli.offload.store import read_checkpoint

SLOT_MORE = 16  # bytes of a slot on the device beyond one in RAM
# the most used 27 % of the experts hold 80 % of the choices
SKEWED = np.diff((np.arange(33) / 32) ** 0.17)


slot_bytes_of = cache(slot_bytes)  # no folder here is written twice


def on_device(
    folder: Path, in_ram: int, in_vram: int, copy_rows: int | None, dtype: torch.dtype
) -> StreamedModel:
    """With slots for so many experts in each memory."""
    each = slot_bytes_of(folder)
    return ModelSpec(
        device=CUDA,
        dtype=dtype,
        tiers=["resident", "ram", "ssd"],
        expert_bytes=in_ram * each,
        device_expert_bytes=in_vram * (each + SLOT_MORE),
        copy_rows=copy_rows,
    ).open(read_checkpoint(folder))


def experts_of(model: StreamedModel) -> DeviceExperts:
    found = model.source.experts  # type: ignore[union-attr]
    assert isinstance(found, DeviceExperts)
    return found


def on_cpu(logits: list[Tensor]) -> Tensor:
    return torch.cat([each.cpu() for each in logits])


def expected_of(folder: Path) -> Tensor:
    model = open_float32(folder)
    found = on_cpu(logits_of_a_text(model))
    model.close()
    return found


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tensor]:
    """A checkpoint, and the logits that it ought to have."""
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, architecture(request.param))
    return folder, expected_of(folder)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copy_rows", [None, 1, 3])
def test_every_place_computes_what_the_cpu_does(
    mixture: tuple[Path, Tensor], copy_rows: int | None
) -> None:
    folder, expected = mixture
    for in_ram, in_vram in ((1, 1), (2, 4), (99, 99)):
        with fake_cuda():
            model = on_device(folder, in_ram, in_vram, copy_rows, torch.float32)
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
        held = dict(experts.slot_of)
        assert len(held) == 7 - PASSING_SLOTS, "the others are for those that are not kept"
        worth = experts.store.scores.worth.ravel()
        least, other = min(held), next(key for key in range(len(worth)) if key not in held)
        worth[:] = 1.0
        worth[least], worth[other] = 0.5, 0.4
        assert experts.slot_for(other, worth) is None
        assert experts.slot_of == held
        worth[other] = 0.6
        assert experts.slot_for(other, worth, 0.2) is None, "not worth so much more"
        assert experts.slot_of == held
        assert experts.slot_for(other, worth) == held[least]
        assert set(experts.slot_of) == set(held) - {least}
        worth[other] = 2.0
        another = experts.slot_for(other, worth)
        assert another in held.values()
        assert another != held[least], "nothing is there to give up"
        model.close()


@pytest.mark.parametrize("choices", ["even", "skewed"])
def test_experts_of_few_rows_are_copied_only_where_that_pays(choices: str, tmp_path: Path) -> None:
    """A row at a time, which the CPU computes: of the bytes that are not in VRAM few are copied,
    and yet those that are used most come to be there."""
    config = architecture("qwen3-moe")
    config.num_experts, config.num_hidden_layers = 32, 3
    save_checkpoint(tmp_path, config)
    rng, layers = np.random.default_rng(0), 3
    share = rng.permutation(np.full(32, 1 / 32) if choices == "even" else SKEWED)
    with fake_cuda():
        model = on_device(tmp_path, 99, 25, 8, torch.float32)
        experts = experts_of(model)
        size = experts.store.files.n_bytes(0)
        held = missed = copied = 0
        for row in range(600):
            before = experts.bytes_copied, experts.hits
            for layer in range(layers):
                chosen = rng.choice(32, size=2, replace=False, p=share).tolist()
                for _ in experts.take(layer, dict.fromkeys(chosen, 1), 1):
                    pass
            if row >= 200:
                copied += (experts.bytes_copied - before[0]) // size
                held += experts.hits - before[1]
                missed += 2 * layers - (experts.hits - before[1])
        model.close()
    assert copied <= 0.1 * missed
    if choices == "skewed":
        assert held > 0.6 * (held + missed)


@pytest.mark.parametrize("copy_rows", [1, 2])
def test_an_aborted_pass_leaves_every_slot_right(
    copy_rows: int, tmp_path: Path, disk: Disk
) -> None:
    """At every read that may fail: an expert whose copy did not happen is not on the device."""
    save_checkpoint(tmp_path, architecture("qwen3-moe"))
    expected = expected_of(tmp_path)
    left = [0]

    def fail_once(*args: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            disk.fail()

    disk.on_read = fail_once
    with fake_cuda():
        model = on_device(tmp_path, 2, 4, copy_rows, torch.float32)
        failed = number = 0
        # a read that nobody waited for fails unseen, and is tried again
        while number < 11 or failed < 3:
            left[0] = 1 + number % 11
            number += 1
            assert number < 200, "a pass never sees a failure"
            try:
                model.forward(PassRows.chain(random_tokens(9), 0), model.new_state(), [0])
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
