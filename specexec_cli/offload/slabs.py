"""How bytes are cut on their way to a GPU, for those who move them and those who plan memory."""

from __future__ import annotations

ALIGNED_BYTES = 16  # that kernels load at once; safetensors promises 8, and disk blocks keep them
COPY_BYTES = 16 << 20  # of a piece, and of a slab; two of them take 1.3 ms at 25 GB/s
FINE_PARTS = 4  # of a piece, and so many in flight, while a drafter has steps to upload: 0.7 ms
IN_FLIGHT = 2  # pieces with the copy engine: one that it copies and one that it goes on with
READ_SLABS = IN_FLIGHT + 2  # at least, that files are read into; two while two are copied
STAGING_SLABS = IN_FLIGHT + 1  # for memory that is not pinned: one is filled while two are copied
SLAB_BYTES = (READ_SLABS + STAGING_SLABS) * COPY_BYTES
SWITCH_S = 0.5e-3  # after which Python takes the interpreter from a thread that computes
PASSING_SLOTS = 2  # of a GPU, for experts that are not kept: one is computed, one is on its way
