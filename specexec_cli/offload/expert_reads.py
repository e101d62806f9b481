"""Joins experts that lie side by side in a file into one read, which brings each into its slot.

An expert may begin and end anywhere within a block of the disk, so neighbours share the block in
which they meet. This block is read for the first expert and copied to the next. The module knows
neither files nor threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specexec_cli.offload.reader import BLOCK_BYTES, Extent

# The longest gap between experts that one read reads through, since a second read would cost more.
# Such a gap is a table of indexes that is not needed (GPTQ's g_idx), or the bias of a neighbour
# that is in a slot already.
GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file that belongs to one expert, and the range's place in the expert's slot."""

    slot: int
    extent: Extent  # its offset counts from the slot's first byte


@dataclass(frozen=True, slots=True)
class Read:
    """One request to the disk: parts in the order of the file, at most GAP_BYTES apart."""

    parts: tuple[Part, ...]

    @property
    def path(self) -> Path:
        return self.parts[0].extent.path

    @property
    def start(self) -> int:
        """The file's byte at which the read begins; a multiple of BLOCK_BYTES."""
        return self.parts[0].extent.start

    @property
    def stop(self) -> int:
        """The file's byte before which the read ends; whole blocks, so perhaps past the end."""
        return self.parts[-1].extent.stop

    def alone(self) -> list[Read]:
        """One read for each part."""
        return [Read((part,)) for part in self.parts]


def follows(before: Extent, after: Extent) -> bool:
    """Whether one read may bring both: `after` begins where `before` ends, or a short gap later."""
    return (
        after.path == before.path
        and before.stop - BLOCK_BYTES <= after.start <= before.stop + GAP_BYTES
        and before.stop <= after.stop
    )


def join(parts: Iterable[Part], most_bytes: int) -> list[Read]:
    """The fewest reads that bring all parts, in the order of the files.

    Args:
        most_bytes: most bytes of a read that brings several parts.
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


Copy = tuple[memoryview, memoryview]  # target, source


def scattered(
    read: Read, slots: Sequence[memoryview], spare: memoryview
) -> tuple[list[memoryview], list[Copy]]:
    """Where the bytes of a read go, and which blocks are copied afterwards.

    Args:
        slots: the slot of each part, block-aligned.
        spare: GAP_BYTES bytes to read gaps into, block-aligned; nobody looks at them.
    Returns:
        The places that the read fills one after another; target and source of each copy.
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
