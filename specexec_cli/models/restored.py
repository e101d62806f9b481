"""What llama.cpp's converter did to the weights of a GGUF file, undone where they are used.

Nothing is copied: rows of queries and keys stay where they are, and what is multiplied with them is
put back in order instead; of norms the one that was added is taken away again as they are loaded.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from specexec_cli.models.stored_names import StoredNames
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint
from specexec_cli.offload.store import Checkpoint


def restore(model: nn.Module, names: StoredNames, checkpoint: Checkpoint) -> frozenset[str]:
    """Makes the linears of queries and keys put their outputs back in order, where they need it.

    Returns:
        Norms' weights, by name in the model, from which one has to be taken away.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        return frozenset()
    restoration = checkpoint.restoration
    for parameter, stored in names.plain.items():
        heads = restoration.rotary_pairs.get(stored.rpartition(".")[0])
        if heads is not None and stored.endswith(".weight"):
            linear = model.get_submodule(parameter.rpartition(".")[0])
            linear.register_forward_hook(_in_order(heads))
    return frozenset(
        parameter for parameter, stored in names.plain.items() if stored in restoration.plus_one
    )


def _in_order(heads: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return in_order(output, heads)

    return hook


def in_order(rows: Tensor, heads: int) -> Tensor:
    """Queries or keys as transformers has them: within a head all first halves of rotary pairs,
    then all second ones, where llama.cpp has both halves of a pair beside each other.

    Args:
        rows: (..., heads * head size).
    """
    pairs = rows.unflatten(-1, (heads, rows.shape[-1] // heads // 2, 2))
    return pairs.transpose(-1, -2).flatten(-3)
