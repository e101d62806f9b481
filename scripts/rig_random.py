"""A speed rig of an architecture that cannot hold a Llama's weights: all weights are random.

Layers that normalize queries and keys, gate with GELU or have attention sinks cannot compute what
the source computes. Such a rig has a real model's bytes, tensors and arithmetic, so its passes take
a real model's time. Its text means nothing, so drafts cannot be measured with it. Vocabulary and
tokenizer are the source's, so that draft models fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rig_shapes import MODELS
from rig_tensors import Array, RandomPool, Source
from transformers import CONFIG_MAPPING

from specexec_cli.planning.built_sizes import empty_model


class RandomRig:
    """Makes the rig's tensors, with the interface of rig_tensors.Rig."""

    def __init__(
        self, source: Source, model: str, pool: RandomPool, layers: int | None = None
    ) -> None:
        """Begins a rig of one of MODELS; `layers` replaces its own number of layers."""
        self.source, self._pool = source, pool
        settings = dict(MODELS[model])
        kind = CONFIG_MAPPING[settings.pop("model_type")]
        if layers is not None:
            settings["num_hidden_layers"] = layers
        for name in ("vocab_size", "bos_token_id", "eos_token_id"):
            settings[name] = source.config[name]
        self.model_config = kind(**settings, pad_token_id=None)

    def config(self, shape_name: str) -> dict[str, Any]:
        """The rig's config.json."""
        found: dict[str, Any] = self.model_config.to_dict()
        found["architectures"] = [type(empty_model(self.model_config)).__name__]
        return found | {"dtype": "bfloat16", "speed_rig": {"shape": shape_name, "random": True}}

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """The names, shapes and safetensors dtypes, in the order of transformers' state dict."""
        model = empty_model(self.model_config)
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        for name, tensor in model.named_parameters():
            if name not in tied:
                yield name, tuple(tensor.shape), "BF16"

    def array(self, name: str, size: tuple[int, ...]) -> Array:
        """A tensor, as bits of bfloat16."""
        return self._pool.take(size)
