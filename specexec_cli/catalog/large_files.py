"""Large files of the hub, fetched so that a download that was killed goes on where it was.

huggingface_hub itself begins anew: each of its downloads writes into a file of a random name, by
http as by Xet (file_download.py, _download_to_tmp_and_move; its issue 4196). So the files that the
hub knows by their SHA-256 are brought to where its cache keeps them before it is asked for the
rest. It finds them there and links them. Ranges, retries and redirects are those of its http_get.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.errors import CheckpointError

_AT_ONCE = 8  # as many as huggingface_hub fetches


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeFile:
    """A file that the hub keeps outside of git, under the hash of its bytes."""

    name: str
    size_bytes: int
    sha256: str

    def blob(self, repo_folder: Path) -> Path:
        """Where huggingface_hub keeps it once it is whole."""
        return repo_folder / "blobs" / self.sha256

    def partial(self, repo_folder: Path) -> Path:
        """Where the first part of it waits for the rest."""
        return repo_folder / "blobs" / f"{self.sha256}.incomplete"

    def bytes_here(self, repo_folder: Path) -> int:
        """How much of it need not be fetched."""
        if self.blob(repo_folder).exists():
            return self.size_bytes
        partial = self.partial(repo_folder)
        n_bytes = partial.stat().st_size if partial.is_file() else 0
        return n_bytes if n_bytes <= self.size_bytes else 0


def resumable(name: str, lfs: Any, repo_folder: Path) -> LargeFile | None:
    """The file as one to fetch here; None where huggingface_hub had better fetch it.

    Args:
        lfs: what the hub's metadata says of a file outside of git; None of one inside.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import are_symlinks_supported

    if lfs is None or lfs.size > constants.MAX_HTTP_DOWNLOAD_SIZE:  # larger ones come by Xet alone
        return None
    if not are_symlinks_supported(repo_folder.parent):  # then a blob is copied, and stays as well
        return None
    return LargeFile(name=name, size_bytes=lfs.size, sha256=lfs.sha256)


def fetch_large(
    entry: ModelEntry,
    commit: str,
    files: Sequence[LargeFile],
    repo_folder: Path,
    stored: Callable[[int], None],
) -> None:
    """Fetches what is missing of the files into the hub's cache.

    Args:
        commit: hash of the revision, at which files do not change.
        repo_folder: the repository's folder in the cache.
        stored: told of bytes as they reach the disk, by several threads.
    Raises:
        CheckpointError: what came has another hash; it was deleted.
        Exception: whatever the hub, the network or the disk did; what came is kept.
    """
    (repo_folder / "blobs").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        fetched = [
            pool.submit(_fetch_one, entry, commit, file, repo_folder, stored) for file in files
        ]
        try:
            for each in fetched:
                each.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _fetch_one(
    entry: ModelEntry,
    commit: str,
    file: LargeFile,
    repo_folder: Path,
    stored: Callable[[int], None],
) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

    partial = file.partial(repo_folder)
    lock = repo_folder.parent / ".locks" / repo_folder.name / f"{file.sha256}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):  # the one that huggingface_hub takes for this blob
        here = file.bytes_here(repo_folder)
        if file.blob(repo_folder).exists():  # another program was faster
            return
        with partial.open("ab" if here else "wb") as writer:
            http_get(
                hf_hub_url(entry.repo, file.name, revision=commit),
                writer,
                resume_size=here,
                headers=build_hf_headers(),
                expected_size=file.size_bytes,
                tqdm_class=_telling_bar(stored, here),
            )
        with partial.open("rb") as reader:
            came = hashlib.file_digest(reader, "sha256").hexdigest()
        if came != file.sha256:
            partial.unlink()
            raise CheckpointError(
                f"{file.name} of {entry.repo} came damaged and was deleted: fetch it again"
            )
        partial.rename(file.blob(repo_folder))


def _telling_bar(stored: Callable[[int], None], here: int) -> type[Any]:
    """A progress bar class for http_get that never shows.

    Args:
        stored: told of bytes as they come, and of those that are lost again.
        here: bytes that were on the disk before.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Telling(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            lost = here - kwargs.get("initial", 0)
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
            if lost:  # the server does not know of ranges, and begins at the beginning
                stored(-lost)

        def update(self, n: float | None = 1) -> bool | None:
            stored(int(n or 0))
            return None

    return Telling
