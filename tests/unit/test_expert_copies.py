"""Experts go to a device ahead of the arithmetic, and no slot is written while it is in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_toys import EXPERTS, LAYERS, Layers, write
from fake_links import EagerLink, LimitedLink
from torch import Tensor

from specexec_cli.errors import StreamError
from specexec_cli.offload.expert_device import DeviceExperts
from specexec_cli.offload.expert_scores import ExpertScores
from specexec_cli.offload.expert_slots import FREE
from specexec_cli.offload.experts import ExpertStore
from specexec_cli.offload.resident import read_tensors
from specexec_cli.offload.slabs import ALIGNED_BYTES, PASSING_SLOTS

FEW, ALL = 110_000, 1 << 40  # bytes that may be pinned: slabs and little else, or what is asked for


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= threads


@pytest.fixture
def layers(tmp_path: Path) -> Layers:
    return write(tmp_path, seed=1, gap=100)


@pytest.fixture
def weights(layers: Layers) -> dict[str, Tensor]:
    return read_tensors([tensor for experts in layers for own in experts for tensor in own])


def opened(
    layers: Layers, link: EagerLink, *, in_ram: int, in_vram: int, copy_rows: int = 1, **told: Any
) -> DeviceExperts:
    """With slots for so many experts in each memory."""
    scores = ExpertScores(LAYERS, EXPERTS, 2)
    sizes = ExpertStore(layers, 1 << 30, scores)
    slot_bytes = sizes.slot_bytes
    sizes.close()
    store = ExpertStore(layers, in_ram * slot_bytes, scores)
    return DeviceExperts(store, link, in_vram * (slot_bytes + ALIGNED_BYTES), copy_rows, **told)


def in_vram(experts: DeviceExperts, tensors: dict[str, Tensor]) -> bool:
    """Whether these lie in slots on the device, which is the machine's own memory here."""
    start = experts._blob.data_ptr()
    inside = {start <= each.data_ptr() < start + experts._blob.numel() for each in tensors.values()}
    assert len(inside) == 1
    return inside.pop()


def begun_are_enqueued(experts: DeviceExperts) -> None:
    assert experts._copies is not None
    for copy in experts._copies._begun:
        copy.result()


def all_layers(
    experts: DeviceExperts, weights: dict[str, Tensor], wanted: dict[int, int], copy_rows: int = 1
) -> None:
    """Takes the experts of every layer; what each is must be right until the next is asked for."""
    for layer in (0, 2):
        seen = []
        held = {key - layer * EXPERTS for key in experts.slot_of}
        for batch in experts.take(layer, wanted, sum(wanted.values())):
            for expert, tensors in batch:
                begun_are_enqueued(experts)  # later copies are under way, and write elsewhere
                many = wanted[expert] >= copy_rows
                assert in_vram(experts, tensors) == (many or expert in held)
                for name, tensor in tensors.items():
                    assert name.startswith(f"{layer}.{expert}.")
                    assert torch.equal(tensor, weights[name])
                seen.append(expert)
        assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize("copy_rows", [1, 3])
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 99])
@pytest.mark.parametrize("in_ram", [1, 4, 99])
@pytest.mark.parametrize(
    "make_link",
    [EagerLink, partial(LimitedLink, 0), partial(LimitedLink, FEW), partial(LimitedLink, ALL)],
)
def test_every_expert_comes_as_it_is_stored(
    layers: Layers,
    weights: dict[str, Tensor],
    make_link: Callable[[], EagerLink],
    in_ram: int,
    slots: int,
    copy_rows: int,
) -> None:
    """Copied at once, or not before somebody waits; pinned, through slabs, or neither."""
    link = make_link()
    with closing(
        opened(layers, link, in_ram=in_ram, in_vram=slots, copy_rows=copy_rows)
    ) as experts:
        rng = np.random.default_rng(0)
        for _ in range(12):
            chosen = rng.permutation(EXPERTS)[: rng.integers(1, EXPERTS + 1)]
            wanted = {int(expert): int(rng.integers(1, 6)) for expert in sorted(chosen)}
            all_layers(experts, weights, wanted, copy_rows)
        assert (experts.hits > 0) == (slots > 1)
    assert not link.registered


def test_the_next_is_copied_while_one_is_computed(
    layers: Layers, weights: dict[str, Tensor]
) -> None:
    """By the device, and by the CPU."""
    all_of_a_layer = dict.fromkeys(range(EXPERTS), 1)
    with closing(opened(layers, EagerLink(), in_ram=99, in_vram=PASSING_SLOTS + 1)) as experts:
        in_order = []
        for _ in range(2):  # first they are read into RAM
            all_layers(experts, weights, all_of_a_layer)
        experts.slot_of.clear()
        experts._held[:] = FREE
        experts.restart()
        for batch in experts.take(0, all_of_a_layer, EXPERTS):
            assert experts._copies is not None
            in_order.append(len(experts._copies._begun))
            assert len(batch) == 1
        # one is to be kept and two pass through; then one more for each that was computed
        assert in_order == [3, 3, 4, 5, 5]
    wanted = {0: 1, 1: 4, 2: 4}
    with closing(
        opened(layers, EagerLink(), in_ram=99, in_vram=PASSING_SLOTS, copy_rows=3)
    ) as experts:
        all_layers(experts, weights, wanted, copy_rows=3)
        experts.slot_of.clear()
        experts._held[:] = FREE
        experts.restart()
        begun = [
            (sorted(expert for expert, _ in batch), len(experts._copies._begun))  # type: ignore[union-attr]
            for batch in experts.take(0, wanted, 9)
        ]
        assert begun[0] == ([0], 2), "the CPU computes the one of a single row meanwhile"


@pytest.mark.parametrize("batches", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "make_link", [EagerLink, partial(LimitedLink, 0), partial(LimitedLink, FEW)]
)
def test_a_pass_that_ends_early_leaves_every_slot_right(
    layers: Layers, weights: dict[str, Tensor], make_link: Callable[[], EagerLink], batches: int
) -> None:
    link = make_link()
    all_of_a_layer = dict.fromkeys(range(EXPERTS), 1)
    with closing(opened(layers, link, in_ram=4, in_vram=4)) as experts:
        for _ in range(3):
            taken = experts.take(2, all_of_a_layer, EXPERTS)
            for _ in range(batches):
                next(taken)
            taken.close()
            experts.restart()
            all_layers(experts, weights, {0: 1, 3: 2})
            all_layers(experts, weights, all_of_a_layer)
    assert not link.registered


@pytest.mark.parametrize("copies_before", [0, 1, 4])
def test_a_copy_that_fails_is_one_line(
    layers: Layers,
    weights: dict[str, Tensor],
    copies_before: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = EagerLink()
    copy, left = link.copy, iter(range(copies_before))

    def fails(target: Tensor, source: Tensor, after: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError("CUDA error: launch failure\nmore of it")
        return copy(target, source, after)

    wanted = dict.fromkeys(range(EXPERTS), 1)
    with closing(opened(layers, link, in_ram=99, in_vram=4)) as experts:
        with monkeypatch.context() as patch:
            patch.setattr(link, "copy", fails)
            for _ in range(2):
                with pytest.raises(
                    StreamError,
                    match=r"^copying an expert to the GPU failed: CUDA error: launch failure$",
                ):
                    all_layers(experts, weights, wanted)
                experts.restart()
        for _ in range(2):
            all_layers(experts, weights, wanted)
    assert not link.registered


@pytest.mark.parametrize(
    ("pins_bytes", "told_of"), [(0, "refuses to pin"), (FEW, "and no more"), (ALL, None)]
)
def test_a_driver_that_refuses_to_pin_is_told_of(
    layers: Layers, pins_bytes: int, told_of: str | None
) -> None:
    told: list[str] = []
    link = LimitedLink(pins_bytes)
    opened(layers, link, in_ram=99, in_vram=4, notice=told.append).close()
    assert len(told) == (told_of is not None)
    assert told_of is None or told_of in told[0]
