"""Settings as frozen dataclasses that check themselves. They know no model and no device.

A setting that users meet is declared once, as a field made by `setting`. The command line makes an
option of it (cli/option_groups.py), the server a field of requests (serve/bodies.py), a file of
prompts a key (engine/jobs.py), and a chat a key of /set (chat/settings.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from specexec_cli.errors import ConfigError

_T = TypeVar("_T")
# What a setting is about; the help of a command shows settings of one topic together.
COMMON, ADVANCED, MEMORY, TREE = "Common", "Advanced", "Memory", "Draft tree"
SAMPLING, DSI = "Sampling", "Several devices"

Method = Literal["specexec", "autoregressive", "dsi"]
SUFFIX = "suffix"  # in the place of a draft model: drafts from the text's own past
SELF = "self"  # in the place of a draft model: drafts with the target's own layers in few bits
MTP = "mtp"  # in the place of a draft model: the target's own layer that predicts further tokens
AUTO_DRAFT = "auto"  # in the place of a draft model: the fastest drafter, by prediction
SELF_DRAFTS: Mapping[str, int] = MappingProxyType({SELF: 4, "self-4": 4, "self-3": 3, "self-2": 2})
DRAFT_WORDS = (SUFFIX, AUTO_DRAFT, MTP, *SELF_DRAFTS)  # what `draft` may be besides a model's name
BenchMethod = str  # a method of `bench`: autoregressive, dsi, or a name in drafting.sources
DSI_REJECTION = "dsi-rejection"  # DSI that keeps drafts by rejection sampling, only in `bench`
OffloadMode = Literal["auto", "ssd", "ram", "none"]
ExpertPlace = Literal["auto", "gpu", "cpu"]  # where a mixture's experts are computed beside a GPU
# Where a layer's weights wait for their turn: on the device that computes (resident), in RAM
# (pinned where there is a GPU; on a CPU, RAM is the device's own memory), or on the SSD.
Tier = Literal["resident", "ram", "ssd"]
DraftScoring = Literal["noise", "probs"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
# Where a CPU rounds rows to 8 bits before it multiplies them by packed weights: in no model, in all
# of them, or in the draft model alone, where that changes no text.
Activations = Literal["full", "8bit", "8bit-draft"]
KvRows = Literal["full", "8bit"]  # how a target's keys and values are kept
DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a user is told of a field of a config, besides its type and default.

    Attributes:
        name: of the option, if it differs from the field's name.
        auto: whether the user writes None as the word auto.
        listed: for a tuple that the user writes as one text with commas: an example of that text.
        must: what a value must be, for errors.
        allows: whether a value is what it must be.
    """

    topic: str
    help: str
    name: str = ""
    auto: bool = False
    listed: str = ""
    must: str = ""
    allows: Callable[[Any], bool] = lambda value: True


def setting(default: _T, topic: str, help: str, **more: Any) -> _T:
    """A field of a dataclass, with the facts from which its option is made.

    Args:
        more: other fields of Setting.
    """
    return field(default=default, metadata={"": Setting(topic=topic, help=help, **more)})


def setting_of(field: Field[Any]) -> Setting | None:
    """What a user is told of a field; None for a field that users do not set."""
    return field.metadata.get("")


def check(settings: Any) -> None:
    """Checks each value of a config by its setting's rule.

    Raises:
        ConfigError: a value is not allowed.
    """
    for each in fields(settings):
        told, value = setting_of(each), getattr(settings, each.name)
        if told is not None and not told.allows(value):
            name = each.name.replace("_", "-")
            raise ConfigError(f"{name} must be {told.must}, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How a token is drawn from the target's logits; transformers' definitions and order."""

    # logits divided by a smaller temperature would overflow float32 to infinities, which tie
    temperature: float = setting(
        0.0, SAMPLING, "0 is greedy.", must="0 (greedy) or between 0.001 and 100",
        allows=lambda value: value == 0.0 or 0.001 <= value <= 100.0,
    )  # fmt: skip
    top_k: int = setting(
        0, SAMPLING, "Keep this many tokens; 0 keeps all.", must="0 (keep all) or more",
        allows=lambda value: value >= 0,
    )  # fmt: skip
    top_p: float = setting(
        1.0, SAMPLING, "Keep the likeliest tokens of this total.", must="above 0 and at most 1",
        allows=lambda value: 0.0 < value <= 1.0,
    )  # fmt: skip
    min_p: float = setting(
        0.0, SAMPLING, "Drop tokens below this share of the likeliest one.",
        must="between 0 and 1", allows=lambda value: 0.0 <= value <= 1.0,
    )  # fmt: skip
    repetition_penalty: float = setting(
        1.0, SAMPLING, "Above 1 discourages repeated tokens.", must="above 0 and at most 100",
        allows=lambda value: 0.0 < value <= 100.0,
    )  # fmt: skip
    seed: int = setting(
        0, SAMPLING, "Same seed, same text.", must="between 0 and 2^64 - 1",
        allows=lambda value: 0 <= value < 2**64,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


def _left_open(name: str) -> Any:
    """A setting of SamplingConfig without its default."""
    (own,) = (each for each in fields(SamplingConfig) if each.name == name)
    return field(default=None, metadata=own.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChoice:
    """What a user says of sampling; None leaves a setting to the model's makers."""

    greedy: bool = setting(
        False, SAMPLING, "Temperature 0. Default for all of these: as the model's makers sample."
    )
    temperature: float | None = _left_open("temperature")
    top_k: int | None = _left_open("top_k")
    top_p: float | None = _left_open("top_p")
    min_p: float | None = _left_open("min_p")
    repetition_penalty: float | None = _left_open("repetition_penalty")
    seed: int | None = _left_open("seed")

    def __post_init__(self) -> None:
        if self.greedy and self.temperature:
            raise ConfigError("`greedy` is temperature 0: leave it or `temperature` out")
        SamplingConfig(**self.given)

    @property
    def given(self) -> dict[str, Any]:
        """The settings that the user has made, by SamplingConfig's names."""
        made = {each.name: getattr(self, each.name) for each in fields(SamplingConfig)}
        greedy = {"temperature": 0.0} if self.greedy else {}
        return {name: value for name, value in made.items() if value is not None} | greedy


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

    max_tokens: int = setting(
        128, COMMON, "Most tokens to generate.", must="1 or more", allows=lambda value: value >= 1
    )
    stop: tuple[str, ...] = setting((), SAMPLING, "End before this text. May be repeated.")

    def __post_init__(self) -> None:
        check(self)
        if any(not text for text in self.stop):
            raise ConfigError("a `stop` string must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class DsiOptions:
    """Speculation over several devices (method dsi); the program chooses what is left out."""

    sp: int | None = setting(None, DSI, "Target servers at once, or auto.", auto=True)
    lookahead: int | None = setting(
        None, DSI, "Draft tokens before each verification, or auto.", auto=True
    )
    devices: tuple[str, ...] = setting(
        (), DSI, "Of the workers, as in cuda:0,cuda:1. Default: every GPU.",
        listed="names as in cuda:0,cuda:1",
    )  # fmt: skip
    more_drafts: tuple[str, ...] = ()  # further draft models; each drafts by itself

    def __post_init__(self) -> None:
        for name, value in (("sp", self.sp), ("lookahead", self.lookahead)):
            if value is not None and not 1 <= value <= 64:
                raise ConfigError(f"`{name}` must be between 1 and 64, or auto, not {value}")
