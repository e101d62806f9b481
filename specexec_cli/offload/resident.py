"""Tensors that stay in memory, and the one place that turns bytes of a file into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from specexec_cli.device import format_bytes, free_ram_bytes
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.checkpoint import ITEM_BYTES, TensorRange
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.reader import (
    READER_THREADS,
    DirectFile,
    Extent,
    Layout,
    Notice,
    Progress,
    lay_out,
    once,
)

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64,
}  # fmt: skip


def read_tensors(
    ranges: Sequence[TensorRange],
    notice: Notice = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> dict[str, Tensor]:
    """Read tensors that stay: embeddings, final norm, head, a draft model.

    They share one buffer, which is unmapped when the last of them is dropped.

    Raises:
        StreamError: reading failed.
        OutOfMemoryError: they do not fit into free memory.
    """
    layout = lay_out(ranges)
    files: dict[Path, DirectFile] = {}
    try:
        open_files(files, [layout], once(notice))
        blobs = load([layout], files, "the resident weights", "Use a smaller model", progress)
        return views(layout, blobs[0])
    finally:
        for file in files.values():
            file.close()


def open_files(files: dict[Path, DirectFile], layouts: Sequence[Layout], notice: Notice) -> None:
    for layout in layouts:
        for extent in layout.extents:
            if extent.path not in files:
                files[extent.path] = DirectFile(extent.path, notice)


def check_free(needed_bytes: int, purpose: str, mend: str) -> None:
    free = free_ram_bytes()
    if needed_bytes > free:
        raise OutOfMemoryError(
            f"{purpose}: {format_bytes(needed_bytes)} of RAM are needed but "
            f"{format_bytes(free)} are free. {mend}"
        )


def load(
    layouts: Sequence[Layout],
    files: dict[Path, DirectFile],
    purpose: str,
    mend: str,
    progress: Progress,
) -> list[Tensor]:
    """Read each layout into a buffer of its own, which lives as long as a tensor made from it.

    Several threads read, as in LayerStream: one waits for the disk while another records its piece.

    Args:
        files: an open file for every path of the layouts.
        purpose: what the memory is for; an error message begins with it.
        mend: what the user can change; an error message ends with it.
        progress: called with the bytes loaded so far and in all.
    Returns:
        For each layout (buffer bytes,) uint8, to be passed to views().
    Raises:
        StreamError: reading failed.
        OutOfMemoryError: the layouts do not fit into free RAM.
    """
    total = sum(layout.tensor_bytes for layout in layouts)
    check_free(sum(layout.buffer_bytes for layout in layouts), purpose, mend)
    done = 0
    loaded = []
    with ThreadPoolExecutor(READER_THREADS) as pool:
        for layout in layouts:
            buffer = HugeBuffer(layout.buffer_bytes, purpose, mend)
            reads = [_begin(pool, files[piece.path], piece, buffer) for piece in layout.pieces()]
            try:
                for read in reads:
                    done += read.result()
                    progress(min(done, total), total)
            finally:
                for read in reads:
                    read.cancel()
            loaded.append(as_blob(buffer))
            buffer.close()  # the blob holds the memory from now on
    return loaded


def _begin(
    pool: ThreadPoolExecutor, file: DirectFile, piece: Extent, buffer: HugeBuffer
) -> Future[int]:
    target = buffer.view[piece.offset : piece.offset + piece.stop - piece.start]
    return pool.submit(file.read_into, target, piece.start, piece.stop)


class StayingTensors(dict[str, Tensor]):
    """A layer's tensors by name, which are the same tensors in every pass."""


class RingTensors(dict[str, Tensor]):
    """A layer's tensors by name in a buffer of a ring, of which it may be another in each pass.

    Args:
        buffer: the buffer's number, where the layer's tensors lie at the same addresses whenever
            they are in it; None where some had to be copied out of it.
    """

    def __init__(self, tensors: dict[str, Tensor], buffer: int | None) -> None:
        super().__init__(tensors)
        self.buffer = buffer


def as_blob(buffer: HugeBuffer) -> Tensor:
    """The buffer as a tensor, (bytes,) uint8; the tensor keeps the buffer's memory mapped."""
    if not buffer.n_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer.view, dtype=torch.uint8)


def views(layout: Layout, blob: Tensor, shift: int = 0) -> dict[str, Tensor]:
    """The layout's tensors by name, as views of the bytes that were read, on the blob's device.

    Args:
        blob: (bytes,) uint8, what the layout was read into.
        shift: byte of the blob where the layout begins.
    """
    tensors = {}
    for tensor, place in layout.places:
        offset = place + shift
        dtype = TORCH_DTYPES[tensor.dtype]
        flat = blob[offset : offset + tensor.n_bytes]
        if offset % ITEM_BYTES[tensor.dtype]:  # torch cannot view unaligned items
            flat = flat.clone()
        tensors[tensor.name] = flat.view(dtype).view(tensor.shape)
    return tensors


def all_in_place(layout: Layout, shift: int) -> bool:
    """Whether `views` copies no tensor."""
    return not any((at + shift) % ITEM_BYTES[tensor.dtype] for tensor, at in layout.places)
