"""Fetches large files of the hub so that a download that was killed goes on where it was.

huggingface_hub itself begins anew: each of its downloads writes into a file of a random name, by
http as by Xet (file_download.py, _download_to_tmp_and_move; its issue 4196). So this module puts
the files that the hub knows by their SHA-256 where huggingface_hub's cache keeps them, before
huggingface_hub fetches the rest; it finds them there and links them. Its http_get does ranges,
retries and redirects.

Two processes that fetch the same file take turns by a file lock. Where file locks do nothing
(Lustre, some NFS) they would write into one another's file: there only one process at a time may
fetch a model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.errors import CheckpointError

_AT_ONCE = 8  # as many as huggingface_hub fetches
_LOCK_TURN_S = 1.0  # while waiting for another process's lock, time between looks at `ended`


class _EndedError(Exception):
    """Another file failed, or the caller left: this download ends, and its bytes stay on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeFile:
    """A file that the hub keeps outside of git, under the hash of its bytes."""

    name: str
    size_bytes: int
    sha256: str

    def blob(self, repo_folder: Path) -> Path:
        """Where huggingface_hub keeps the whole file."""
        return repo_folder / "blobs" / self.sha256

    def partial(self, repo_folder: Path) -> Path:
        """Where the file's first bytes wait for the rest."""
        return repo_folder / "blobs" / f"{self.sha256}.incomplete"

    def bytes_here(self, repo_folder: Path) -> int:
        """Bytes of the file that are here and need not be fetched."""
        if self.blob(repo_folder).exists():
            return self.size_bytes
        try:
            n_bytes = self.partial(repo_folder).stat().st_size
        except FileNotFoundError:
            return 0
        return n_bytes if n_bytes <= self.size_bytes else 0


def resumable(name: str, lfs: Any, repo_folder: Path) -> LargeFile | None:
    """The file, if fetch_large() can fetch it; None if huggingface_hub has to.

    Args:
        lfs: the hub's metadata of a file outside of git; None for a file inside.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import are_symlinks_supported

    if lfs is None or lfs.size > constants.MAX_HTTP_DOWNLOAD_SIZE:  # larger ones come by Xet alone
        return None
    if not are_symlinks_supported(repo_folder.parent):  # the blob would be copied, and stay
        return None
    return LargeFile(name=name, size_bytes=lfs.size, sha256=lfs.sha256)


def fetch_large(
    entry: ModelEntry,
    commit: str,
    files: Sequence[LargeFile],
    repo_folder: Path,
    stored: Callable[[int], None],
) -> None:
    """Fetches the missing bytes of the files into the hub's cache.

    Args:
        commit: hash of the revision; at a commit, files do not change.
        repo_folder: the repository's folder in the cache.
        stored: called by several threads with the number of bytes that have reached the disk since
            its last call; below 0 if bytes were lost again.
    Raises:
        CheckpointError: the bytes of a file have another hash; they were deleted.
        Exception: an error of the hub, the network or the disk; the bytes that came are kept.
    """
    # imported here: it imports logging, and most commands fetch nothing
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

    (repo_folder / "blobs").mkdir(parents=True, exist_ok=True)
    run = _Run(entry, commit, repo_folder, stored, ended=Event())
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            fetched = [pool.submit(run.fetch, file, file.bytes_here(repo_folder)) for file in files]
            for each in wait(fetched, return_when=FIRST_EXCEPTION).done:
                each.result()
        finally:
            run.ended.set()
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Run:
    """The downloads of one call of fetch_large(); when one fails, all end.

    Args:
        ended: set once one of them failed, or the caller left.
    """

    entry: ModelEntry
    commit: str
    repo_folder: Path
    stored: Callable[[int], None]
    ended: Event

    def fetch(self, file: LargeFile, known: int) -> None:
        """Completes a file and makes it a blob; fetches all of it anew if the part here is damaged.

        Args:
            known: bytes of the file that were here when the caller counted.
        """
        with self._locked(file):
            here = file.bytes_here(self.repo_folder)
            self.stored(here - known)  # another program has fetched more
            if file.blob(self.repo_folder).exists():
                return
            right = self._complete(file, here)
            if here and not right:
                self.stored(-file.size_bytes)
                right = self._complete(file, 0)
            if not right:
                raise CheckpointError(
                    f"{file.name} of {self.entry.repo} came damaged and was deleted: fetch it again"
                )
            file.partial(self.repo_folder).rename(file.blob(self.repo_folder))

    def _locked(self, file: LargeFile) -> ExitStack:
        """Holds the lock that huggingface_hub takes for this blob.

        Raises:
            _EndedError: the run ended while another process held it.
        """
        from filelock import Timeout
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        folder = self.repo_folder
        lock = folder.parent / ".locks" / folder.name / f"{file.sha256}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = ExitStack()
        while not self.ended.is_set():
            try:
                held.enter_context(WeakFileLock(lock, timeout=_LOCK_TURN_S))
            except Timeout:
                continue
            return held
        raise _EndedError

    def _complete(self, file: LargeFile, here: int) -> bool:
        """Fetches the bytes after the first `here`; True if the hash is right, else deletes all."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        partial = file.partial(self.repo_folder)
        with partial.open("ab" if here else "wb") as writer:
            http_get(
                hf_hub_url(self.entry.repo, file.name, revision=self.commit),
                writer,
                resume_size=here,
                headers=build_hf_headers(),
                expected_size=file.size_bytes,
                tqdm_class=_telling_bar(self.stored, here, self.ended),
            )
            writer.flush()
            os.fsync(writer.fileno())  # nobody checks a blob again: no power cut may shorten it
        with partial.open("rb") as reader:
            right = hashlib.file_digest(reader, "sha256").hexdigest() == file.sha256
        if not right:
            partial.unlink()
        return right


def _telling_bar(stored: Callable[[int], None], here: int, ended: Event) -> type[Any]:
    """A progress bar class that never shows, and that ends http_get once `ended` is set.

    Args:
        stored: called with the number of bytes that came, or below 0 for bytes lost again.
        here: bytes that were on the disk before.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Telling(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            lost = here - kwargs.get("initial", 0)
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
            if lost:  # the server does not know ranges, and begins at the first byte
                stored(-lost)

        def update(self, n: float | None = 1) -> bool | None:
            if ended.is_set():
                raise _EndedError
            stored(int(n or 0))
            return None

    return Telling
