"""Streams layers to a GPU ahead of the pass: from RAM or SSD into a ring of device buffers.

    copier:  a thread (copier.py) fills a buffer of the ring once the event behind the buffer's last
             use is done
    pass:    computes with a layer once the event behind the layer's copies is done

Nothing waits for the whole device. DeviceStream has the interface of LayerStream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from specexec_cli.config import Tier
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.copier import Copier
from specexec_cli.offload.link import Link
from specexec_cli.offload.reader import Layout, Notice, Progress, lay_out, once
from specexec_cli.offload.resident import RingTensors, StayingTensors, all_in_place, views
from specexec_cli.offload.slabs import ALIGNED_BYTES, COPY_BYTES
from specexec_cli.offload.upload import device_buffer, upload


class DeviceStream:
    """The layers of a target in cyclic order, 0..L-1, 0..L-1, ..., as tensors on a device."""

    def __init__(
        self,
        layers: Sequence[Sequence[TensorRange]],
        tiers: Sequence[Tier],
        link: Link,
        *,
        host_buffers: int = 3,
        device_buffers: int = 3,
        notice: Notice = lambda text: None,
        progress: Progress = lambda done, total: None,
        piece_bytes: int = COPY_BYTES,
    ) -> None:
        """Load the 'resident' and 'ram' layers, and start to copy streamed layers to the device.

        Args:
            layers: per layer, its tensors.
            tiers: per layer, where it stays: 'resident' (on the device), or 'ram' or 'ssd', from
                where it is streamed in every pass.
            host_buffers: RAM for layers on their way from the SSD, counted in largest layers.
            device_buffers: streamed layers on the device at once, the one in use included; 2 or
                more.
            piece_bytes: bytes of one copy to the device; a multiple of a disk's block.
        Raises:
            StreamError: a file cannot be read.
            OutOfMemoryError: something does not fit into RAM or device memory.
        """
        if len(layers) != len(tiers) or device_buffers < 2:
            raise ValueError("one tier per layer and at least 2 buffers are needed")
        notice = once(notice)
        self.bytes_streamed = 0  # of the streamed layers handed out so far
        self._link = link
        self._count = len(layers)
        self._next_layer = 0
        self._in_use: object | None = None  # a new object for each use
        self._streamed = [i for i, tier in enumerate(tiers) if tier != "resident"]
        self._layouts: list[Layout] = [lay_out(layers[i]) for i in self._streamed]
        self._in_place = [all_in_place(each, each.shift(ALIGNED_BYTES)) for each in self._layouts]
        self._resident: dict[int, StayingTensors] = {}
        self._buffers: list[Tensor] = []
        self._copier: Copier | None = None
        try:
            self._load_resident(layers, tiers, piece_bytes, notice, progress)
            if self._streamed:
                self._take_buffers(device_buffers)
                host_tiers = [tiers[i] for i in self._streamed]
                on_disk = [tier == "ssd" for tier in host_tiers]
                self._copier = Copier(
                    self._layouts, host_tiers, self._buffers, link,
                    host_bytes=host_buffers * self._largest(on_disk),
                    piece_bytes=piece_bytes, notice=notice, progress=progress,
                )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def _load_resident(
        self,
        layers: Sequence[Sequence[TensorRange]],
        tiers: Sequence[Tier],
        piece_bytes: int,
        notice: Notice,
        progress: Progress,
    ) -> None:
        chosen = [i for i, tier in enumerate(tiers) if tier == "resident"]
        if not chosen:
            return
        loaded = upload(
            [lay_out(layers[i]) for i in chosen], self._link,
            piece_bytes=piece_bytes, notice=notice, progress=progress,
        )  # fmt: skip
        self._resident = dict(zip(chosen, map(StayingTensors, loaded), strict=True))

    def _largest(self, chosen: Sequence[bool]) -> int:
        """Bytes that the largest chosen layer takes in a buffer; 0 if none is chosen."""
        pairs = zip(self._layouts, chosen, strict=True)
        return max((layout.buffer_bytes for layout, is_one in pairs if is_one), default=0)

    def _take_buffers(self, device_buffers: int) -> None:
        size = self._largest([True] * len(self._layouts))
        for _ in range(min(device_buffers, len(self._streamed) + 1)):
            self._buffers.append(device_buffer(size, "a ring buffer on the device", self._link))

    @property
    def staying(self) -> Mapping[int, dict[str, Tensor]]:
        """The tensors of the layers that stay on the device, by index; valid until close()."""
        return self._resident

    @property
    def all_stay(self) -> bool:
        """Whether no layer is streamed."""
        return not self._streamed

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk."""
        return self._copier.bytes_read if self._copier else 0

    @contextmanager
    def layer(self, index: int) -> Iterator[dict[str, Tensor]]:
        """The layer's tensors by name on the device, in file dtype and shape.

        Work enqueued on the current stream inside the `with` may use them.

        Raises:
            StreamError: the layer could not be read or copied; names the file and offset of a read.
        """
        if index != self._next_layer or self._in_use:
            raise RuntimeError(f"layer {index} asked for, next is {self._next_layer}")
        following = (index + 1) % self._count
        if index in self._resident:
            self._next_layer = following
            yield self._resident[index]
            return
        assert self._copier is not None
        copied = self._copier.take()
        # After the last streamed layer the drafter grows a tree and uploads its steps, so pieces
        # are copied in parts, which let them pass.
        self._copier.fine = index == self._streamed[-1]
        # Until _in_use is taken back, restart() knows that it has something to mend.
        use = self._in_use = object()
        self._next_layer = following
        buffer = self._copier.next_buffer
        place = self._streamed.index(index)
        layout = self._layouts[place]
        # Work is enqueued two layers ahead of the device, not a whole pass ahead: so an aborted
        # pass ends soon, and a live status tells what has really been streamed.
        self._link.wait(self._copier.last_use((buffer + 1) % len(self._buffers)))
        self._link.compute_waits(copied)
        try:
            tensors = views(layout, self._buffers[buffer], layout.shift(ALIGNED_BYTES))
            yield RingTensors(tensors, buffer if self._in_place[place] else None)
        finally:
            if self._in_use is use:  # otherwise restart() came first; see LayerStream.blob
                self.bytes_streamed += layout.tensor_bytes
                self._copier.give(self._link.compute_mark())
                self._in_use = None

    @property
    def failed(self) -> bool:
        """Whether reading or copying ahead has met an error, or restart() did not end."""
        return self._copier is not None and self._copier.failed

    def restart(self) -> None:
        """Begin again at layer 0 after an aborted pass; copies under way are waited for."""
        if not (self._next_layer or self._in_use or self.failed):
            return  # a pass has just ended: the layers copied ahead are the right ones
        if self._copier is not None:
            self._copier.restart()
        self._next_layer = 0
        self._in_use = None

    def close(self) -> None:
        """Stop the threads, unpin and free the memory, close the files. Idempotent."""
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        self._buffers.clear()
        self._resident.clear()

    def __enter__(self) -> DeviceStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
