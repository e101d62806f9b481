"""`specexec models`: lists the entries of models.toml and how they would run on this machine."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from specexec_cli.catalog.downloads import free_disk_bytes
from specexec_cli.catalog.found_files import FoundFile, found_files
from specexec_cli.catalog.hub import cached_snapshot
from specexec_cli.catalog.models_file import TASKS, ModelEntry, is_path
from specexec_cli.catalog.own_copies import OwnCopy, own_copies
from specexec_cli.catalog.registry import Registry, load_registry, user_models_file
from specexec_cli.cli import options, own_names
from specexec_cli.cli.complete import names
from specexec_cli.cli.machine import DescribedMachine
from specexec_cli.cli.model_screen import memory_words, screen, sorted_fits
from specexec_cli.cli.option_groups import grouped
from specexec_cli.cli.panels import PanelCommand, PanelGroup
from specexec_cli.device import format_bytes
from specexec_cli.errors import SpecexecError, UnknownModelError, nearest
from specexec_cli.planning.alternatives import Fit, fits, recommended, unpaired_fits
from specexec_cli.planning.expected_speed import READING_TOKENS_PER_S
from specexec_cli.planning.machine import taken_of_a_datasheet
from specexec_cli.planning.speed import figure

app = typer.Typer(
    cls=PanelGroup,
    help="Named models and pairs: where they run here, and how fast.",
    no_args_is_help=True,
)

ModelsFile = Annotated[
    Path | None,
    typer.Option("--models-file", metavar="FILE", help="TOML file whose entries override others."),
]
_WIDE = 216  # terminal columns for all facts about a pair on one line
_MIDDLE = 130  # terminal columns for a pair with its models
_MODEL_COLUMNS = 80  # terminal columns for all facts about a model
_LEGEND = (
    "from: where the target's layers are when a pass needs them, at the slowest; no: it does not "
    "fit this machine.",
    "tok/s: predicted, with drafting; `specexec plan NAME` says how. *: gated, a licence is "
    "to be accepted.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list", cls=PanelCommand)
@grouped
def list_command(
    word: Annotated[
        str | None, typer.Argument(metavar="[WORD]", help="Only names with this in them.")
    ] = None,
    *,
    models_file: ModelsFile = None,
    machine: DescribedMachine,
    everything: Annotated[
        bool, typer.Option("--all", help="More than a screen, and details.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List models: how fast each would write on this machine, and what to fetch.

    Those that are here come first, then the largest that write as fast as one reads.
    """
    registry, site = load_registry(models_file), machine.site()
    found = [fit for fit in fits(site, models_file) if _has(word, _names_of(fit))]
    models = [model for model in registry.models.values() if _has(word, [model.name])]
    named = {model.repo for model in registry.models.values()}
    files = [each for each in found_files() if _has(word, [each.name]) and each.name not in named]
    copies = [each for each in own_copies() if _has(word, [each.name])]
    aliases = {name: of for name, of in registry.names.items() if _has(word, [name, of])}
    if not (found or models or files or copies or aliases):
        hint = nearest(str(word), [*registry.pairs, *registry.models])
        raise UnknownModelError(f"no model's name has '{word}' in it.{hint}")
    if as_json:
        content = {
            "schema": 1,
            "pairs": [{**asdict(fit.pair), **_fit_json(fit)} for fit in found],
            "models": [_model_json(model) for model in models],
            "found": [{**asdict(each), "path": str(each.path)} for each in files],
            "own_copies": [{**asdict(each), "folder": str(each.folder)} for each in copies],
            "names": dict(registry.names),
            "used": registry.used,
            "user_models_file": str(user_models_file()),
        }
        typer.echo(json.dumps(content, indent=2))
        return
    last = []
    if registry.used:
        last.append(f"Taken when no model is named, as `specexec use` set it: {registry.used}")
    if everything:
        _print_pairs_and_models(found, models)
        _print_others(files, copies, aliases)
        state = "" if user_models_file().is_file() else " (not there yet)"
        last.append(f"Your own entries: {user_models_file()}{state}")
    else:
        last += [f"{name}  {of}  (a name of your own)" for name, of in aliases.items()]
        others = [model for model in models if _has_own_row(model, found, word)]
        if word is not None:  # to predict a file takes as long as to read its header
            others += _own_files(registry, aliases)
        unpaired = unpaired_fits(others, site, models_file)
        lines = shutil.get_terminal_size().lines - len(last)  # 24 in a pipe
        if found or unpaired or files:
            last = [*screen(found, unpaired, files, site, lines, word), *last]
    for line in last:
        typer.echo(line)


def _own_files(registry: Registry, aliases: Mapping[str, str]) -> list[ModelEntry]:
    """The user's own names of files and folders that can be opened, as models."""
    found = []
    for name, of in aliases.items():
        if is_path(of):
            with suppress(SpecexecError):  # it has gone, or holds no model or several
                found.append(replace(registry.resolve(name), name=name))
    return found


def _has_own_row(model: ModelEntry, found: Sequence[Fit], word: str | None) -> bool:
    """Whether a model is listed beside its pairs: one that is here, unless a pair is here whole."""
    fetches = [fit.verdict.fetch_bytes for fit in found if fit.target.name == model.name]
    return 0 not in fetches if _presence(model) != "no" else word is not None and not fetches


def _print_pairs_and_models(found: Sequence[Fit], models: Sequence[ModelEntry]) -> None:
    columns = shutil.get_terminal_size().columns  # 80 in a pipe, unless COLUMNS says otherwise
    if found:
        _print_table([_pair_row(fit, columns) for fit in sorted_fits(found)])
        for line in _LEGEND:
            typer.echo("\n".join(textwrap.wrap(line, _columns())))
        typer.echo()
    if models:
        _print_table([_model_row(model, columns) for model in models])


def _print_others(
    files: Sequence[FoundFile], copies: Sequence[OwnCopy], aliases: Mapping[str, str]
) -> None:
    if files:
        typer.echo("Models that other programs brought here, each a MODEL or --draft:")
        _print_table([_found_row(each) for each in files])
    if copies:
        typer.echo("Targets' own copies, made for --draft self; `specexec rm NAME` deletes one:")
        _print_table([_copy_row(each) for each in copies])
    if aliases:
        typer.echo("Names of your own; `specexec models rm NAME` removes one:")
        _print_table([{"name": name, "is": word} for name, word in aliases.items()])


def _has(word: str | None, names: Sequence[str]) -> bool:
    return word is None or any(word.lower() in name.lower() for name in names)


def _names_of(fit: Fit) -> tuple[str, str]:
    return fit.pair.name, fit.pair.target


@app.command("recommend", cls=PanelCommand)
@grouped
def recommend_command(
    *,
    task: Annotated[str, typer.Option(help="chat, code, or text (base models).")] = "chat",
    machine: DescribedMachine,
    models_file: ModelsFile = None,
    as_json: AsJson = False,
) -> None:
    """Name the best pair for a machine, and the command that runs it.

    The best is the largest target that `models list` expects to write 4 tok/s, about as fast as one
    reads; where none does, the fastest. Mixtures count as the geometric mean of all weights and a
    token's. Models come last of which newer ones as small write better.
    """
    options.one_of(task, "--task", TASKS)
    site = machine.site()
    able = fits(site, models_file)
    room = free_disk_bytes() if machine == DescribedMachine() else None
    fetched = [fit for fit in able if room is None or (fit.verdict.fetch_bytes or 0) <= room]
    found, wanted = recommended(fetched, task), recommended(able, task)
    if as_json:
        pairs = [{"name": fit.pair.name, **_fit_json(fit)} for fit in found]
        typer.echo(json.dumps({"schema": 1, "task": task, "pairs": pairs}, indent=2))
        return
    memory = memory_words(site)
    if not found:
        disk = f" and the {format_bytes(room)} free on this disk" if wanted and room else ""
        raise UnknownModelError(
            f"no pair for {task} fits {memory}{disk}. `specexec models list` shows all of them"
        )
    best = found[0]
    begin = "specexec chat" if task != "text" else "specexec generate -m"
    end = "" if task != "text" else ' "Once upon a time"'
    lines = [f"For {task} with {memory}:", "", described(best), ""]
    lines += [f"    {begin} {best.pair.name}{end}", "", _rule(best)]
    lines += [f"{_compared(fit, best)}: {described(fit)}" for fit in found[1:]]
    if left := [fit for fit in wanted if fit not in fetched]:
        assert room is not None, "it is why they are left out"
        lines.append(
            f"Left out, since {format_bytes(room)} are free on this disk: "
            + "; ".join(
                f"{fit.pair.name}, {format_bytes(fit.verdict.fetch_bytes or 0)}" for fit in left
            )
        )
    taken = taken_of_a_datasheet(site.settings, site.gpu) if site.gpu else ""
    by = f" ({taken})" if taken else ""
    lines.append(f"tok/s are predictions{by}: `specexec plan {best.pair.name}`.")
    for line in lines:
        wrapped = textwrap.wrap(line, _columns(), subsequent_indent="  ") or [""]
        typer.echo("\n".join([line] if line.startswith("    ") else wrapped))


def _rule(best: Fit) -> str:
    """A sentence that says why the pair is the best."""
    assert best.verdict.speed is not None, "it fits"
    if best.verdict.speed.typical >= READING_TOKENS_PER_S:
        return (
            f"Of all that write at least {READING_TOKENS_PER_S:.0f} tok/s and that newer ones "
            "have not replaced, it is the largest."
        )
    return f"None writes {READING_TOKENS_PER_S:.0f} tok/s, as fast as one reads: it is the fastest."


def described(fit: Fit) -> str:
    """A sentence about a pair: its name and the verdict on it."""
    return f"{fit.pair.name} {fit.verdict.sentence}"


def _compared(fit: Fit, best: Fit) -> str:
    return "Larger" if fit.target.dense_params > best.target.dense_params else "Faster"


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, 100)


def _fit_json(fit: Fit) -> dict[str, Any]:
    speed = fit.verdict.speed
    return {**fit.verdict.as_json(), "prediction": speed.as_json() if speed is not None else None}


@app.command("show", cls=PanelCommand)
def show_command(
    name: Annotated[
        str, typer.Argument(help="Name of a model, pair or head.", autocompletion=names)
    ],
    models_file: ModelsFile = None,
    as_json: AsJson = False,
) -> None:
    """Show all that is known of a model, a pair or a trained head."""
    registry = load_registry(models_file)
    content: dict[str, Any] = {"schema": 1}
    given, name = name, registry.names.get(name, name)
    if name in registry.pairs:
        pair = registry.pairs[name]
        content["pair"] = asdict(pair)
        content["target"] = _model_json(registry.resolve(pair.target))
        draft = registry.draft_of(pair)
        content["draft"] = _model_json(draft) if draft is not None else None
    if name in registry.models:
        content["model"] = _model_json(registry.models[name])
        content["drafts"] = registry.drafts_for(name)
    if name in registry.heads:
        head = registry.heads[name]
        content["head"] = asdict(head) | {"here": _presence(registry.resolve(name))}
    if len(content) == 1 and given != name:  # a name of the user's own for a file or folder
        content["model"] = _model_json(replace(registry.resolve(name), name=given))
    if len(content) == 1:
        hint = nearest(name, sorted(registry.all_names))
        hint = hint or " `specexec models list` shows what is known."
        raise UnknownModelError(f"no model, pair or head '{name}' in models.toml.{hint}")
    typer.echo(json.dumps(content, indent=2) if as_json else _described(content))


def _presence(model: ModelEntry) -> str:
    """The place of a model's weights: built in, folder, cached, or no (not on this machine)."""
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
    name = {"compressed-tensors": "ct"}.get(str(model.quantization), str(model.quantization))
    return f"{name} {model.bits}-bit" if model.bits else name


def _billions(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _gigabytes(size: int | None) -> str:
    """A size in GB, with at most three digits."""
    if size is None:
        return "-"
    if not size:
        return "0"
    return f"{size / 1e9:.3g}" if size < 1e11 else f"{size / 1e9:.0f}"


def _model_row(model: ModelEntry, columns: int) -> dict[str, str]:
    row = {
        "model": model.name,
        "params": _billions(model.params),
        "weights": _weights(model),
        "GB": _gigabytes(model.size_bytes),
        "context": str(model.context or "-"),
        "here": _presence(model),
    }
    if columns < _MODEL_COLUMNS:
        del row["params"], row["weights"], row["context"]
    return row


def _found_row(found: FoundFile) -> dict[str, str]:
    return {"file": found.name, "of": found.program, "GB": _gigabytes(found.size_bytes)}


def _copy_row(each: OwnCopy) -> dict[str, str]:
    return {"copy": each.name, "GB": _gigabytes(each.size_bytes)}


def _pair_row(fit: Fit, columns: int) -> dict[str, str]:
    pair, speed = fit.pair, fit.verdict.speed
    row = {
        "pair": pair.name,
        "from": fit.verdict.place,
        "tok/s": figure(speed.typical) if speed is not None else "-",
        "fetch GB": _gigabytes(fit.verdict.fetch_bytes) + "*" * fit.verdict.gated,
    }
    if columns >= _MIDDLE:
        row |= {"target": pair.target, "draft": pair.draft}
    if columns >= _WIDE:
        row |= {"budget": str(pair.budget), "depth": str(pair.depth), "source": pair.source}
    return row


def _print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Prints a rich table on a terminal; in a pipe, aligned plain lines that are never wrapped."""
    headers = list(rows[0])
    right = {"budget", "depth", "params", "GB", "context", "tok/s", "fetch GB"}
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
    """The content of the JSON output for people, one fact per line."""
    blocks = []
    for kind in ("pair", "target", "draft", "model", "head"):
        if content.get(kind) is None or (kind == "model" and "pair" in content):
            continue
        facts = dict(content[kind])
        if kind == "head":  # its makers may not say them
            facts |= {key: facts[key] or "not stated" for key in ("params", "license")}
        lines = [f"{kind} {facts.pop('name')}"]
        size = facts.pop("size_bytes", None)
        if size:
            facts["size"] = f"{_gigabytes(size)} GB"
        if isinstance(facts.get("params"), int):
            facts["params"] = _billions(facts["params"])
        shape = facts.pop("shape", None)
        if shape:
            facts["shape"] = ", ".join(f"{key} {value}" for key, value in shape.items())
        for key, value in facts.items():
            if value not in (None, "", False):
                fact = f"  {key:<13} {'yes' if value is True else value}"
                lines += textwrap.wrap(fact, _columns(), subsequent_indent=" " * 16)
        blocks.append("\n".join(lines))
    if content.get("drafts"):
        blocks.append("draft models of this tokenizer: " + ", ".join(content["drafts"]))
    return "\n\n".join(blocks)


app.command("add", cls=PanelCommand)(own_names.add)
app.command("rm", cls=PanelCommand)(own_names.remove)
