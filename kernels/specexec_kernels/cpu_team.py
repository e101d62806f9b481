"""Runs compiled kernels on several threads.

On Linux these are a team of our own (cpu_team_ir), elsewhere a pool of Python threads. There are as
many of them as torch uses; torch keeps threads of its own for the operations between two kernels.
"""

from __future__ import annotations

import atexit
import os
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from specexec_kernels import cpu_jit, cpu_team_ir

# A thread reads a row of words across all strips that it claims. 16 strips of 64 outputs, with a
# word for each output, are a page of such a row. Claims of 4 strips took 0.71 ms where claims of 16
# took 0.53 ms (a weight of 4096 x 11008).
_MOST_STRIPS_AT_ONCE = 16


class Team:
    """Helper threads that join whichever thread runs a kernel, and wait in between."""

    def __init__(self) -> None:
        self._memory = torch.zeros(cpu_team_ir.TEAM_BYTES, dtype=torch.uint8)
        self._at = self._memory.data_ptr()
        self._launch = cpu_jit.compiled("launch", None, cpu_team_ir.build_launch)
        self._help = cpu_jit.compiled("helper", None, cpu_team_ir.build_helper)
        self._helpers: list[threading.Thread] = []
        self._hiring = threading.Lock()

    def run(self, kernel: Any, address: int, threads: int) -> None:
        """Runs a kernel on the calling thread and on up to `threads` - 1 helpers.

        Helpers join as they wake; the call waits for none that has not joined.

        Args:
            kernel: from cpu_jit.compiled.
            address: address of its arguments.
            threads: the most threads, the calling one included.
        """
        given = array("q", self.launch(kernel, address, threads))
        self._launch(given.buffer_info()[0])

    def launch(self, kernel: Any, address: int, threads: int) -> tuple[int, int, int, int]:
        """The arguments of the compiled launch that `run` makes; see there. Hires the helpers."""
        helpers = min(threads - 1, cpu_team_ir.MOST_HELPERS)
        if len(self._helpers) < helpers:
            self._hire(helpers)
        return self._at, kernel.address, address, helpers

    @property
    def launch_kernel(self) -> Any:
        """The compiled function that takes what `launch` gives."""
        return self._launch

    def _hire(self, helpers: int) -> None:
        with self._hiring:
            for number in range(len(self._helpers), helpers):
                helper = threading.Thread(
                    target=self._help, args=(self._at,), name=f"kernel-team-{number}",
                    daemon=True,  # the interpreter would wait for others before it calls `stop`
                )  # fmt: skip
                helper.start()
                self._helpers.append(helper)

    def stop(self) -> None:
        """Ends all helpers, which must be done before the code that they run is freed."""
        given = array("q", (self._at, 0, 0, 0))
        self._launch(given.buffer_info()[0])
        for helper in self._helpers:
            helper.join()


@cache
def team() -> Team:
    """This process's team; only where cpu_team_ir.has_team()."""
    found = Team()
    atexit.register(found.stop)
    return found


if hasattr(os, "register_at_fork"):
    # a forked child has none of its parent's threads, so it needs a team of its own
    os.register_at_fork(after_in_child=team.cache_clear)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="kernel-team")


def _run_in_pool(kernel: Any, address: int, threads: int) -> None:
    helpers = [_pool().submit(kernel, address) for _ in range(threads - 1)]
    kernel(address)
    for helper in helpers:
        helper.result()


def strips_at_once(strips: int, most: int = _MOST_STRIPS_AT_ONCE) -> int:
    """How many strips a thread claims at once: so many that all threads get equal shares.

    Args:
        strips: of the whole kernel.
        most: the most strips of one claim.
    """
    threads = torch.get_num_threads()
    rounds = -(-strips // (most * threads))
    return max(-(-strips // (rounds * threads)), 1) if strips else 1


def run(kernel: Any, address: int, tiles: int) -> None:
    """Runs `kernel` on the int64 arguments at `address`, on as many threads as torch uses.

    Args:
        kernel: from cpu_jit.compiled.
        address: address of its argument array.
        tiles: how many claims the kernel's work comes to; more threads than that find nothing.
    """
    threads = min(torch.get_num_threads(), tiles)
    if threads <= 1:
        kernel(address)
    elif cpu_team_ir.has_team():
        team().run(kernel, address, threads)
    else:
        _run_in_pool(kernel, address, threads)
