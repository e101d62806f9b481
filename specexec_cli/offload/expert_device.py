"""A mixture's experts where a GPU computes: kept in slots of VRAM, or in RAM for the CPU.

take() hands out the wanted experts that are in VRAM at once. Of the others, as they come into RAM,
experts with many rows are copied to the GPU, and experts with few rows are handed out in RAM, for
the CPU to compute.

An expert that the CPU computes is also copied to the GPU if that will pay: into a free slot, or
into the slot of an expert with fewer rows so far, if the CPU takes longer for the difference in
rows than the copy takes.

Copies into a slot are ordered behind all work enqueued before, so no expert is overwritten while
the GPU still multiplies by it. While the GPU computes one expert, a thread (expert_copies.py)
copies the next: PASSING_SLOTS slots are for experts that are not kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specexec_cli.device import format_bytes
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.expert_copies import ExpertCopies
from specexec_cli.offload.expert_files import ExpertTensors
from specexec_cli.offload.expert_slots import FREE
from specexec_cli.offload.experts import Batch, ExpertStore
from specexec_cli.offload.link import Link
from specexec_cli.offload.reader import Notice
from specexec_cli.offload.slabs import ALIGNED_BYTES, PASSING_SLOTS


class DeviceExperts:
    """The experts of an ExpertStore for a GPU; those that are worth most stay in its VRAM."""

    def __init__(
        self,
        store: ExpertStore,
        link: Link,
        cap_bytes: int,
        copy_rows: int | None,
        notice: Notice = lambda text: None,
    ) -> None:
        """Allocate the slots; experts are copied into them as they are used.

        Args:
            store: reads the experts into RAM; close() closes it.
            cap_bytes: most bytes of VRAM that the slots may take, those for experts that are not
                kept included.
            copy_rows: fewest rows for which an expert is copied to the GPU; the CPU computes the
                others. None: the CPU computes all.
            notice: called with one line of text if the driver refuses to pin memory.
        Raises:
            OutOfMemoryError: the slots do not fit into VRAM, or slabs not into RAM.
            ValueError: experts are to be copied, but not one slot fits under the cap.
        """
        self.store, self._link, self._copy_rows = store, link, copy_rows
        self.bytes_copied = 0  # of experts, to the GPU
        self.hits = 0  # experts asked for that were in VRAM
        self._slot_bytes = store.slot_bytes + ALIGNED_BYTES
        most = len(store.files) + PASSING_SLOTS
        slots = min(cap_bytes // self._slot_bytes, most) if copy_rows else 0
        self._slots = slots
        # the first slots are for experts that are kept: one slot at least, if there are two or more
        self._kept = max(slots - PASSING_SLOTS, min(slots - 1, 1), 0)
        self.slot_of: dict[int, int] = {}  # key of a kept expert -> its slot
        self._held: NDArray[np.int64] = np.full(self._kept, FREE)  # slot -> key of its expert
        self._free = list(range(self._kept))
        self._passing = list(range(self._kept, slots))  # slots for other experts, free now
        self._blob = torch.empty(0, dtype=torch.uint8)
        self._copies: ExpertCopies | None = None
        try:
            if copy_rows and not slots:
                raise ValueError(f"no slot of {self._slot_bytes} bytes fits into {cap_bytes}")
            if slots:
                self._blob = self._new_slots(slots)
                in_ram = torch.split(store.blob, store.slot_bytes)
                self._copies = ExpertCopies(in_ram, link, notice)
        except BaseException:
            store.close()
            raise

    def _new_slots(self, count: int) -> Tensor:
        size = count * self._slot_bytes
        try:
            return torch.empty(size, dtype=torch.uint8, device=self._link.device)
        except torch.OutOfMemoryError:
            raise OutOfMemoryError(
                f"slots for {count} experts need {format_bytes(size)} of GPU memory, which is not "
                "free. Close what else runs on the GPU, or compute experts on the CPU: "
                "`experts='cpu'`"
            ) from None

    def take(self, layer: int, wanted: Mapping[int, int], rows: int) -> Iterator[Batch]:
        """Yields each wanted expert once, in VRAM or in RAM; see ExpertStore.take."""
        first = layer * self.store.width
        here = {expert: n for expert, n in wanted.items() if first + expert in self.slot_of}
        self.hits += len(here)
        if here:
            yield [
                (expert, self._tensors(first + expert, self.slot_of[first + expert]))
                for expert in here
            ]
        others = {expert: n for expert, n in wanted.items() if expert not in here}
        for batch in self.store.take(layer, others, rows, elsewhere=here):
            if self._copies is None or self._copy_rows is None:
                yield batch
            else:
                many = {expert for expert, _ in batch if wanted[expert] >= self._copy_rows}
                kept = self._places(first, batch, many, self._copy_rows)
                yield from self._brought(self._copies, first, batch, many, kept)

    def _places(
        self, first: int, batch: Batch, many: set[int], copy_rows: int
    ) -> dict[int, int | None]:
        """For each expert of a batch, the VRAM slot to keep it in; None if it is not kept.

        The CPU takes as long for `copy_rows` rows as a copy takes. An expert's count (ExpertScores)
        spans so many rows that it is a fair guess of the rows to come. So copying an expert that
        the CPU computes pays if its count exceeds that of the expert it replaces by more than
        `copy_rows`.
        """
        scores = self.store.scores
        worth, counts = scores.worth.ravel(), scores.counts.ravel()
        return {
            expert: self.slot_for(first + expert, worth)
            if expert in many
            else self.slot_for(first + expert, counts, copy_rows)
            for expert, _ in batch
        }

    def _brought(
        self,
        copies: ExpertCopies,
        first: int,
        batch: Batch,
        many: set[int],
        kept: Mapping[int, int | None],
    ) -> Iterator[Batch]:
        """Yields the experts of a batch: those of `many` on the GPU, the others in RAM.

        Copies are begun as far ahead as there are slots; meanwhile the CPU computes the others.

        Args:
            first: key of the layer's first expert.
            batch: experts of the layer that are in RAM.
            many: the experts with enough rows to be copied.
            kept: see _places.
        """
        left = deque(expert for expert in kept if kept[expert] is not None or expert in many)
        few = [(expert, tensors) for expert, tensors in batch if expert not in many]
        begun: deque[tuple[int, int, Future[Any]]] = deque()
        while few or left or begun:
            while left and (slot := self._room(kept[left[0]])) is not None:
                expert = left.popleft()
                begun.append((expert, slot, self._begin(copies, first + expert, slot)))
            if few:
                yield few
                few = []
                continue
            expert, slot, copy = begun.popleft()
            if expert in many:
                self._link.compute_waits(copy.result())
                yield [(expert, self._tensors(first + expert, slot))]
            if slot >= self._kept:
                self._passing.append(slot)
        copies.land()  # the store may then read other experts into these slots
        for expert, own in kept.items():
            if own is not None:
                self.slot_of[first + expert] = own
                self._held[own] = first + expert
                self.store.elsewhere(first + expert, True)

    def _room(self, kept: int | None) -> int | None:
        """The slot to copy an expert into: `kept` if given, else one to pass through, else None."""
        if kept is not None:
            return kept
        return self._passing.pop() if self._passing else None

    def _begin(self, copies: ExpertCopies, key: int, slot: int) -> Future[Any]:
        """Begins to copy an expert that the store has handed out, behind all enqueued work."""
        source = self.store.bytes_of(key)
        start = slot * self._slot_bytes + self._shift(key)
        target = self._blob[start : start + source.numel()]
        self.bytes_copied += source.numel()
        return copies.begin(target, source, self._link.compute_mark())

    def slot_for(self, key: int, worth: NDArray[np.float64], margin: float = 0.0) -> int | None:
        """An emptied slot to keep an expert in; None if every kept expert is worth as much.

        Args:
            key: the expert's key.
            worth: (keys,), the worth of every expert.
            margin: how much more than the expert it replaces this one must be worth.
        """
        if self._free:
            return self._free.pop()
        if not self._kept:
            return None
        by_slot = np.where(self._held == FREE, np.inf, worth[self._held])
        slot = int(np.argmin(by_slot))
        if by_slot[slot] + margin >= worth[key]:
            return None
        last = int(self._held[slot])
        self._held[slot] = FREE
        del self.slot_of[last]
        self.store.elsewhere(last, False)
        return slot

    def _tensors(self, key: int, slot: int) -> ExpertTensors:
        return self.store.files.tensors(key, self._blob, slot * self._slot_bytes + self._shift(key))

    def _shift(self, key: int) -> int:
        return -self.store.files.first_byte(key) % ALIGNED_BYTES

    def restart(self) -> None:
        """Forget the request of an aborted pass.

        An expert counts as being on the GPU only once its copy is done, so a slot is free again if
        the copy into it was under way.
        """
        if self._copies is not None:
            self._copies.drop()
        self._free = np.flatnonzero(self._held == FREE).tolist()
        self._passing = list(range(self._kept, self._slots))
        self.store.restart()

    def close(self) -> None:
        """Stop the threads, give the memory back, and close the store. Idempotent."""
        copies, self._copies = self._copies, None
        self.slot_of.clear()
        self._held[:] = FREE
        try:
            if copies is not None:
                copies.close()
        finally:
            self._blob = torch.empty(0, dtype=torch.uint8)
            self.store.close()
