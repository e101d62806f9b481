"""Groups of options that a command takes as one parameter, and what they come to.

A command names these dataclasses as parameters and is decorated with `grouped`, which shows their
fields to typer as options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any, cast, get_type_hints

from specexec_cli.cli import options
from specexec_cli.config import DraftScoring, DsiOptions, Method, Overlap, SamplingConfig
from specexec_cli.errors import ConfigError
from specexec_cli.planning.request import Request, TreeRequest


@dataclass(frozen=True, kw_only=True)
class NamedModels:
    """Options that say which models to use, and where their files are."""

    pair: options.Pair = None
    target: options.Target = None
    draft: options.Draft = None
    models_file: options.ModelsFile = None
    tokenizer: options.Tokenizer = None
    offline: options.Offline = False
    yes: options.Yes = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions(NamedModels):
    """The models of one session, and how it decodes."""

    method: options.MethodName = "specexec"
    revision: options.Revision = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options that say how a token is drawn."""

    temperature: options.Temperature = 0.0
    top_p: options.TopP = 1.0
    top_k: options.TopK = 0
    min_p: options.MinP = 0.0
    repetition_penalty: options.RepetitionPenalty = 1.0
    seed: options.Seed = 0

    def config(self) -> SamplingConfig:
        """These options as a SamplingConfig, which checks their values."""
        return SamplingConfig(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """Options of the draft tree."""

    budget: options.Budget = None
    depth: options.Depth = None
    batch: options.Batch = None
    draft_scoring: options.Scoring = "noise"
    policy: options.PolicyName = "auto"
    calibration: options.Calibration = True
    past: options.Past = True
    overlap: options.Overlapping = "off"

    def request(self) -> TreeRequest:
        """These options as a TreeRequest."""
        return TreeRequest(
            budget=self.budget, depth=self.depth, batch=self.batch,
            scoring=cast(DraftScoring, self.draft_scoring),
            policy=None if self.policy == "auto" else self.policy,
            calibrated=self.calibration, past=self.past, overlap=cast(Overlap, self.overlap),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Options that say where weights lie, and where and how to compute."""

    offload: options.Offload = "auto"
    experts: options.Experts = "auto"
    device: options.Device = "auto"
    dtype: options.Dtype = "auto"


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of the method dsi: how many workers, and where they run."""

    sp: options.Sp = "auto"
    lookahead: options.Lookahead = "auto"
    devices: options.Devices = None
    ray: options.Ray = None

    def dsi(self, draft: str | None) -> DsiOptions:
        """These options in one object, each word checked.

        Args:
            draft: the value of --draft, all but the first of whose models are further ones.
        """
        more_drafts = draft_models(draft)[1:]
        return dsi_options(self.sp, self.lookahead, self.devices, self.ray, more_drafts)


@dataclass(frozen=True, kw_only=True)
class MachineOptions(WorkerOptions, ComputeOptions):
    """The machine of one session, its other devices included."""


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
        for field in fields(WorkerOptions):
            if getattr(machine, field.name) != field.default:
                flag = field.name.replace("_", "-")
                told.append(f"--{flag} has no effect without --method dsi")
    if models.method != "specexec":
        where = "without draft trees" if models.method == "autoregressive" else "where DSI runs"
        for field in fields(TreeOptions):
            if getattr(tree, field.name) != field.default:
                switch = field.name in ("calibration", "past")
                flag = f"no-{field.name}" if switch else field.name
                told.append(f"--{flag.replace('_', '-')} has no effect {where}")
    if models.method == "autoregressive" and models.draft is not None:
        told.append("--draft has no effect with --method autoregressive")
    return told


@dataclass(frozen=True, kw_only=True)
class MeasuredModels(NamedModels, ComputeOptions):
    """Models and machine of the commands that measure: their methods and trees are a grid."""

    def request(
        self, longest_prompt: str, beside_tokens: int, several_drafts: bool = False
    ) -> Request:
        """These options as a Request: memory is planned for the prompt and the tokens beside it.

        Args:
            several_drafts: --draft may name further models, which are not this request's.
        """
        return Request(
            **_models(self, several_drafts), **_compute(self), tree=TreeRequest(policy="fixed"),
            prompt=longest_prompt, context_tokens=beside_tokens,
        )  # fmt: skip


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
    """The Request of chat, generate and serve.

    Args:
        more: other fields of Request.
    Raises:
        ConfigError: a word that an option does not take.
    """
    return Request(
        **_models(models, several_drafts=models.method == "dsi"),
        **_compute(machine),
        method=cast(Method, models.method),
        revision=models.revision,
        tree=tree.request(),
        dsi=machine.dsi(models.draft),
        **more,
    )


def _models(named: NamedModels, several_drafts: bool) -> dict[str, Any]:
    """The fields of a Request that say which models.

    Raises:
        ConfigError: --draft names several, and only one can be used.
    """
    told = {field.name: getattr(named, field.name) for field in fields(NamedModels)}
    drafts = draft_models(named.draft)
    if len(drafts) > 1 and not several_drafts:
        raise ConfigError(f"--draft '{named.draft}': several models are for --method dsi alone")
    told["draft"] = drafts[0] if drafts else None
    del told["yes"]  # whether to ask before a download is no matter of planning
    return told


def _compute(machine: ComputeOptions) -> dict[str, Any]:
    """The fields of a Request that say where to compute."""
    return {field.name: getattr(machine, field.name) for field in fields(ComputeOptions)}


def dsi_options(
    sp: str,
    lookahead: str,
    devices: str | None,
    ray: str | None = None,
    more_drafts: tuple[str, ...] = (),
) -> DsiOptions:
    """The values of the options of --method dsi in one object.

    Raises:
        ConfigError: not a number and not auto, or an empty name.
    """
    return DsiOptions(
        sp=_number_or_auto(sp, "--sp"),
        lookahead=_number_or_auto(lookahead, "--lookahead"),
        devices=_names(devices, "--devices", "names as in cuda:0,cuda:1"),
        ray=ray,
        more_drafts=more_drafts,
    )


def draft_models(text: str | None) -> tuple[str, ...]:
    """The models that --draft names, as in A,B; a file or folder whose name has a comma is one.

    Raises:
        ConfigError: an empty name.
    """
    if text is not None and Path(text).expanduser().exists():
        return (text,)
    return _names(text, "--draft", "models as in A,B")


def _names(text: str | None, flag: str, form: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text is not None else ()
    if not all(names):
        raise ConfigError(f"{flag} takes {form}, not '{text}'")
    return names


def _number_or_auto(text: str, flag: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{flag} takes a whole number or auto, not '{text}'") from error
