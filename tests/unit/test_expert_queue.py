"""The queue of experts: which is read next, and into which slot. No files, no threads."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from expert_toys import EXPERTS, LAYERS, write
from hypothesis import given, settings
from hypothesis import strategies as st

from specexec_cli.offload import expert_queue
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.expert_files import ExpertFiles
from specexec_cli.offload.expert_queue import LIKELY, ReadQueue
from specexec_cli.offload.expert_scores import ExpertScores, Floats
from specexec_cli.offload.expert_slots import SlotTable
from specexec_cli.offload.reader import BLOCK_BYTES

KEYS = [layer * EXPERTS + expert for layer in (0, 2) for expert in range(EXPERTS)]


class Toy:
    """A queue over a table of slots, in which some experts are."""

    def __init__(
        self, folder: Path, held: list[int], slots: int, piece_bytes: int = 1 << 20
    ) -> None:
        self.files = ExpertFiles(write(folder, 1, 0, "rising"), piece_bytes)
        self.table = SlotTable(slots, LAYERS * EXPERTS)
        self.scores = ExpertScores(LAYERS, EXPERTS, chosen=2)
        self.queue = ReadQueue(self.files, self.table, self.scores)
        for slot, key in enumerate(held):
            self.table.give(slot, key, pinned=False)
            self.table.ready[slot] = True

    def read_next(self) -> list[int]:
        """The experts of the next read, by what their slots are for; none if nothing is read."""
        read = self.queue.next_read(None)
        return [int(self.table.held[part.slot]) for part in read.parts] if read else []

    def all_reads(self) -> list[list[int]]:
        """What is read if every read is done before the next one begins."""
        done = []
        while (read := self.queue.next_read(None)) is not None:
            done.append([int(self.table.held[part.slot]) for part in read.parts])
            for slot in self.queue.read_done(read, None):
                assert self.queue.arrived(slot, None) is None
        return done

    def expect(self, likely: Floats) -> None:
        self.queue.expect(likely, np.zeros_like(likely), 1)


def likely(**by_layer: list[float]) -> Floats:
    found = np.zeros((LAYERS, EXPERTS))
    for name, values in by_layer.items():
        found[int(name[1:])] = values
    return found


@settings(max_examples=200, deadline=None)
@given(
    shares=st.lists(
        st.sampled_from([0.0, 0.5, 0.8, 0.95, 0.96, 0.99, 1.0]), min_size=10, max_size=10
    ),
    held=st.sets(st.sampled_from(KEYS)),
    elsewhere=st.sets(st.sampled_from(KEYS)),
)
def test_a_layer_is_read_whole_where_nearly_all_that_is_missing_is_needed(
    shares: list[float], held: set[int], elsewhere: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        toy = Toy(Path(name), sorted(held), 2 * EXPERTS)
        toy.table.elsewhere[list(elsewhere)] = True
        by_key = dict(zip(KEYS, shares, strict=True))
        toy.expect(likely(l0=shares[:EXPERTS], l2=shares[EXPERTS:]))
        expected = set()
        for layer in (0, 2):
            own = [key for key in KEYS if key // EXPERTS == layer and key not in elsewhere]
            missing = [key for key in own if key not in held]
            exactly = sum(by_key[key] * toy.files.n_bytes(key) for key in missing)
            ahead = sum(map(toy.files.n_bytes, missing))
            if ahead <= 1.05 * exactly:
                expected.update(missing)
            else:
                expected.update(key for key in missing if by_key[key] >= LIKELY)
        read = [key for run in toy.all_reads() for key in run]
        assert read == toy.files.in_order(expected)


def test_nothing_is_given_up_for_it_that_the_pass_is_expected_to_need(tmp_path: Path) -> None:
    """The slots are full of what later layers need: nothing is read before a layer is done."""
    toy = Toy(tmp_path, [10, 11, 12, 13], 4)
    toy.expect(likely(l0=[1.0] * EXPERTS, l2=[1.0] * EXPERTS))
    assert toy.all_reads() == []
    toy.queue.want(0, [0, 1])  # what is asked for takes the place of what is needed last
    assert toy.all_reads() == [[0, 1]]
    assert set(toy.table.of) == {0, 1, 12, 13}
    toy.table.unpin(slice(None))
    toy.queue.want(1, [])
    assert toy.all_reads() == [[10, 11]]
    assert set(toy.table.of) == {10, 11, 12, 13}


def test_nothing_is_read_ahead_in_the_place_of_what_the_pass_may_need(tmp_path: Path) -> None:
    """Of 10 and 11, which later rows may ask for, the first is used more, but less in this pass."""
    toy = Toy(tmp_path, [10, 11], 2)
    toy.scores.worth[2] = [0.2, 0.1, 0.0, 0.0, 0.0]
    toy.expect(likely(l0=[1.0, 0.0, 0.0, 0.0, 0.0], l2=[0.2, 0.7, 0.0, 0.0, 0.0]))
    assert toy.all_reads() == []
    toy.queue.want(0, [0])  # what is asked for must go somewhere
    assert toy.all_reads() == [[0]]
    assert set(toy.table.of) == {0, 11}
    toy.table.unpin(slice(None))
    toy.queue.want(2, [12])  # what a layer that is visited did not ask for is needed no more
    assert toy.all_reads() == [[12]]
    assert set(toy.table.of) == {11, 12}


def test_all_experts_of_a_layer_are_needed_equally_soon(tmp_path: Path) -> None:
    """Also the first one: of those that are needed at once, the one used least gives way."""
    toy = Toy(tmp_path, [10, 13], 2)
    toy.scores.worth[2] = [1.0, 0.0, 0.0, 5.0, 0.0]
    toy.expect(likely(l2=[1.0, 0.0, 0.0, 1.0, 0.0]))
    toy.queue.want(0, [1])
    assert toy.read_next() == [1]
    assert set(toy.table.of) == {1, 13}


def test_what_is_asked_for_is_read_before_what_is_expected(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [], 2 * EXPERTS, piece_bytes=4096)
    toy.expect(likely(l2=[1.0] * EXPERTS))
    assert toy.read_next() == [10]
    assert len(toy.table.of) == EXPERTS, "the others are to be read next"
    toy.queue.want(0, [3])
    assert toy.read_next() == [3]


def test_a_run_is_no_longer_than_half_of_the_slots_and_than_a_readers_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slots").mkdir()
    toy = Toy(tmp_path / "slots", [], 5)
    toy.queue.want(0, range(EXPERTS))
    assert toy.all_reads() == [[0, 1], [2, 3], [4]]
    sizes = [toy.files.n_bytes(key) for key in range(EXPERTS)]
    monkeypatch.setattr(expert_queue, "RUN_BYTES", sum(sizes[:3]))
    (tmp_path / "bytes").mkdir()
    toy = Toy(tmp_path / "bytes", [], 2 * EXPERTS)
    toy.queue.want(0, range(EXPERTS))
    assert toy.all_reads() == [[0, 1, 2], [3, 4]]


def test_a_read_of_several_that_fails_is_done_again_for_each(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [], 2 * EXPERTS)
    toy.queue.want(0, [0, 1, 2])
    read = toy.queue.next_read("request")
    assert read is not None
    assert toy.queue.read_done(read, OSError("bad")) == []
    again = [toy.queue.next_read("request") for _ in range(3)]
    assert [each.parts for each in again if each] == [(part,) for part in read.parts]
    for place, each in enumerate(again):
        assert each is not None
        error = OSError("bad") if place == 1 else None
        assert toy.queue.read_done(each, error) == [each.parts[0].slot]
        assert (toy.queue.arrived(each.parts[0].slot, "request") is not None) == (place == 1)
    assert set(toy.table.of) == {0, 2}
    assert toy.queue.next_read("request") is None


def test_experts_in_parts_come_with_one_read_of_each_part() -> None:
    """As in GGUF and gpt-oss files: all experts' `down`, then all their `gate_up`."""
    path, size, apart = Path("stacks"), 100_000, 10_000_000
    experts = [
        [
            TensorRange(
                f"{leaf}.{n}", path, "U8", (size,), start + n * size, start + (n + 1) * size
            )
            for leaf, start in (("down", 5000), ("gate_up", 5000 + apart))
        ]
        for n in range(4)
    ]
    files = ExpertFiles([experts], 1 << 20)
    parts = [part for slot, key in enumerate((0, 1, 3)) for part in files.pieces(key, slot)]
    reads = files.joined(parts)
    assert [[part.slot for part in read.parts] for read in reads] == [[0, 1], [2]] * 2
    assert [read.start // BLOCK_BYTES for read in reads] == [1, 74, 2442, 2515]
    for read in reads:
        tensors = [tensor for slot in experts for tensor in slot]
        inside = [t.name for t in tensors if read.start <= t.start and t.stop <= read.stop]
        assert len(inside) == len(read.parts)
    short = ExpertFiles([experts], 150_000)  # too short for two
    assert [len(read.parts) for read in short.joined(parts)] == [1] * 6
    table = SlotTable(8, 4)
    queue = ReadQueue(files, table, ExpertScores(1, 4, 2))
    queue.want(0, [0, 1, 2, 3])
    read = queue.next_read(None)
    assert read is not None
    assert len(read.parts) == 4
