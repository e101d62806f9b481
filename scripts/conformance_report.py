"""Writes the results of the conformance run: docs/architectures.md, and the program's own table."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from conformance_configs import tiny_config
from conformance_reasons import BOTH_HALVES, by_error, by_name, kind_among
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from specexec_cli.catalog.architectures import ALIASES, relatives
from specexec_cli.catalog.conforming import ONE_BY_ONE, WITH_LAYERS
from specexec_cli.planning.built_sizes import empty_model, has_separable_experts, text_decoder

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "architectures.md"
_LONGEST = 220  # the most characters of a reason
TABLE = ROOT / "specexec_cli" / "catalog" / "conforming.py"


def reason(model_type: str, raised: str) -> str:
    """The reason why an architecture does not run, as far as its code tells."""
    if known := by_name(model_type):
        return known
    kind = CONFIG_MAPPING[model_type]
    if any(getattr(each, "is_encoder_decoder", False) for each in (kind, kind())):
        return BOTH_HALVES
    return kind_among(_class_names(model_type)) or by_error(raised)


def _class_names(model_type: str) -> list[str]:
    """The class names of a type's modules; of its whole modelling code if no model can be built."""
    for make in (tiny_config, lambda name: CONFIG_MAPPING[name]()):
        try:
            model = empty_model(_text(make(model_type)))
        except Exception:  # the model cannot be built
            continue
        return list(dict.fromkeys(type(module).__name__ for module in model.modules()))
    code = CONFIG_MAPPING[model_type].__module__.replace(".configuration_", ".modeling_")
    return [
        name for name, part in vars(import_module(code)).items()
        if isinstance(part, type) and issubclass(part, nn.Module)
    ]  # fmt: skip


def untried_kinds(model: PreTrainedModel) -> str | None:
    """The parts for text in a type's modelling code that its tiny model lacks; real models may have
    them."""
    module = sys.modules[type(text_decoder(model)).__module__]
    used = {type(part).__name__ for part in model.modules()}
    return kind_among(
        name for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and name not in used
        and not issubclass(kind, PreTrainedModel)
    )  # fmt: skip


def _text(config: PretrainedConfig) -> PretrainedConfig:
    text = config.get_text_config(decoder=True)
    known = type(text) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return text if known else config


def write_reports(found: Mapping[str, Mapping[str, Any]], types: set[str]) -> str:
    """Writes both files; returns a line for people."""
    runs = {name: _title(name) for name in sorted(types) if found[name]["verdict"] == "runs"}
    refused = {name: found[name]["reason"] for name in sorted(types) if name not in runs}
    experts = {name: how for name in runs if (how := how_experts_move(name)) is not None}
    TABLE.write_text(_table(runs, refused, experts))
    DOCS.write_text(docs(runs, refused, experts))
    return f"{len(runs)} of {len(types)} types run"


def how_experts_move(model_type: str) -> str | None:
    """For a type that runs, how a mixture's experts move; None if it has no experts."""
    model = empty_model(tiny_config(model_type))
    parts = list(text_decoder(model).modules())
    if any(has_separable_experts(part) for part in parts):
        return ONE_BY_ONE
    whole = any(re.search(r"Experts?($|GLU)", type(part).__name__) for part in parts)
    return WITH_LAYERS if whole else None


def _title(model_type: str) -> str:
    return CONFIG_MAPPING[model_type].__name__.removesuffix("Config").rstrip("_")


def _table(runs: Mapping[str, str], refused: Mapping[str, str], experts: Mapping[str, str]) -> str:
    lines = [
        '"""What scripts/conformance found: written by it, not by hand."""',
        "# ruff: noqa: E501",
        "",
        "# model_type -> name for people",
        "RUNS: dict[str, str] = {",
        *(f'    "{name}": "{title}",' for name, title in runs.items()),
        "}",
        "# model_type -> how the experts of its mixtures move",
        f'ONE_BY_ONE, WITH_LAYERS = "{ONE_BY_ONE}", "{WITH_LAYERS}"',
        "EXPERTS: dict[str, str] = {",
        *(
            f'    "{name}": {"ONE_BY_ONE" if how == ONE_BY_ONE else "WITH_LAYERS"},'
            for name, how in experts.items()
        ),
        "}",
        "# model_type -> tokens that its index picks where config.json has no index_topk",
        "PICKED: dict[str, int] = {",
        *(f'    "{name}": {count},' for each in runs for name, count in picked(each).items()),
        "}",
        "# model_type -> why not",
        "REFUSED: dict[str, str] = {",
        *(
            f"    {name!r}: {_shown(reason)!r},".replace("'", '"')
            for name, reason in refused.items()
        ),
        "}",
        "",
    ]
    return "\n".join(lines)


def _shown(reason: str) -> str:
    """A reason without quotes and folders, in one short line."""
    reason = re.sub(r"/\S*/", "", reason).replace('"', "").replace("'", "").replace("\\", "")
    return reason if len(reason) <= _LONGEST else reason[: _LONGEST - 3].rstrip() + "..."


_HEAD = """# Architectures

Written by `scripts/conformance --write`. Every `model_type` of transformers {version} that
writes text, alone or beside pictures, was tried as a tiny random model whose checkpoint
`save_pretrained` wrote. A type runs if, streamed from disk in float32,

- a prompt of several chunks with a tree of siblings behind it, the pass after a commit, interrupted
  and run anew, and the pass after a crop have the logits of transformers' own forward with eager
  attention, to 1e-4 of the largest (sums are added in another order; a wrong mask, position or
  weight shows from 1e-2 on),
- texts with drafts, greedy and sampled, are the autoregressive ones, token for token,
- a pass in bfloat16 has logits that point the same way (a rounding may change a random expert),
- layers, experts and cache rows have the bytes that `plan` reckons with,
- a mixture's experts, where they move one by one, give the same bits under any cap,
- a row has the same bits in a pass by itself, among 131 rows, in a tree with other branches in
  between and beside another text, with 1, 2 and 3 threads, in float32 and bfloat16, in models with
  heads of 64 and 128 (on a CPU, with the type's defaults),
- every tensor of the checkpoint is used, tied to another, or of a part that does not read or write
  text,
- all this holds with the type's defaults and with the options of published models that
  `VARIANTS` in `scripts/conformance_configs.py` lists for it (experts in groups, norms of queries
  and keys, parallel attention and MLP, multipliers).

Layers of some types pick the tokens they see by an index (DeepSeek-V3.2, GLM-5). It is not computed
here: up to the `index_topk` tokens of their config, 2,048 of published ones, it picks a whole text.
Longer texts are refused, and so is a config by which the index leaves out a text's latest tokens
(GLM-5.3's with `index_kpool_always_select_tail` false).

Of models that see or hear, the part that reads and writes text runs; pictures are not read.
Everything else is refused when it is opened, with the reason below and the types of the same family
that run, the nearest by name first.

{runs} run, {refused} are refused.

| model_type | verdict | reason, or what a mixture's experts do |
|---|---|---|
"""


def picked(model_type: str) -> dict[str, int]:
    """How many tokens the index of a type picks where config.json does not say, for the type and
    for its part for text; empty if it has no index."""
    kind = CONFIG_MAPPING[model_type]
    for each in (kind, *kind.sub_configs.values()):
        if hasattr(each, "index_topk"):
            return dict.fromkeys((model_type, each.model_type), int(each.index_topk))
    return {}


def docs(runs: Mapping[str, str], refused: Mapping[str, str], experts: Mapping[str, str]) -> str:
    """docs/architectures.md."""
    head = _HEAD.format(version=transformers.__version__, runs=len(runs), refused=len(refused))
    rows = {}
    for name in runs:
        told = [f"experts move {experts[name]}"] if name in experts else []
        told += ["texts of up to `index_topk` tokens"] if picked(name) else []
        rows[name] = f"| `{name}` | runs | {''.join(f'{each}; ' for each in told)[:-2]} |"
        rows[name] = rows[name].replace("|  |", "| |")
    for name, known in ALIASES.items():
        rows[name] = f"| `{name}` | runs | another name of `{known}` |"
    for name, why in refused.items():
        near = ", ".join(f"`{each}`" for each in relatives(name, runs))
        rows[name] = f"| `{name}` | refused | {_shown(why)}{f'; nearest: {near}' if near else ''} |"
    return head + "\n".join(rows[name] for name in sorted(rows)) + "\n"
