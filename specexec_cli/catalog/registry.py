"""Merges the models.toml files, and finds the model that a name, folder or hub id stands for.

Nothing is downloaded, no checkpoint opened. Three files are merged entry by entry, and a later
file overrides an earlier one: the file shipped with the program, the one in the user's config
folder, and the one that a request names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path

from platformdirs import user_config_path

from specexec_cli.catalog.found_files import OLLAMA, nearest_of_ollama, ollama_file
from specexec_cli.catalog.gguf_choice import file_of_folder, file_of_hub, of_cache
from specexec_cli.catalog.models_file import (
    HeadEntry,
    ModelEntry,
    ModelsFile,
    PairEntry,
    is_path,
    read_models_file,
)
from specexec_cli.config import DRAFT_WORDS
from specexec_cli.errors import ConfigError, UnknownModelError, nearest
from specexec_cli.gguf.container import is_gguf

__all__ = ["DEMO", "ModelEntry", "PairEntry", "Registry", "load_registry", "user_models_file"]

DEMO = "demo"  # the pair that is meant where no model is named, and none was set
_LIST_HINT = " `specexec models list` shows what is known."
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Registry:
    """All entries after the merge; pairs of overriding files come first.

    Attributes:
        offline: the hub is not asked which file of a repository a quantization's name means.
        names: other names of models, each with the word that it stands for.
        used: the model that commands take where none is named; None is the demo.
    """

    models: Mapping[str, ModelEntry]
    pairs: Mapping[str, PairEntry]
    offline: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    used: str | None = None
    heads: Mapping[str, HeadEntry] = field(default_factory=dict)

    def meant(self, word: str | None) -> str:
        """The word without names of the user's own: what such a name, or None, stands for."""
        word = word if word is not None else self.used or DEMO
        return self.names.get(word, word)

    @property
    def all_names(self) -> set[str]:
        """Every name of a model, pair or head."""
        return {*self.pairs, *self.models, *self.heads, *self.names}

    def resolve(self, reference: str) -> ModelEntry:
        """The model that a reference stands for; of a pair, its target.

        In this order: a name in models.toml or of the user's own, a model folder or GGUF file, a
        model of ollama's as ollama:NAME, a hub repository as org/name[@revision], or one GGUF file
        of a repository as org/name[@revision]:FILE.gguf or, by its quantization,
        org/name[@revision]:Q4_K_M. The hub
        is asked only for the last of these, if the cache has no such file.

        Raises:
            UnknownModelError: it is none of these, or a folder without config.json.
        """
        reference = self.names.get(reference, reference)
        if reference in self.models:
            return self.models[reference]
        if reference in self.pairs:
            return self.resolve(self.pairs[reference].target)
        if reference in self.heads:
            return self.heads[reference].model
        path = Path(reference).expanduser()
        if path.is_dir():
            if not (path / "config.json").is_file():
                path = file_of_folder(path, reference)
            return ModelEntry(name=reference, repo=str(path.resolve()))
        if path.is_file():
            if not is_gguf(path):
                raise UnknownModelError(
                    f"'{reference}' is no GGUF file: give one, or the folder of a checkpoint"
                )
            return ModelEntry(name=reference, repo=str(path.resolve()))
        if reference.startswith(OLLAMA):
            blob = ollama_file(reference)
            if blob is None:
                hint = nearest_of_ollama(reference) or _LIST_HINT
                raise UnknownModelError(
                    f"ollama has no model '{reference.removeprefix(OLLAMA)}' here.{hint}"
                )
            return ModelEntry(name=reference, repo=str(blob))
        # a hub repository's name may end in .gguf as well, but seldom begins with a folder of here
        gone = reference.endswith(".gguf") and ":" not in reference and path.parent.is_dir()
        if gone or is_path(reference):
            raise UnknownModelError(f"no file or folder '{reference}': check the path.{_LIST_HINT}")
        named, colon, file = reference.partition(":")
        repo, _, revision = named.partition("@")
        if not _HUB_ID.fullmatch(repo):
            hint = nearest(reference, sorted(self.all_names)) or _LIST_HINT
            raise UnknownModelError(f"no model '{reference}' in models.toml.{hint}")
        if colon:
            entry = ModelEntry(name=reference, repo=repo, revision=revision or None, file=file)
            return entry if file.endswith(".gguf") else file_of_hub(entry, self.offline)
        known = self._of_repo(repo)
        if known is None:
            return of_cache(ModelEntry(name=reference, repo=repo, revision=revision or None))
        if revision in ("", known.revision):
            return known
        return replace(known.at(revision), name=reference)

    def pair_for_target(self, reference: str) -> PairEntry | None:
        """The first pair for the target that `reference` stands for; None if there is none."""
        wanted = self._identity(reference)
        pairs = self.pairs.values()
        return next((pair for pair in pairs if self._identity(pair.target) == wanted), None)

    def draft_of(self, pair: PairEntry) -> ModelEntry | None:
        """A pair's draft model; None if the text's own past or the target's own copy drafts.

        Raises:
            UnknownModelError: the draft model's folder has gone.
        """
        return None if pair.draft in DRAFT_WORDS else self.resolve(pair.draft)

    def pair_of(self, target: ModelEntry, draft: ModelEntry) -> PairEntry | None:
        """The first pair of these two models; None if there is none."""
        first, second = (target.weights, target.revision), (draft.weights, draft.revision)
        for pair in self.pairs.values():
            if self._identity(pair.target) == first and self._identity(pair.draft) == second:
                return pair
        return None

    def drafts_for(self, target: str) -> list[str]:
        """Draft models known to share the target's tokenizer, the smallest first.

        They are the drafts of the pairs that name this target, and smaller models of its family.
        """
        entry = self.resolve(target)
        wanted = self._identity(target)
        paired = {
            pair.draft
            for pair in self.pairs.values()
            if pair.draft not in DRAFT_WORDS and self._identity(pair.target) == wanted
        }
        family = {
            model.name
            for model in self.models.values()
            if entry.tokenizer is not None
            and model.tokenizer == entry.tokenizer
            and model.repo != entry.repo
            and (model.params or 0) < (entry.params or float("inf"))
        }
        size = {model.name: model.params or 0 for model in self.models.values()}
        return sorted(paired | family, key=lambda name: (size.get(name, 0), name))

    def heads_for(self, target: str) -> list[HeadEntry]:
        """Trained heads with files of their own that are known to draft for the target."""
        wanted = self._identity(target)
        return [head for head in self.heads.values() if self._identity(head.target) == wanted]

    def _identity(self, reference: str) -> tuple[str, str | None]:
        """A model's weights and revision, by which its name and its hub id compare equal.

        A folder that has gone is no error: it must not break the search for other pairs.
        """
        if reference in self.models:
            entry = self.models[reference]
            return entry.weights, entry.revision
        if reference in self.pairs:
            return self._identity(self.pairs[reference].target)
        path = Path(reference).expanduser()
        if is_path(reference) or path.is_dir():
            return str(path.resolve()), None
        named, _, file = reference.partition(":")
        repo, _, revision = named.partition("@")
        if file:
            return f"{repo}:{file}", revision or None
        known = self._of_repo(repo)
        if known is None:
            return repo, revision or None
        return known.weights, revision or known.revision

    def _of_repo(self, repo: str) -> ModelEntry | None:
        return next((model for model in self.models.values() if model.repo == repo), None)


def load_registry(models_file: Path | None = None, *, offline: bool = False) -> Registry:
    """The shipped models.toml, overridden by the user's and then by `models_file`.

    Args:
        offline: see Registry.
    Raises:
        ConfigError: a file cannot be read, or an entry is not right.
    """
    files, users = [shipped_file()], user_models_file()
    if users.is_file():
        files.append(users)
    if models_file is not None:
        files.append(models_file)
    merged = _merged(tuple((path, read_models_file(path)) for path in files))
    return replace(merged, offline=offline)


@lru_cache(maxsize=4)
def _merged(files: tuple[tuple[Path, ModelsFile], ...]) -> Registry:
    """What files say together, each overriding those before it; `models list` asks 180 times."""
    models: dict[str, ModelEntry] = {}
    pairs: dict[str, PairEntry] = {}
    names: dict[str, str] = {}
    heads: dict[str, HeadEntry] = {}
    used = None
    for path, content in files:
        models = {**models, **content.models}
        older = {name: pair for name, pair in pairs.items() if name not in content.pairs}
        pairs = {**content.pairs, **older}
        names = {**names, **content.names}
        heads = {**heads, **content.heads}
        used = content.use or used
        check_pairs(path, content, models)
    return Registry(models, pairs, names=names, used=used, heads=heads)


def user_models_file() -> Path:
    """Where a user's own entries live: models.toml in the platform's config folder."""
    return user_config_path("specexec", appauthor=False) / "models.toml"


@cache
def shipped_file() -> Path:
    """models.toml of the installed package, or of the repository when run from a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package, package.parent):
        if (folder / "models.toml").is_file():
            return folder / "models.toml"
    raise ConfigError(f"models.toml is missing from {package}: install specexec again")


def check_pairs(path: Path, content: ModelsFile, models: Mapping[str, ModelEntry]) -> None:
    """Checks that every target and draft, a head's target too, is a model of this or an earlier
    file, a hub id or a path.

    A target may also be a model of ollama's. A draft may also be the text's own past, the target's
    own copy, or the fastest of those at hand.

    Raises:
        ConfigError: a target or draft is none of these.
    """
    said = [
        (f"[pairs.{pair.name}] {key}", name)
        for pair in content.pairs.values()
        for key, name in (("target", pair.target), ("draft", pair.draft))
        if key == "target" or name not in DRAFT_WORDS
    ]
    said += [(f"[heads.{head.name}] target", head.target) for head in content.heads.values()]
    for where, name in said:
        named = "/" in name or name.startswith(OLLAMA)
        if name not in models and not named and not is_path(name):
            raise ConfigError(
                f"{path}: {where} '{name}' is not a model in models.toml."
                + nearest(name, list(models))
            )
