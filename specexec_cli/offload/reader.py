"""Reads files into memory at the speed of the disk: with O_DIRECT, aligned, in large pieces.

Knows where tensors lie but not what they are.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specexec_cli.errors import StreamError
from specexec_cli.offload.checkpoint import TensorRange

BLOCK_BYTES = 4096  # offsets, lengths and addresses of O_DIRECT reads are multiples of it
MAX_GAP_BYTES = 256 << 10  # reading through a smaller gap is cheaper than another request
PIECE_BYTES = 8 << 20  # one read; 2 to 32 MB are as fast on the disks that were tried
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # macOS has none
READER_THREADS = 2  # one reads while the other records its piece: 8.5 GB/s from the page cache

Notice = Callable[[str], None]
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class Extent:
    """A block-aligned range of a file and its place in a buffer. `stop` may lie past EOF."""

    path: Path
    start: int
    stop: int
    offset: int  # in the buffer, block-aligned


@dataclass(frozen=True, slots=True)
class Layout:
    """How a set of tensors is read: what to read, and where in the buffer each tensor starts."""

    extents: tuple[Extent, ...]
    places: tuple[tuple[TensorRange, int], ...]  # tensor, buffer offset of its first byte
    buffer_bytes: int

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor, _ in self.places)

    def shift(self, aligned_bytes: int) -> int:
        """The byte of a buffer to begin at, for a first tensor at a multiple of `aligned_bytes`."""
        return -self.places[0][1] % aligned_bytes if self.places else 0

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> list[Extent]:
        """The extents cut into reads of at most `piece_bytes`."""
        return [
            Extent(extent.path, start, min(start + piece_bytes, extent.stop),
                   extent.offset + start - extent.start)
            for extent in self.extents
            for start in range(extent.start, extent.stop, piece_bytes)
        ]  # fmt: skip


def lay_out(ranges: Sequence[TensorRange]) -> Layout:
    """Coalesce tensors that are neighbours on disk into few large extents."""
    extents: list[Extent] = []
    places = []
    size = 0
    for tensor in sorted(ranges, key=lambda tensor: (str(tensor.path), tensor.start)):
        start = tensor.start // BLOCK_BYTES * BLOCK_BYTES
        stop = max(-(-tensor.stop // BLOCK_BYTES) * BLOCK_BYTES, start)
        last = extents[-1] if extents else None
        if last and last.path == tensor.path and start <= last.stop + MAX_GAP_BYTES:
            last = Extent(last.path, last.start, max(last.stop, stop), last.offset)
            extents[-1] = last
        else:
            last = Extent(tensor.path, start, stop, size)
            extents.append(last)
        size = last.offset + last.stop - last.start
        places.append((tensor, last.offset + tensor.start - last.start))
    return Layout(tuple(extents), tuple(places), size)


def as_range(piece: Extent) -> TensorRange:
    """The piece as a tensor of bytes, for readers that take tensors."""
    n_bytes = piece.stop - piece.start
    return TensorRange("piece", piece.path, "U8", (n_bytes,), piece.start, piece.stop)


class DirectFile:
    """One open checkpoint file, read without the page cache. Safe to read from several threads."""

    def __init__(self, path: Path, notice: Notice) -> None:
        """Open for reading.

        Raises:
            StreamError: the file cannot be opened.
        """
        self.path = path
        self._notice = notice
        self._lock = threading.Lock()
        self._direct = _O_DIRECT != 0
        if not self._direct:
            notice("this system has no O_DIRECT: files are read with the page cache's help")
        try:
            self._fd = self._open()
            status = os.fstat(self._fd)
        except OSError as error:
            raise StreamError(f"cannot open {path}: {error.strerror}") from None
        self.n_bytes = status.st_size
        self._mtime_ns = status.st_mtime_ns

    def _open(self) -> int:
        if self._direct:
            try:
                return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._refused()
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(fcntl, "F_NOCACHE"):  # macOS, which has no O_DIRECT
            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
        return descriptor

    def _refused(self) -> None:
        self._direct = False
        self._notice(
            "the file system refuses O_DIRECT: reading through the page cache, which is slower "
            f"({self.path.parent})"
        )

    def read_into(self, target: memoryview, start: int, stop: int) -> int:
        """Like scatter(), into one target of stop - start bytes."""
        return self.scatter([target], start, stop)

    def scatter(self, targets: Sequence[memoryview], start: int, stop: int) -> int:
        """Fill `targets`, one after another, with the file's bytes start..stop.

        Targets past EOF are left as they are.

        Args:
            targets: writable bytes, stop - start in all; addresses and sizes block-aligned.
            start: block-aligned, as is `stop`.
        Returns:
            The number of bytes read.
        Raises:
            StreamError: the disk fails, or the file is not what it was when it was opened.
        """
        wanted = min(stop, self.n_bytes) - start
        done = 0
        while done < wanted:
            try:
                count = self._read_once(_behind(targets, done), start + done)
            except OSError as error:
                raise StreamError(
                    f"reading {self.path} failed at byte {start + done}: {error.strerror}"
                ) from None
            if done + count < wanted:
                # A short read: go on from the last whole block; O_DIRECT takes no other offset.
                count = (done + count) // BLOCK_BYTES * BLOCK_BYTES - done
            if count <= 0:
                raise StreamError(
                    f"{self.path} ends at byte {os.fstat(self._fd).st_size} but had {self.n_bytes} "
                    "bytes when it was opened: it was truncated meanwhile, download it again"
                )
            done += count
        self._check_unchanged(start)
        return wanted

    def _read_once(self, targets: Sequence[memoryview], offset: int) -> int:
        direct = self._direct
        try:
            count = os.preadv(self._fd, targets, offset)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self._fall_back()
            count = os.preadv(self._fd, targets, offset)
        if sys.platform != "darwin" and not self._direct and hasattr(os, "posix_fadvise"):
            # Cached pages would evict what the next layers need, and count against the cgroup.
            os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def _fall_back(self) -> None:
        """Swap the descriptor for a buffered one in place: other threads may be reading from it."""
        with self._lock:
            if self._direct:
                self._refused()
                buffered = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                os.dup2(buffered, self._fd, inheritable=False)
                os.close(buffered)

    def _check_unchanged(self, offset: int) -> None:
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != (self.n_bytes, self._mtime_ns):
            raise StreamError(
                f"{self.path} was changed while it was being read (at byte {offset}): start again"
            )

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _behind(targets: Sequence[memoryview], done: int) -> list[memoryview]:
    """The targets without their first `done` bytes."""
    left = []
    for target in targets:
        if done < len(target):
            left.append(target[done:])
        done = max(0, done - len(target))
    return left


def once(notice: Notice) -> Notice:
    """Wraps `notice` to pass each text on only once, however many files or buffers it concerns."""
    told: set[str] = set()

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            notice(text)

    return tell
