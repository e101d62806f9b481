"""Layers of a short convolution alone, as LFM2 has them."""

from __future__ import annotations

from transformers import PretrainedConfig

from specexec_cli.models.layer_state import LayerState
from specexec_cli.models.layer_states import LAYER_STATES
from specexec_cli.models.recurrent import Windows


def _state(config: PretrainedConfig) -> LayerState:
    return Windows(config.conv_L_cache)


LAYER_STATES["conv"] = _state
