"""Stand-ins for the Link of a GPU, whose memory is the machine's own."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class EagerLink:
    """Copies happen at once: nothing may be copied into a slot that is still in use."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def own_thread(self) -> None:
        pass

    def register(self, blob: Tensor) -> bool:
        assert blob.data_ptr() % 4096 == 0
        self.registered.add(blob.data_ptr())
        return True

    def unregister(self, blob: Tensor) -> None:
        self.registered.remove(blob.data_ptr())

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        assert after is not None
        target.copy_(source)
        return True

    def compute_waits(self, event: Any) -> None:
        pass

    def compute_mark(self) -> Any:
        return True

    def wait(self, event: Any) -> None:
        pass


class LazyLink(EagerLink):
    """Copies happen only when somebody waits for them: every wait that is needed must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.performed = 0
        self.lock = threading.Lock()

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        with self.lock:
            self.queue.append((target, source))
            return self.performed + len(self.queue)

    def compute_waits(self, event: Any) -> None:
        self.wait(event)

    def compute_mark(self) -> Any:
        return 0  # computing on the CPU is over when it returns

    def wait(self, event: Any) -> None:
        with self.lock:
            while self.performed < event:
                target, source = self.queue.pop(0)
                target.copy_(source)
                self.performed += 1


class LimitedLink(LazyLink):
    """Pins so many bytes and no more."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.pinned: dict[int, int] = {}
        self.limit = limit

    def register(self, blob: Tensor) -> bool:
        if sum(self.pinned.values()) + blob.numel() > self.limit:
            return False
        self.pinned[blob.data_ptr()] = blob.numel()
        return super().register(blob)

    def unregister(self, blob: Tensor) -> None:
        del self.pinned[blob.data_ptr()]
        super().unregister(blob)
