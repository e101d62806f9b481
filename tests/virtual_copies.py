"""What the copier makes of a link: its idle share, and how long small uploads wait, by tiers.

A 70B target in GPTQ whose draft model is a 7B in 4 bits, under the virtual clock of
virtual_time.py: the program's own copier and readers run, and only devices are models. One byte
here stands for SCALE of the target's. `python tests/virtual_copies.py` prints the table of
docs/measured.md.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from virtual_time import Hardware, VirtualDevice, virtual_time

from specexec_cli.config import Tier
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.cuda import DeviceStream
from specexec_cli.offload.slabs import COPY_BYTES, SWITCH_S
from specexec_cli.planning.tiers import spread_order

BLOCK_BYTES = 4096
SCALE = COPY_BYTES // BLOCK_BYTES
LAYER_BYTES = 428_000_000
LAYERS = 80


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Where the layers are, and what a pass and a draft take."""

    resident: int = 30
    ssd: int = 0
    link_bytes_per_s: float = 25e9
    ssd_bytes_per_s: float = 7e9
    memcpy_bytes_per_s: float = 20e9
    pins_bytes: float = 1e18
    piece_blocks: int = 1  # of a piece of COPY_BYTES
    device_buffers: int = 3
    layer_s: float = 5e-3  # of computing a layer, dequantizing included
    draft_steps: int = 20
    step_s: float = 5.5e-3  # of the GPU
    python_s: float = 1e-3  # of Python between two steps
    switch_s: float = SWITCH_S
    seed: int = 0

    @property
    def draft_s(self) -> float:
        """Of a tree."""
        return self.draft_steps * (self.step_s + self.python_s)

    @property
    def full_s(self) -> float:
        """How long the link stands still in a draft, since all buffers are full."""
        return max(0.0, self.draft_s - self.device_buffers * LAYER_BYTES / self.link_bytes_per_s)

    @property
    def tiers(self) -> list[Tier]:
        order = spread_order(LAYERS)
        tiers: list[Tier] = ["ssd"] * LAYERS
        for rank, index in enumerate(order[: LAYERS - self.ssd]):
            tiers[index] = "resident" if rank < self.resident else "ram"
        return tiers

    @property
    def hardware(self) -> Hardware:
        return Hardware(
            link_bytes_per_s=self.link_bytes_per_s / SCALE,
            ssd_bytes_per_s=self.ssd_bytes_per_s / SCALE,
            memcpy_bytes_per_s=self.memcpy_bytes_per_s / SCALE,
            switch_s=self.switch_s,
            pins_bytes=int(self.pins_bytes / SCALE),
        )


@dataclass(frozen=True)
class Outcome:
    """Of some iterations in steady state."""

    iteration_s: float
    idle_share: float  # of the link
    upload_s: float  # the longest that an upload waited for the copy engine


def outcome(mix: Mix, iterations: int = 3) -> Outcome:
    """Iterations behind a first one: a draft tree, then a pass."""
    with tempfile.TemporaryDirectory() as name, virtual_time(mix.hardware, mix.seed) as device:
        path = Path(name) / "weights"
        n_bytes = LAYER_BYTES // SCALE
        path.write_bytes(bytes(n_bytes))  # every layer has the same
        layers = [[TensorRange(f"{i}", path, "U8", (n_bytes,), 0, n_bytes)] for i in range(LAYERS)]
        with DeviceStream(
            layers, mix.tiers, device, device_buffers=mix.device_buffers,
            piece_bytes=mix.piece_blocks * BLOCK_BYTES,
        ) as stream:  # fmt: skip
            _iteration(mix, device, stream)
            began_s, busy_s = device.time.now, device.busy_s
            device.upload_delays_s.clear()
            for _ in range(iterations):
                _iteration(mix, device, stream)
            seconds = device.time.now - began_s
            idle = 1 - (device.busy_s - busy_s) / seconds
            longest = max(device.upload_delays_s)
    return Outcome(seconds / iterations, idle, longest)


def _iteration(mix: Mix, device: VirtualDevice, stream: DeviceStream) -> None:
    """A tree and a pass."""
    for _ in range(mix.draft_steps):
        device.upload()
        device.compute(mix.step_s)
        device.wait(device.compute_mark())  # the search reads what the step found
        device.python(mix.python_s)
    device.upload()
    for index in range(LAYERS):
        with stream.layer(index):
            device.compute(mix.layer_s)
    device.wait(device.compute_mark())
    device.python(mix.python_s)


WIDE = Mix(resident=25, device_buffers=8)  # the VRAM of Mix(), five layers of it as a longer ring
MIXES = {
    "ram, 30 layers stay, ring of 3": Mix(),
    "ram, 25 stay, ring of 8": WIDE,
    "ram + 5 on the SSD, ring of 3": Mix(ssd=5),
    "ram + 5 on the SSD, ring of 8": replace(WIDE, ssd=5),
    "ram + 10 on the SSD, ring of 8": replace(WIDE, ssd=10),
    "ram + 25 on the SSD, ring of 8": replace(WIDE, ssd=25),
    "ssd, ring of 8": replace(WIDE, ssd=55),
    "ram, 500 MB of pins": replace(WIDE, pins_bytes=500e6),
    "ram + 5 on the SSD, 500 MB of pins": replace(WIDE, ssd=5, pins_bytes=500e6),
    "ram, link of 12.5 GB/s": replace(WIDE, link_bytes_per_s=12.5e9),
    "ram, 4 ms of Python between draft steps": replace(WIDE, python_s=4e-3),
    "the same, interpreter taken after 5 ms": replace(WIDE, python_s=4e-3, switch_s=5e-3),
    "ram, pieces of 32 MB": replace(WIDE, piece_blocks=2),
    "ram, whole layers in one copy": replace(WIDE, piece_blocks=26),
}


def main() -> None:
    print("| layers | iteration, s | link idle | longest wait of an upload, ms |")
    print("|---|---:|---:|---:|")
    for name, mix in MIXES.items():
        found = outcome(mix)
        print(
            f"| {name} | {found.iteration_s:.2f} | {found.idle_share:.1%} "
            f"| {1000 * found.upload_s:.2f} |"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
