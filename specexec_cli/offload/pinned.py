"""RAM that a GPU copies from and to: on large pages, and pinned as far as the driver pins it."""

from __future__ import annotations

import torch
from torch import Tensor

from specexec_cli.offload.link import Link
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.reader import Notice
from specexec_cli.offload.resident import as_blob, check_free


class PinnedMemory:
    """Hands out RAM, and unpins what comes back.

    Args:
        link: to the GPU.
        notice: called with one line of text if the driver pins no more.
    """

    def __init__(self, link: Link, notice: Notice) -> None:
        self._link = link
        self._notice = notice
        self._pinned: dict[int, Tensor] = {}  # by address
        self._refused = False

    def take(self, n_bytes: int, purpose: str, mend: str) -> Tensor:
        """(n_bytes,) uint8 of zeros, which `give` takes back.

        Args:
            purpose, mend: the beginning and the end of the error's message.
        Raises:
            OutOfMemoryError: there is not as much.
        """
        if not n_bytes:
            return torch.empty(0, dtype=torch.uint8)
        check_free(n_bytes, purpose, mend)
        buffer = HugeBuffer(n_bytes, purpose, mend)
        blob = as_blob(buffer)
        buffer.close()  # the blob holds the memory from now on
        if not self._refused and self._link.register(blob):
            self._pinned[blob.data_ptr()] = blob
        elif not self._refused:
            self._refused = True
            self._notice(
                f"the driver pins no more memory, so copies of {purpose} to the GPU are slower"
            )
        return blob

    def give(self, blob: Tensor) -> None:
        """Unpins memory that is to be freed, if it is pinned still."""
        if self._pinned.pop(blob.data_ptr(), None) is not None:
            self._link.unregister(blob)

    def close(self) -> None:
        """Unpins all memory, which stays with whoever has it; idempotent."""
        for blob in list(self._pinned.values()):
            self.give(blob)
