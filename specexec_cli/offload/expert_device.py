"""Experts of a mixture where a GPU computes: in slots of its memory, or in RAM, where they lie.

    take():  those in VRAM at once; of the others, as they come into RAM, those of many rows are
             copied to the GPU, and those of few are handed out in RAM, to be computed by the CPU

An expert that the CPU computes is copied as well only where that will pay: into a slot that nothing
is in, or where its rows were so many more than those of the expert whose slot it takes that the CPU
takes longer for the difference than a copy.

A slot on the GPU is written only by copies that are ordered behind all work enqueued before, so no
expert is overwritten while the GPU still multiplies by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from specexec_cli.device import format_bytes
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.expert_files import ExpertTensors
from specexec_cli.offload.expert_slots import FREE
from specexec_cli.offload.experts import Batch, ExpertStore
from specexec_cli.offload.link import Link

_ALIGNED_BYTES = 16  # what kernels need to load 16 bytes at once; see cuda.py


class DeviceExperts:
    """The experts of an ExpertStore for a GPU, which keeps those that are worth most."""

    def __init__(
        self, store: ExpertStore, link: Link, cap_bytes: int, copy_rows: int | None
    ) -> None:
        """Take the slots; experts come into them as they are used.

        Args:
            store: taken over: close() closes it.
            cap_bytes: of VRAM for slots; one of them is for experts that are not kept.
            copy_rows: an expert of so many rows and more is copied to the GPU, others are computed
                by the CPU. None: the CPU computes all.
        Raises:
            OutOfMemoryError: the slots do not fit into VRAM.
            ValueError: experts are to be copied, and not one slot fits under the cap.
        """
        self.store, self._link, self._copy_rows = store, link, copy_rows
        self.bytes_copied = 0  # to the GPU
        self.hits = 0  # experts asked for that were in VRAM
        self._slot_bytes = store.slot_bytes + _ALIGNED_BYTES
        slots = min(cap_bytes // self._slot_bytes, len(store.files) + 1) if copy_rows else 0
        if copy_rows and not slots:
            store.close()
            raise ValueError(f"no slot of {self._slot_bytes} bytes fits into {cap_bytes}")
        self._scratch = slots - 1  # the slot of what is not worth keeping
        self._slot_of: dict[int, int] = {}  # expert -> slot; never the scratch slot
        self._held: NDArray[np.int64] = np.full(max(slots - 1, 0), FREE)  # slot -> expert
        self._free = list(range(slots - 1))
        self._copying: object | None = None  # the event of a copy that was not waited for
        try:
            self._blob = torch.empty(
                max(slots, 0) * self._slot_bytes, dtype=torch.uint8, device=link.device
            )
        except torch.OutOfMemoryError:
            store.close()
            raise OutOfMemoryError(
                f"slots for {slots} experts need {format_bytes(slots * self._slot_bytes)} of GPU "
                "memory, which is not free. Close what else runs on the GPU, or compute experts on "
                "the CPU: `experts='cpu'`"
            ) from None
        self._registered = copy_rows is not None and link.register(store.blob)

    def take(self, layer: int, wanted: Mapping[int, int], rows: int) -> Iterator[Batch]:
        """Each wanted expert once, in VRAM or in RAM; see ExpertStore.take."""
        first = layer * self.store.width
        here = {expert: n for expert, n in wanted.items() if first + expert in self._slot_of}
        self.hits += len(here)
        if here:
            yield [
                (expert, self._tensors(first + expert, self._slot_of[first + expert]))
                for expert in here
            ]
        others = {expert: n for expert, n in wanted.items() if expert not in here}
        for batch in self.store.take(layer, others, rows, elsewhere=here):
            if self._copy_rows is None:
                yield batch
                continue
            many = [expert for expert, _ in batch if wanted[expert] >= self._copy_rows]
            if few := [(expert, tensors) for expert, tensors in batch if expert not in many]:
                copying = self._copy_what_pays([first + expert for expert, _ in few])
                yield few  # the CPU computes while the copies are under way
                self._now_here(copying)
            for expert in many:
                key = first + expert
                slot = self._slot_for(key, self.store.scores.worth.ravel())
                slot = self._scratch if slot is None else slot
                self._copy(key, slot)
                self._link.compute_waits(self._copying)
                yield [(expert, self._tensors(key, slot))]
                self._now_here({key: slot} if slot != self._scratch else {})

    def _copy_what_pays(self, keys: list[int]) -> dict[int, int]:
        """Enqueue copies of experts that the CPU computes; returns their slots.

        For `copy_rows` rows the CPU takes as long as a copy, and a count remembers as many rows as
        make it a fair guess of those to come. So a copy pays where the counts differ by more.
        """
        assert self._copy_rows is not None, "else nothing is copied"
        slots, counts = {}, self.store.scores.counts.ravel()
        for key in keys:
            slot = self._slot_for(key, counts, self._copy_rows)
            if slot is not None:
                self._copy(key, slot)
                slots[key] = slot
        return slots

    def _now_here(self, slots: Mapping[int, int]) -> None:
        """Wait for copies, whose slots are then those experts'.

        Not before: the store may read other experts into the memory that is copied from.
        """
        self._wait_for_copy()
        for key, slot in slots.items():
            self._slot_of[key] = slot
            self._held[slot] = key
            self.store.elsewhere(key, True)

    def _slot_for(self, key: int, worth: NDArray[np.float64], margin: float = 0.0) -> int | None:
        """The slot to copy an expert into, which nothing is in any more; None where none is.

        Args:
            worth: by expert.
            margin: that the expert must be worth more than the one whose slot it takes.
        """
        if self._free:
            return self._free.pop()
        if not len(self._held):
            return None
        by_slot = np.where(self._held == FREE, np.inf, worth[self._held])
        slot = int(np.argmin(by_slot))
        if by_slot[slot] + margin >= worth[key]:
            return None
        last = int(self._held[slot])
        self._held[slot] = FREE
        del self._slot_of[last]
        self.store.elsewhere(last, False)
        return slot

    def _copy(self, key: int, slot: int) -> None:
        """Enqueue the copy of an expert that the store has handed out."""
        source, shift = self.store.bytes_of(key), self._shift(key)
        start = slot * self._slot_bytes + shift
        target = self._blob[start : start + source.numel()]
        self.bytes_copied += source.numel()
        self._copying = self._link.copy(target, source, self._link.compute_mark())

    def _wait_for_copy(self) -> None:
        if self._copying is not None:
            self._link.wait(self._copying)
            self._copying = None

    def _tensors(self, key: int, slot: int) -> ExpertTensors:
        return self.store.files.tensors(key, self._blob, slot * self._slot_bytes + self._shift(key))

    def _shift(self, key: int) -> int:
        return -self.store.files.first_byte(key) % _ALIGNED_BYTES

    def restart(self) -> None:
        """Forget the request of an aborted pass.

        An expert counts as being on the GPU once its copy is done, so the slot of one whose copy
        was under way is free again.
        """
        self._wait_for_copy()
        self._free = np.flatnonzero(self._held == FREE).tolist()
        self.store.restart()

    def close(self) -> None:
        """Give the memory back, and close the store. Idempotent."""
        if self._registered:
            self._registered = False
            self._wait_for_copy()
            self._link.unregister(self.store.blob)
        self._slot_of.clear()
        self._held[:] = FREE
        self._blob = torch.empty(0, dtype=torch.uint8)
        self.store.close()
