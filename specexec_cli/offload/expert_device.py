"""Experts of a mixture where a GPU computes: in slots of its memory, or in RAM, where they lie.

    take():  those in VRAM at once; of the others, as they come into RAM, those of many rows are
             copied to the GPU, and those of few are handed out in RAM, to be computed by the CPU

A slot on the GPU is written only by copies that are ordered behind all work enqueued before, so no
expert is overwritten while the GPU still multiplies by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from specexec_cli.device import format_bytes
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.expert_files import ExpertTensors
from specexec_cli.offload.experts import Batch, ExpertStore
from specexec_cli.offload.link import Link
from specexec_cli.offload.slabs import ALIGNED_BYTES


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
        self._slot_bytes = store.slot_bytes + ALIGNED_BYTES
        slots = min(cap_bytes // self._slot_bytes, len(store.files) + 1) if copy_rows else 0
        if copy_rows and not slots:
            store.close()
            raise ValueError(f"no slot of {self._slot_bytes} bytes fits into {cap_bytes}")
        self._scratch = slots - 1  # the slot of what is not worth keeping
        self._slot_of: dict[int, int] = {}  # expert -> slot; never the scratch slot
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
            many = {expert for expert, _ in batch if wanted[expert] >= self._copy_rows}
            if few := [(expert, tensors) for expert, tensors in batch if expert not in many]:
                yield few
            for expert, _ in batch:
                key, copied = first + expert, expert in many
                slot = self._slot_for(key)
                if copied or slot != self._scratch:
                    self._copy(key, slot)
                if copied:
                    self._link.compute_waits(self._copying)
                    yield [(expert, self._tensors(key, slot))]
                self._wait_for_copy()  # the store may then read another expert into its slot
                if slot != self._scratch:
                    self._slot_of[key] = slot
                    self.store.elsewhere(key, True)

    def _slot_for(self, key: int) -> int:
        """The slot to copy an expert into: one that nothing is in, or the scratch slot."""
        if self._free:
            return self._free.pop()
        worth = self.store.scores.worth.ravel()
        last = min(self._slot_of, key=worth.__getitem__, default=None)
        if last is None or worth[last] >= worth[key]:
            return self._scratch
        self.store.elsewhere(last, False)
        return self._slot_of.pop(last)

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
        return -self.store.files.first_byte(key) % ALIGNED_BYTES

    def restart(self) -> None:
        """Forget the request of an aborted pass.

        An expert counts as being on the GPU once its copy is done, so the slot of one whose copy
        was under way is free again.
        """
        self._wait_for_copy()
        used = set(self._slot_of.values())
        self._free = [slot for slot in range(self._scratch) if slot not in used]
        self.store.restart()

    def close(self) -> None:
        """Give the memory back, and close the store. Idempotent."""
        if self._registered:
            self._registered = False
            self._wait_for_copy()
            self._link.unregister(self.store.blob)
        self._slot_of.clear()
        self._blob = torch.empty(0, dtype=torch.uint8)
        self.store.close()
