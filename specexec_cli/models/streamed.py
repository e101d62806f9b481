"""A causal language model whose decoder layers arrive one after another, pass after pass.

transformers' own forward drives; each decoder layer is a thin wrapper that asks the layer source
for its weights, runs, and lets them go. A resident model (the draft) is the same class with weights
that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from specexec_cli.models.kv_cache import SlotCache
from specexec_cli.models.linear import MixedEmbedding, MixedLinear
from specexec_cli.models.quant_checkpoint import Quantization, config_dict
from specexec_cli.models.quantized import QuantizedLinear
from specexec_cli.models.rows import PassRows
from specexec_cli.models.skeleton import Skeleton, build_skeleton, load_config
from specexec_cli.offload.cuda import DeviceStream, DeviceTier
from specexec_cli.offload.link import CudaLink
from specexec_cli.offload.store import TensorRange, read_checkpoint
from specexec_cli.offload.stream import LayerStream, Tier, read_tensors

# Rows that go through a layer together: bounds activations and masks of a long prompt.
CHUNK_ROWS = 512


class LayerSource(Protocol):
    """Where a decoder layer's weights come from. Layers are asked for in cyclic order."""

    bytes_streamed: int

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The layer's tensors by checkpoint name; valid inside the `with`."""

    def restart(self) -> None:
        """Begin again at layer 0 after an aborted pass."""

    def close(self) -> None:
        """Give threads, files and memory back."""


class DecoderLayer(nn.Module):
    """One decoder layer of the skeleton, fed by the layer source."""

    def __init__(
        self, layer: nn.Module, index: int, model: StreamedModel, tensors: dict[str, TensorRange]
    ) -> None:
        super().__init__()
        self.layer = layer
        self.index = index
        self.window = _window(model.skeleton.config, index)
        self._model = [model]  # in a list, so that nn.Module does not register it as a child
        self._names = {name: tensor.name for name, tensor in tensors.items()}
        # linears take the file's dtype; everything else is converted to the compute dtype
        self._kept = {
            f"{path}.{leaf}"
            for path, module in layer.named_modules()
            if isinstance(module, MixedLinear | QuantizedLinear)
            for leaf, _ in module.named_parameters()
        }

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(1, rows, hidden) -> (1, rows, hidden)."""
        model = self._model[0]
        if model.source is None:
            output = self._chunks(self.layer, hidden, args, kwargs)
            model.on_layer(self.index)
            return output
        with model.source.layer(self.index) as stored:
            weights = self.stage(stored, model.device, model.dtype)
            output = self._chunks(
                lambda *a, **k: functional_call(self.layer, weights, a, k), hidden, args, kwargs
            )
            weights.clear()  # no view may outlive the slot
        model.on_layer(self.index)
        return output

    def stage(
        self, stored: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The layer's parameters from its stored tensors."""
        return {
            name: stored[stored_name].to(device)
            if name in self._kept
            else stored[stored_name].to(device=device, dtype=dtype)
            for name, stored_name in self._names.items()
        }

    def _chunks(
        self,
        run: Callable[..., Any],
        hidden: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Runs the rows through the layer in chunks; the cache fills up in between."""
        model = self._model[0]
        per_row = kwargs.keys() & {"position_ids", "position_embeddings"}
        outputs = []
        for start in range(0, hidden.shape[1], CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, hidden.shape[1])
            own = {name: _slice_rows(kwargs[name], start, stop) for name in per_row}
            own["attention_mask"] = model.attention_mask(start, stop, self.window)
            output = run(hidden[:, start:stop], *args, **{**kwargs, **own})
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _slice_rows(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_slice_rows(part, start, stop) for part in value)
    return value[:, start:stop]


def _window(config: Any, index: int) -> int | None:
    """The layer's sliding window in positions, or None for full attention."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[index] != "sliding_attention":
        return None
    return window


class StreamedModel:
    """A model that runs passes over rows; see PassRows for what a pass is."""

    def __init__(self, skeleton: Skeleton, device: torch.device, dtype: torch.dtype) -> None:
        self.skeleton = skeleton
        self.device = device
        self.dtype = dtype
        self.source: LayerSource | None = None
        self.on_layer: Callable[[int], None] = lambda index: None
        self._rows: PassRows | None = None
        self._masks: dict[int | None, Tensor] = {}
        self._layers = [
            DecoderLayer(layer, index, self, skeleton.layer_tensors[index])
            for index, layer in enumerate(skeleton.layers)
        ]
        for index, layer in enumerate(self._layers):
            skeleton.layers[index] = layer
        self._load_resident()

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        tiers: DeviceTier | Sequence[DeviceTier] | None,
        slots: int = 3,
        device_slots: int = 3,
        notice: Callable[[str], None] = lambda text: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> StreamedModel:
        """Opens a checkpoint folder.

        Args:
            tiers: where layers are streamed from, one for all or one for each; None loads them
                to stay, converted to the compute dtype.
            slots: of the ring in RAM.
            device_slots: of the ring on a GPU.
        Raises:
            CheckpointError, StreamError, OutOfMemoryError: as their names say.
        """
        config, checkpoint = load_config(folder), read_checkpoint(folder)
        quantization = Quantization.read(checkpoint, config_dict(folder), notice)
        skeleton = build_skeleton(config, checkpoint, quantization)
        model = cls(skeleton, device, dtype)
        if tiers is None:
            model._load_layers(progress)
        else:
            each = [tiers] * len(skeleton.layers) if isinstance(tiers, str) else tiers
            model.source = _open_source(
                skeleton, each, device, slots, device_slots, notice, progress
            )
        return model

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.skeleton.config.vocab_size)

    @property
    def context_length(self) -> int:
        """Most positions that one set of rotary frequencies covers.

        LongRoPE (Phi-3 128k) has two sets and changes to the second, for all positions, where the
        text outgrows the first; keys in the cache would then be of the wrong one.
        """
        config = self.skeleton.config
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            return int(rope["original_max_position_embeddings"])
        return int(config.max_position_embeddings)

    def new_cache(self) -> SlotCache:
        """An empty cache for this model."""
        return SlotCache(len(self._layers))

    @torch.no_grad()
    def forward(self, rows: PassRows, cache: SlotCache, logit_rows: Sequence[int]) -> Tensor:
        """One pass over all layers; appends every row to the cache.

        Args:
            logit_rows: rows whose logits are wanted.
        Returns:
            (len(logit_rows), vocab) logits in the compute dtype.
        Raises:
            StreamError: weights could not be read; the cache may then hold part of the rows and
                is to be cropped by the caller.
        """
        self._rows = rows
        self._masks.clear()
        # transformers hands a 4D mask on as it is; the layers replace it by their own
        placeholder = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        output = self.skeleton.model(
            input_ids=torch.tensor([list(rows.tokens)], device=self.device),
            position_ids=torch.tensor([list(rows.positions)], device=self.device),
            attention_mask=placeholder,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(list(logit_rows), dtype=torch.int64, device=self.device),
        )
        logits: Tensor = output.logits[0]
        return logits

    def attention_mask(self, start: int, stop: int, window: int | None) -> Tensor:
        """The current pass's mask for rows start..stop, in the form the attention needs."""
        assert self._rows is not None
        whole = stop - start == len(self._rows.tokens)
        if whole and window in self._masks:
            return self._masks[window]
        mask = self._rows.mask(start, stop, window).to(self.device)
        if self.skeleton.config._attn_implementation == "eager":
            lowest = torch.finfo(self.dtype).min
            mask = torch.zeros(mask.shape, dtype=self.dtype, device=self.device).masked_fill(
                ~mask, lowest
            )
        if whole:
            self._masks[window] = mask
        return mask

    @property
    def bytes_streamed(self) -> int:
        """Bytes of layers that came over the link so far."""
        return self.source.bytes_streamed if self.source is not None else 0

    def close(self) -> None:
        """Gives threads, files and memory back; idempotent."""
        if self.source is not None:
            self.source.close()

    def _load_resident(self) -> None:
        """Embeddings, norms and head: they stay on the device."""
        model, tensors = self.skeleton.model, self.skeleton.resident_tensors
        loaded = read_tensors(list(tensors.values()))
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            weight = loaded[tensor.name].to(self.device)
            if isinstance(module, nn.Embedding):
                _set_module(model, path, MixedEmbedding(module, weight, self.dtype))
            elif isinstance(module, nn.Linear):
                _set_module(model, path, _resident_linear(weight))
            elif isinstance(module, QuantizedLinear):
                setattr(module, leaf, _frozen(weight))
            else:
                setattr(module, leaf, _frozen(weight.to(self.dtype)))
        if not any(name.startswith("lm_head.") for name in tensors):  # tied
            embedding = model.get_input_embeddings()
            _set_module(model, "lm_head", _resident_linear(embedding.table))

    def _load_layers(self, progress: Callable[[int, int], None]) -> None:
        """Every layer's weights, converted once to the compute dtype, to stay."""
        total = sum(t.n_bytes for layer in self.skeleton.layer_tensors for t in layer.values())
        done = 0
        for layer, tensors in zip(self._layers, self.skeleton.layer_tensors, strict=True):
            staged = layer.stage(read_tensors(list(tensors.values())), self.device, self.dtype)
            for name, weight in staged.items():
                path, _, leaf = name.rpartition(".")
                module = layer.layer.get_submodule(path)
                # a copy of its own, so that the buffer it was read into is let go
                dtype = weight.dtype if isinstance(module, QuantizedLinear) else self.dtype
                setattr(module, leaf, _frozen(weight.to(dtype, copy=True)))
            done += sum(tensor.n_bytes for tensor in tensors.values())
            progress(done, total)


def _open_source(
    skeleton: Skeleton,
    tiers: Sequence[DeviceTier],
    device: torch.device,
    slots: int,
    device_slots: int,
    notice: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> LayerSource:
    layers = [list(layer.values()) for layer in skeleton.layer_tensors]
    if device.type == "cuda":
        return DeviceStream(
            layers, tiers, CudaLink(device), host_slots=slots, device_slots=device_slots,
            notice=notice, progress=progress,
        )  # fmt: skip
    # on a CPU, RAM is where resident layers are
    host_tiers: list[Tier] = ["ssd" if tier == "ssd" else "ram" for tier in tiers]
    return LayerStream(layers, host_tiers, slots=slots, notice=notice, progress=progress)


def _resident_linear(weight: Tensor) -> MixedLinear:
    linear = MixedLinear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = _frozen(weight)
    return linear


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
