"""Tensors as bytes for files of rows, and back; copied by one thread, beside a pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specexec_cli.offload.resident import TORCH_DTYPES
from specexec_cli.prefixes.kept_file import Form

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def form_of(tensor: Tensor) -> Form:
    """Dtype and shape of a tensor."""
    return Form(_NAMES[tensor.dtype], tuple(tensor.shape))


def like(form: Form) -> Tensor:
    """A tensor of this dtype and shape without memory."""
    return torch.empty(form.shape, dtype=TORCH_DTYPES[form.dtype], device="meta")


def put(tensor: Tensor, view: memoryview) -> None:
    """Copies a tensor's elements into memory of its size.

    PyTorch would start threads of its own for it, which the threads of a pass would wait for.
    """
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    source = tensor.cpu().view(torch.uint8).numpy()
    np.copyto(np.frombuffer(view, np.uint8).reshape(source.shape), source)


def taken(view: memoryview, form: Form) -> Tensor:
    """The tensor that `put` had; it shares the memory."""
    return torch.frombuffer(view, dtype=TORCH_DTYPES[form.dtype]).view(form.shape)


def fill_rows(room: Tensor, start: int, rows: Tensor) -> None:
    """Copies rows, (1, heads, n, size), to the place from `start` on in `room`."""
    there = room.narrow(2, start, rows.shape[2])
    if there.device.type == "cpu":
        np.copyto(there.view(torch.uint8).numpy(), rows.view(torch.uint8).numpy())
    else:
        there.copy_(rows)
