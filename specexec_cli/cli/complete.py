"""Completions for the values of options, used after `specexec --install-completion`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from specexec_cli.errors import SpecexecError

Complete = Callable[[str], list[str]]


def pair_names(incomplete: str) -> list[str]:
    """Pairs in models.toml with names that begin with `incomplete`."""
    from specexec_cli.catalog.registry import load_registry

    try:
        return _beginning(load_registry().pairs, incomplete)
    except SpecexecError:  # a models file of the user's that cannot be read: nothing to offer
        return []


def model_names(incomplete: str) -> list[str]:
    """Models and names of the user's own that begin with `incomplete`; folders for a path."""
    if incomplete.startswith((".", "/", "~")):
        folder, begun = Path(incomplete).expanduser().parent, Path(incomplete).name
        if incomplete.endswith("/"):
            folder, begun = Path(incomplete).expanduser(), ""
        if not folder.is_dir():
            return []
        found = (path for path in folder.iterdir() if path.is_dir())
        return sorted(f"{path}/" for path in found if path.name.startswith(begun))
    from specexec_cli.catalog.registry import load_registry

    try:
        registry = load_registry()
        return _beginning([*registry.models, *registry.names], incomplete)
    except SpecexecError:
        return []


def names(incomplete: str) -> list[str]:
    """Pairs and models with names that begin with `incomplete`."""
    return sorted({*pair_names(incomplete), *model_names(incomplete)})


def own_names(incomplete: str) -> list[str]:
    """What `specexec models rm` can remove, where it begins with `incomplete`."""
    from specexec_cli.catalog.models_file import read_models_file
    from specexec_cli.catalog.registry import user_models_file

    try:
        found = read_models_file(user_models_file())
    except SpecexecError:  # there is none, or it cannot be read
        return []
    return sorted(_beginning({*found.models, *found.pairs, *found.names}, incomplete))


def among(*words: str) -> Complete:
    """A completion that offers these words."""
    return lambda incomplete: _beginning(words, incomplete)


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
