"""One decoder layer of the skeleton: fed by the layer source, run in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.quantized import QuantizedLinear
from specexec_cli.offload.store import TensorRange

if TYPE_CHECKING:
    from specexec_cli.models.streamed import StreamedModel

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
