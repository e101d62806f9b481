"""Writes a recipe's report in Markdown, and its figures."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from specexec_cli.errors import ConfigError
from specexec_cli.kept import file_name
from specexec_cli.lab.bench.tables import aligned, markdown
from specexec_cli.lab.papers.registry import Finding, Recipe, Setting


def text_of(
    recipe: Recipe, finding: Finding, setting: Setting, form: str, width: int | None = None
) -> str:
    """The text of a finding.

    Args:
        form: md, or table for a terminal of `width` columns.
    """
    models = " and ".join(setting.models) or "no model"
    here = f"Here: {models}, {setting.form} form, seed {setting.seed}."
    lines = [f"# {recipe.name}" if form == "md" else recipe.name, ""]
    lines += [f"Printed: {recipe.printed}.", "", here]
    for table in finding.tables:
        header, rows = list(table.header), [list(row) for row in table.rows]
        made = markdown(header, rows) if form == "md" else aligned(header, rows, width)
        lines += ["", f"{table.title}:", "", *made]
    lines += ["", *(f"- {'holds' if c.held else 'LOST'}: {c.text}" for c in finding.claims)]
    lines += [f"- {note}" for note in finding.notes]
    return "\n".join(lines)


def write(
    recipe: Recipe, finding: Finding, setting: Setting, folder: Path, form: str
) -> list[Path]:
    """Writes NAME.md and NAME-*.FORM to the folder; without matplotlib only NAME.md.

    NAME contains the recipe, the models, and the form (small or full).

    Args:
        form: png or svg.
    Raises:
        ConfigError: the folder cannot be written.
    """
    name = file_name(recipe.name, *setting.models, setting.form)
    written = [folder / f"{name}.md"]
    figures = finding.figures if find_spec("matplotlib") is not None else {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written[0].write_text(text_of(recipe, finding, setting, "md") + "\n", encoding="utf-8")
        for end, draw in figures.items():
            written.append(folder / f"{name}{end and '-' + end}.{form}")
            draw().savefig(written[-1], dpi=130)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
    return written
