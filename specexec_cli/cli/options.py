"""Options that several commands share, each defined once; option_groups.py puts them together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from specexec_cli.cli.complete import among, model_names, pair_names
from specexec_cli.cli.panels import ADVANCED, DSI, MANY, MEMORY, SAMPLING, TREE
from specexec_cli.config import (
    DraftScoring,
    DtypeName,
    ExpertPlace,
    Method,
    OffloadMode,
)
from specexec_cli.drafting.policies import POLICIES
from specexec_cli.drafting.sources import policies_for
from specexec_cli.planning.request import MOST_SLOTS

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
        help="A name of models.toml, a folder, a GGUF file, a hub id (org/name, "
        "org/name@revision, org/name:FILE.gguf), or ollama:NAME.",
        rich_help_panel=_COMMON, autocompletion=model_names,
    ),
]  # fmt: skip
Draft = Annotated[
    str | None,
    typer.Option(
        help="Draft (default: the pair's; for dsi A,B); self: 4-bit copy; suffix: past text; "
        "auto: fastest.",
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
Past = Annotated[
    bool,
    typer.Option(
        help="Add what followed the last tokens where they stood before.",
        rich_help_panel=TREE,
    ),
]
Overlapping = Annotated[
    str,
    typer.Option(
        help="on, off, auto: go on drafting while a pass waits for layers; auto: where it does.",
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
    typer.Option(
        help="Target servers at once, or auto.",
        rich_help_panel=DSI,
    ),
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
Jsonl = Annotated[
    bool,
    typer.Option(
        "--jsonl",
        help='Each line of -f is a prompt: {"prompt"} or {"messages": [{"role", "content"}]}, an '
        '"id" if it has one, and max_tokens, stop and sampling options where they differ. Each '
        'text is a line {"id", "text", "tokens", "finish_reason", "seed", "pair", "made_of"}, the '
        "one it would be alone.",
        rich_help_panel=MANY,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="File for the texts; those that it has already are left out.",
        rich_help_panel=MANY,
    ),
]
Slots = Annotated[
    int,
    typer.Option(
        min=1,
        max=MOST_SLOTS,
        help="Texts at once, each with memory of its own.",
        rich_help_panel=MANY,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Nothing on stderr but errors.", rich_help_panel=_OUTPUT),
]
