"""All of CUDA that streaming needs: settings, the device of each thread, copies and their order.

Tests replace a Link by a fake.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from specexec_cli.device import under_wsl
from specexec_cli.errors import WorkerError

# Environment variables by which users set torch's allocator; the second is the older name.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_ASK_FREE = """
import sys, torch
for name in sys.argv[1:]:
    print(torch.cuda.mem_get_info(torch.device(name))[0])
"""


def prepare_cuda() -> None:
    """Makes the settings that all use of a GPU relies on; call it before the first call of CUDA.

    torch's allocator gets expandable segments, since buffers of many sizes come and go beside a
    plan that fills the GPU. It does not if the user has set the allocator, nor under WSL2, where
    the driver may then refuse the first allocation (pytorch/pytorch#192330).

    Matrix products sum in float32 and in one piece. The rounding of 16-bit partial sums depends on
    how the library cuts a sum, and stream-K kernels cut it by where a row lies among the others: a
    row's bits must depend on neither.
    """
    if not under_wsl() and not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        # torch 2.9 reads the setting under the older name only (pytorch/pytorch#183387)
        name = ALLOCATOR_SETTINGS[torch.__version__ < "2.10"]
        os.environ[name] = "expandable_segments:True"
    matmul = torch.backends.cuda.matmul
    for dtype in ("fp16", "bf16"):
        name = f"allow_{dtype}_reduced_precision_reduction"
        # older versions of torch take no second value
        in_one_piece = hasattr(matmul, f"{name}_split_k")
        setattr(matmul, name, (False, False) if in_one_piece else False)
    # cuBLAS itself cannot be told to leave sums whole, and torch refuses to call it then. The
    # command line asks by the environment, which other programs' torch may have read before.
    cublas = torch.backends.cuda.preferred_blas_library
    if torch.version.cuda is not None and "cublaslt" not in str(cublas()).lower():
        cublas("cublaslt")


def use_device(device: torch.device) -> None:
    """Makes a GPU the calling thread's current one; every thread that uses CUDA calls this first.

    A thread begins with GPU 0. Without this call, any call of CUDA would make a context of some
    0.4 GB on GPU 0, and Triton's kernels and graphs would be launched there.

    Args:
        device: the device with its index; for the CPU nothing happens.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def free_vram(devices: Sequence[torch.device]) -> list[int]:
    """Free bytes of each GPU, for a process that must not make a context on any of them.

    CUDA tells the free memory only to a process with a context on the GPU, so a process started for
    this asks. The memory that its own contexts take is not counted as free.

    Raises:
        WorkerError: the process gave no answer.
    """
    names = [str(device) for device in devices]
    command = [sys.executable, "-c", _ASK_FREE, *names]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        return [int(line) for line in asked.stdout.split()]
    raise WorkerError(f"DSI: no memory of {', '.join(names)} is to be had: {reason}")


class Link(Protocol):
    """Copies to one device and their order. Events are opaque.

    One thread copies while another computes; copy() and wait() may be called by both.
    """

    device: torch.device

    def own_thread(self) -> None:
        """Prepare a thread; all but the one that made the link call this before they copy."""

    def register(self, blob: Tensor) -> bool:
        """Make host memory fit for asynchronous copies; False if the driver refuses."""

    def unregister(self, blob: Tensor) -> None:
        """Undo register()."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Enqueue a copy to the device that begins once `after` is done; returns its event."""

    def compute_waits(self, event: Any) -> None:
        """Make compute work that is enqueued from now on begin once `event` is done."""

    def compute_mark(self) -> Any:
        """An event behind all compute work that is enqueued so far."""

    def wait(self, event: Any) -> None:
        """Block until the event has happened."""


class CudaLink:
    """The Link of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index or 0)
        self.own_thread()
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._written = torch.empty(1, device=self.device)  # written by register()

    def own_thread(self) -> None:
        use_device(self.device)

    def register(self, blob: Tensor) -> bool:
        """Page-locks the memory where it is; torch's pin_memory would round it up and copy it."""
        status = self._runtime.cudaHostRegister(blob.data_ptr(), blob.numel(), 0)
        if status == self._runtime.cudaError.success:
            return True
        # CUDA remembers the refusal, and the next kernel launch reports it as its own: this one
        with suppress(RuntimeError):
            self._written.fill_(1)
        return False

    def unregister(self, blob: Tensor) -> None:
        self._runtime.cudaHostUnregister(blob.data_ptr())

    def copy(self, target: Tensor, source: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(after)
            target.copy_(source, non_blocking=True)
            # a thread that waits for a copy sleeps: spinning would take a core from CPU copies
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._copies)
        return event

    def compute_waits(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def compute_mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()
