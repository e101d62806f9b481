"""Where the decoder layers of a streamed model come from, and a mixture's experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from specexec_cli.config import Tier
from specexec_cli.models.skeleton import Skeleton
from specexec_cli.offload.cuda import DeviceStream
from specexec_cli.offload.expert_device import DeviceExperts
from specexec_cli.offload.expert_scores import ExpertScores
from specexec_cli.offload.experts import ExpertStore
from specexec_cli.offload.link import CudaLink
from specexec_cli.offload.mixture import MixtureStream
from specexec_cli.offload.store import TensorRange
from specexec_cli.offload.stream import LayerStream


def open_source(
    skeleton: Skeleton,
    tiers: Sequence[Tier],
    device: torch.device,
    buffers: int,
    device_buffers: int,
    notice: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> LayerStream | DeviceStream:
    """Opens a ring that layers come through, in RAM and, beside a GPU, on it.

    Args:
        tiers: of each layer.
        buffers: of the ring in RAM.
        device_buffers: of the ring on a GPU.
    Raises:
        StreamError, OutOfMemoryError: as their names say.
    """
    layers = [list(layer.values()) for layer in skeleton.layer_tensors]
    if device.type == "cuda":
        return DeviceStream(
            layers, tiers, CudaLink(device), host_buffers=buffers, device_buffers=device_buffers,
            notice=notice, progress=progress,
        )  # fmt: skip
    # on a CPU, RAM is where resident layers are
    host_tiers: list[Tier] = ["ssd" if tier == "ssd" else "ram" for tier in tiers]
    return LayerStream(layers, host_tiers, buffers=buffers, notice=notice, progress=progress)


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
    """Takes the slots of experts that come one by one; where that fails nothing stays open.

    Args:
        dense: where the rest of each layer comes from.
        experts: of each layer, where the tensors of each expert lie.
        chosen: experts that a row is routed to.
        cap_bytes, device_bytes: that slots in RAM and on a GPU may take.
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
