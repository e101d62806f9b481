"""Finds models that other programs brought to this machine; they are used where they lie.

ollama keeps blobs under their hashes, and manifests that say which blob a model is
(https://github.com/ollama/ollama/blob/main/docs/api.md). llama.cpp and LM Studio each keep a folder
of GGUF files (https://lmstudio.ai/docs/app/basics/import-model). Both llama.cpp and the hub's own
tools keep files in huggingface_hub's cache, which has folders of safetensors as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specexec_cli.catalog.architectures import ARCHITECTURES, known_config
from specexec_cli.catalog.hub import cached_snapshot
from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.errors import CheckpointError, nearest
from specexec_cli.gguf.container import is_gguf, part_names
from specexec_cli.guarded import read_json

OLLAMA = "ollama:"  # begins the names of ollama's models
_MODEL = "application/vnd.ollama.image.model"  # mediaType of the weights among a manifest's layers
_PARAMETERS = "application/vnd.ollama.image.params"
_LARGEST_MANIFEST_BYTES = 1_000_000
NO_MODEL = "mmproj"  # in the names of files that hold a vision encoder, which is no model


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A model in a GGUF file, in the parts of one, or in a folder of the hub's cache."""

    name: str  # as every command takes it
    program: str  # that brought the file here
    path: Path  # the first part of a split file, or the folder
    size_bytes: int


def found_files() -> list[FoundFile]:
    """All files that are found, by program and then by name; opens no connection."""
    kinds = (_of_ollama, _of_llama_cpp, _of_lm_studio, _of_hub, _repositories_of_hub)
    return [each for kind in kinds for each in _sorted(kind())]


def ollama_file(name: str) -> Path | None:
    """The file of the ollama model that is called `ollama:NAME[:TAG]`; None if there is none."""
    wanted = name if ":" in name.removeprefix(OLLAMA) else f"{name}:latest"
    return next((each.path for each in _of_ollama() if each.name == wanted), None)


def nearest_of_ollama(name: str) -> str:
    """' Did you mean ...?' for the ollama model here whose name and tag are closest to
    `ollama:NAME[:TAG]`, or an empty string."""
    here = [each.name.removeprefix(OLLAMA) for each in _sorted(_of_ollama())]
    return nearest(name.removeprefix(OLLAMA), here).replace("'", f"'{OLLAMA}", 1)


def ollama_parameters(blob: Path) -> Path | None:
    """ollama's file of the parameters that a model is run with; None if it has none.

    Args:
        blob: a GGUF file; it need not be ollama's.
    """
    if blob.parent.name != "blobs":
        return None
    blobs = blob.parent
    for manifest in _files(blobs.parent / "manifests", "*"):
        if _layer(manifest, _MODEL, blobs) == blob:
            return _layer(manifest, _PARAMETERS, blobs)
    return None


def _sorted(found: Iterator[FoundFile]) -> list[FoundFile]:
    return sorted(found, key=lambda each: each.name)


def ollama_folders() -> list[Path]:
    """Where ollama keeps models: OLLAMA_MODELS if set, else the user's folder and the service's."""
    if told := os.environ.get("OLLAMA_MODELS"):
        return [Path(told)]
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def llama_cpp_folder() -> Path:
    """Where llama.cpp keeps the files it downloads."""
    if told := os.environ.get("LLAMA_CACHE"):
        return Path(told)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "llama.cpp"
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "llama.cpp"


def _of_ollama() -> Iterator[FoundFile]:
    for folder in ollama_folders():
        manifests = folder / "manifests"
        for manifest in _files(manifests, "*"):
            blob = _layer(manifest, _MODEL, folder / "blobs")
            if blob is not None and (size := _size(blob)) is not None:
                *place, tag = manifest.relative_to(manifests).parts
                # a name without a slash belongs to registry.ollama.ai/library
                named = "/".join(place).removeprefix("registry.ollama.ai/").removeprefix("library/")
                name = f"{OLLAMA}{named}:{tag}"
                yield FoundFile(name, "ollama", blob, size)


def _layer(manifest: Path, kind: str, blobs: Path) -> Path | None:
    """The file of a manifest's first layer of a kind; None if one of them cannot be read."""
    try:
        layers = read_json(manifest, most_bytes=_LARGEST_MANIFEST_BYTES)["layers"]
        digest = next(str(each["digest"]) for each in layers if each["mediaType"] == kind)
        blob = blobs / digest.replace(":", "-")
        # a digest may be an impossible file name
        return blob if blob.parent == blobs and blob.is_file() else None
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return None  # another program's file: not ours to judge


def _of_llama_cpp() -> Iterator[FoundFile]:
    for path in _files(llama_cpp_folder(), "*.gguf"):
        if (size := _size(path)) is not None:
            yield FoundFile(str(path), "llama.cpp", path, size)


def lm_studio_folders() -> list[Path]:
    """Where LM Studio keeps models: today's folder and the one of its versions before 0.3.6."""
    return [Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"]


def _of_lm_studio() -> Iterator[FoundFile]:
    for folder in lm_studio_folders():
        for path in _files(folder, "*.gguf"):
            if (size := _size(path)) is not None:
                yield FoundFile(str(path), "LM Studio", path, size)


def _repositories_of_hub() -> Iterator[FoundFile]:
    """Whole folders of safetensors, of the types of model that run here."""
    for repo in _hub_cache():
        name = repo.name.removeprefix("models--").replace("--", "/", 1)
        folder = cached_snapshot(ModelEntry(name=name, repo=name))
        if folder is None or not _is_language_model(folder / "config.json"):
            continue
        size = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
        yield FoundFile(name, "hub", folder, size)


def _is_language_model(path: Path) -> bool:
    try:
        config = read_json(path, most_bytes=_LARGEST_MANIFEST_BYTES)
        return known_config(config)["model_type"] in ARCHITECTURES
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # another program's file: not ours to judge


def _hub_cache() -> list[Path]:
    """The folders of models in the hub's cache."""
    from huggingface_hub import constants

    return sorted(Path(constants.HF_HUB_CACHE).glob("models--*"))


def _of_hub() -> Iterator[FoundFile]:
    for repo in _hub_cache():
        found: dict[str, FoundFile] = {}
        for snapshot in sorted(repo.glob("snapshots/*")):
            for path in _files(snapshot, "*.gguf"):
                if (size := _size(path)) is not None:
                    file = path.relative_to(snapshot).as_posix()
                    named = repo.name.removeprefix("models--").replace("--", "/", 1)
                    name = f"{named}:{file}"
                    found[file] = FoundFile(name, "hub", path, size)
        yield from found.values()


def _files(folder: Path, pattern: str) -> list[Path]:
    """Files below a folder; an empty list if the folder may not be read."""
    try:
        return sorted(path for path in folder.rglob(pattern) if path.is_file())
    except OSError:
        return []


def _size(path: Path) -> int | None:
    """Bytes of a model, all parts together; None for a later part, or if a part is missing.

    None also for files that are no model, and for impossible names: x-00004-of-00003.gguf.
    """
    try:
        parts = [path.parent / name for name in part_names(path.name)]
        if NO_MODEL in path.name or path != parts[0] or not is_gguf(path):
            return None
        return sum(part.stat().st_size for part in parts)
    except (OSError, CheckpointError):
        return None
