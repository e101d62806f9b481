"""Small tensors to a GPU and back: without a wait, and with one wait for several of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MOST_PINNED_BYTES = 4 << 20  # of one tensor: torch keeps what it has pinned for the next one


def downloaded(parts: Sequence[Tensor]) -> NDArray[np.float64]:
    """The numbers of several tensors, brought to the CPU by one transfer, for which it waits once.

    Args:
        parts: on one device, (..., columns) each and alike but for the columns; float32, bool, or
            integers below 2^53, all of which float64 holds exactly.
    Returns:
        (..., all columns)
    """
    found: NDArray[np.float64] = torch.cat([part.double() for part in parts], dim=-1).cpu().numpy()
    return found


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy of a small tensor on a device; the tensor itself where it lies there.

    Work on a GPU that is started from now on finds the copy. The host does not wait for it: a copy
    from memory that is not pinned would wait for all work before it, and for weights on their way.

    Args:
        numbers: may be changed as soon as this returns, unless it is pinned already.
    """
    small = numbers.numel() * numbers.element_size() <= _MOST_PINNED_BYTES
    if device.type != "cuda" or numbers.device.type != "cpu" or not small:
        return numbers.to(device)
    try:
        numbers = numbers.pin_memory()  # torch keeps this copy until the GPU has read it
    except RuntimeError:  # no more memory can be pinned: then the host waits
        return numbers.to(device)
    return numbers.to(device, non_blocking=True)
