"""Kinds of layer state besides keys and values: every file here is read, and registers its kind."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from transformers import PretrainedConfig

from specexec_cli.models.layer_state import LayerState

StateKind = Callable[[PretrainedConfig], LayerState]

# states other than keys and values, by the layer's name in `layer_types` of transformers' configs
LAYER_STATES: dict[str, StateKind] = {}


def state_kind(config: PretrainedConfig, index: int) -> StateKind | None:
    """The constructor of a layer's state; None if the layer keeps keys and values."""
    layer_types = getattr(config, "layer_types", None)
    return LAYER_STATES.get(layer_types[index]) if layer_types is not None else None


for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
