"""How a model is opened: its settings, which can be sent to other processes, and the opening."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from specexec_cli.catalog.conforming import EXPERTS, WITH_LAYERS
from specexec_cli.config import Tier
from specexec_cli.errors import clear_shortage
from specexec_cli.models.experts import SplitLayer, split_layers, stream_experts
from specexec_cli.models.layer_sources import open_experts, open_source
from specexec_cli.models.packed_linear import round_rows
from specexec_cli.models.packing import read_packing
from specexec_cli.models.resident_parts import SharedParts, load_layers
from specexec_cli.models.skeleton import Skeleton, build_skeleton
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.cuda import DeviceStream
from specexec_cli.offload.link import CudaLink, prepare_cuda, use_device
from specexec_cli.offload.pinned import PinnedMemory
from specexec_cli.planning.built_sizes import chosen_experts
from specexec_cli.planning.placement import converts_tables
from specexec_cli.planning.tiers import table_in_ram

Notice = Callable[[str], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Where a model's weights are to be, and in which dtype it computes."""

    device: torch.device
    dtype: torch.dtype  # that passes compute in
    # The offload tier of all layers, or one for each layer. None makes all layers resident,
    # converted to the compute dtype.
    tiers: Tier | Sequence[Tier] | None
    buffers: int = 3  # ring buffers in RAM
    device_buffers: int = 3  # ring buffers on a GPU
    # Most bytes of RAM that slots for experts may take. Experts then come one by one, and `tiers`
    # applies to the rest of each layer. 0 moves experts with their layers.
    expert_bytes: int = 0
    device_expert_bytes: int = 0  # most bytes of GPU memory that slots for experts may take
    # Fewest rows for which a GPU copies an expert instead of leaving it to the CPU; see
    # DeviceExperts.
    copy_rows: int | None = None
    # Most rows of a long prompt that go through a layer together; None is CHUNK_ROWS.
    chunk_rows: int | None = None
    # Layers whose keys and values wait in RAM, see waiting_rows.py; only beside a GPU.
    kv_layers: tuple[int, ...] = ()
    # The layers to open, to which `tiers` apply; None opens all. See spans.py.
    span: range | None = None
    # See StreamedModel. A draft model does not need it: its bits choose no token.
    own_rows: bool = True
    # Whether a CPU rounds rows to 8 bits where it multiplies them by packed weights of integers.
    eight_bit_rows: bool = False
    # Whether keys and values are kept in 8 bits, see eight_bit_kv.py; of a target alone.
    eight_bit_kv: bool = False

    def open(
        self,
        checkpoint: Checkpoint,
        *,
        shared: SharedParts | None = None,
        notice: Notice = lambda text: None,
        progress: Progress = lambda done, total: None,
    ) -> StreamedModel:
        """Opens a checkpoint whose headers have been read.

        Args:
            shared: weights of the model that this one is a low-bit copy of; only for a resident
                copy.
        Raises:
            CheckpointError: the checkpoint does not fit the model, or is not supported.
            StreamError: weights cannot be read.
            OutOfMemoryError: memory for weights or buffers is lacking.
        """
        device = self.device
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            prepare_cuda()
            use_device(device)
        with clear_shortage(f"{checkpoint.folder.name} does not fit into it"):
            skeleton = build_skeleton(checkpoint, read_packing(checkpoint, notice))
            for text in self._surprises(skeleton):
                notice(f"{checkpoint.folder.name}: {text}")
            split = split_layers(skeleton) if self.expert_bytes else []
            if split:
                skeleton = replace(skeleton, layer_tensors=[parts.dense for parts in split])
            model = self._loaded(skeleton, device, shared or SharedParts(), progress)
            if checkpoint.head is not None:
                model.later = tuple(
                    self.open(each, shared=shared) for each in checkpoint.head.later
                )
            if self.span is not None:
                model.open_alone(self.span)
            if self.tiers is not None:
                self._stream(model, split, notice, progress)
            if self.kv_layers:
                memory = PinnedMemory(CudaLink(device), notice)
                model.keep_rows_in_ram(self.kv_layers, memory)
            if self.eight_bit_kv:
                model.keep_rows_in_8_bits()
            return model

    def _surprises(self, skeleton: Skeleton) -> Iterator[str]:
        """What users may not expect of the model, a line each."""
        if skeleton.model.config is not skeleton.config:
            yield "the part for text is used, pictures are not read"
        model_type = skeleton.model.config.model_type
        if self.tiers is not None and EXPERTS.get(model_type) == WITH_LAYERS:
            yield (
                f"experts of {model_type} models move with their layers, so every pass reads all "
                "of them"
            )

    def _loaded(
        self, skeleton: Skeleton, device: torch.device, shared: SharedParts, progress: Progress
    ) -> StreamedModel:
        """The model with embeddings, norms and head, and with its layers if these are to stay."""
        stays, on_gpu = self.tiers is None, device.type == "cuda"
        converts = converts_tables(stays, on_gpu, self.dtype.itemsize)
        model = StreamedModel(
            skeleton, device, self.dtype, self.dtype if converts else None,
            table_in_ram=table_in_ram(stays, on_gpu), own_rows=self.own_rows, shared=shared,
        )  # fmt: skip
        if self.eight_bit_rows:
            round_rows(skeleton.model, shared.ends or ())
        if self.chunk_rows is not None:
            model.context.chunk_rows = self.chunk_rows
        if stays:
            load_layers(model.layers, skeleton, device, self.dtype, progress, shared.layers)
        return model

    def _stream(
        self,
        model: StreamedModel,
        split: list[SplitLayer],
        notice: Notice,
        progress: Progress,
    ) -> None:
        """Begins to stream layers and, where they come one by one, experts.

        Args:
            split: each layer's dense part and experts; none where experts move with their layers.
        """
        skeleton, tiers = model.skeleton, self.tiers
        assert tiers is not None
        opened = [skeleton.layer_tensors[index] for index in model.span]
        each = [tiers] * len(opened) if isinstance(tiers, str) else tiers
        source = open_source(
            opened, each, model.device, self.buffers, self.device_buffers, notice, progress
        )
        model.source = source
        if isinstance(source, DeviceStream):
            for index, stored in source.staying.items():
                model.layers[model.span[index]].rearrange(stored)
        if split:
            stream_experts(skeleton, split, model.context)
            model.source, model.experts = open_experts(
                source, [parts.experts for parts in split], model.device,
                chosen_experts(skeleton.config), self.expert_bytes, self.device_expert_bytes,
                self.copy_rows, notice,
            )  # fmt: skip
