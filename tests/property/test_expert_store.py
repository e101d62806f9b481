"""Whatever is requested, prefetched, interrupted or unreadable, an expert has its own bytes."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from disk import Disk
from expert_toys import EXPERTS, LAYERS, Layers, write
from faults import Interruption, points
from hypothesis import given, settings
from hypothesis import strategies as st

from specexec_cli.errors import StreamError
from specexec_cli.offload import expert_reads
from specexec_cli.offload.expert_files import ExpertFiles, ExpertTensors
from specexec_cli.offload.expert_scores import ExpertScores
from specexec_cli.offload.experts import ExpertStore

DEADLINE_S = 60.0


def opened(layers: Layers, slots: int, piece_bytes: int = 4096) -> ExpertStore:
    scores = ExpertScores(LAYERS, EXPERTS, chosen=2)
    probe = ExpertStore(layers, 1 << 24, scores)
    each = probe.slot_bytes
    probe.close()
    return ExpertStore(layers, slots * each, scores, piece_bytes=piece_bytes)


class ExpertDisk(Disk):
    """Files as they are, but for ranges that cannot be read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.bad: set[int] = set()  # first bytes of experts
        self.reads: list[tuple[int, int]] = []
        self.on_read = self._note

    def _note(self, fd: int, targets: Sequence[memoryview], start: int) -> None:
        stop = start + sum(map(len, targets))
        self.reads.append((start, stop))
        if any(start <= byte < stop for byte in self.bad):
            self.fail()


class Machine:
    """A consumer that knows what every expert holds."""

    def __init__(self, store: ExpertStore, layers: Layers) -> None:
        self.store, self.layers = store, layers
        self.raw = layers[0][0][0].path.read_bytes()

    def check(self, layer: int, expert: int, tensors: dict[str, torch.Tensor]) -> None:
        ranges = self.layers[layer][expert]
        assert set(tensors) == {tensor.name for tensor in ranges}
        for tensor in ranges:
            held = tensors[tensor.name].numpy().tobytes()
            assert held == self.raw[tensor.start : tensor.stop], "an expert of other bytes"

    def take(self, layer: int, wanted: list[int], most: int) -> None:
        """Takes `most` of the wanted experts, then ends as an aborted pass would."""
        seen: list[int] = []
        for batch in self.store.take(layer, dict.fromkeys(wanted, 1), 1):
            if len(seen) >= most:
                self.store.restart()
                return
            for _ in range(2):  # readers have had time to do wrong
                for expert, tensors in batch:
                    self.check(layer, expert, tensors)
            seen += [expert for expert, _ in batch]
        assert sorted(seen) == sorted(wanted)


def within_deadline(run: Iterator[None]) -> None:
    """Runs it in a thread, so that a deadlock is a failure and not a hang."""
    caught: list[BaseException] = []

    def target() -> None:
        try:
            list(run)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "a deadlock"
    if caught:
        raise caught[0]


wanted_sets = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS, unique=True)
steps = st.one_of(
    st.tuples(st.just("take"), st.sampled_from([0, 2]), wanted_sets, st.integers(1, 9)),
    st.tuples(st.just("expect"), st.integers(1, 50), st.integers(1, 3)),
    st.tuples(st.just("break"), st.sampled_from([0, 2]), st.integers(0, EXPERTS - 1)),
    st.tuples(st.just("mend")),
    st.tuples(st.just("warm")),
    st.tuples(st.just("restart")),
)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 99),
    gap=st.sampled_from([0, 5000, 300_000]),
    order=st.sampled_from(["random", "rising"]),
    piece_bytes=st.sampled_from([4096, 16384, 1 << 20]),
    slots=st.integers(1, 2 * EXPERTS),
    program=st.lists(steps, min_size=1, max_size=25),
)
def test_a_random_machine(
    seed: int,
    gap: int,
    order: str,
    piece_bytes: int,
    slots: int,
    program: list[tuple],  # type: ignore[type-arg]
) -> None:
    threads = threading.active_count()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        layers = write(Path(name), seed, gap, order)
        disk = ExpertDisk(patch)
        store = opened(layers, slots, piece_bytes)
        machine = Machine(store, layers)
        within_deadline(run(machine, disk, program))
        assert not machine.store.table.pinned.any()
        # what is left is right, and every slot can still be used
        disk.bad.clear()
        within_deadline(iter_take(machine, [(layer, list(range(EXPERTS))) for layer in (0, 2)]))
        store.close()
    assert threading.active_count() <= threads + 1  # the one of within_deadline may still end


def run(machine: Machine, disk: ExpertDisk, program: list[tuple]) -> Iterator[None]:  # type: ignore[type-arg]
    store = machine.store
    for name, *args in program:
        if name == "take":
            layer, wanted, most = args
            # a block of the disk may hold the ends of two experts
            broken = any(
                part.extent.start <= byte < part.extent.stop
                for expert in wanted
                for part in store.files.pieces(layer * EXPERTS + expert, 0)
                for byte in disk.bad
            )
            try:
                machine.take(layer, wanted, most)
            except StreamError as error:
                failed = str(error)
                store.restart()
                assert broken
                assert f"reading {machine.layers[0][0][0].path} failed at byte" in failed
        elif name == "expect":
            store.expect(*args)
        elif name == "break":
            layer, expert = args
            disk.bad.add(machine.layers[layer][expert][0].start)
        elif name == "mend":
            disk.bad.clear()
        elif name == "warm":
            store.warm()
        else:
            store.restart()
        yield


def iter_take(machine: Machine, requests: list[tuple[int, list[int]]]) -> Iterator[None]:
    for layer, wanted in requests:
        machine.take(layer, wanted, EXPERTS + 1)
        yield


def test_ctrl_c_at_any_line_leaves_the_store_right(tmp_path: Path) -> None:
    layers = write(tmp_path, 1, 100)

    def work(machine: Machine) -> None:
        machine.store.expect(40, 1)
        for layer, wanted in ((0, [0, 1, 2, 3, 4]), (2, [1, 3]), (0, [0, 4])):
            machine.take(layer, wanted, EXPERTS + 1)

    recorded = Interruption()
    store = opened(layers, 3)
    with recorded:
        work(Machine(store, layers))
    store.close()
    store = opened(layers, 3)
    machine = Machine(store, layers)
    fired = 0
    for point in points(recorded.sites):
        interruption = Interruption(point)
        try:
            with interruption:
                work(machine)
        except KeyboardInterrupt:
            fired += 1
        store.restart()
        within_deadline(iter_take(machine, [(0, [0, 1, 2, 3, 4]), (2, [0, 2])]))
    store.close()
    assert fired > 30


def test_what_is_kept_is_not_read_again(tmp_path: Path) -> None:
    layers = write(tmp_path, 3, 0)
    store = opened(layers, 2 * EXPERTS)
    machine = Machine(store, layers)
    for _ in range(3):
        machine.take(0, [0, 1, 2], 9)
    assert (store.touched, store.hits) == (9, 6)
    read = store.bytes_read
    machine.take(0, [2, 1], 9)
    assert store.bytes_read == read
    store.close()


def test_an_expert_in_use_is_not_evicted(tmp_path: Path) -> None:
    """One slot: the next expert is not read before the consumer asks for it."""
    layers = write(tmp_path, 3, 0)
    store = opened(layers, 1)
    machine = Machine(store, layers)
    taken = store.take(0, {0: 1, 1: 1, 2: 1}, 1)
    for _ in range(3):
        ((expert, tensors),) = next(taken)
        held = {name: tensor.clone() for name, tensor in tensors.items()}
        threading.Event().wait(0.05)
        assert all(torch.equal(held[name], tensors[name]) for name in held)
        machine.check(0, expert, tensors)
    assert next(taken, None) is None
    store.close()


def test_what_is_likely_is_read_before_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = write(tmp_path, 3, 0)
    store = opened(layers, 2 * EXPERTS)
    store.expect(100, 1)
    for _ in range(200):
        if store.table.ready.all():
            break
        threading.Event().wait(0.01)
    Machine(store, layers).take(2, [0, 1, 2, 3, 4], 9)
    assert store.hits == 5
    store.close()


def test_counts_warm_a_new_store(tmp_path: Path) -> None:
    layers = write(tmp_path, 3, 0)
    store = opened(layers, 2)
    for _ in range(5):
        Machine(store, layers).take(2, [1, 4], 9)
    counts = store.scores.counts.copy()
    store.close()
    again = opened(layers, 2)
    again.scores.restore(counts)
    again.warm()
    for _ in range(200):
        if again.table.ready.all():
            break
        threading.Event().wait(0.01)
    Machine(again, layers).take(2, [1, 4], 9)
    assert again.hits == 2
    again.close()
    with pytest.raises(ValueError, match="not counts"):
        again.scores.restore(counts[:, :2])


def test_an_expert_is_not_ready_before_its_tensors_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = write(tmp_path, 3, 0)
    store = opened(layers, 2 * EXPERTS)
    machine = Machine(store, layers)
    machine.take(0, [1], 9)
    real, failing = ExpertFiles.tensors, [True]

    def tensors(files: ExpertFiles, key: int, blob: torch.Tensor, shift: int) -> ExpertTensors:
        if key == 2 and failing[0]:
            raise MemoryError("no room for a copy")
        return real(files, key, blob, shift)

    monkeypatch.setattr(ExpertFiles, "tensors", tensors)
    with pytest.raises(RuntimeError, match="a reader thread died") as raised:
        machine.take(0, [2, 3], 9)
    assert isinstance(raised.value.__cause__, MemoryError)
    store.restart()
    assert store.table.ready_slot(2) is None
    failing[0] = False
    within_deadline(iter_take(machine, [(0, [1, 2, 3])]))
    store.close()


def test_neighbours_come_with_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of their blocks once, also those that two of them share, and a gap between them."""
    disk = ExpertDisk(monkeypatch)
    layers = write(tmp_path, 3, 5000, "rising")
    store = opened(layers, 2 * EXPERTS, 1 << 20)
    machine = Machine(store, layers)
    alone = [store.files.pieces(2 * EXPERTS + expert, 0)[0].extent for expert in range(EXPERTS)]
    machine.take(2, list(range(EXPERTS)), 9)
    assert disk.reads == [(alone[0].start, alone[-1].stop)]
    together = min(alone[-1].stop, len(machine.raw)) - alone[0].start
    assert (store.reads, store.bytes_read) == (1, together)
    gaps = sum(max(0, b.start - a.stop) for a, b in pairwise(alone))
    shared = sum(max(0, a.stop - b.start) for a, b in pairwise(alone))
    past_the_end = max(0, alone[-1].stop - len(machine.raw))
    assert together == sum(e.stop - e.start for e in alone) + gaps - shared - past_the_end
    assert shared > 0
    machine.take(0, [0, 2, 3], 9)  # through the one between them, so small are they
    assert len(disk.reads) == 2
    store.close()
    monkeypatch.setattr(expert_reads, "GAP_BYTES", 0)
    store = opened(layers, 2 * EXPERTS, 1 << 20)
    Machine(store, layers).take(0, [0, 2, 3], 9)
    assert store.reads == len(disk.reads) - 2 >= 2
    store.close()


def test_not_even_one_expert_fits(tmp_path: Path) -> None:
    layers = write(tmp_path, 3, 0)
    with pytest.raises(ValueError, match="no slot"):
        ExpertStore(layers, 4095, ExpertScores(LAYERS, EXPERTS, 2))
