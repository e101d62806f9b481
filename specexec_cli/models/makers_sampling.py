"""Reads how a model's makers sample: generation_config.json, or a GGUF file's own settings.

The values mean what they mean to transformers. Without `do_sample` the text is greedy; a file that
samples and names no temperature or top_k has transformers' own, 1.0 and 50. The other values are
kept in a greedy file too: the repetition penalty counts there, and top_p does once a user asks for
a temperature. llama.cpp's converter copies the values and leaves `do_sample` out, so a GGUF file
samples if it names one of temperature, top_k, top_p and min_p; so does ollama's file of parameters,
which comes before the GGUF file beside it. A temperature below 0.001 (some makers write 1e-6 for
none) counts as 0, and a top_k below 0 keeps every token, as in llama.cpp.
Source: transformers' GenerationConfig; Keys.General in llama.cpp's gguf-py/gguf/constants.py;
https://github.com/ollama/ollama/blob/main/docs/modelfile.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexec_cli.catalog.found_files import ollama_parameters
from specexec_cli.config import SamplingChoice, SamplingConfig
from specexec_cli.errors import CheckpointError, ConfigError
from specexec_cli.guarded import read_json
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint

FILE = "generation_config.json"
_SAMPLES = {"temperature": 1.0, "top_k": 50}  # transformers' own, where a file samples
_GGUF = "general.sampling."
# transformers', llama.cpp's and ollama's names -> ours
_NAMES = {
    "temperature": "temperature", "temp": "temperature", "top_k": "top_k", "top_p": "top_p",
    "min_p": "min_p", "repetition_penalty": "repetition_penalty",
    "penalty_repeat": "repetition_penalty", "repeat_penalty": "repetition_penalty",
}  # fmt: skip
# What draws other tokens and cannot be applied here -> the value that changes nothing.
_NOT_APPLIED = {
    "typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "num_beams": 1,
    "penalty_alpha": None, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "guidance_scale": 1.0,
    "exponential_decay_length_penalty": None, "bad_words_ids": None, "sequence_bias": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "min_length": 0, "min_new_tokens": 0,
    "stop_strings": None, "watermarking_config": None,
    # llama.cpp's and ollama's
    "sequence": None, "xtc_probability": 0.0, "penalty_last_n": -1, "repeat_last_n": -1,
    "mirostat": 0, "tfs_z": 1.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MakersSampling:
    """What a file says of sampling, unchecked until it is used.

    Attributes:
        source: the file, for messages.
        values: by SamplingConfig's names.
        not_applied: names of settings that the program does not have.
    """

    source: Path
    values: Mapping[str, Any]
    not_applied: tuple[str, ...]

    def with_choice(self, choice: SamplingChoice) -> SamplingConfig:
        """The makers' sampling, with the user's own settings in the place of theirs.

        Raises:
            CheckpointError: the file has an impossible value for a setting that the user left open.
        """
        given = choice.given
        makers = {
            name: self._checked(name, value)
            for name, value in self.values.items()
            if name not in given
        }
        return SamplingConfig(**{**makers, **given})

    def _checked(self, name: str, value: Any) -> float:
        whole = name == "top_k"
        try:
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ConfigError(f"`{name}` is no number")
            if whole and value != int(value):
                raise ConfigError(f"`{name}` is no whole number")
            if name == "temperature" and 0 < value < 0.001:
                value = 0.0
            value = max(0, int(value)) if whole else float(value)
            SamplingConfig(**{name: value})
        except (ConfigError, OverflowError) as error:
            raise CheckpointError(
                f"{self.source}: {error}: give `{name}` yourself, or mend the file"
            ) from error
        return value


def makers_sampling(checkpoint: Checkpoint) -> MakersSampling:
    """What the files of a checkpoint say of sampling.

    Raises:
        CheckpointError: generation_config.json, or ollama's file, is not a JSON object.
    """
    source = checkpoint.folder
    if isinstance(checkpoint, GgufCheckpoint):
        metadata = checkpoint.file.metadata
        said = _named({k.removeprefix(_GGUF): metadata[k] for k in metadata if k.startswith(_GGUF)})
        ollamas = ollama_parameters(source)
        if ollamas is not None:
            source, said = ollamas, said | _named(_read_object(ollamas))
        samples = not said.keys().isdisjoint(("temperature", "top_k", "top_p", "min_p"))
    else:
        source, said = source / FILE, _named(read_generation_config(source))
        samples = said.get("do_sample") is True
    values = {name: said[name] for name in said.keys() & set(_NAMES.values())}
    values = {**_SAMPLES, **values} if samples else {**values, "temperature": 0.0}
    not_applied = (
        name
        for name, nothing in _NOT_APPLIED.items()
        if said.get(name) not in (None, nothing, [], {})
    )
    return MakersSampling(source=source, values=values, not_applied=tuple(not_applied))


def _named(said: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not null, under our names where we have them."""
    return {_NAMES.get(name, name): value for name, value in said.items() if value is not None}


def read_generation_config(folder: Path) -> Mapping[str, Any]:
    """The object in a checkpoint folder's generation_config.json; empty where there is none.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    path = folder / FILE
    return _read_object(path) if path.is_file() else {}


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        value = read_json(path)
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}")
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a JSON object: {error}") from error
    return value
