"""Layers of a convolution and a recurrence: Gated DeltaNet and its kin, and Mamba-2."""

from __future__ import annotations

from transformers import PretrainedConfig

from specexec_cli.models.kv_cache import SlotLayer
from specexec_cli.models.layer_state import LayerState
from specexec_cli.models.layer_states import LAYER_STATES
from specexec_cli.models.recurrent import Parts, Recurrence, Windows

# names that configs give the tokens that the convolution of a Mamba sees
_WIDTHS_OF_MAMBA = ("conv_kernel", "mamba_d_conv")


def _parts(config: PretrainedConfig) -> tuple[LayerState, LayerState]:
    width = getattr(config, "linear_conv_kernel_dim", None)
    if width is not None:
        return Windows(width), Recurrence(corrects=True)
    found = (getattr(config, name, None) for name in _WIDTHS_OF_MAMBA)
    return Windows(next(width for width in found if width)), Recurrence(corrects=False)


def _state(config: PretrainedConfig) -> LayerState:
    return Parts(*_parts(config))


def _beside_attention(config: PretrainedConfig) -> LayerState:
    return Parts(*_parts(config), SlotLayer())


LAYER_STATES["linear_attention"] = _state
LAYER_STATES["hybrid"] = _beside_attention
