"""Settings as frozen dataclasses that check themselves. They know no model and no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from specexec_cli.errors import ConfigError

Method = Literal["specexec", "autoregressive", "dsi"]
SUFFIX = "suffix"  # in the place of a draft model: drafts from the text's own past
SELF = "self"  # in the place of a draft model: drafts with the target's own layers in few bits
AUTO_DRAFT = "auto"  # in the place of a draft model: the fastest drafter, by prediction
SELF_DRAFTS: Mapping[str, int] = MappingProxyType({SELF: 4, "self-4": 4, "self-3": 3, "self-2": 2})
BenchMethod = str  # a method of `bench`: autoregressive, dsi, or a name in drafting.sources
DSI_REJECTION = "dsi-rejection"  # DSI that keeps drafts by rejection sampling, only in `bench`
OffloadMode = Literal["auto", "ssd", "ram", "none"]
ExpertPlace = Literal["auto", "gpu", "cpu"]  # where a mixture's experts are computed beside a GPU
# Where a layer's weights wait for their turn: on the device that computes (resident), in RAM
# (pinned where there is a GPU; on a CPU, RAM is the device's own memory), or on the SSD.
Tier = Literal["resident", "ram", "ssd"]
DraftScoring = Literal["noise", "probs"]
Overlap = Literal["auto", "on", "off"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How a token is drawn from the target's logits; transformers' definitions and order."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        # logits divided by a smaller temperature would overflow float32 to infinities, which tie
        if self.temperature != 0.0 and not 0.001 <= self.temperature <= 100.0:
            raise ConfigError(
                f"temperature must be 0 (greedy) or between 0.001 and 100, not {self.temperature}"
            )
        if self.top_k < 0:
            raise ConfigError(f"top-k must be 0 (keep all) or more, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(f"min-p must be between 0 and 1, not {self.min_p}")
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise ConfigError(
                f"repetition-penalty must be above 0 and at most 100, not {self.repetition_penalty}"
            )
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed must be between 0 and 2^64 - 1, not {self.seed}")


MOST_NODES = 65536  # in a tree, and on a path in it


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeConfig:
    """How a draft tree grows (SpecExec, arXiv:2406.02532, algorithm 2: K, D, B)."""

    budget: int = 128  # most nodes, root excluded
    max_depth: int = 32  # longest root-to-leaf path, tokens
    batch: int = 16  # nodes expanded per draft step
    scoring: DraftScoring = "noise"  # children ranked by the target's own noise, or without it
    policy: str = "fixed"  # how much of the budget a tree uses: a name in drafting.policies
    calibrated: bool = True  # scores corrected by acceptance so far, see drafting/calibration.py
    past: bool = False  # adds nodes that the text's own past suggests, see drafting/suffix.py
    overlap: Overlap = "off"  # whether drafting goes on while passes wait for weights

    def __post_init__(self) -> None:
        for name in ("budget", "max_depth", "batch"):
            value = getattr(self, name)
            if not 1 <= value <= MOST_NODES:
                raise ConfigError(f"`{name}` must be between 1 and {MOST_NODES}, not {value}")
        if self.max_depth > self.budget:
            raise ConfigError(
                f"`max_depth` ({self.max_depth}) cannot exceed `budget` ({self.budget}): "
                "a path of that depth would not fit in the tree"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """When a generation ends."""

    max_tokens: int = 128
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max-tokens must be 1 or more, not {self.max_tokens}")
        if any(not text for text in self.stop):
            raise ConfigError("a `stop` string must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class DsiOptions:
    """Speculation over several devices (method dsi); the program chooses what is left out."""

    sp: int | None = None  # target servers at once
    lookahead: int | None = None  # draft tokens before each verification
    devices: tuple[str, ...] = ()  # empty: every GPU, or the CPU
    ray: str | None = None  # address of a Ray cluster that runs the workers on its GPUs
    more_drafts: tuple[str, ...] = ()  # further draft models; each drafts by itself

    def __post_init__(self) -> None:
        for name, value in (("sp", self.sp), ("lookahead", self.lookahead)):
            if value is not None and not 1 <= value <= 64:
                raise ConfigError(f"`{name}` must be between 1 and 64, or auto, not {value}")
        if self.ray is not None and self.devices:
            raise ConfigError("`ray` and `devices` exclude each other: Ray places the workers")
