"""Says what a download would take, downloads a model, and deletes it again.

All files lie in huggingface_hub's own cache, so other programs find what is fetched here, and the
other way round. After `pull` was stopped, whatever stopped it, files outside of git of up to 50 GB
go on where they were, on a disk with symbolic links (large_files.py). huggingface_hub fetches all
other files, and begins a file that was stopped anew.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from specexec_cli.catalog.gguf_choice import check_no_adapter, of_listing
from specexec_cli.catalog.hub import (
    UNWANTED_FILES,
    WANTED_FILES,
    cached_snapshot,
    explain,
    fetch,
    gate,
    wanted_files,
)
from specexec_cli.catalog.hub_answers import watch_answers
from specexec_cli.catalog.large_files import LargeFile, fetch_large, resumable
from specexec_cli.catalog.models_file import TORCH_FILE, ModelEntry
from specexec_cli.errors import NotFetchedError, SpecexecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A model that is not on this machine, or not all of it."""

    entry: ModelEntry  # its revision is the one to fetch
    total_bytes: int  # of the files that are wanted
    fetch_bytes: int  # of the wanted files, those bytes that are not here
    gated: bool  # the hub wants an accepted licence
    allowed: bool  # the hub would hand it out: not gated, or accepted by the user's login
    commit: str = ""  # hash of the revision
    large: tuple[LargeFile, ...] = ()  # files not here that go on where they were stopped

    @property
    def obstacle(self) -> str:
        """Why the hub would refuse the download, in a sentence; empty if it would not."""
        return "" if self.allowed else gate(self.entry.repo)


def missing(entries: Sequence[ModelEntry]) -> list[ModelEntry]:
    """The entries without their weights on this machine, each once; opens no connection."""
    return [
        entry
        for index, entry in enumerate(entries)
        if entry.folder is None and entry not in entries[:index] and cached_snapshot(entry) is None
    ]


def survey(entry: ModelEntry) -> Download:
    """Asks the hub how much there is to fetch, and whether the user may fetch it.

    Of a repository that has GGUF files alone it is one file, which the download's entry names.

    Raises:
        UnknownModelError: no such repository or revision, or the hub cannot be reached.
        NotFetchedError: the cache cannot be written to.
    """
    from huggingface_hub import HfApi, errors

    watch_answers()
    api, revision = HfApi(), entry.revision
    try:
        info = api.model_info(entry.repo, revision=revision, files_metadata=True)
        allowed = True
        if info.gated:
            try:
                api.auth_check(entry.repo)
            except errors.GatedRepoError:
                allowed = False
        if entry.file is None:
            names = [file.rfilename for file in info.siblings or ()]
            check_no_adapter(names, entry.name)
            entry = of_listing(entry, names)
        chosen = _wanted([file.rfilename for file in info.siblings or ()], entry)
        folder = _repo_folder(entry)
        snapshot = folder / "snapshots" / str(info.sha)
        wanted = list(  # a content that has two names counts once
            {
                file.lfs.sha256 if file.lfs else file.rfilename: file
                for file in info.siblings or ()
                if file.rfilename in chosen
            }.values()
        )
        absent = [file for file in wanted if not (snapshot / file.rfilename).is_file()]
        large = [resumable(file.rfilename, file.lfs, folder) for file in absent]
        found = tuple(file for file in large if file is not None)
        fetch_bytes = sum(file.size or 0 for file in absent)
        fetch_bytes -= sum(file.bytes_here(folder) for file in found)
    except Exception as error:  # whatever the hub, the network or the disk did: one line
        raise explain(error, entry, offline=False) from error
    return Download(
        entry=entry,
        total_bytes=sum(file.size or 0 for file in wanted),
        fetch_bytes=fetch_bytes,
        gated=bool(info.gated),
        allowed=allowed,
        commit=str(info.sha),
        large=found,
    )


def _wanted(names: Collection[str], entry: ModelEntry) -> set[str]:
    """The names of the files, of those that a repository has, that hub.fetch brings."""
    if entry.file is not None:
        return set(wanted_files(entry)) & set(names)
    found = {
        name
        for name in names
        if any(fnmatch(name, pattern) for pattern in WANTED_FILES)
        and not any(fnmatch(name, pattern) for pattern in UNWANTED_FILES)
    }
    if not any(name.endswith(".safetensors") for name in found):
        found |= {TORCH_FILE} & set(names)
    return found


def free_disk_bytes() -> int:
    """Free bytes of the disk that the hub's cache is on, or will be on."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return shutil.disk_usage(there).free


def pull(download: Download, progress: Callable[[int], None]) -> Path:
    """Fetches the missing files of a model.

    Args:
        progress: called by several threads with the number of bytes that have come since its last
            call; below 0 if bytes were lost again.
    Returns:
        The folder of its files.
    Raises:
        UnknownModelError, CheckpointError: see hub.fetch.
    """
    entry = download.entry
    try:
        fetch_large(entry, download.commit, download.large, _repo_folder(entry), progress)
    except SpecexecError:
        raise
    except Exception as error:  # whatever the hub, the network or the disk did: one line
        raise explain(error, entry, offline=False) from error
    return fetch(entry, stored=progress)


@dataclass(frozen=True, slots=True)
class Cached:
    """A repository in the hub's cache, whole or in part."""

    repo: str
    folder: Path
    size_bytes: int


def cached(entry: ModelEntry) -> Cached | None:
    """What the cache holds of a model of the hub; None if it holds nothing."""
    folder = _repo_folder(entry)
    if entry.folder is not None or not folder.is_dir():
        return None
    blobs = [path.stat().st_size for path in (folder / "blobs").glob("*") if path.is_file()]
    return Cached(entry.repo, folder, sum(blobs))


def remove(found: Cached) -> None:
    """Deletes all revisions of a repository, and the remains of broken downloads.

    Raises:
        NotFetchedError: a file cannot be deleted.
    """
    from huggingface_hub import scan_cache_dir

    try:
        revisions = [
            revision.commit_hash
            for repo in scan_cache_dir(found.folder.parent).repos
            if repo.repo_path.resolve() == found.folder.resolve()
            for revision in repo.revisions
        ]
        if revisions:
            scan_cache_dir(found.folder.parent).delete_revisions(*revisions).execute()
        if found.folder.is_dir():  # a download that never ended has left no revision
            shutil.rmtree(found.folder)
    except OSError as error:
        raise NotFetchedError(
            f"cannot delete {error.filename or found.folder}: {error.strerror}"
        ) from error


def _repo_folder(entry: ModelEntry) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / ("models--" + entry.repo.replace("/", "--"))
