"""Two machines on a cable, on one: network namespaces joined by a link of a limited rate."""

from __future__ import annotations

import fcntl
import os
import random
import re
import select
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

_NUMBERS = count()  # of cables of this process
_ENDS, _ADDRESSES = ("sxa", "sxb"), ("10.43.7.1", "10.43.7.2")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000  # linux/if_tun.h
_MOST_PACKET = 1 << 16  # bytes
_LOOK_S = 0.2  # between looks whether the air is still wanted


class NoCableError(Exception):
    """This system makes none; the text says what is lacking."""


@dataclass(slots=True)
class Air:
    """What carries packets between two ends in place of a cable, and loses some at random.

    The kernel's own `netem` does that too, and is left out of many kernels.
    """

    loss: float  # the share of packets that are lost
    carried: int = 0
    lost: int = 0

    def carry(self, ends: tuple[int, int], over: threading.Event) -> None:
        """Carries packets between two TUN devices until it is over."""
        chance = random.Random(43)
        while not over.is_set():
            for end in select.select(ends, (), (), _LOOK_S)[0]:
                packet = os.read(end, _MOST_PACKET)
                if chance.random() < self.loss:
                    self.lost += 1
                    continue
                self.carried += 1
                os.write(ends[1 - ends.index(end)], packet)


@dataclass(frozen=True, slots=True)
class Cable:
    """The namespaces at both ends."""

    names: tuple[str, str]
    addresses: tuple[str, str] = _ADDRESSES
    air: Air = field(default_factory=lambda: Air(0.0))  # of a radio link

    def inside(self, end: int) -> list[str]:
        """The beginning of a command that runs at an end."""
        return ["ip", "netns", "exec", self.names[end]]


def lost_packets(made: Cable) -> tuple[int, int]:
    """Packets that found the queue of the first end full, and those that were lost on their way:
    all are sent again."""
    told = subprocess.run(
        [*made.inside(0), "tc", "-s", "qdisc", "show", "dev", _ENDS[0]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(re.findall(r"dropped (\d+)", told.stdout)[0]), made.air.lost


def carried_bytes() -> int:
    """Bytes that went either way so far, as told to a process at the first end."""
    return sum(
        int(Path(f"/sys/class/net/{_ENDS[0]}/statistics/{way}_bytes").read_text())
        for way in ("tx", "rx")
    )


@contextmanager
def cable(rate: str = "1gbit", *, loss: float = 0.0) -> Iterator[Cable]:
    """A cable of a rate each way, as `tc` writes it.

    Args:
        loss: the share of packets that are lost at random, as on a bad radio link. Hardly anything
            may wait for its turn there: what comes beside it is lost too.
    Raises:
        NoCableError: this system makes none, or this user may not.
    """
    if os.name != "posix" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise NoCableError("network namespaces need root and iproute2")
    room = ("burst", "8kb", "limit", "8kb") if loss else ("burst", "128kb", "latency", "50ms")
    number = next(_NUMBERS)
    names = f"specexec-{os.getpid()}-{number}-a", f"specexec-{os.getpid()}-{number}-b"
    made = Cable(names, air=Air(loss))
    with ExitStack() as left:
        for name in made.names:
            left.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
            _run("ip", "netns", "add", name)
        devices = _devices(made, left) if loss else None
        if devices is None:
            _run("ip", "-n", made.names[0], "link", "add", _ENDS[0], "type", "veth",
                 "peer", "name", _ENDS[1], "netns", made.names[1])  # fmt: skip
        for name, end, address in zip(made.names, _ENDS, made.addresses, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", end, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf",
                 "rate", rate, *room)  # fmt: skip
        if devices is not None:
            over = threading.Event()
            carrying = threading.Thread(target=made.air.carry, args=(devices, over), daemon=True)
            left.callback(carrying.join)
            left.callback(over.set)
            carrying.start()
        yield made


def _devices(made: Cable, left: ExitStack) -> tuple[int, int]:
    """TUN devices at both ends of a link, each open here until it is left."""
    found = list[int]()
    for name, end in zip(made.names, _ENDS, strict=True):
        here = f"{end}{os.getpid()}"  # until it is at its end: others make theirs here too
        try:
            found.append(os.open("/dev/net/tun", os.O_RDWR))
            left.callback(os.close, found[-1])
            asked = struct.pack("16sH22x", here.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(found[-1], _TUNSETIFF, asked)
        except OSError as error:
            raise NoCableError(f"this system makes no TUN device: {error}") from error
        _run("ip", "link", "set", here, "netns", name, "name", end)
    return found[0], found[1]


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NoCableError(f"{' '.join(words)}: {done.stderr.strip()}")
