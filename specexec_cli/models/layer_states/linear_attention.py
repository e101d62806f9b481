"""Layers of a convolution and a recurrence: Gated DeltaNet and its kin, Mamba-1 and Mamba-2."""

from __future__ import annotations

from transformers import PretrainedConfig

from specexec_cli.models.kv_cache import SlotLayer
from specexec_cli.models.layer_state import LayerState
from specexec_cli.models.layer_states import LAYER_STATES
from specexec_cli.models.recurrent import Parts, Recurrence, SelectiveScan, Windows

# names that configs give the tokens that the convolution of a Mamba sees
_WIDTHS_OF_MAMBA = ("conv_kernel", "mamba_d_conv")
# names that configs give the heads of Mamba-2; Mamba-1 has channels
_HEADS_OF_MAMBA = ("num_heads", "mamba_num_heads", "mamba_n_heads", "n_mamba_heads")


def _parts(config: PretrainedConfig) -> tuple[LayerState, LayerState]:
    width = getattr(config, "linear_conv_kernel_dim", None)
    if width is not None:
        return Windows(width), Recurrence(corrects=True)
    found = (getattr(config, name, None) for name in _WIDTHS_OF_MAMBA)
    has_heads = any(getattr(config, name, None) for name in _HEADS_OF_MAMBA)
    recurrence = Recurrence(corrects=False) if has_heads else SelectiveScan()
    return Windows(next(width for width in found if width)), recurrence


def _state(config: PretrainedConfig) -> LayerState:
    return Parts(*_parts(config))


def _beside_attention(config: PretrainedConfig) -> LayerState:
    return Parts(*_parts(config), SlotLayer())


LAYER_STATES["linear_attention"] = _state
LAYER_STATES["hybrid"] = _beside_attention
