"""Loads layers that stay on a device: threads read pieces into slabs, each piece is copied on.

No layer is ever whole in RAM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count

import torch
from torch import Tensor

from specexec_cli.device import format_bytes
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.link import Link
from specexec_cli.offload.reader import Layout, Notice, Progress, as_range
from specexec_cli.offload.resident import views
from specexec_cli.offload.slabs import ALIGNED_BYTES, IN_FLIGHT, READ_SLABS
from specexec_cli.offload.stream import LayerStream
from specexec_cli.offload.uplink import Uplink


def upload(
    layouts: Sequence[Layout],
    link: Link,
    *,
    piece_bytes: int,
    notice: Notice,
    progress: Progress,
) -> list[dict[str, Tensor]]:
    """Reads layers from disk into the memory of a device.

    Args:
        layouts: one for each layer.
        piece_bytes: bytes of one copy; a multiple of a disk's block.
        notice: called with one line of text if reading will be slower than it could be.
        progress: called with the bytes uploaded so far and in all.
    Returns:
        For each layer its tensors by name, which are views of one buffer.
    Raises:
        StreamError: a file cannot be read.
        OutOfMemoryError: a layer does not fit into device memory, or slabs not into RAM.
    """
    pieces = [layout.pieces(piece_bytes) for layout in layouts]
    ranges = [[as_range(piece)] for own in pieces for piece in own]
    total, done = sum(layout.tensor_bytes for layout in layouts), 0
    numbers = count()
    buffers: list[Tensor] = []
    with (
        LayerStream(
            ranges, ["ssd"] * len(ranges), buffers=READ_SLABS, kept=IN_FLIGHT, notice=notice
        ) as host,
        closing(Uplink(link)) as uplink,  # closed before the slabs, once all bytes have arrived
    ):
        uplink.pin(host.blobs)  # no notice: Copier tells of a refusal, if it slows passes down
        for layout, own in zip(layouts, pieces, strict=True):
            buffers.append(device_buffer(layout.buffer_bytes, "a resident layer", link))
            free = link.compute_mark()
            for piece in own:
                with host.blob(next(numbers)) as blob:
                    start = layout.shift(ALIGNED_BYTES) + piece.offset
                    uplink.send(buffers[-1][start : start + blob.numel()], blob, free)
            done += layout.tensor_bytes
            progress(done, total)
    loaded = []
    for layout, buffer in zip(layouts, buffers, strict=True):
        with _clear_shortage("a resident layer", buffer.numel()):  # unaligned ones are copied
            loaded.append(views(layout, buffer, layout.shift(ALIGNED_BYTES)))
    return loaded


def device_buffer(n_bytes: int, purpose: str, link: Link) -> Tensor:
    """Memory of the device for layers of up to `n_bytes` and their Layout.shift.

    Args:
        purpose: what the memory is for; the error message begins with it.
    Raises:
        OutOfMemoryError: the device has less memory free.
    """
    size = n_bytes + ALIGNED_BYTES
    with _clear_shortage(purpose, size):
        return torch.empty(size, dtype=torch.uint8, device=link.device)


@contextmanager
def _clear_shortage(purpose: str, n_bytes: int) -> Iterator[None]:
    """Turns torch's error for a shortage of device memory into one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise OutOfMemoryError(
            f"{purpose} needs {format_bytes(n_bytes)} of GPU memory, which is not free. "
            "Close what else runs on the GPU, or use a smaller draft model: `draft`"
        ) from None
