"""Sizes and counts of the pieces in which bytes go to a GPU, for copying and for the plan."""

from __future__ import annotations

ALIGNED_BYTES = 16  # loaded at once by kernels; safetensors aligns to 8, and disk blocks keep that
COPY_BYTES = 16 << 20  # of a piece and of a slab; two of them take 1.3 ms at 25 GB/s
FINE_PARTS = 4  # parts of a piece, and most copies in flight, while a drafter uploads: 0.7 ms
IN_FLIGHT = 2  # pieces in the copy engine: one being copied, and one to go on with
READ_SLABS = IN_FLIGHT + 2  # fewest slabs to read files into: two are filled while two are copied
STAGING_SLABS = IN_FLIGHT + 1  # for memory that is not pinned: one is filled while two are copied
SLAB_BYTES = (READ_SLABS + STAGING_SLABS) * COPY_BYTES
SWITCH_S = 0.5e-3  # after which a thread that computes gives Python's interpreter to another
PASSING_SLOTS = 2  # in VRAM, for experts that are not kept: one is computed, one on its way
