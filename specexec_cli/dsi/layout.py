"""Assigns DSI's workers to a machine's devices, and says how much memory each may plan with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specexec_cli.config import DsiOptions
from specexec_cli.planning.machine import Setting, Site


def target_servers(options: DsiOptions, devices: Sequence[str]) -> int:
    """How many target servers to run: as asked for, or as many as the devices allow."""
    # with three devices or more, the drafter has one to itself
    return options.sp or (len(devices) - 1 if len(devices) > 2 else len(devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The workers of one machine; each is a process, with a CUDA context of its own on its GPU."""

    devices: Sequence[str]  # target servers are dealt out to them in turn; drafters use the last
    servers: int  # number of target servers
    drafters: int = 1  # number of drafters
    further_draft_bytes: int = 0  # bytes of weights of draft models besides the pair's own

    def server_device(self, number: int) -> str:
        """The device of a target server."""
        return self.devices[number % len(self.devices)]

    @property
    def drafter_device(self) -> str:
        """The device of all drafters."""
        return self.devices[-1]

    def share(self, site: Site) -> Site:
        """The Site that one target server plans for: its share of memory and of all workers'
        processes and CUDA contexts.

        A plan counts the pair's draft model beside each target server.

        Args:
            site: the whole machine, on which no worker runs yet. Its VRAM is that of each GPU, and
                its program and context bytes are those of one worker.
        """
        here = Counter(self.server_device(number) for number in range(self.servers))
        workers = here + Counter({self.drafter_device: self.drafters})
        fullest = max(here.values())
        contexts = max(-(-workers[name] * site.context_bytes // here[name]) for name in here)
        drafts = self.further_draft_bytes if self.drafter_device in here else 0
        ram, vram = (site.settings[name].value for name in ("ram", "vram"))
        if vram:
            vram = max(0, vram - drafts) // fullest
        else:
            ram = max(0, ram - drafts)
        source = site.settings["ram"].source, site.settings["vram"].source
        return replace(
            site,
            settings={
                **site.settings,
                "ram": Setting(ram // self.servers, source[0]),
                "vram": Setting(vram, source[1]),
            },
            program_bytes=-(-(self.servers + self.drafters) * site.program_bytes // self.servers),
            context_bytes=contexts,
        )

    def describe(self) -> str:
        """One line for a person about the share."""
        workers = self.servers + self.drafters
        return (
            f"This is the memory of each of {self.servers} target servers of DSI, with its part of "
            f"the processes and CUDA contexts of all {workers} workers."
        )
