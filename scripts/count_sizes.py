"""Counts the weights of every model in models.toml and writes them there, as its key `counted`.

    python scripts/count_sizes.py            counts and writes
    python scripts/count_sizes.py --check    fails where a stored count differs from the model's

A model is built from its entry's shape on PyTorch's meta device, without weights or a download.
Counts are the same for entries of one shape, whatever their dtype and quantization.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specexec_cli.catalog.models_file import ModelEntry, read_models_file
from specexec_cli.catalog.weight_counts import table_of
from specexec_cli.planning.built_sizes import count_weights

PATH = Path(__file__).parents[1] / "models.toml"
_ENTRY = re.compile(r'\[models\."?([^"\]]+)"?\]')


def counted(models: Iterable[ModelEntry]) -> dict[str, dict[str, Any]]:
    """The counts of models by name, as models.toml has them; none of models without a shape."""
    by_config: dict[str, dict[str, Any]] = {}
    found = {}
    for model in models:
        keys = ("model_type", *model.shape)
        config = {key: value for key, value in model.config_json().items() if key in keys}
        if config and str(config) not in by_config:
            by_config[str(config)] = table_of(count_weights(config))
        if config:
            found[model.name] = by_config[str(config)]
    return found


def as_toml(value: Any) -> str:
    """A value in one line of TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {as_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def with_counts(text: str, counts: dict[str, dict[str, Any]]) -> str:
    """A models file's text with the counts below each entry's shape, in place of what was there."""
    lines, name = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            entry = _ENTRY.fullmatch(line)
            name = entry[1] if entry else ""
        if not line.startswith("counted ="):
            lines.append(line)
        if line.startswith("shape =") and name in counts:
            lines.append(f"counted = {as_toml(counts[name])}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    arguments = parser.parse_args()
    models = read_models_file(PATH).models
    counts = counted(models.values())
    if not arguments.check:
        PATH.write_text(with_counts(PATH.read_text("utf-8"), counts), "utf-8")
        return
    wrong = [name for name, table in counts.items() if models[name].counted != table]
    if wrong:
        sys.exit(f"models.toml: counts differ of {', '.join(wrong)}: run scripts/count_sizes.py")


if __name__ == "__main__":
    main()
