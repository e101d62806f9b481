"""`specexec models`: what models.toml knows, how big it is, and what is already on this machine."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specexec_cli.catalog.hub import cached_snapshot
from specexec_cli.catalog.models_file import ModelEntry, PairEntry
from specexec_cli.catalog.registry import load_registry, user_models_file
from specexec_cli.errors import UnknownModelError, nearest

app = typer.Typer(help="List the models and pairs that have a name.", no_args_is_help=True)

ModelsFile = Annotated[
    Path | None,
    typer.Option("--models-file", metavar="FILE", help="TOML file whose entries override others."),
]
_WIDE = 150  # columns that hold a pair on one line

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list")
def list_command(models_file: ModelsFile = None, as_json: AsJson = False) -> None:
    """List all pairs and models: their size before any download, and what is already here."""
    registry = load_registry(models_file)
    if as_json:
        content = {
            "schema": 1,
            "pairs": [asdict(pair) for pair in registry.pairs.values()],
            "models": [_model_json(model) for model in registry.models.values()],
            "user_models_file": str(user_models_file()),
        }
        typer.echo(json.dumps(content, indent=2))
        return
    narrow = sys.stdout.isatty() and shutil.get_terminal_size().columns < _WIDE
    _print_table([_pair_row(pair, narrow) for pair in registry.pairs.values()])
    _print_table([_model_row(model) for model in registry.models.values()])
    state = "" if user_models_file().is_file() else " (not there yet)"
    typer.echo(f"Your own entries: {user_models_file()}{state}")


@app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(help="Name of a model or of a pair.")],
    models_file: ModelsFile = None,
    as_json: AsJson = False,
) -> None:
    """Show all that is known of a model or a pair."""
    registry = load_registry(models_file)
    content: dict[str, Any] = {"schema": 1}
    if name in registry.pairs:
        pair = registry.pairs[name]
        content["pair"] = asdict(pair)
        content["target"] = _model_json(registry.resolve(pair.target))
        content["draft"] = _model_json(registry.resolve(pair.draft))
    if name in registry.models:
        content["model"] = _model_json(registry.models[name])
        content["drafts"] = registry.drafts_for(name)
    if len(content) == 1:
        hint = nearest(name, [*registry.pairs, *registry.models])
        hint = hint or " `specexec models list` shows what is known."
        raise UnknownModelError(f"no model or pair '{name}' in models.toml.{hint}")
    typer.echo(json.dumps(content, indent=2) if as_json else _described(content))


def _presence(model: ModelEntry) -> str:
    """Where the weights are now: built in, folder, cached, or no (not on this machine)."""
    if model.folder is None:
        return "cached" if cached_snapshot(model) else "no"
    if not model.size_bytes:
        return "no"
    return "built in" if model.repo.startswith("package:") else "folder"


def _model_json(model: ModelEntry) -> dict[str, Any]:
    return {**asdict(model), "size_bytes": model.size_bytes, "here": _presence(model)}


def _weights(model: ModelEntry) -> str:
    if model.quantization in (None, "none"):
        return model.dtype or "-"
    return f"{model.quantization} {model.bits}-bit"


def _billions(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _gigabytes(size: int | None) -> str:
    """Size in GB, three digits at most."""
    if size is None:
        return "-"
    return f"{size / 1e9:.3g}" if size < 1e11 else f"{size / 1e9:.0f}"


def _model_row(model: ModelEntry) -> dict[str, str]:
    return {
        "model": model.name,
        "params": _billions(model.params),
        "weights": _weights(model),
        "GB": _gigabytes(model.size_bytes),
        "context": str(model.context or "-"),
        "here": _presence(model),
    }


def _pair_row(pair: PairEntry, narrow: bool) -> dict[str, str]:
    tree = {"draft": pair.draft, "budget": str(pair.budget), "depth": str(pair.depth)}
    if not narrow:
        return {"pair": pair.name, "target": pair.target, **tree, "source": pair.source}
    # most pairs bear their target's name; of the source, say only whose it is
    name = pair.name if pair.name == pair.target else f"{pair.name}\n target {pair.target}"
    source = "estimate" if "estimate" in pair.source else pair.source.split(",")[0]
    return {"pair": name, **tree, "source": source}


def _print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """A rich table on a terminal; aligned plain lines, never wrapped, in a pipe."""
    headers = list(rows[0])
    right = {"budget", "depth", "params", "GB", "context"}
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        for header in headers:
            table.add_column(header, justify="right" if header in right else "left")
        for row in rows:
            table.add_row(*row.values())
        Console().print(table, "")
        return
    lines = [headers, *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.rjust(width) if header in right else cell.ljust(width)
            for header, cell, width in zip(headers, line, widths, strict=True)
        )
        typer.echo("  ".join(cells).rstrip())
    typer.echo()


def _described(content: dict[str, Any]) -> str:
    """The same content as the JSON, one fact per line, for people."""
    blocks = []
    for kind in ("pair", "target", "draft", "model"):
        if kind not in content or (kind == "model" and "pair" in content):
            continue
        facts = dict(content[kind])
        lines = [f"{kind} {facts.pop('name')}"]
        size = facts.pop("size_bytes", None)
        if size:
            facts["size"] = f"{_gigabytes(size)} GB"
        if facts.get("params"):
            facts["params"] = _billions(facts["params"])
        shape = facts.pop("shape", None)
        if shape:
            facts["shape"] = ", ".join(f"{key} {value}" for key, value in shape.items())
        for key, value in facts.items():
            if value not in (None, "", False):
                lines.append(f"  {key:<13} {'yes' if value is True else value}")
        blocks.append("\n".join(lines))
    if content.get("drafts"):
        blocks.append("draft models of this tokenizer: " + ", ".join(content["drafts"]))
    return "\n\n".join(blocks)
