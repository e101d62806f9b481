"""One decoder layer of the skeleton: fed by the layer source, run in chunks of rows.

What runs from layer to layer, the embedding plus every block's output, is float32 in every compute
dtype. In bfloat16 each of those additions would round to 8 bits, and a bit that comes out otherwise
in a pass with other rows would be carried through all layers to come. The norms that read it give
the compute dtype, in which everything else is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from specexec_cli.models.activation import replace_activations
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.pass_context import PassContext
from specexec_cli.models.quantized import QuantizedLinear
from specexec_cli.offload.store import TensorRange

# Rows that go through a layer together: bounds activations and masks of a long prompt.
CHUNK_ROWS = 512


class DecoderLayer(nn.Module):
    """One decoder layer of the skeleton, fed by the layer source."""

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        context: PassContext,
        tensors: dict[str, TensorRange],
        window: int | None,
    ) -> None:
        """Wraps transformers' own layer.

        Args:
            context: shared by the layers of a model.
            tensors: by parameter name inside the layer, where its bytes are.
            window: the layer's sliding window in positions, None for full attention.
        """
        super().__init__()
        self.layer = layer
        self.index = index
        self.window = window
        self._context = context
        self._names = {name: tensor.name for name, tensor in tensors.items()}
        replace_activations(layer)
        # linears take the file's dtype, norms float32; the rest is converted to the compute dtype
        self._kept = _parameters(layer, _is_linear)
        self._wide = _parameters(layer, _is_norm)
        for norm in filter(_is_norm, layer.modules()):
            norm.register_forward_hook(lambda module, args, output: output.to(context.dtype))

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(1, rows, hidden) -> (1, rows, hidden), both float32."""
        context = self._context
        if context.source is None:
            output = self._chunks(self.layer, hidden, args, kwargs)
            context.on_layer(self.index)
            return output
        with context.source.layer(self.index) as stored:
            weights = self.stage(stored, context.device, context.dtype)
            output = self._chunks(
                lambda *a, **k: functional_call(self.layer, weights, a, k), hidden, args, kwargs
            )
            weights.clear()  # no view may outlive the buffer
        context.on_layer(self.index)
        return output

    def stage(
        self, stored: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The layer's parameters from its stored tensors.

        Args:
            dtype: of what is neither a linear's, which stays as stored, nor a norm's.
        """

        def converted(name: str, weight: Tensor) -> Tensor:
            if name in self._kept:
                return weight.to(device)
            return weight.to(device=device, dtype=torch.float32 if name in self._wide else dtype)

        return {name: converted(name, stored[place]) for name, place in self._names.items()}

    def _chunks(
        self,
        run: Callable[..., Any],
        hidden: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Runs the rows through the layer in chunks; the cache fills up in between."""
        per_row = kwargs.keys() & {"position_ids", "position_embeddings"}
        outputs = []
        for start in range(0, hidden.shape[1], CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, hidden.shape[1])
            own = {name: _slice_rows(kwargs[name], start, stop) for name in per_row}
            if "position_embeddings" in own:  # transformers makes them in the dtype of `hidden`
                own["position_embeddings"] = tuple(
                    part.to(self._context.dtype) for part in own["position_embeddings"]
                )
            own["attention_mask"] = self._context.attention_mask(start, stop, self.window)
            output = run(hidden[:, start:stop], *args, **{**kwargs, **own})
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, MixedLinear | QuantizedLinear)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")


def _parameters(layer: nn.Module, chosen: Callable[[nn.Module], bool]) -> set[str]:
    """Names in the layer of the parameters of the chosen modules."""
    return {
        f"{path}.{leaf}"
        for path, module in layer.named_modules()
        if chosen(module)
        for leaf, _ in module.named_parameters()
    }


def _slice_rows(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_slice_rows(part, start, stop) for part in value)
    return value[:, start:stop]


def sliding_window(config: Any, index: int) -> int | None:
    """The layer's sliding window in positions, or None for full attention."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[index] != "sliding_attention":
        return None
    return window
