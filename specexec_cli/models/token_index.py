"""Layers that pick the earlier tokens they see by an index (DeepSeek-V3.2, GLM-5).

Where a text has no more tokens than the index picks, it picks all of them, and such a layer is one
with ordinary attention. Longer texts are refused (catalog/architectures.py says from where on), so
that the index is never computed: planning/built_sizes.py builds models without its weights, and the
layers' own code is run with a mask that it cannot cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from specexec_cli.planning.built_sizes import sees_all


@dataclass(frozen=True, slots=True)
class UncutMask:
    """The mask of a layer's rows, in whatever form attention takes, on its way through modelling
    code that cuts a part out of it for the index."""

    mask: Any

    def __getitem__(self, part: Any) -> Self:
        """The whole mask again: nothing reads the part."""
        return self


def keep_masks_whole(module: nn.Module) -> None:
    """Has a layer's attention hand its mask on as it is, where it would cut it for an index."""
    if not sees_all(module):
        return
    run = module.forward

    def forward(*args: Any, attention_mask: Any, **given: Any) -> Any:
        # GLM-5.3 makes its masks of the picked tokens
        whole = UncutMask(attention_mask)
        module.build_attention_mask_from_topk = lambda **picked: whole  # type: ignore[assignment]
        return run(*args, attention_mask=whole, **given)

    module.forward = forward
