"""Private anonymous memory on huge pages, into which O_DIRECT reads fast. Knows no tensors.

On 4 KiB pages the kernel splits an 8 MB read into hundreds of small requests; on 2 MiB pages it
makes a few large ones, which are three times as fast on an NVMe disk.
"""

from __future__ import annotations

import mmap
import re
from contextlib import suppress
from pathlib import Path

import numpy as np

from specexec_cli.device import HUGE_PAGE_BYTES, format_bytes, free_ram_bytes
from specexec_cli.errors import OutOfMemoryError


class HugeBuffer:
    """`n_bytes` of zeroed memory, aligned to 2 MiB, every page present.

    Views of it (slices of `view`, tensors made from them) keep the memory mapped; it is unmapped by
    close() or, where views are still alive then, together with the last of them.
    """

    def __init__(self, n_bytes: int, purpose: str, mend: str) -> None:
        """Map and touch the memory.

        Args:
            purpose: what the memory is for; the error message begins with it.
            mend: what the user can change; the error message ends with it.
        Raises:
            OutOfMemoryError: the operating system refuses the mapping.
        """
        self.n_bytes = n_bytes
        size = -(-max(n_bytes, 1) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        try:
            # One page more than needed, so that an aligned start lies within.
            mapping = mmap.mmap(
                -1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, ValueError, OverflowError, MemoryError):
            raise OutOfMemoryError(
                f"{purpose}: {format_bytes(n_bytes)} of RAM are needed but "
                f"{format_bytes(free_ram_bytes())} are free. {mend}"
            ) from None
        self._mapping: mmap.mmap | None = mapping
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        offset = -address % HUGE_PAGE_BYTES
        self.address = address + offset
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages; has_huge_pages() tells
                mapping.madvise(mmap.MADV_HUGEPAGE, offset, size)
        np.frombuffer(mapping, np.uint8)[offset : offset + size : mmap.PAGESIZE] = 0
        self._view: memoryview | None = memoryview(mapping)[offset : offset + n_bytes]

    @property
    def view(self) -> memoryview:
        """The whole buffer as writable bytes."""
        if self._view is None:
            raise ValueError("this HugeBuffer is closed")
        return self._view

    def has_huge_pages(self) -> bool:
        """Whether most of this buffer lies on huge pages; True where the kernel does not tell."""
        try:
            text = Path("/proc/self/smaps").read_text()
        except OSError:
            return True
        header = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*$", re.MULTILINE)
        for match in header.finditer(text):
            if int(match[1], 16) <= self.address < int(match[2], 16):
                fields = dict(
                    re.findall(r"^(Rss|AnonHugePages):\s+(\d+) kB$",
                               text[match.end() : match.end() + 2000], re.MULTILINE)[:2]
                )  # fmt: skip
                return 2 * int(fields.get("AnonHugePages", 0)) >= int(fields.get("Rss", 0))
        return True

    def close(self) -> None:
        """Give the memory back, now or when the last view of it is dropped. Idempotent."""
        mapping, self._mapping = self._mapping, None
        self._view = None
        if mapping is not None:
            with suppress(BufferError):  # views are alive and hold the mapping until they go
                mapping.close()
