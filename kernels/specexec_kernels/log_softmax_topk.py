"""The k most likely tokens of each row and their log-probabilities: the reference in PyTorch.

log p(v) = logits[v] - log sum exp(logits). A drafter needs few of 32,000 to 256,000 columns. This
reference writes the whole log-softmax to memory and reads it again; a fused kernel (triton_topk)
does not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_softmax_topk_ref(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest log-probabilities of each row.

    Args:
        logits: (rows, vocab), any float dtype.
        k: 1 to vocab.
    Returns:
        log-probabilities (rows, k) float32, falling, and their columns (rows, k) int64; of equal
        logits the lower column comes first.
    Raises:
        ValueError: k is out of range.
    """
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be between 1 and {logits.shape[1]}, not {k}")
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    order = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :k]
    return log_probs.gather(1, order), order
