"""Two machines on a cable, on one: network namespaces joined by a link of a limited rate."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ENDS, _ADDRESSES = ("sxa", "sxb"), ("10.43.7.1", "10.43.7.2")


class NoCableError(Exception):
    """This system makes none; the text says what is lacking."""


@dataclass(frozen=True, slots=True)
class Cable:
    """The namespaces at both ends."""

    names: tuple[str, str]
    addresses: tuple[str, str] = _ADDRESSES

    def inside(self, end: int) -> list[str]:
        """The beginning of a command that runs at an end."""
        return ["ip", "netns", "exec", self.names[end]]


def carried_bytes() -> int:
    """Bytes that went either way so far, as told to a process at the first end."""
    return sum(
        int(Path(f"/sys/class/net/{_ENDS[0]}/statistics/{way}_bytes").read_text())
        for way in ("tx", "rx")
    )


@contextmanager
def cable(rate: str = "1gbit") -> Iterator[Cable]:
    """A cable of a rate each way, as `tc` writes it.

    Raises:
        NoCableError: this system makes none, or this user may not.
    """
    if os.name != "posix" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise NoCableError("network namespaces need root and iproute2")
    made = Cable((f"specexec-{os.getpid()}-a", f"specexec-{os.getpid()}-b"))
    try:
        for name in made.names:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", made.names[0], "link", "add", _ENDS[0], "type", "veth",
             "peer", "name", _ENDS[1], "netns", made.names[1])  # fmt: skip
        for name, end, address in zip(made.names, _ENDS, made.addresses, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", end, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf",
                 "rate", rate, "burst", "128kb", "latency", "50ms")  # fmt: skip
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NoCableError(f"{' '.join(words)}: {done.stderr.strip()}")
