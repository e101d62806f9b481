"""The settings for opening a model, as plain data that can be sent to processes and machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from specexec_cli.config import Tier
from specexec_cli.errors import clear_shortage
from specexec_cli.models.resident_parts import SharedParts
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The arguments of StreamedModel.open, besides the files; each field is explained there."""

    device: torch.device
    dtype: torch.dtype
    tiers: Sequence[Tier] | None
    buffers: int = 3
    device_buffers: int = 3
    expert_bytes: int = 0
    device_expert_bytes: int = 0
    copy_rows: int | None = None
    chunk_rows: int | None = None
    own_rows: bool = True

    def open(
        self,
        checkpoint: Checkpoint,
        *,
        shared: SharedParts | None = None,
        notice: Callable[[str], None] = lambda text: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> StreamedModel:
        """Opens a checkpoint whose headers have been read.

        Raises:
            CheckpointError, StreamError, OutOfMemoryError: see StreamedModel.open.
        """
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        with clear_shortage(f"{checkpoint.folder.name} does not fit into it"):
            return StreamedModel.open(
                checkpoint, **told, shared=shared, notice=notice, progress=progress
            )
