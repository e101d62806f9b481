"""Undoes the changes that llama.cpp's converter made to the weights of a GGUF file.

No weight is copied. The weights of queries and keys stay in llama.cpp's order of rows, and the
products with them are reordered. The 1 that was added to norms is subtracted when they are loaded.
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
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint


@dataclass(frozen=True, slots=True)
class Restored:
    """Changes to undo while weights are loaded; parameters have their names in the model."""

    plus_one: frozenset[str] = frozenset()  # weights of norms from which 1 is subtracted
    tables: Mapping[str, PackedFormat] = field(default_factory=dict)  # packed embedding tables


def restore(model: nn.Module, names: StoredNames, checkpoint: Checkpoint) -> Restored:
    """Prepares a model for a GGUF file's weights; other checkpoints need nothing.

    Linears of queries and keys get hooks that reorder their outputs if need be, and packed
    embedding tables get the shape that they have in the file.

    Raises:
        CheckpointError: the width of an embedding is no multiple of its packed format's blocks.
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
    """Reorders queries or keys from llama.cpp's order to transformers'.

    llama.cpp has both halves of a rotary pair side by side. transformers has, within each head, all
    first halves and then all second halves.

    Args:
        rows: (..., heads * head size).
    """
    pairs = rows.view(*rows.shape[:-1], heads, rows.shape[-1] // heads // 2, 2)
    return pairs.transpose(-1, -2).reshape(rows.shape)
