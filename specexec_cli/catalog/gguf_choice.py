"""Chooses one GGUF file of a folder, or of a hub repository by the name of its quantization."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from specexec_cli.catalog.found_files import NO_MODEL
from specexec_cli.catalog.hub import explain, snapshot_folder
from specexec_cli.catalog.hub_answers import watch_answers
from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.errors import CheckpointError, UnknownModelError
from specexec_cli.gguf.container import is_gguf, part_names

_MOST_TOLD = 8  # file names in an error
# the quantization in a file's name, and its bits
_QUANTIZATION = re.compile(
    r"(?<![A-Za-z0-9])(?:I?Q([1-8])(?:_[A-Z0-9]+)+|B?F(16|32)|MXFP(4))(?![A-Za-z0-9])",
    re.IGNORECASE,
)


def file_of_folder(folder: Path, reference: str) -> Path:
    """The GGUF file, or the first part of it, in a folder that has no config.json.

    Args:
        reference: the folder as the user named it, for errors.
    Raises:
        UnknownModelError: there is none, or more than one.
    """
    files = gguf_models(path.name for path in folder.glob("*.gguf") if is_gguf(path))
    if len(files) > 1:
        raise UnknownModelError(
            f"folder '{reference}' has several GGUF files: name one, as in {folder / files[0]}"
        )
    if not files:
        check_no_adapter((path.name for path in folder.glob("*")), reference)
        raise UnknownModelError(
            f"folder '{reference}' has no config.json: give the folder of a checkpoint"
        )
    return folder / files[0]


def file_of_hub(entry: ModelEntry, offline: bool) -> ModelEntry:
    """The entry with the name of its GGUF file in the place of its quantization's name.

    Files in the cache come first; the hub is asked for its list of files otherwise.

    Args:
        entry: its `file` is a quantization such as Q4_K_M, in letters of either case.
        offline: do not ask the hub.
    Raises:
        UnknownModelError: there is no such file, or more than one, or the hub cannot be asked.
    """
    word = entry.file or ""
    snapshot = snapshot_folder(entry)
    here = []
    if snapshot is not None:
        here = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
    found = _named(gguf_models(here), word)
    if not found:
        listed = gguf_models(_files_of_hub(entry, offline))
        found = _named(listed, word)
        if not found:
            raise UnknownModelError(f"{entry.repo} has no GGUF file '{word}'.{_some(listed)}")
    if len(found) > 1:
        raise UnknownModelError(
            f"{entry.repo} has several GGUF files '{word}': name one, as in {entry.repo}:{found[0]}"
        )
    return replace(entry, file=found[0])


def check_no_adapter(names: Iterable[str], reference: str) -> None:
    """Checks that files are no LoRA adapter without its model.

    Raises:
        UnknownModelError: they are one.
    """
    names = set(names)
    if "adapter_config.json" in names and "config.json" not in names:
        raise UnknownModelError(
            f"'{reference}' is an adapter (LoRA), and adapters are not applied: merge it into its "
            "model, as peft's merge_and_unload does, and give the folder of the result"
        )


def of_cache(entry: ModelEntry) -> ModelEntry:
    """A repository's entry; with its usual file, if the cache has GGUF files of it alone."""
    snapshot = snapshot_folder(entry)
    if snapshot is None or any(snapshot.glob("*.safetensors")):
        return entry
    here = gguf_models(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf"))
    found = usual_file(here)
    return replace(entry, file=found) if found is not None else entry


def of_listing(entry: ModelEntry, names: Iterable[str]) -> ModelEntry:
    """A repository's entry; with its usual file, if the repository has GGUF files alone.

    Args:
        entry: of a hub id without a file.
        names: the repository's files.
    Raises:
        UnknownModelError: no GGUF file of several stands out.
    """
    names = list(names)
    found = gguf_models(names)
    if not found or any(name.endswith(".safetensors") for name in names):
        return entry
    usual = usual_file(found)
    if usual is None:
        raise UnknownModelError(
            f"{entry.repo} holds GGUF files alone: name one, as in {entry.repo}:{found[0]}."
            + _some(found)
        )
    return replace(entry, file=usual)


def of_hub(entry: ModelEntry, offline: bool) -> ModelEntry:
    """As of_listing, of what the hub has; offline, the entry as it is.

    Raises:
        UnknownModelError: as of_listing, or the hub cannot be asked.
    """
    from huggingface_hub import constants

    if offline or constants.is_offline_mode():
        return entry
    return of_listing(entry, _files_of_hub(entry, offline))


def usual_file(names: Iterable[str]) -> str | None:
    """The GGUF file that is taken where none is named; None if no file stands out.

    Q4_K_M; else the file of the fewest bits from 4 up, or of the most bits if all have fewer. Of
    several with as many bits one of a K_M comes first, then another K, then by name.
    """
    names = list(names)
    ranked = sorted((rank, name) for name in names if (rank := _rank(name)) is not None)
    if len(names) == 1:
        return names[0]
    if not ranked or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
        return None
    return ranked[0][1]


def _rank(name: str) -> tuple[bool, int, bool, bool, str] | None:
    found = _QUANTIZATION.search(name)
    if found is None:
        return None
    bits, word = int(found[1] or found[2] or found[3]), found[0].upper()
    return bits < 4, abs(bits - 4), not word.endswith("_K_M"), "_K" not in word, word


def gguf_models(names: Iterable[str]) -> list[str]:
    """The names of GGUF files that hold models, sorted; of a split file, its first part's."""
    found = set()
    for name in names:
        folder, slash, file = name.rpartition("/")
        if file.endswith(".gguf") and NO_MODEL not in file:
            try:
                found.add(f"{folder}{slash}{part_names(file)[0]}")
            except CheckpointError:  # an impossible part, as in 00004-of-00003
                continue
    return sorted(found)


def _named(names: Iterable[str], word: str) -> list[str]:
    """Those of the names that contain a quantization's name as a whole word."""
    # dots and dashes separate words; Q4_K is none in Q4_K_M
    pattern = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [name for name in names if pattern.search(name)]


def _files_of_hub(entry: ModelEntry, offline: bool) -> list[str]:
    from huggingface_hub import HfApi, constants

    if offline or constants.is_offline_mode():
        raise UnknownModelError(
            f"the cache has no GGUF file '{entry.file}' of {entry.repo}, and this run is offline: "
            "fetch it once without `offline` and HF_HUB_OFFLINE, or name a file"
        )
    watch_answers()
    try:
        info = HfApi().model_info(entry.repo, revision=entry.revision)
    except Exception as error:  # whatever the hub or the network did: one line
        raise explain(error, entry, offline) from error
    return [file.rfilename for file in info.siblings or ()]


def _some(names: list[str]) -> str:
    if not names:
        return " It has none at all"
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return f" It has {', '.join(names[:_MOST_TOLD])}{more}"
