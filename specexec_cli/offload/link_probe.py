"""Measures how fast bytes go from RAM to a GPU, by the way that a target's layers take.

If the driver pins little memory, most of a large target goes through pinned slabs. Then the rate
combines both ways, pinned and through slabs, by their shares of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specexec_cli.device import free_ram_bytes
from specexec_cli.errors import clear_shortage
from specexec_cli.offload.disk_probe import best_of
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.slabs import COPY_BYTES

if TYPE_CHECKING:
    from torch import Tensor

# Most bytes that are pinned for a trial: above every limit that users of WSL2 and containers
# report, and not more, since pinning takes time.
_PIN_TRIAL_BYTES = 1280 << 20
_LARGE_TARGET_BYTES = 16 << 30  # of layers in RAM, assumed while no target is known


@clear_shortage("there is no room to measure the link to it")
def probe_link(
    device: Any,
    n_bytes: int = 256 << 20,
    streamed_bytes: int = _LARGE_TARGET_BYTES,
    repeats: int = 5,
    most_pinned_bytes: int = _PIN_TRIAL_BYTES,
) -> float:
    """Bytes per second from RAM to a CUDA device.

    Args:
        n_bytes: bytes that are copied for one timing.
        streamed_bytes: bytes of the target's layers in RAM.
        repeats: timings, of which the fastest counts.
        most_pinned_bytes: pinned for the measurement at most.
    Raises:
        OutOfMemoryError: no memory for the probe.
    """
    import torch

    from specexec_cli.offload.link import CudaLink
    from specexec_cli.offload.uplink import Uplink

    link = CudaLink(device)
    uplink = Uplink(link)
    trial_bytes = min(streamed_bytes, most_pinned_bytes, free_ram_bytes() // 2)
    blobs = [_blob(COPY_BYTES) for _ in range(max(1, max(n_bytes, trial_bytes) // COPY_BYTES))]
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)

    def rate(chosen: Sequence[Tensor]) -> float:
        chosen = chosen[: max(1, n_bytes // COPY_BYTES)]

        def copy() -> None:
            for blob in chosen:
                uplink.send(target, blob, link.compute_mark())
            uplink.land()

        copy()
        return len(chosen) * COPY_BYTES / best_of(repeats, copy)

    try:
        if uplink.pin(blobs):
            return rate(blobs)
        pinned = [blob for blob in blobs if uplink.is_pinned(blob)]
        others = [blob for blob in blobs if not uplink.is_pinned(blob)]
        share = min(1.0, len(pinned) * COPY_BYTES / max(streamed_bytes, 1))
        return 1 / ((1 - share) / rate(others) + (share / rate(pinned) if pinned else 0.0))
    finally:
        uplink.close()


def _blob(n_bytes: int) -> Tensor:
    from specexec_cli.offload.resident import as_blob

    buffer = HugeBuffer(n_bytes, "the link's probe", "Close other programs")
    blob = as_blob(buffer)
    buffer.close()  # the blob holds the memory from now on
    return blob
