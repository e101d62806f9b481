"""The thread that copies a mixture's experts to a GPU; no other thread waits for the link.

consumer:  copy = copies.begin(target, source, after)   ...other work...   copy.result()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from specexec_cli.offload.link import Link
from specexec_cli.offload.reader import Notice
from specexec_cli.offload.slabs import COPY_BYTES
from specexec_cli.offload.uplink import Uplink, copy_error


class ExpertCopies:
    """Copies experts from slots in RAM in the order of the begin() calls. One consumer thread."""

    def __init__(self, slots: Sequence[Tensor], link: Link, notice: Notice) -> None:
        """Pin what can be pinned, and start the thread.

        Args:
            slots: (bytes,) uint8 each, page-aligned; every copy begins at the start of a slot.
            notice: called with one line of text if the driver refuses to pin.
        Raises:
            OutOfMemoryError: there is no RAM for slabs.
        """
        self._begun: list[Future[Any]] = []  # copies begun since all earlier ones had arrived
        self._uplink = Uplink(link)
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="specexec-copy-experts", initializer=link.own_thread
        )
        try:
            pieces = [piece for slot in slots for piece in torch.split(slot, COPY_BYTES)]
            self._uplink.pin(pieces, notice)
        except BaseException:
            self.close()
            raise

    def begin(self, target: Tensor, source: Tensor, after: Any) -> Future[Any]:
        """Asks for a copy that begins once `after` is done.

        Args:
            target: (bytes,) uint8 on the device.
            source: (bytes,) uint8, the beginning of a slot; must not change until land().
        Returns:
            A future: result() waits until the copy is enqueued and returns the event behind the
            copy, or raises StreamError if the copy failed.
        """
        self._begun.append(self._thread.submit(_told, self._send, target, source, after))
        return self._begun[-1]

    def land(self) -> None:
        """Waits until all copies that were begun have arrived.

        Raises:
            StreamError: a copy failed.
        """
        for copy in self._begun:
            copy.result()
        self.drop()

    def drop(self) -> None:
        """Cancels the copies that are not under way yet, and waits for the others.

        Raises:
            StreamError: a copy under way failed.
        """
        for copy in self._begun:
            copy.cancel()
        self._thread.submit(_told, self._uplink.land).result()
        self._begun.clear()

    def close(self) -> None:
        """Stop the thread and unpin the memory. Idempotent."""
        self._thread.shutdown(cancel_futures=True)
        self._uplink.close()

    def _send(self, target: Tensor, source: Tensor, after: Any) -> Any:
        event = after
        pieces = torch.split(source, COPY_BYTES)
        for to, piece in zip(torch.split(target, COPY_BYTES), pieces, strict=True):
            event = self._uplink.send(to, piece, after)
        return event


def _told(work: Callable[..., Any], *args: Any) -> Any:
    """Calls `work`; an error becomes the one line that the consumer is told (copy_error)."""
    try:
        return work(*args)
    except BaseException as error:
        # a traceback's frames would keep views of the memory alive
        raise copy_error(error.with_traceback(None), "an expert") from None
