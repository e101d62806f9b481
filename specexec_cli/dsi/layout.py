"""On which devices the workers of a machine run, and how much of its memory each may plan with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specexec_cli.config import DsiOptions
from specexec_cli.planning.machine import Setting, Site


def target_servers(options: DsiOptions, devices: Sequence[str]) -> int:
    """How many instances of the target to run: as asked for, or as many as the devices allow."""
    # from three devices on, the drafter has one to itself
    return options.sp or (len(devices) - 1 if len(devices) > 2 else len(devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The workers of one machine; each is a process with a CUDA context of its own on its GPU."""

    devices: Sequence[str]  # on which target servers run in turns; drafters share the last
    servers: int  # instances of the target
    drafters: int = 1  # instances of draft models
    further_draft_bytes: int = 0  # weights of the draft models besides the pair's own

    def server_device(self, number: int) -> str:
        """The device of a target server."""
        return self.devices[number % len(self.devices)]

    @property
    def drafter_device(self) -> str:
        """The device of all drafters."""
        return self.devices[-1]

    def share(self, site: Site) -> Site:
        """What one target server can plan with: its part of memory, and of what workers take of it.

        A plan counts the pair's draft model beside each target server.

        Args:
            site: of the whole machine, on which no worker runs yet: its VRAM that of each GPU, its
                program and its context those of one worker.
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
        """One line for a person."""
        workers = self.servers + self.drafters
        return (
            f"This is the memory of each of {self.servers} target servers of DSI, with its part of "
            f"the processes and CUDA contexts of all {workers} workers."
        )
