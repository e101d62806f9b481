"""Makes a command's options from the settings of the configs that it takes.

A command decorated with `grouped` may take configs as parameters, such as a Request or a
SamplingConfig. Each setting of a config (see config.py) becomes an option, and the command gets the
configs filled in with the user's choices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from specexec_cli.cli.complete import among, names
from specexec_cli.cli.options import option
from specexec_cli.cli.panels import DEVICES
from specexec_cli.config import (
    DSI,
    DsiOptions,
    GenerationConfig,
    SamplingConfig,
    Setting,
    setting_of,
)
from specexec_cli.drafting.policies import POLICIES
from specexec_cli.drafting.sources import policies_for
from specexec_cli.errors import ConfigError
from specexec_cli.planning.request import Request, TreeRequest

_POLICIES = policies_for("specexec")
# What the command line adds to a setting: completions for TAB, and the names of policies, which
# rooms above the setting's register.
_MORE: dict[str, dict[str, Any]] = {
    "model": {"autocompletion": names, "metavar": "MODEL"},
    "draft": {"autocompletion": names},
    "device": {"autocompletion": among("auto", "cpu", "cuda")},
    "policy": {"words": ("auto", *_POLICIES)},
}
_FLAGS = {"model": ["--model", "-m"]}
_HELP = {"policies": ", ".join(f"{name} ({POLICIES[name].help})" for name in _POLICIES)}


class Shown:
    """Says which settings of a config are options of a command: `Annotated[Config, Shown(...)]`.

    Args:
        names: names of the options in the order of the help, with spaces between them; without
            names, every setting is an option.
        without: the name of a setting that is no option.
        argument: the name of the setting that is the command's argument; without it, all settings
            are options.
        defaults: defaults that differ from the config's, by name.
    """

    def __init__(
        self, names: str = "", *, without: str = "", argument: str = "model", **defaults: Any
    ) -> None:
        self.names, self.without, self.defaults = names.split(), without, defaults
        self.argument = argument

    def __contains__(self, name: str) -> bool:
        return name in self.names if self.names else name != self.without


# Models and machine, for commands that measure: their methods and trees are a grid.
_MEASURED = (
    "offload experts device dtype activations kv hosts model draft models_file tokenizer offline"
)
Measured = Annotated[Request, Shown(_MEASURED)]
MeasuredByOption = Annotated[Request, Shown(_MEASURED, argument="")]  # beside another argument


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Shows typer a command's configs as one parameter for each setting."""
    configs: dict[str, tuple[Any, list[str]]] = {}
    parameters: dict[str, inspect.Parameter] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind, *more = (
            get_args(hints[name]) if get_origin(hints[name]) is Annotated else [hints[name]]
        )
        if not is_dataclass(kind):
            parameters[name] = parameter.replace(
                kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]
            )
            continue
        shown = more[0] if more else Shown()
        options = _options(kind, shown)
        configs[name] = kind, shown.names or [*options]
        parameters |= {each: options[each] for each in configs[name][1]}

    @wraps(command)
    def run(**values: Any) -> Any:
        for name, (kind, options) in configs.items():
            values[name] = _config(kind, {each: values.pop(each) for each in options})
        return command(**values)

    made: Any = run
    made.__signature__ = inspect.Signature([*parameters.values()])
    made.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    return run


def _options(kind: Any, shown: Shown) -> dict[str, inspect.Parameter]:
    """The options of a config, and of the configs in its fields, by name."""
    found: dict[str, inspect.Parameter] = {}
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        told, own = setting_of(field), hints[field.name]
        if is_dataclass(own):
            found |= _options(own, shown)
        elif (name := option_name(field)) in shown and (told or get_origin(own) is Annotated):
            annotation, default = (own, field.default) if told is None else _made(field, told, own)
            if told is not None and name == shown.argument:
                annotation = Annotated[own, typer.Argument(help=told.help, **_MORE[name])]
            found[name] = inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation,
                default=shown.defaults.get(name, default),
            )  # fmt: skip
    return found


def option_name(field: Field[Any]) -> str:
    """The name of a field's option, as typer's parameters have it: `max_tokens`."""
    told = setting_of(field)
    return (told and told.name) or field.name


def _made(field: Field[Any], told: Setting, kind: Any) -> tuple[Any, Any]:
    """The annotation of a setting's option, and the default that the help shows."""
    default, more = field.default, {}
    if get_origin(kind) is Literal:
        kind, more["words"] = str, get_args(kind)
    elif told.auto:
        kind, default = str, "auto"
    elif get_origin(kind) is tuple:
        kind, default = (str if told.listed else list[str]) | None, None
    return Annotated[kind, _option(field, told, **more)], default


def _option(field: Field[Any], told: Setting, **more: Any) -> Any:
    name = option_name(field)
    flags = [f"--{name.replace('_', '-')}"] if field.default is False else _FLAGS.get(name, [])
    panel = DEVICES if told.topic == DSI else told.topic
    return option(panel, told.help.format(**_HELP), *flags, **_MORE.get(name, {}), **more)


def option_of(config: Any, name: str) -> Any:
    """The option of one setting, for commands that do not take the whole config."""
    (field,) = (each for each in fields(config) if each.name == name)
    told = setting_of(field)
    assert told is not None, f"{name} is a setting"
    return _option(field, told)


ModelsFile = Annotated[Path | None, option_of(Request, "models_file")]
Offline = Annotated[bool, option_of(Request, "offline")]
MaxTokens = Annotated[int, option_of(GenerationConfig, "max_tokens")]
Seed = Annotated[int, option_of(SamplingConfig, "seed")]
Batch = Annotated[int | None, option_of(TreeRequest, "batch")]


def _config(kind: Any, values: Mapping[str, Any]) -> Any:
    """Makes a config from the values of its options.

    Args:
        values: by the option's name.

    Raises:
        ConfigError: a value is not what its setting takes.
    """
    found: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            found[field.name] = _config(hints[field.name], values)
        elif (name := option_name(field)) in values:
            told, flag = setting_of(field), f"--{name.replace('_', '-')}"
            found[field.name] = _read(values[name], told, flag, hints[field.name])
    return kind(**found)


def _read(value: Any, told: Setting | None, flag: str, kind: Any) -> Any:
    """Turns an option's value into the value of the config's field."""
    if told is not None and told.auto:
        return None if value == "auto" else _number(value, flag) if int in get_args(kind) else value
    if told is not None and told.listed:
        return _listed(value, flag, told.listed)
    return tuple(value or ()) if get_origin(kind) is tuple else value


def _number(text: str, flag: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{flag} takes a whole number or auto, not '{text}'") from error


def _listed(text: str | None, flag: str, example: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text is not None else ()
    if not all(names):
        raise ConfigError(f"{flag} takes {example}, not '{text}'")
    return names


def with_drafts(asked: Request, several: bool | None = None) -> Request:
    """Splits a --draft such as A,B into the draft model A and further ones of the method dsi.

    The name of an existing file or folder is never split.

    Args:
        several: whether several may be named; by default they may if the method is dsi.
    Raises:
        ConfigError: --draft names several, and only one can be used; or a name is empty.
    """
    draft = asked.draft
    if draft is None or Path(draft).expanduser().exists():
        return asked
    first, *further = _listed(draft, "--draft", "models as in A,B")
    if further and not (asked.method == "dsi" if several is None else several):
        raise ConfigError(f"--draft '{draft}': several models are for --method dsi alone")
    return replace(asked, draft=first, dsi=replace(asked.dsi, more_drafts=tuple(further)))


def without_effect(asked: Request) -> list[str]:
    """One sentence for each option of a request that was given and changes nothing."""
    told = []
    if asked.method != "dsi":
        told += [f"{flag} has no effect without --method dsi" for flag in _changed(asked.dsi)]
    if asked.method != "specexec":
        where = "without draft trees" if asked.method == "autoregressive" else "where DSI runs"
        told += [f"{flag} has no effect {where}" for flag in _changed(asked.tree)]
    if asked.method == "autoregressive" and asked.draft is not None:
        told.append("--draft has no effect with --method autoregressive")
    return told


def _changed(config: DsiOptions | TreeRequest) -> list[str]:
    """The flags of settings that differ from their defaults."""
    return [
        f"--{'no-' * (field.default is True)}{option_name(field).replace('_', '-')}"
        for field in fields(config)
        if setting_of(field) and getattr(config, field.name) != field.default
    ]
