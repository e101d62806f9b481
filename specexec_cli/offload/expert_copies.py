"""The thread that copies a mixture's experts to a GPU: nothing but it waits for the link.

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
    """Copies from slots in RAM, in the order in which they are begun. One consumer thread."""

    def __init__(self, slots: Sequence[Tensor], link: Link, notice: Notice) -> None:
        """Pin what can be pinned, and start the thread.

        Args:
            slots: (bytes,) uint8 each, page-aligned: what is copied begins where one of them does.
            notice: told in one line where the driver refuses to pin.
        Raises:
            OutOfMemoryError: there is no RAM for slabs.
        """
        self._begun: list[Future[Any]] = []  # since all had arrived
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
            source: (bytes,) uint8, the beginning of a slot, which stays as it is until land().
        Returns:
            of which result() waits until the copy is enqueued, and is the event behind it; it
            raises StreamError where that failed.
        """
        self._begun.append(self._thread.submit(_told, self._send, target, source, after))
        return self._begun[-1]

    def land(self) -> None:
        """Waits until all that was begun has arrived.

        Raises:
            StreamError: a copy failed.
        """
        for copy in self._begun:
            copy.result()
        self.drop()

    def drop(self) -> None:
        """Takes back what was begun, but for copies under way, which are waited for.

        Raises:
            StreamError: one of these failed.
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
    """Does it; an error is what the consumer is told."""
    try:
        return work(*args)
    except BaseException as error:
        # a traceback's frames would keep views of the memory alive
        raise copy_error(error.with_traceback(None), "an expert") from None
