"""Two machines on a cable, on one: network namespaces joined by a link of a limited rate."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

_NUMBERS = count()  # of cables of this process
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


def lost_packets(made: Cable) -> int:
    """Packets that found the queue of their end full, and were sent again."""
    told = subprocess.run(
        [*made.inside(0), "tc", "-s", "qdisc", "show", "dev", _ENDS[0]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(re.findall(r"dropped (\d+)", told.stdout)[0])


def carried_bytes() -> int:
    """Bytes that went either way so far, as told to a process at the first end."""
    return sum(
        int(Path(f"/sys/class/net/{_ENDS[0]}/statistics/{way}_bytes").read_text())
        for way in ("tx", "rx")
    )


@contextmanager
def cable(rate: str = "1gbit", *, loses: bool = False) -> Iterator[Cable]:
    """A cable of a rate each way, as `tc` writes it.

    Args:
        loses: whether hardly anything may wait for its turn at an end: what comes beside it is
            lost, as packets are on a bad radio link.
    Raises:
        NoCableError: this system makes none, or this user may not.
    """
    if os.name != "posix" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise NoCableError("network namespaces need root and iproute2")
    room = ("burst", "8kb", "limit", "8kb") if loses else ("burst", "128kb", "latency", "50ms")
    whole = ("gso_max_segs", "1") if loses else ()  # packets of a link, and no larger ones
    number = next(_NUMBERS)
    made = Cable((f"specexec-{os.getpid()}-{number}-a", f"specexec-{os.getpid()}-{number}-b"))
    try:
        for name in made.names:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", made.names[0], "link", "add", _ENDS[0], "type", "veth",
             "peer", "name", _ENDS[1], "netns", made.names[1])  # fmt: skip
        for name, end, address in zip(made.names, _ENDS, made.addresses, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", end, "up", *whole)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf",
                 "rate", rate, *room)  # fmt: skip
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NoCableError(f"{' '.join(words)}: {done.stderr.strip()}")
