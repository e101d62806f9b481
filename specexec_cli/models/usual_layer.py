"""Runs decoder layers of the usual form for few rows as one compiled call each, on a CPU.

A layer qualifies if its modelling code is Llama's to the byte: most architectures of transformers
are copies of it, some with norms of queries and keys (as Qwen3's), with Gemma's norms, with norms
behind attention and MLP, or with capped scores (as Gemma 2's) or sinks (as gpt-oss). All that such
code does is known, so the compiled call (specexec_kernels.cpu_layer) computes the same bits. Where
the MLP is another one, such as routed experts, the call ends in front of it, and the MLP's module
follows. Other layers, passes of more rows or of several texts, and weights in other formats go
transformers' way.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import zip_longest
from types import FunctionType
from typing import Any

import torch
from specexec_kernels import cpu_calls, cpu_layer
from specexec_kernels.cpu_activation import Activation
from specexec_kernels.cpu_layer import LayerShape, Program, Workspace
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama  # noqa: F401  with all that others import

from specexec_cli.models import attention
from specexec_cli.models.kv_cache import SlotLayer
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.models.restored import InOrder

# Classes of modelling code, each in the file of its model. A file is imported where a class has to
# be compared with one of it: to import all takes a tenth of the time until the first pass.
_NORM, _MLP = "llama.LlamaRMSNorm", "llama.LlamaMLP"
_OSS_LAYER, _WITH_SINKS = "gpt_oss.GptOssDecoderLayer", "gpt_oss.GptOssAttention"
_PARTLY_ROTARY = "glm4_moe.Glm4MoeAttention"  # some of whose models have norms of queries and keys
_GEMMA_NORM, _CAPPED = "gemma3.Gemma3RMSNorm", "gemma2.Gemma2Attention"
_NORM_KINDS = _NORM, _GEMMA_NORM, "gpt_oss.GptOssRMSNorm"
_WITH_HEAD_NORMS = "qwen3.Qwen3Attention", "gemma3.Gemma3Attention"
# Others differ in what they tell the attention function of a window, which here is in the mask.
_ATTENTION = (
    "llama.LlamaAttention", "mistral.MistralAttention", "qwen2.Qwen2Attention", _CAPPED,
    _WITH_SINKS, _PARTLY_ROTARY, *_WITH_HEAD_NORMS,
)  # fmt: skip
_OF_ATTENTION = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
}  # fmt: skip
_OF_MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
_NORMS = {"first": "input_layernorm", "second": "post_attention_layernorm"}
_HEAD_NORMS = {"q": "self_attn.q_norm", "k": "self_attn.k_norm"}
_FOUR_NORMS = {
    "first": "input_layernorm", "behind attention": "post_attention_layernorm",
    "second": "pre_feedforward_layernorm", "behind MLP": "post_feedforward_layernorm",
}  # fmt: skip
_FORMS = {  # of layers, and their norms; Mixtral's takes the same arguments in another order
    "llama.LlamaDecoderLayer": _NORMS, "mixtral.MixtralDecoderLayer": _NORMS, _OSS_LAYER: _NORMS,
    "gemma3.Gemma3DecoderLayer": _FOUR_NORMS,
}  # fmt: skip
_BIASED = frozenset("qkvo")  # linears that may have a bias
_ACTIVATIONS: Mapping[type, Activation] = {
    type(ACT2FN["silu"]): "silu", type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}  # fmt: skip


def known_activation(module: nn.Module) -> Activation | None:
    """The kernels' activation of the same bits as a module; None where they have none.

    transformers' GELU has a form in Python of the same class, which rounds after each operation.
    """
    formula = getattr(module, "act", None)
    of_torch = formula is None or isinstance(formula, partial)
    return _ACTIVATIONS.get(type(module)) if of_torch else None


class UsualLayer:
    """A layer of the usual form, and its programs."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype, space: Workspace) -> None:
        """Looks up the parts of a layer that `is_usual` accepts.

        Args:
            dtype: compute dtype.
            space: of the model.
        """
        self._space = space
        self._index = int(layer.self_attn.layer_idx)  # type: ignore[union-attr, arg-type]
        own = _has_usual_mlp(layer)
        self._mlp: Any = None if own else layer.mlp
        # gpt-oss's MLP gives its router's scores too
        self._gives_more = _code_of(layer, _FORMS) == _OSS_LAYER
        attn: Any = layer.self_attn
        self._sinks: Any = attn if _code_of(attn, _ATTENTION) == _WITH_SINKS else None
        self._linears: dict[str, Any] = _parts(layer, _linear_paths(own))
        self._norms = _parts(layer, _norm_paths(layer))
        # the hooks of all linears, and how many there are now
        self._hooks = [hooks for linear in self._linears.values() for hooks in _hooks(linear)]
        self._hook_counts = list(map(len, self._hooks))
        self._shape = self._shape_of(layer, dtype)
        self._programs: dict[Any, Program | None] = {}
        self._placed: set[Program] = set()  # those that keep the layer's parameters

    def _shape_of(self, layer: Any, dtype: torch.dtype) -> LayerShape:
        attn, linears = layer.self_attn, self._linears
        epsilons = {name: _epsilon(norm) for name, norm in self._norms.items()}
        behind = "behind attention", "behind MLP"
        packed = isinstance(linears["q"], QuantizedLinear)
        return LayerShape(
            hidden=linears["q"].in_features,
            intermediate=0 if self._mlp else linears["gate"].out_features,
            heads=linears["q"].out_features // attn.head_dim,
            kv_heads=linears["k"].out_features // attn.head_dim,
            head_dim=attn.head_dim, dtype=dtype,
            activation=None if self._mlp else known_activation(layer.mlp.act_fn),
            epsilons=(epsilons["first"], epsilons["second"]),
            head_epsilons=(epsilons["q"], epsilons["k"]) if "q" in epsilons else None,
            behind_epsilons=(epsilons[behind[0]], epsilons[behind[1]])
                            if behind[0] in epsilons else None,
            rounds_once=_code_of(self._norms["first"], _NORM_KINDS) != _NORM,
            scale=float(attn.scaling),
            sinks=self._sinks is not None,
            rotary=_rotary(attn),
            softcap=attn.attn_logit_softcapping
                    if _code_of(attn, _ATTENTION) == _CAPPED else None,
            biased=frozenset(name for name in _BIASED if linears[name].bias is not None),
            rounds_first=packed,
            pairs=frozenset(name for name in "qk" if linears[name]._forward_hooks),
        )  # fmt: skip

    def forget(self) -> None:
        """Forgets the parameters: they may move now."""
        for program in self._placed:
            program.let_go()
        self._placed.clear()

    def run(
        self, hidden: Tensor, given: Mapping[str, Any], mask: Any, stays: bool
    ) -> Tensor | None:
        """The layer's result, and its keys and values in the cache.

        Args:
            hidden: (1, rows, hidden) float32.
            given: the layer's arguments, by name.
            mask: of all rows of the pass, in the form that attention takes.
            stays: whether the parameters that are bound stay where they are.
        Returns:
            (1, rows, hidden) float32; None, with nothing changed, where this pass must go
            transformers' way.
        """
        state = self._state(given.get("past_key_values"))
        angles = given.get("position_embeddings")
        if state is None or angles is None or type(mask) is not Tensor:
            return None
        texts, rows, _ = hidden.shape
        fits = texts == 1 and mask.dtype == torch.bool and hidden.is_contiguous()
        # gpt-oss gives one half of a head's angles, since the other half has the same
        dim = self._shape.rotary // (1 if self._sinks is None else 2)
        if not fits or angles[0].shape != (1, rows, dim):
            return None
        program = self._program(rows)
        if program is None or list(map(len, self._hooks)) != self._hook_counts:
            return None
        if program not in self._placed:
            self._place(program)
            self._placed.add(program)
        (cos, sin), start = angles, state.claim(rows) - state.front[0].slots
        found, normed = program.run(
            hidden, cos, sin, state.keys, state.values, start, mask, state.front
        )
        if not stays:
            self.forget()
        if normed is None:
            return found
        own = self._mlp(normed)
        return found + (own[0] if self._gives_more else own)

    def _state(self, cache: Any) -> SlotLayer | None:
        """The layer's keys and values, if they are those of one text in plain slots."""
        layers = getattr(cache, "layers", ())
        state = layers[self._index] if self._index < len(layers) else None
        # a subclass keeps some of its rows elsewhere
        if type(state) is not SlotLayer or not state.is_initialized:
            return None
        plain = state.write_slots is None and state.keys.dtype == self._shape.dtype
        return state if plain else None

    def _program(self, rows: int) -> Program | None:
        if rows > cpu_layer.MOST_ROWS:
            return None
        key = rows, cpu_calls.machine_key()
        if key not in self._programs:
            weights = {name: linear.stored_weight() for name, linear in self._linears.items()}
            self._programs[key] = cpu_layer.program(self._shape, rows, weights, self._space)
        return self._programs[key]

    def _place(self, program: Program) -> None:
        dtype = self._shape.dtype
        biases = {name: self._linears[name].bias.to(dtype).float() for name in self._shape.biased}
        program.place(
            {name: linear.stored_weight() for name, linear in self._linears.items()},
            {name: _factors(norm) for name, norm in self._norms.items()},
            biases,
            None if self._sinks is None else self._sinks.sinks,
        )


def is_usual(layer: nn.Module, implementation: str, dtype: torch.dtype) -> bool:
    """Whether a layer is of the usual form: its code is Llama's, and it has no other parts.

    Args:
        implementation: name of the attention function that the layer uses.
        dtype: compute dtype, to which DecoderLayer's hooks bring the rows of linears.
    """
    attn, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if implementation != attention.CPU or attn is None or mlp is None:
        return False
    names, own = _norm_paths(layer), _has_usual_mlp(layer)
    if not names or not (own or "behind MLP" not in names):
        return False
    paths = {*_linear_paths(own).values(), *names.values(), "self_attn", "mlp", ""}
    found = {path for path, _ in layer.named_modules() if own or not path.startswith("mlp.")}
    if found != (paths | {"mlp.act_fn"} if own else paths):
        return False
    linears, norms = _parts(layer, _linear_paths(own)), _parts(layer, names)
    narrowed = int(dtype != torch.float32)
    kinds = {_code_of(norm, _NORM_KINDS) for norm in norms.values()}
    return (
        len(kinds) == 1
        and None not in kinds
        and all(map(_is_linear, linears.values()))
        and all(_in_known_order(linears[name], attn.head_dim, name) for name in linears)
        and all(_count(_hooks(linear))[1] == narrowed for linear in linears.values())
        and all(_count(_hooks(norm)) == (1, 0) for norm in norms.values())
        and all(_count(_hooks(part)) == (0, 0) for part in (layer, attn))
        and _round_alike(linears)
    )


def _round_alike(linears: Mapping[str, Any]) -> bool:
    """Whether all biases are added in the same place, in front of a rounding or behind it."""
    biased = [name for name in _BIASED if name != "o" or linears[name].bias is not None]
    return len({isinstance(linears[name], QuantizedLinear) for name in biased}) == 1


def _has_usual_mlp(layer: Any) -> bool:
    """Whether a layer's MLP is Llama's, with an activation that the kernels have."""
    mlp = layer.mlp
    return (
        _code_of(mlp, (_MLP,)) is not None
        and known_activation(mlp.act_fn) is not None
        and all(_count(_hooks(part)) == (0, 0) for part in (mlp, mlp.act_fn))
        and all(layer.get_submodule(path).bias is None for path in _OF_MLP.values())
    )


def _linear_paths(with_mlp: bool) -> Mapping[str, str]:
    return {**_OF_ATTENTION, **_OF_MLP} if with_mlp else _OF_ATTENTION


def _norm_paths(layer: Any) -> dict[str, str]:
    """Where the norms of a layer are, by their names for the compiled call; none where its code and
    its attention's are not of the usual form."""
    paths = _FORMS.get(_code_of(layer, _FORMS) or "")
    attn = layer.self_attn
    code = _code_of(attn, _ATTENTION) if paths is not None else None
    if paths is None or code is None:
        return {}
    normed = code in _WITH_HEAD_NORMS or (code == _PARTLY_ROTARY and attn.use_qk_norm)
    return {**paths, **_HEAD_NORMS} if normed else dict(paths)


def _rotary(attn: Any) -> int:
    """Numbers of a head to which an attention applies rotary positions."""
    share = 1.0
    if _code_of(attn, _ATTENTION) == _PARTLY_ROTARY:
        share = attn.config.rope_parameters.get("partial_rotary_factor", 1.0)
    return int(attn.head_dim * share)


def _is_gemma_s(norm: nn.Module) -> bool:
    """Whether a norm is Gemma's, and not Llama's."""
    return _code_of(norm, _NORM_KINDS) == _GEMMA_NORM


def _epsilon(norm: Any) -> float:
    return float(norm.eps if _is_gemma_s(norm) else norm.variance_epsilon)


def _factors(norm: Any) -> Tensor:
    """What a norm multiplies by: its weight, which Gemma stores less one."""
    weight: Tensor = norm.weight
    return 1.0 + weight.float() if _is_gemma_s(norm) else weight


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is one of our linears, and nothing stands in for its product."""
    return isinstance(module, MixedLinear | QuantizedLinear) and "forward" not in vars(module)


def _in_known_order(linear: nn.Module, head_dim: int, name: str) -> bool:
    """Whether a linear's outputs need no hook, or are those of queries or keys in GGUF's order."""
    hooks = list(linear._forward_hooks.values())
    if not hooks:
        return True
    return (
        name in ("q", "k")
        and len(hooks) == 1
        and isinstance(hooks[0], InOrder)
        and hooks[0].rows.order == "pairs"
        and hooks[0].rows.heads * head_dim == linear.out_features
    )


def _parts(layer: nn.Module, paths: Mapping[str, str]) -> dict[str, Any]:
    return {name: layer.get_submodule(path) for name, path in paths.items()}


def _hooks(module: nn.Module) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    return module._forward_hooks, module._forward_pre_hooks


def _count(hooks: tuple[Mapping[int, Any], Mapping[int, Any]]) -> tuple[int, int]:
    return len(hooks[0]), len(hooks[1])


def _code_of(module: nn.Module, references: Iterable[str]) -> str | None:
    """Which of several classes has the same `forward` as a module's, with all that it calls."""
    return _first_alike((type(module), *references))


@cache
def _first_alike(classes: tuple[Any, ...]) -> str | None:
    kind, *references = classes
    # those of files that are imported already come first: mostly it is one of them
    references.sort(key=lambda reference: _file(reference) not in sys.modules)
    return next((each for each in references if _alike((kind, each))), None)


def _file(reference: str) -> str:
    model = reference.partition(".")[0]
    return f"transformers.models.{model}.modeling_{model}"


@cache
def _alike(classes: tuple[type[nn.Module], str]) -> bool:
    """Whether two classes of modelling code do the same."""
    kind, reference = classes
    other = getattr(importlib.import_module(_file(reference)), reference.partition(".")[2])
    pairs = zip_longest(_functions(kind), _functions(other))
    return all(found and expected and _told(found) == _told(expected) for found, expected in pairs)


def _functions(kind: type[nn.Module]) -> Iterator[FunctionType]:
    """The `forward` of a class, and what it calls of the class and of its file, one after another.

    The file's attention function is left out: the config names another one.
    """
    first = inspect.unwrap(kind.forward)
    assert isinstance(first, FunctionType), "modelling code is Python"
    found, waiting = set(), [first]
    while waiting:
        function = waiting.pop(0)
        yield function
        found.add(function)
        for name in function.__code__.co_names:
            other = inspect.unwrap(vars(kind).get(name) or function.__globals__.get(name, int))
            own = isinstance(other, FunctionType) and other.__module__ == function.__module__
            if own and other not in found and name != "eager_attention_forward":
                waiting.append(other)


def _told(function: FunctionType) -> tuple[object, ...]:
    """All that decides what a function does, besides the functions that it calls."""
    code = function.__code__
    constants = [each for each in code.co_consts if each != function.__doc__]
    return code.co_code, code.co_names, code.co_varnames, constants, function.__defaults__
