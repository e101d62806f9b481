"""Has recurrent modules of transformers' modelling code keep their state in a ModelState.

Such a module convolves its rows with those of the tokens before them, and then runs them through a
recurrence. Both are functions that its file imports or defines, and both go by the order of rows,
which in a tree is not that of the text. A copy of the module's forward is given functions that go
by ancestors; projections, gates and norms stay transformers'.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from specexec_kernels import cpu_activation
from specexec_kernels.recurrence import unit_length
from torch import Tensor, nn
from torch.nn import functional

from specexec_cli.models.own_bits import softplus, with_own_bits

_NO_STATE = torch.empty(0)
# names of the argument by which modelling code takes a cache
CACHE_NAMES = ("past_key_values", "cache_params")


class _RowsInTree:
    """What modelling code takes for its cache, and the functions that run its rows.

    The cache is always empty for it: then it hands over its rows, whatever their number, and leaves
    the state to the functions.
    """

    state: Any  # of the module's layer, in the present call

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """None: the windows of the convolution are found by `convolve`."""

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        """None: the state that rows come behind is found by the recurrence."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """False."""
        return False

    def update_conv_state(self, rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The rows as they are."""
        return rows

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def convolve(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """The causal convolution of each channel over a row and its nearest ancestors.

        Args:
            rows: (1, channels, rows).
            weight: (channels, width), the farthest ancestor first.
        Returns:
            (1, channels, rows) in the dtype of `rows`; sums run in one order, in float32.
        """
        part = self.state.parts[0] if hasattr(self.state, "parts") else self.state
        windows = part.run(rows.transpose(1, 2)).float()
        taps = weight.float()
        sums = windows[:, :, 0] * taps[:, 0]
        for place in range(1, taps.shape[1]):
            sums = sums + windows[:, :, place] * taps[:, place]
        if bias is not None:
            sums = sums + bias.float()
        if activation == "silu" and cpu_activation.supports(sums):
            sums = cpu_activation.apply("silu", sums)
        elif activation is not None:
            assert activation in ("silu", "swish"), f"no convolution has '{activation}' behind it"
            sums = functional.silu(sums)
        return sums.to(rows.dtype).transpose(1, 2)

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The gated delta rule (arXiv:2412.06464), with a decay for each head or key dimension.

        Args:
            query, key: (1, rows, key_heads, key_dim).
            value: (1, rows, heads, value_dim).
            g: (1, rows, heads), or (1, rows, heads, key_dim): the logarithms of the decays.
            beta: (1, rows, heads).
        Returns:
            (1, rows, heads, value_dim) in the dtype of `query`, and nothing in place of the state.
        """
        scaled = unit_length(query) * query.shape[-1] ** -0.5
        outputs = self.state.parts[1].run(
            scaled, unit_length(key), value.float(), torch.exp(g.float()), beta.float()
        )
        return outputs.to(query.dtype), _NO_STATE

    def selective_scan(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        chunk_size: int = 0, D: Tensor | None = None, dt_bias: Tensor | None = None,
        dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The recurrence of Mamba-2 (arXiv:2405.21060), under the names that it has there.

        Args:
            hidden_states: (1, rows, heads, value_dim).
            dt: (1, rows, heads), before its bias and the softplus.
            A: (heads,), negative.
            B, C: (1, rows, key_heads, key_dim), what a row writes to and reads from.
            D: (heads,), the share of its input that a row passes on.
        Returns:
            (1, rows, heads, value_dim) float32, and nothing in place of the state.
        """
        steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        steps = (softplus(steps) if dt_softplus else steps).clamp(*dt_limit).float()
        values = hidden_states.float()
        decays = torch.exp(steps * A.float())
        outputs = self.state.parts[1].run(C.float(), B.float(), values, decays, steps)
        if D is not None:
            outputs = outputs + values * D.float()[:, None]
        return outputs, _NO_STATE

    def channel_scan(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
        delta_softplus: bool = False, **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The recurrence of Mamba-1 (arXiv:2312.00752), under the names that it has there.

        Args:
            hidden_states: (1, channels, rows).
            dt: (1, channels, rows), before its bias and the softplus.
            A: (channels, states), negative.
            B, C: (1, states, rows), what a row writes to and reads from.
            D: (channels,), the share of its input that a row passes on.
            z: (1, channels, rows), the gate of the outputs.
        Returns:
            (1, channels, rows) in the dtype of `hidden_states`, and nothing in place of the state.
        """
        steps = dt.transpose(1, 2)
        if delta_bias is not None:
            steps = steps + delta_bias.to(dt.dtype)
        steps = (softplus(steps) if delta_softplus else steps).float()
        rows = hidden_states.transpose(1, 2).float()
        rates = A.float().t().expand(1, rows.shape[1], -1, -1)
        queries, keys = (part.transpose(1, 2)[:, :, None].float() for part in (C, B))
        outputs = self.state.parts[1].run(queries, keys, rows * steps, steps, rates)
        if D is not None:
            outputs = outputs + rows * D.float()
        if z is not None:
            gate = z.transpose(1, 2).float()
            own = cpu_activation.supports(gate)
            outputs = outputs * (
                cpu_activation.apply("silu", gate) if own else functional.silu(gate)
            )
        return outputs.to(hidden_states.dtype).transpose(1, 2), _NO_STATE


# names in modelling code of the functions that take rows in order -> what takes their place; a
# module that looks up none of those behind the first only convolves
_CONVOLUTION = "causal_conv1d_fn"
_RECURRENCES: Mapping[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _RowsInTree.delta_rule,
    "chunk_kimi_delta_attention": _RowsInTree.delta_rule,
    "mamba2_chunk_scan": _RowsInTree.selective_scan,
    "mamba_selective_scan": _RowsInTree.channel_scan,
}


class _Steps:
    """Stands for the linear of a Mamba-1's steps, by whose weight modelling code itself multiplies.

    The linear adds its bias too, so there is none for the recurrence to add.
    """

    bias = None

    def __init__(self, linear: nn.Module) -> None:
        self._linear = linear

    @property
    def weight(self) -> _Steps:
        """What columns are multiplied by."""
        return self

    def __matmul__(self, columns: Tensor) -> Tensor:
        """(1, inputs, rows) -> (1, outputs, rows)."""
        steps: Tensor = self._linear(columns.transpose(1, 2))
        return steps.transpose(1, 2)


class _WithSteps:
    """A recurrent module of transformers as its forward is to see it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def dt_proj(self) -> _Steps:
        """Looked up each time, since another linear takes its place where weights are packed."""
        return _Steps(self._module.get_submodule("dt_proj"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is one of those that `follow_ancestors` knows."""
    return _CONVOLUTION in _names(module)


def _names(module: nn.Module) -> tuple[str, ...]:
    forward = inspect.unwrap(type(module).forward)
    return forward.__code__.co_names if inspect.isfunction(forward) else ()


def follow_ancestors(module: nn.Module) -> None:
    """Has a recurrent module keep its state in the ModelState that it is given as its cache."""
    kind: Any = type(module)
    rows = _RowsInTree()
    run = with_own_bits(inspect.unwrap(kind.forward))
    own = {_CONVOLUTION: rows.convolve}
    own |= {name: function.__get__(rows) for name, function in _RECURRENCES.items()}
    run.__globals__.update(own)
    cache = next(name for name in CACHE_NAMES if name in inspect.signature(run).parameters)
    seen: Any = _WithSteps(module) if hasattr(module, "dt_proj") else module

    def forward(hidden_states: Tensor, **given: Any) -> Any:
        rows.state = given.pop(cache).layers[module.layer_idx]
        # rows are never padding, and what the mask says about ancestors the state knows
        return run(seen, hidden_states, **{**given, cache: rows, "attention_mask": None})

    module.forward = forward
