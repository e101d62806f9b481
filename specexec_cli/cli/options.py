"""Options that several commands share, each defined once.

Commands that take a whole group of them name a dataclass of this module as one parameter and are
decorated with `grouped`, which shows its fields to typer as options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_type_hints

import typer

from specexec_cli.cli.complete import among, model_names, pair_names
from specexec_cli.cli.panels import ADVANCED, DSI, MEMORY, SAMPLING, TREE
from specexec_cli.config import (
    DraftScoring,
    DsiOptions,
    DtypeName,
    ExpertPlace,
    Method,
    OffloadMode,
    SamplingConfig,
)
from specexec_cli.drafting.policies import POLICIES, policies_for
from specexec_cli.errors import ConfigError, nearest
from specexec_cli.planning.request import Request, TreeRequest

_COMMON, _OUTPUT = "Common", "Output"

Pair = Annotated[
    str | None,
    typer.Option(
        help="A pair of models.toml. Default: demo.", rich_help_panel=_COMMON,
        autocompletion=pair_names,
    ),
]  # fmt: skip
Target = Annotated[
    str | None,
    typer.Option(
        help="A name of models.toml, a folder, or a hub id: org/name or org/name@revision.",
        rich_help_panel=_COMMON, autocompletion=model_names,
    ),
]  # fmt: skip
Draft = Annotated[
    str | None,
    typer.Option(
        help="Draft model, likewise. Default: the target's pair's, or the best that is known.",
        rich_help_panel=_COMMON, autocompletion=model_names,
    ),
]  # fmt: skip
Yes = Annotated[
    bool,
    typer.Option(
        "--yes", "-y", help="Fetch models that are not here without asking.",
        rich_help_panel=_COMMON,
    ),
]  # fmt: skip
MethodName = Annotated[
    str,
    typer.Option(
        help="specexec, autoregressive (a token a pass), dsi. The text is the same.",
        rich_help_panel=ADVANCED, autocompletion=among(*get_args(Method)),
    ),
]  # fmt: skip
ModelsFile = Annotated[
    Path | None,
    typer.Option(help="Entries that override models.toml.", rich_help_panel=ADVANCED),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of the target.", rich_help_panel=ADVANCED),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="Folder of a tokenizer, for targets without.", rich_help_panel=ADVANCED),
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Use downloaded files only.", rich_help_panel=ADVANCED)
]
# What a chat template adds to a turn, at most, when memory is planned.
TEMPLATE_TOKENS = 128

Context = Annotated[
    int | None,
    typer.Option(
        min=64,
        help="Most tokens of the conversation. Default: the window, memory planned for 4096.",
        rich_help_panel=MEMORY,
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(help="Most nodes. Default: the pair's.", rich_help_panel=TREE),
]
Depth = Annotated[
    int | None,
    typer.Option(help="Longest path, in tokens. Default: the pair's.", rich_help_panel=TREE),
]
Batch = Annotated[
    int | None,
    typer.Option(help="Nodes expanded at once. Default: the pair's.", rich_help_panel=TREE),
]
Scoring = Annotated[
    str,
    typer.Option(
        help="Rank draft tokens by the target's sampling noise: noise, or probs.",
        rich_help_panel=TREE,
        autocompletion=among(*get_args(DraftScoring)),
    ),
]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        help="How much of the budget each tree uses: "
        + ", ".join(f"{name} ({POLICIES[name].help})" for name in policies_for("specexec"))
        + ". auto is cost, and fixed for other methods than specexec.",
        rich_help_panel=TREE,
        autocompletion=among("auto", *policies_for("specexec")),
    ),
]
Calibration = Annotated[
    bool,
    typer.Option(
        help="Correct draft probabilities by what was accepted.",
        rich_help_panel=TREE,
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float,
    typer.Option(help="Keep the likeliest tokens of this total.", rich_help_panel=SAMPLING),
]
TopK = Annotated[
    int, typer.Option(help="Keep this many tokens; 0 keeps all.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float,
    typer.Option(
        help="Drop tokens below this share of the likeliest one.", rich_help_panel=SAMPLING
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(help="Above 1 discourages repeated tokens.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int,
    typer.Option(help="Same seed, same text.", rich_help_panel=SAMPLING),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_COMMON)]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this text. May be repeated.", rich_help_panel=SAMPLING),
]
Offload = Annotated[
    str,
    typer.Option(
        help="Where layers stream from: ssd, ram, none (they stay), or auto.",
        rich_help_panel=MEMORY,
        autocompletion=among(*get_args(OffloadMode)),
    ),
]
Experts = Annotated[
    str,
    typer.Option(
        help="Beside a GPU, what computes a mixture's experts: gpu, cpu, or auto.",
        rich_help_panel=MEMORY,
        autocompletion=among(*get_args(ExpertPlace)),
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda or cuda:N.", rich_help_panel=MEMORY,
        autocompletion=among("auto", "cpu", "cuda"),
    ),
]  # fmt: skip
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or auto.",
        rich_help_panel=MEMORY,
        autocompletion=among(*get_args(DtypeName)),
    ),
]
Sp = Annotated[
    str,
    typer.Option(help="Target servers at once, or auto.", rich_help_panel=DSI),
]
Lookahead = Annotated[
    str,
    typer.Option(
        help="Draft tokens before each verification, or auto.",
        rich_help_panel=DSI,
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        help="Of the workers, as in cuda:0,cuda:1. Default: every GPU.",
        rich_help_panel=DSI,
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run them on a Ray cluster: auto, host:port, or local.",
        rich_help_panel=DSI,
    ),
]
Stats = Annotated[
    bool, typer.Option("--stats", help="A line of statistics at the end.", rich_help_panel=_OUTPUT)
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="One JSON object on stdout, nothing else.", rich_help_panel=_OUTPUT
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Nothing on stderr but errors.", rich_help_panel=_OUTPUT),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options that say which models to use, and where their files are."""

    pair: Pair = None
    target: Target = None
    draft: Draft = None
    method: MethodName = "specexec"
    models_file: ModelsFile = None
    revision: Revision = None
    tokenizer: Tokenizer = None
    offline: Offline = False
    yes: Yes = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options that say how a token is drawn."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Seed = 0

    def config(self) -> SamplingConfig:
        """These options as a SamplingConfig, which checks their values."""
        return SamplingConfig(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """Options of the draft tree."""

    budget: Budget = None
    depth: Depth = None
    batch: Batch = None
    draft_scoring: Scoring = "noise"
    policy: PolicyName = "auto"
    calibration: Calibration = True

    def request(self) -> TreeRequest:
        """These options as a TreeRequest, each word checked against those that it may be."""
        chosen = one_of(self.policy, "--policy", ("auto", *policies_for("specexec")))
        return TreeRequest(
            budget=self.budget,
            depth=self.depth,
            batch=self.batch,
            scoring=cast(
                DraftScoring, one_of(self.draft_scoring, "--draft-scoring", get_args(DraftScoring))
            ),
            policy=None if chosen == "auto" else chosen,
            calibrated=self.calibration,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """Options that say where and how to compute."""

    offload: Offload = "auto"
    experts: Experts = "auto"
    device: Device = "auto"
    dtype: Dtype = "auto"
    sp: Sp = "auto"
    lookahead: Lookahead = "auto"
    devices: Devices = None
    ray: Ray = None


def without_effect(
    models: ModelOptions, sampling: SamplingOptions, tree: TreeOptions, machine: MachineOptions
) -> list[str]:
    """What was asked for and changes nothing here, one sentence each."""
    told = []
    if sampling.temperature == 0.0:
        for name in ("top_p", "top_k", "min_p", "seed"):
            if getattr(sampling, name) != getattr(SamplingOptions(), name):
                flag = name.replace("_", "-")
                told.append(f"--{flag} has no effect at --temperature 0, which is greedy")
    if models.method != "dsi":
        for name in ("sp", "lookahead", "devices", "ray"):
            if getattr(machine, name) != getattr(MachineOptions(), name):
                told.append(f"--{name} has no effect without --method dsi")
    if models.method == "autoregressive":
        for field in fields(TreeOptions):
            if getattr(tree, field.name) != field.default:
                flag = "no-calibration" if field.name == "calibration" else field.name
                told.append(f"--{flag.replace('_', '-')} has no effect without draft trees")
        if models.draft is not None:
            told.append("--draft has no effect with --method autoregressive")
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModels:
    """Models and machine of the commands that measure: their methods and trees are a grid."""

    pair: Pair = None
    target: Target = None
    draft: Draft = None
    models_file: ModelsFile = None
    tokenizer: Tokenizer = None
    offline: Offline = False
    yes: Yes = False
    offload: Offload = "auto"
    experts: Experts = "auto"
    device: Device = "auto"
    dtype: Dtype = "auto"

    def request(self, longest_prompt: str, beside_tokens: int) -> Request:
        """These options as a Request: memory is planned for the prompt and the tokens beside it."""
        return Request(
            pair=self.pair,
            target=self.target,
            draft=self.draft,
            models_file=self.models_file,
            tokenizer=self.tokenizer,
            offline=self.offline,
            tree=TreeRequest(policy="fixed"),
            offload=offload_mode(self.offload),
            experts=expert_place(self.experts),
            device=self.device,
            dtype=dtype_name(self.dtype),
            prompt=longest_prompt,
            context_tokens=beside_tokens,
        )


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Lets typer see the fields of a command's option groups as parameters of the command."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not is_dataclass(kind):
            parameters.append(
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind)
            )
            continue
        groups[name] = kind
        own = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                annotation=own[field.name],
            )
            for field in fields(kind)
        ]  # fmt: skip

    @wraps(command)
    def run(**values: Any) -> Any:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return command(**values)

    shown: Any = run
    shown.__signature__ = inspect.Signature(parameters)
    shown.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def request(
    models: ModelOptions, tree: TreeOptions, machine: MachineOptions, **more: Any
) -> Request:
    """The Request of chat and generate, each word checked against those that it may be.

    Args:
        more: other fields of Request.
    Raises:
        ConfigError: a word that an option does not take.
    """
    return Request(
        pair=models.pair,
        target=models.target,
        draft=models.draft,
        method=cast(Method, one_of(models.method, "--method", get_args(Method))),
        models_file=models.models_file,
        revision=models.revision,
        tokenizer=models.tokenizer,
        offline=models.offline,
        tree=tree.request(),
        offload=offload_mode(machine.offload),
        experts=expert_place(machine.experts),
        device=machine.device,
        dtype=dtype_name(machine.dtype),
        dsi=dsi_options(machine.sp, machine.lookahead, machine.devices, machine.ray),
        **more,
    )


def offload_mode(value: str) -> OffloadMode:
    """The value of --offload, checked against the words it takes."""
    return cast(OffloadMode, one_of(value, "--offload", get_args(OffloadMode)))


def expert_place(value: str) -> ExpertPlace:
    """The value of --experts, checked against the words it takes."""
    return cast(ExpertPlace, one_of(value, "--experts", get_args(ExpertPlace)))


def dtype_name(value: str) -> DtypeName:
    """The value of --dtype, checked against the words it takes."""
    return cast(DtypeName, one_of(value, "--dtype", get_args(DtypeName)))


def one_of(value: str, flag: str, allowed: tuple[str, ...]) -> str:
    """`value`, checked against the words a flag takes.

    Raises:
        ConfigError: with the nearest word.
    """
    if value not in allowed:
        hint = nearest(value, list(allowed))
        raise ConfigError(f"{flag} '{value}' is not one of {', '.join(allowed)}.{hint}")
    return value


def dsi_options(sp: str, lookahead: str, devices: str | None, ray: str | None = None) -> DsiOptions:
    """The values of --sp, --lookahead, --devices and --ray in one object.

    Raises:
        ConfigError: not a number and not auto, or an empty device.
    """
    names = tuple(name.strip() for name in devices.split(",")) if devices is not None else ()
    if not all(names):
        raise ConfigError(f"--devices takes names as in cuda:0,cuda:1, not '{devices}'")
    return DsiOptions(
        sp=_number_or_auto(sp, "--sp"),
        lookahead=_number_or_auto(lookahead, "--lookahead"),
        devices=names,
        ray=ray,
    )


def _number_or_auto(text: str, flag: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{flag} takes a whole number or auto, not '{text}'") from error
