"""Reads that bring several experts at once: what lies side by side in a file, each into its slot.

Experts begin and end anywhere within the disk's blocks, so neighbours share the block in which they
meet. It is read for the first of them and copied to the others. Knows neither files nor threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specexec_cli.offload.reader import BLOCK_BYTES, Extent

# A gap as long is read through, since a read of its own costs more: what lies between neighbours is
# a table of indexes that is not needed (GPTQ's g_idx), or a held neighbour's bias.
GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file that belongs to one expert, and where in its slot it goes."""

    slot: int
    extent: Extent  # whose offset is one of the slot


@dataclass(frozen=True, slots=True)
class Read:
    """One request to the disk: parts in the order of the file, at most GAP_BYTES apart."""

    parts: tuple[Part, ...]

    @property
    def path(self) -> Path:
        return self.parts[0].extent.path

    @property
    def start(self) -> int:
        """Of the file, in whole blocks."""
        return self.parts[0].extent.start

    @property
    def stop(self) -> int:
        """Of the file, in whole blocks; may lie past its end."""
        return self.parts[-1].extent.stop

    def alone(self) -> list[Read]:
        """Each part by itself."""
        return [Read((part,)) for part in self.parts]


def follows(before: Extent, after: Extent) -> bool:
    """Whether one read may bring both: `after` begins where `before` ends, or a gap behind it."""
    return (
        after.path == before.path
        and before.stop - BLOCK_BYTES <= after.start <= before.stop + GAP_BYTES
        and before.stop <= after.stop
    )


def join(parts: Iterable[Part], most_bytes: int) -> list[Read]:
    """The fewest reads that bring all parts, in the order of the files.

    Args:
        most_bytes: of a read of several parts.
    """
    reads: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: (str(part.extent.path), part.extent.start)):
        extent = part.extent
        if (
            reads
            and follows(reads[-1][-1].extent, extent)
            and extent.stop - reads[-1][0].extent.start <= most_bytes
        ):
            reads[-1].append(part)
        else:
            reads.append([part])
    return [Read(tuple(each)) for each in reads]


Copy = tuple[memoryview, memoryview]  # to and from


def scattered(
    read: Read, slots: Sequence[memoryview], spare: memoryview
) -> tuple[list[memoryview], list[Copy]]:
    """Where the bytes of a read go, one behind the other, and what is then copied.

    Args:
        slots: each part's own, block-aligned.
        spare: GAP_BYTES that nobody looks at, block-aligned.
    """
    targets: list[memoryview] = []
    copies: list[Copy] = []
    at, shared = read.start, spare[:0]
    for part, slot in zip(read.parts, slots, strict=True):
        extent = part.extent
        if extent.start > at:
            targets.append(spare[: extent.start - at])
            at = extent.start
        own = slot[extent.offset : extent.offset + extent.stop - extent.start]
        doubled = at - extent.start
        if doubled:
            copies.append((own[:doubled], shared))
        if doubled < len(own):
            targets.append(own[doubled:])
            shared = own[-BLOCK_BYTES:]
        at = extent.stop
    return targets, copies
