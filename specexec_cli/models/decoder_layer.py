"""One decoder layer of the skeleton: fed by the layer source, run in chunks of rows.

The residual stream (the embedding plus every block's output) is float32 in every compute dtype. In
bfloat16 each of its additions would round to 8 bits, and a bit that differs in a pass with other
rows would be carried through all later layers. The norms that read the residual stream return the
compute dtype, in which everything else is computed.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from specexec_kernels import dispatch
from specexec_kernels.cpu_layer import MOST_ROWS
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specexec_cli.errors import CheckpointError
from specexec_cli.models.binding import Binding
from specexec_cli.models.expert_mlp import PerExpert
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.own_bits import hold_bits
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.models.pass_context import PassContext, in_dtype
from specexec_cli.models.pass_rows import Chunks, Span
from specexec_cli.models.recurrent_layers import is_recurrent
from specexec_cli.models.skeleton import Skeleton
from specexec_cli.models.spans import check_rows_alone
from specexec_cli.models.tensor_finder import is_piece
from specexec_cli.models.usual_layer import UsualLayer, is_usual
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.resident import TORCH_DTYPES, RingTensors, StayingTensors


class DecoderLayer(nn.Module):
    """One decoder layer of the skeleton, fed by the layer source."""

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        context: PassContext,
        skeleton: Skeleton,
        span: Span | None,
    ) -> None:
        """Wraps transformers' own layer.

        Args:
            context: the pass context that all layers of a model share.
            skeleton: the model that the layer belongs to, with the places of its parameters' bytes.
            span: how far back the layer's rows attend; None is full attention.
        """
        super().__init__()
        self.layer = layer
        self.index = index
        self.span = span
        # in some architectures the last layers attend to an earlier layer's keys (Gemma-4)
        self.writes_cache = not any(
            getattr(part, "is_kv_shared_layer", False) for part in layer.modules()
        )
        self._context = context
        self._signature = inspect.signature(layer.forward)
        tensors = skeleton.layer_tensors[index]
        self._pieces = {tensor.name for name, tensor in tensors.items() if is_piece(name)}
        names = {name: tensor.name for name, tensor in tensors.items() if not is_piece(name)}
        self._conversions = skeleton.conversions[index]
        self._prefix = f"{skeleton.layers_path}.{index}."
        self._restored = skeleton.restored.changes
        self._model = [skeleton.model]  # in a list, so that it is no submodule
        self._scale_queries_by_position()
        self._rows_at = _rows_axis(skeleton.config)
        if context.device.type == "cpu":
            hold_bits(layer)
        # Linears keep the file's dtype; norms, convolutions, the numbers of a recurrence and what
        # transformers keeps in float32 get float32, other parameters the compute dtype.
        self._kept = _parameters(layer, _is_linear)
        self._wide = _parameters(layer, is_wide) | _kept_wide(skeleton.model, tensors)
        self._as_stored = {name: names[name] for name in names if name in self._kept}
        self._others = {name: names[name] for name in names if name not in self._kept}
        self._unchanging = Binding(layer, self._as_stored)
        self._changing: Binding | None = None  # made when the converted parameters are known
        self._stays_bound = self._all_stay_bound = False
        for _, part in _mixtures(layer):
            part.space = context.space
        self._mixtures = [
            part for path, part in _mixtures(layer) if self._uses_as_stored(path, part)
        ]
        _compute_in(layer, context.dtype)
        # Takes the layer's place where another machine has it, see waves.py. Where it returns None
        # no rows come yet, and the pass goes on to its next wave with those that there are.
        self.elsewhere: Callable[[Tensor, bool], Tensor | None] | None = None
        self._usual: UsualLayer | None = None  # made in the first pass of few rows
        self._is_usual = context.device.type == "cpu" and is_usual(
            layer, skeleton.config._attn_implementation, context.dtype
        )

    def __getattr__(self, name: str) -> Any:
        """An attribute that modelling code reads from a layer, such as its attention type."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(..., rows, hidden) -> (..., rows, hidden), both float32; see _chunks."""
        context = self._context
        if self.elsewhere is not None:
            check_rows_alone(self._by_name(hidden, args, kwargs))
            rows = self.elsewhere(hidden, context.layers_give_tuples)
            if rows is None:
                rows = hidden
            else:
                context.on_layer(self.index)
            # behind the rows, layers of GLM-5 tell the next one which tokens an index picked
            return (rows, None) if context.layers_give_tuples else rows
        if context.source is None:
            output = self._rows(hidden, args, kwargs)
        else:
            at = self.index - context.first_layer
            with (
                context.source.layer(at) as stored,
                nullcontext() if self._all_stay_bound else self._bound(stored),
            ):
                output = self._rows(hidden, args, kwargs)
        context.offer(self.index + 1, output[0] if isinstance(output, tuple) else output)
        context.on_layer(self.index)
        return output

    @contextmanager
    def _bound(self, stored: Mapping[str, Tensor]) -> Iterator[None]:
        """Binds the layer's parameters, and unbinds them before their buffer is used again.

        Parameters that are resident and used as stored stay bound: a mixture has thousands of them.
        So do converted ones if all are vectors, such as norms: they take next to no memory.
        """
        changed = self._changed(stored, self._context.device, self._context.dtype)
        if self._changing is None:
            self._changing = Binding(self.layer, {name: name for name in changed})
        try:
            if not self._stays_bound:
                self._unchanging.bind(stored)
                buffer = stored.buffer if isinstance(stored, RingTensors) else None
                self.stay_bound(isinstance(stored, StayingTensors), buffer)
            self._changing.bind(changed)
            few = all(weight.ndim == 1 for weight in changed.values())
            self._all_stay_bound = self._stays_bound and few
            yield
        finally:
            if not self._all_stay_bound:
                self._changing.release()
            if not self._stays_bound:
                self._unchanging.release()

    def _uses_as_stored(self, path: str, mixture: PerExpert) -> bool:
        """Whether the experts of a mixture come with the layer, in the form they are used in."""
        return all(f"{path}.{name}" in self._as_stored for name, _ in mixture.named_parameters())

    def used_as_stored(self, tensors: Mapping[str, TensorRange], dtype: torch.dtype) -> set[str]:
        """The parameters that stay in the file's dtype where plain linears get a dtype.

        Args:
            tensors: the places of the layer's parameters, by name.
        """
        linears = {f"{path}." for path, part in self.layer.named_modules()
                   if isinstance(part, MixedLinear)}  # fmt: skip
        return {
            name
            for name in self._as_stored
            if name[: name.rindex(".") + 1] not in linears
            or TORCH_DTYPES[tensors[name].dtype] == dtype
        }

    def rearrange(self, stored: dict[str, Tensor]) -> None:
        """Has packed weights, which stay on a GPU, lie as its kernels read them fastest.

        Args:
            stored: the layer's tensors by name, changed in place.
        """
        if not dispatch.uses_triton(self._context.device):
            return
        uses = Counter(self._as_stored.values())
        for path, linear in self.layer.named_modules():
            if not isinstance(linear, QuantizedLinear):
                continue
            names = {leaf: f"{path}.{name}" for leaf, name in linear.leaves.items()}
            if any(uses[self._as_stored.get(name, "")] != 1 for name in names.values()):
                continue  # made of other tensors, or read by other linears too
            places = {leaf: self._as_stored[name] for leaf, name in names.items()}
            tensors = {leaf: stored[place] for leaf, place in places.items()}
            for leaf, tensor in linear.rearrange(tensors).items():
                stored[places[leaf]] = tensor

    def release(self) -> None:
        """Unbinds the layer's parameters, once its source is closed."""
        self.stay_bound(False)
        self._unchanging.release()
        if self._changing is not None:
            self._changing.release()

    def stay_bound(self, stays: bool, buffer: int | None = None) -> None:
        """Sets whether the parameters that are bound to the linears now stay bound.

        Args:
            buffer: the ring buffer that they lie in, see RingTensors.
        """
        self._stays_bound, self._all_stay_bound = stays, False
        if self._usual is not None:
            self._usual.forget()
        for experts in self._mixtures:
            experts.stay(stays, buffer)

    def stage(
        self, stored: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The layer's parameters from its stored tensors.

        Args:
            dtype: the dtype of all parameters except those of linears, which stay as stored, and of
                norms, which become float32.
        """
        weights = {name: stored[place].to(device) for name, place in self._as_stored.items()}
        return weights | self._changed(stored, device, dtype)

    def _changed(
        self, stored: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The parameters that are not used as stored: converted, or made of several tensors."""

        def converted(name: str, weight: Tensor) -> Tensor:
            if name in self._kept:
                return weight.to(device)
            weight = weight.to(device=device, dtype=torch.float32 if name in self._wide else dtype)
            change = self._restored.get(self._prefix + name)
            return weight if change is None else change(weight)

        weights = {name: converted(name, stored[place]) for name, place in self._others.items()}
        for conversion in self._conversions:
            pieces = {name: stored[name].to(device) for name in conversion.names}
            for name, weight in conversion.parameters(pieces, self._model[0]).items():
                inside = name.removeprefix(self._prefix)
                weights[inside] = converted(inside, weight)
        return weights

    def _scale_queries_by_position(self) -> None:
        """Scales Llama 4's queries by their positions in the text.

        In layers without rotary positions Llama 4 scales queries by position, and its own code
        takes the slot for the position. A draft node's slot is not its position.
        """
        for part in self.layer.modules():
            if not getattr(part, "attn_temperature_tuning", False) or part.use_rope:
                continue
            part.attn_temperature_tuning = False  # type: ignore[assignment]

            def scaled(module: nn.Module, args: Any, output: Tensor, of: Any = part) -> Tensor:
                positions = self._context.positions
                assert positions is not None, "layers get their rows' positions"
                steps = torch.floor((positions.float() + 1.0) / of.floor_scale)
                scales = torch.log1p(steps) * of.attn_scale + 1.0
                return (output * scales[..., None]).to(output.dtype)

            part.q_proj.register_forward_hook(scaled)  # type: ignore[union-attr]

    def _rows(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the rows through the layer, few of them at once where the layer is usual.

        Returns:
            the layer's result: rows, or in older architectures a tuple that begins with rows.
        """
        given = self._by_name(hidden, args, kwargs) if args else kwargs
        if self._is_usual and hidden.shape[-2] <= min(MOST_ROWS, self._context.chunk_rows):
            at_once = self._at_once(hidden, given)
            if at_once is not None:
                return at_once
        return self._chunks(self.layer, hidden, given)

    def _chunks(self, run: Callable[..., Any], hidden: Tensor, given: dict[str, Any]) -> Any:
        """Runs the rows through the layer in chunks, each of which appends to the cache; see
        `_rows`."""
        rows_at = self._rows_at
        if hidden.ndim == 4:  # several residual streams, which the layer mixes
            hidden = hidden.to(self._context.dtype)
        total = hidden.shape[rows_at]
        if given.get("position_embeddings") is not None:
            angles = self._context.angles(given["position_embeddings"])
            given = {**given, "position_embeddings": angles}
        outputs = []
        chunks = self._context.chunks(total, self.span, self.writes_cache)
        for start, stop, mask in chunks:
            own = {name: given[name] for name in given.keys() & _PER_ROW}
            if stop - start < total:
                own = {name: _slice_rows(value, start, stop) for name, value in own.items()}
            if given.get("attention_scaling") is not None:  # (1, 1, rows, 1), for all heads (Beam)
                own["attention_scaling"] = given["attention_scaling"][:, :, start:stop]
            own |= dict.fromkeys({"attention_mask"} | (given.keys() & _OTHER_MASKS), mask)
            self._context.positions = own.get("position_ids")
            output = run(hidden.narrow(rows_at, start, stop - start), **{**given, **own})
            outputs.append(output[0] if isinstance(output, tuple) else output)
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=rows_at)
        whole = whole.float()
        self._context.layers_give_tuples = isinstance(output, tuple)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def _at_once(self, hidden: Tensor, given: Mapping[str, Any]) -> Tensor | None:
        """The few rows of a pass as one compiled call; None where that cannot be."""
        context = self._context
        if self._usual is None:
            self._usual = UsualLayer(self.layer, context.dtype, context.space)
        mask = context.one_mask(hidden.shape[-2], self.span, self.writes_cache)
        stays = self._stays_bound or context.source is None
        return self._usual.run(hidden, given, mask, stays)

    def _by_name(
        self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The layer's arguments besides `hidden`, by name."""
        bound = self._signature.bind(hidden, *args, **kwargs).arguments
        named = dict(list(bound.items())[1:])
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(parameter.name, {}))
        return named


_OTHER_MASKS = {"causal_mask"}  # of a layer that both attends and keeps a state (Zamba)
# arguments of a layer that hold one entry for each row
_PER_ROW = {"position_ids", "position_embeddings", "per_layer_input", "original_hidden_states"}


def _mixtures(layer: nn.Module) -> list[tuple[str, PerExpert]]:
    """The mixtures of a layer, by their paths in it."""
    return [each for each in layer.named_modules() if isinstance(each[1], PerExpert)]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, MixedLinear | QuantizedLinear)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: LayerNorm, or one of transformers' classes named ...Norm... that
    multiplies by no matrix, as DBRX's attention between two norms does."""
    if isinstance(module, nn.LayerNorm):
        return True
    named = "Norm" in type(module).__name__
    return named and not any(_is_linear(part) for part in module.modules())


def is_wide(module: nn.Module) -> bool:
    """Whether a module's own parameters are few and become float32."""
    return is_norm(module) or isinstance(module, nn.Conv1d) or is_recurrent(module)


def _rows_axis(config: PretrainedConfig) -> int:
    """Which dimension of what a layer reads is that of its rows.

    With hyper-connections (GLM-5.3) the residual streams are (1, rows, streams, hidden). In
    Gemma-3n they are (streams, 1, rows, hidden), elsewhere there is one: (1, rows, hidden).
    """
    return -3 if hasattr(config, "hc_mult") else -2


def _kept_wide(model: PreTrainedModel, names: Collection[str]) -> set[str]:
    """Of a layer's parameters, those that transformers keeps in float32 in any compute dtype.

    Such are the corrections by which DeepSeek-V3 and its kin choose experts: they differ by less
    than their roundings to bfloat16.
    """
    wide = [f".{part}." for part in model._keep_in_fp32_modules_strict or ()]
    return {name for name in names if any(part in f".{name}." for part in wide)}


def _compute_in(layer: nn.Module, dtype: torch.dtype) -> None:
    """Has a layer's norms return a dtype, and its linears read it."""
    for module in layer.modules():
        if is_norm(module):
            module.register_forward_hook(lambda module, args, output: in_dtype(output, dtype))
        elif isinstance(module, MixedLinear | QuantizedLinear | nn.Linear) and (
            dtype != torch.float32
        ):
            # a linear without a norm in front of it (OLMo-2) reads the float32 residual stream
            module.register_forward_pre_hook(_narrowed(dtype))


def _narrowed(dtype: torch.dtype) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return args[0].to(dtype), *args[1:]

    return hook


def _parameters(layer: nn.Module, chosen: Callable[[nn.Module], bool]) -> set[str]:
    """Names, within the layer, of the parameters of all modules that `chosen` picks."""
    return {
        f"{path}.{leaf}"
        for path, module in layer.named_modules()
        if chosen(module)
        for leaf, _ in module.named_parameters()
    }


def _slice_rows(value: Any, start: int, stop: int) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(_slice_rows(part, start, stop) for part in value)
    if value.ndim == 3 and value.shape[0] == 3:  # positions in time, height and width
        return value[:, :, start:stop]
    return value[:, start:stop]


def visible_span(config: Any, index: int) -> Span | None:
    """How far back a layer's rows attend; None is full attention."""
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[index] if layer_types is not None else "sliding_attention"
    if kind == "chunked_attention":
        return Chunks(_at_least_one(config, "attention_chunk_size"))
    if kind != "sliding_attention" or getattr(config, "sliding_window", None) is None:
        return None
    return _at_least_one(config, "sliding_window")


def _at_least_one(config: Any, name: str) -> int:
    """A number of tokens from the config; at least 1, so that every row attends to itself.

    Raises:
        CheckpointError: the config says less than 1.
    """
    tokens = int(getattr(config, name))
    if tokens < 1:
        raise CheckpointError(
            f"the config of this {config.model_type} model says {tokens} as '{name}', with which "
            "no token would see itself: get another copy of the model"
        )
    return tokens
