"""All of CUDA that streaming needs: copies to a device, and their order. Tests fake it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor


class Link(Protocol):
    """Copies to one device and their order. Events are opaque.

    One thread copies while another computes; copy(), done() and wait() may be called by both.
    """

    device: torch.device

    def register(self, blob: Tensor) -> bool:
        """Make host memory fit for asynchronous copies; False if that is refused."""

    def unregister(self, blob: Tensor) -> None:
        """Undo register()."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Enqueue a copy to the device that begins once `after` is done; returns its event."""

    def compute_waits(self, event: Any) -> None:
        """What is enqueued for computing from now on begins once `event` is done."""

    def compute_mark(self) -> Any:
        """An event behind all that is enqueued for computing so far."""

    def done(self, event: Any) -> bool:
        """Whether the event has happened."""

    def wait(self, event: Any) -> None:
        """Block until the event has happened."""


class CudaLink:
    """The Link of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._written = torch.empty(1, device=device)  # by register()

    def register(self, blob: Tensor) -> bool:
        """Page-locks the memory where it is; torch's pin_memory would round it up and copy it."""
        status = self._runtime.cudaHostRegister(blob.data_ptr(), blob.numel(), 0)
        if status == self._runtime.cudaError.success:
            return True
        # CUDA remembers the refusal, and the next kernel launch would report it as its own
        with suppress(RuntimeError):
            self._written.fill_(1)
        return False

    def unregister(self, blob: Tensor) -> None:
        self._runtime.cudaHostUnregister(blob.data_ptr())

    def copy(self, target: Tensor, source: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(after)
            target.copy_(source, non_blocking=True)
            # who waits for a copy sleeps: spinning would take a core from the CPU's own copies
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._copies)
        return event

    def compute_waits(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def compute_mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()
