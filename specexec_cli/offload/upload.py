"""Layers that stay on a device: several threads read them into slabs, and each goes on as it comes.

No layer is ever whole in RAM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specexec_cli.device import format_bytes
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.link import Link
from specexec_cli.offload.reader import Layout, Notice, Progress, as_range
from specexec_cli.offload.resident import views
from specexec_cli.offload.slabs import IN_FLIGHT, READ_SLABS
from specexec_cli.offload.stream import LayerStream
from specexec_cli.offload.uplink import Uplink


def upload(
    layouts: Sequence[Layout],
    shifts: Sequence[int],
    link: Link,
    *,
    spare_bytes: int,
    piece_bytes: int,
    notice: Notice,
    progress: Progress,
) -> list[dict[str, Tensor]]:
    """Reads layers from disk into the memory of a device.

    Args:
        shifts: per layer, how many bytes of its buffer lie before its own first.
        spare_bytes: of a buffer beyond what its layer takes.
        piece_bytes: of one copy; a multiple of a disk's block.
    Returns:
        per layer its tensors by name, views of one buffer each.
    Raises:
        StreamError: a file cannot be read.
        OutOfMemoryError: a layer does not fit into device memory, or slabs not into RAM.
    """
    pieces = [layout.pieces(piece_bytes) for layout in layouts]
    ranges = [[as_range(piece)] for own in pieces for piece in own]
    total, done = sum(layout.tensor_bytes for layout in layouts), 0
    host = LayerStream(
        ranges, ["ssd"] * len(ranges), buffers=READ_SLABS, kept=IN_FLIGHT, notice=notice
    )
    uplink, number = Uplink(link), 0
    buffers: list[Tensor] = []
    try:
        uplink.pin(host.blobs)  # what is refused is told where it matters, see Copier
        for layout, shift, own in zip(layouts, shifts, pieces, strict=True):
            size = layout.buffer_bytes + spare_bytes
            with device_shortage("a resident layer", size):
                buffers.append(torch.empty(size, dtype=torch.uint8, device=link.device))
            free = link.compute_mark()
            for piece in own:
                with host.blob(number) as blob:
                    start = shift + piece.offset
                    uplink.send(buffers[-1][start : start + blob.numel()], blob, free)
                number += 1
            done += layout.tensor_bytes
            progress(done, total)
    finally:
        uplink.close()  # once all has arrived
        host.close()
    loaded = []
    for layout, buffer, shift in zip(layouts, buffers, shifts, strict=True):
        with device_shortage("a resident layer", buffer.numel()):  # what is not aligned is copied
            loaded.append(views(layout, buffer, shift))
    return loaded


@contextmanager
def device_shortage(purpose: str, n_bytes: int) -> Iterator[None]:
    """Device memory running out becomes one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise OutOfMemoryError(
            f"{purpose} needs {format_bytes(n_bytes)} of GPU memory, which is not free. "
            "Close what else runs on the GPU, or use a smaller draft model: `draft`"
        ) from None
