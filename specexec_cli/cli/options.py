"""Options that several commands share, each defined once; option_groups.py puts them together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from specexec_cli.cli.complete import among, model_names, pair_names
from specexec_cli.cli.panels import ADVANCED, DSI, MANY, MEMORY, SAMPLING, TREE
from specexec_cli.config import DraftScoring, DtypeName, ExpertPlace, Method, OffloadMode, Overlap
from specexec_cli.drafting.policies import POLICIES
from specexec_cli.drafting.sources import policies_for
from specexec_cli.errors import ConfigError, nearest
from specexec_cli.planning.request import MOST_SLOTS

# What a chat template adds to a turn, at most, when memory is planned.
TEMPLATE_TOKENS = 128


def one_of(value: str, flag: str, allowed: tuple[str, ...]) -> str:
    """`value`, checked against the words a flag takes.

    Raises:
        ConfigError: with the nearest word.
    """
    if value not in allowed:
        hint = nearest(value, list(allowed))
        raise ConfigError(f"{flag} '{value}' is not one of {', '.join(allowed)}.{hint}")
    return value


def _option(
    panel: str, help: str, *flags: str, words: tuple[str, ...] = (), tab: Any = None, **more: Any
) -> Any:
    """An option in a panel of the help.

    Args:
        flags: unless told, two dashes and the parameter's name.
        words: all that it takes, which TAB offers; without them, anything.
        tab: what TAB offers, where that is not all that it takes.
    """
    if words:
        more["callback"] = _checked(words)
    tab = tab or (among(*words) if words else None)
    return typer.Option(*flags, help=help, rich_help_panel=panel, autocompletion=tab, **more)


def _checked(words: tuple[str, ...]) -> Callable[[typer.Context, typer.CallbackParam, str], str]:
    def check(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
        return value if ctx.resilient_parsing else one_of(value, param.opts[0], words)

    return check


_common, _output = partial(_option, "Common"), partial(_option, "Output")
_advanced, _memory, _tree = (partial(_option, panel) for panel in (ADVANCED, MEMORY, TREE))
_sampling, _dsi, _many = (partial(_option, panel) for panel in (SAMPLING, DSI, MANY))

Pair = Annotated[str | None, _common("A pair of models.toml. Default: demo.", tab=pair_names)]
Target = Annotated[
    str | None,
    _common(
        "A name of models.toml, a folder, a GGUF file, a hub id (org/name, org/name@revision, "
        "org/name:FILE.gguf), or ollama:NAME.",
        tab=model_names,
    ),
]
Draft = Annotated[
    str | None,
    _common(
        "Draft (default: the pair's; for dsi A,B); self: 4-bit copy; suffix: past text; "
        "auto: fastest.",
        tab=model_names,
    ),
]
Yes = Annotated[bool, _common("Fetch models that are not here without asking.", "--yes", "-y")]
MaxTokens = Annotated[int, _common("Most tokens to generate.")]
MethodName = Annotated[
    str,
    _advanced(
        "specexec, autoregressive (a token a pass), dsi. The text is the same.",
        words=get_args(Method),
    ),
]
ModelsFile = Annotated[Path | None, _advanced("Entries that override models.toml.")]
Revision = Annotated[str | None, _advanced("Branch, tag or commit of the target.")]
Tokenizer = Annotated[Path | None, _advanced("Folder of a tokenizer, for targets without.")]
Offline = Annotated[bool, _advanced("Use downloaded files only.", "--offline")]

Budget = Annotated[int | None, _tree("Most nodes. Default: the pair's.")]
Depth = Annotated[int | None, _tree("Longest path, in tokens. Default: the pair's.")]
Batch = Annotated[int | None, _tree("Nodes expanded at once. Default: the pair's.")]
Scoring = Annotated[
    str,
    _tree(
        "Rank draft tokens by the target's sampling noise: noise, or probs.",
        words=get_args(DraftScoring),
    ),
]
PolicyName = Annotated[
    str,
    _tree(
        "How much of the budget each tree uses: "
        + ", ".join(f"{name} ({POLICIES[name].help})" for name in policies_for("specexec"))
        + ". auto is cost, and fixed for other methods than specexec.",
        words=("auto", *policies_for("specexec")),
    ),
]
Calibration = Annotated[bool, _tree("Correct draft probabilities by what was accepted.")]
Past = Annotated[bool, _tree("Add what followed the last tokens where they stood before.")]
Overlapping = Annotated[
    str,
    _tree(
        "on, off, auto: go on drafting while a pass waits for layers; auto: where it does.",
        words=get_args(Overlap),
    ),
]

Temperature = Annotated[float, _sampling("0 is greedy.")]
TopP = Annotated[float, _sampling("Keep the likeliest tokens of this total.")]
TopK = Annotated[int, _sampling("Keep this many tokens; 0 keeps all.")]
MinP = Annotated[float, _sampling("Drop tokens below this share of the likeliest one.")]
RepetitionPenalty = Annotated[float, _sampling("Above 1 discourages repeated tokens.")]
Seed = Annotated[int, _sampling("Same seed, same text.")]
Stop = Annotated[list[str] | None, _sampling("End before this text. May be repeated.")]

Context = Annotated[
    int | None,
    _memory(
        "Most tokens of the conversation. Default: the window, memory planned for 4096.", min=64
    ),
]
Offload = Annotated[
    str,
    _memory(
        "Where layers stream from: ssd, ram, none (they stay), or auto.",
        words=get_args(OffloadMode),
    ),
]
Experts = Annotated[
    str,
    _memory(
        "Beside a GPU, what computes a mixture's experts: gpu, cpu, or auto.",
        words=get_args(ExpertPlace),
    ),
]
Device = Annotated[str, _memory("auto, cpu, cuda or cuda:N.", tab=among("auto", "cpu", "cuda"))]
Dtype = Annotated[str, _memory("float32, bfloat16, float16, or auto.", words=get_args(DtypeName))]

Sp = Annotated[str, _dsi("Target servers at once, or auto.")]
Lookahead = Annotated[str, _dsi("Draft tokens before each verification, or auto.")]
Devices = Annotated[str | None, _dsi("Of the workers, as in cuda:0,cuda:1. Default: every GPU.")]
Ray = Annotated[
    str | None,
    _dsi("Run them on a Ray cluster: auto, host:port, or local.", metavar="ADDRESS"),
]

Stats = Annotated[bool, _output("A line of statistics at the end.", "--stats")]
Json = Annotated[bool, _output("One JSON object on stdout, nothing else.", "--json")]
Quiet = Annotated[bool, _output("Nothing on stderr but errors.", "--quiet", "-q")]
Jsonl = Annotated[
    bool,
    _many(
        'Each line of -f is a prompt: {"prompt"} or {"messages": [{"role", "content"}]}, an "id" '
        "if it has one, and max_tokens, stop and sampling options where they differ. Each text is "
        'a line {"id", "text", "tokens", "finish_reason", "seed", "pair", "made_of"}, the one it '
        "would be alone.",
        "--jsonl",
    ),
]
Output = Annotated[
    Path | None,
    _many("File for the texts; those that it has already are left out.", "--output", "-o"),
]
Slots = Annotated[int, _many("Texts at once, each with memory of its own.", min=1, max=MOST_SLOTS)]
