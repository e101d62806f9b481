"""What llama.cpp's converter did to the weights of a GGUF file, undone where they are used.

Nothing is copied: rows of queries and keys stay where they are, and what is multiplied with them is
put back in order instead; of norms the one that was added is taken away again as they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from specexec_kernels.formats.base import PackedFormat
from specexec_kernels.formats.gguf import GGUF_FORMATS
from torch import Tensor, nn

from specexec_cli.errors import CheckpointError
from specexec_cli.models.stored_names import StoredNames
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint
from specexec_cli.offload.store import Checkpoint


@dataclass(frozen=True, slots=True)
class Restored:
    """What is left to do where weights are loaded; parameters by name in the model."""

    plus_one: frozenset[str] = frozenset()  # norms' weights from which one is to be taken away
    tables: Mapping[str, PackedFormat] = field(default_factory=dict)  # of embeddings, packed


def restore(model: nn.Module, names: StoredNames, checkpoint: Checkpoint) -> Restored:
    """Makes the linears of queries and keys put their outputs back in order, where they need it,
    and gives packed tables of embeddings the shape that they have in the file.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        return Restored()
    restoration = checkpoint.restoration
    tables = {}
    for parameter, stored in names.plain.items():
        path, _, leaf = parameter.rpartition(".")
        heads = restoration.rotary_pairs.get(stored.rpartition(".")[0])
        if heads is not None and leaf == "weight":
            model.get_submodule(path).register_forward_hook(_in_order(heads))
        module = model.get_submodule(path)
        if isinstance(module, nn.Embedding) and stored in checkpoint.blocks:
            tables[parameter] = _pack(module, checkpoint, stored)
    plus_one = (name for name, stored in names.plain.items() if stored in restoration.plus_one)
    return Restored(frozenset(plus_one), tables)


def _pack(embedding: nn.Embedding, checkpoint: GgufCheckpoint, stored: str) -> PackedFormat:
    fmt, tensor = GGUF_FORMATS[checkpoint.blocks[stored]], checkpoint[stored]
    columns = embedding.embedding_dim // fmt.unit * fmt.block_bytes
    empty = torch.empty(embedding.num_embeddings, columns, dtype=torch.uint8, device="meta")
    embedding.weight = nn.Parameter(empty, requires_grad=False)
    if embedding.embedding_dim % fmt.unit:
        raise CheckpointError(
            f"{tensor.path}: embeddings of {embedding.embedding_dim} numbers are no whole blocks "
            f"of {fmt.name}: the file is damaged, download it again"
        )
    return fmt


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
    pairs = rows.view(*rows.shape[:-1], heads, rows.shape[-1] // heads // 2, 2)
    return pairs.transpose(-1, -2).reshape(rows.shape)
