"""The decoder architectures that specexec runs: one table for sizes, for loading and for the docs.

transformers has the modelling code of each. Knows no torch, because `plan` reads it before anything
is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from specexec_cli.catalog.conforming import PICKED, REFUSED, RUNS
from specexec_cli.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One `model_type` of config.json that specexec runs."""

    model_type: str
    title: str  # for people, as README lists it


# a maker's `model_type` -> transformers' own of the same architecture.
# Sources: "Kimi-K2 reuses the DeepSeekV3CausalLM architecture [...] you can still run the model by
# changing model_type to deepseek_v3", MoonshotAI/Kimi-K2/docs/deploy_guidance.md; and for NVIDIA's
# omni files `_legacy_field_names` of transformers' configuration_nemotron_h_omni.py.
ALIASES: Mapping[str, str] = MappingProxyType(
    {"kimi_k2": "deepseek_v3", "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h_omni"}
)

# Types whose layers a CPU runs as one compiled call for few rows (models/usual_layer.py), except in
# float16 and with keys in 8 bits; a test runs each. Some others are copies of their code, too.
ONE_CALL = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"})
_OMNI = {"llm_config": "text_config", "sound_config": "audio_config"}  # NVIDIA's names -> today's
_FLOATS = ("Infinity", "-Infinity", "NaN")
_INDEX = re.compile(r"(^|\.)indexer\.")  # by which layers pick the tokens they see
_table: dict[str, Architecture] = {}
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(_table)


def known_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json as transformers' config classes take it.

    It has transformers' `model_type` in place of an alias of it, and infinities and NaN in place of
    the objects as which transformers writes them.
    """
    known = ALIASES.get(str(config.get("model_type")))
    found = {
        # most values are plain, and `models list` asks for a hundred configs
        name: _with_floats(value) if isinstance(value, list | dict) else value
        for name, value in config.items()
    }
    if known == "nemotron_h_omni":
        found = {_OMNI.get(name, name): value for name, value in found.items()}
        # its `model_type` is 'parakeet', which transformers' class means to leave out, and does not
        if isinstance(sound := found.get("audio_config"), dict):
            found["audio_config"] = {key: sound[key] for key in sound if key != "model_type"}
    return found if known is None else {**found, "model_type": known}


def _with_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in _FLOATS:
        return float(value["__float__"])
    return {name: _with_floats(each) for name, each in value.items()}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json's values for the part that reads and writes text, with those of the whole
    model where that part has none, and transformers' `model_type`.

    Raises:
        ConfigError: `text_config` is no object.
    """
    whole = known_config(config)
    text = whole.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ConfigError("config.json's 'text_config' is no object")
    return known_config({**whole, **text}) if text else whole


def picked_tokens(config: Mapping[str, Any]) -> int | None:
    """How many tokens a model's index picks for a row to see; None if rows see all tokens.

    Args:
        config: of the part that reads and writes text.
    Raises:
        ConfigError: config.json says something else than a count.
    """
    usual = PICKED.get(str(config.get("model_type")))
    if usual is None:
        return None
    picked = config.get("index_topk", usual)
    if type(picked) is not int or picked < 1:
        raise ConfigError(
            f"config.json says {str(picked)[:60]} as 'index_topk', where a whole number of 1 or "
            "more must be"
        )
    return picked


def is_unread_index(model_type: str, name: str) -> bool:
    """Whether a model's tensor is of an index that picks tokens, which is never computed here."""
    return model_type in PICKED and _INDEX.search(name) is not None


def longest_text(config: Mapping[str, Any]) -> int | None:
    """Most tokens of a text that a model can read; None where nothing tells.

    Args:
        config: of the part that reads and writes text.
    Raises:
        ConfigError: see picked_tokens.
    """
    known = config.get("max_position_embeddings") or config.get("n_positions")
    limits = [int(each) for each in (known, picked_tokens(config)) if each]
    return min(limits, default=None)


def why_no_longer(config: Mapping[str, Any]) -> str:
    """Why texts are no longer than that, where the reason is not the model's window; else empty.

    A model that picks the tokens it sees by an index sees all of a text that has no more of them.

    Raises:
        ConfigError: see picked_tokens.
    """
    picked = picked_tokens(config)
    if picked is None or longest_text(config) != picked:
        return ""
    return (
        f"beyond {picked} tokens this model picks those it sees by an index, which is not "
        "computed here"
    )


def refusal(model_type: str) -> str:
    """One line about a `model_type` that is not in the table: why, and what comes nearest."""
    reason = REFUSED.get(model_type)
    near = relatives(model_type, ARCHITECTURES)
    return (
        f"architecture '{model_type}' is not supported"
        + (f": {reason}. " if reason else ". ")
        + (f"Nearest of those that run: {', '.join(near)}. " if near else "")
        + "docs/architectures.md lists all"
    )


def relatives(model_type: str, known: Iterable[str]) -> list[str]:
    """At most three of the known types whose names begin as this one's, the nearest first."""
    family = re.split(r"[_.-]", model_type)[0].rstrip("0123456789")
    same = [name for name in known if family and name.startswith(family)]
    return get_close_matches(model_type, same, n=3, cutoff=0.0)


def register(architecture: Architecture) -> None:
    """Adds an architecture; tests/e2e/test_architectures.py then asks for its test checkpoint."""
    if architecture.model_type in _table:
        raise ValueError(f"architecture '{architecture.model_type}' is registered twice")
    _table[architecture.model_type] = architecture


_TITLES = {  # where transformers' name of a class is not what people write
    "gemma2": "Gemma-2", "gemma3_text": "Gemma-3 (text)",
    "gpt_bigcode": "GPTBigCode (StarCoder)", "phi3": "Phi-3", "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE", "starcoder2": "StarCoder2",
}  # fmt: skip
for _model_type, _title in RUNS.items():
    register(Architecture(model_type=_model_type, title=_TITLES.get(_model_type, _title)))
