"""Opens the sources of a streamed model's decoder layers and of a mixture's experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from specexec_cli.config import Tier
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.cuda import DeviceStream
from specexec_cli.offload.expert_device import DeviceExperts
from specexec_cli.offload.expert_scores import ExpertScores
from specexec_cli.offload.experts import ExpertStore
from specexec_cli.offload.link import CudaLink
from specexec_cli.offload.mixture import MixtureStream
from specexec_cli.offload.stream import LayerStream


def open_source(
    layers: Sequence[Mapping[str, TensorRange]],
    tiers: Sequence[Tier],
    device: torch.device,
    buffers: int,
    device_buffers: int,
    notice: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> LayerStream | DeviceStream:
    """Opens the ring of buffers in RAM that layers are streamed through, and one on a GPU, if any.

    Args:
        layers: the places of each layer's tensors in the checkpoint.
        tiers: the offload tier of each layer.
        buffers: number of ring buffers in RAM.
        device_buffers: number of ring buffers on a GPU.
    Raises:
        StreamError: a layer cannot be read.
        OutOfMemoryError: memory for the buffers or for resident layers is lacking.
    """
    tensors = [list(layer.values()) for layer in layers]
    if device.type == "cuda":
        return DeviceStream(
            tensors, tiers, CudaLink(device), host_buffers=buffers, device_buffers=device_buffers,
            notice=notice, progress=progress,
        )  # fmt: skip
    # without a GPU, resident layers are in RAM
    host_tiers: list[Tier] = ["ssd" if tier == "ssd" else "ram" for tier in tiers]
    return LayerStream(tensors, host_tiers, buffers=buffers, notice=notice, progress=progress)


def open_experts(
    dense: LayerStream | DeviceStream,
    experts: Sequence[Sequence[Mapping[str, TensorRange]]],
    device: torch.device,
    chosen: int,
    cap_bytes: int,
    device_bytes: int,
    copy_rows: int | None,
    notice: Callable[[str], None],
) -> tuple[MixtureStream, ExpertStore]:
    """Allocates the slots of experts that come one by one; on failure, `dense` is closed.

    Args:
        dense: the source of each layer's other tensors.
        experts: for each layer, the places of each expert's tensors in the checkpoint.
        chosen: number of experts that a row is routed to.
        cap_bytes, device_bytes: most bytes that slots may take in RAM and on a GPU.
        copy_rows: see DeviceExperts.
    """
    scores = ExpertScores(len(experts), max(map(len, experts)), chosen)
    ranges = [[list(expert.values()) for expert in layer] for layer in experts]
    try:
        link = CudaLink(device) if device.type == "cuda" else None
        store = ExpertStore(ranges, cap_bytes, scores, notice=notice)
        source: ExpertStore | DeviceExperts = store
        if link is not None:
            source = DeviceExperts(store, link, device_bytes, copy_rows, notice)
    except BaseException:
        dense.close()
        raise
    return MixtureStream(dense, source), store
