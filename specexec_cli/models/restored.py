"""Undoes the changes that llama.cpp's converter made to the weights of a GGUF file.

Weights whose rows were reordered stay as they are, and the products with them are reordered. The 1
that was added to norms is subtracted when they are loaded. A few parameters have other shapes in
the file, such as the halves of DeepSeek's latent projection: they are made anew in each pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from specexec_kernels.formats.base import PackedFormat
from specexec_kernels.formats.ggml import GgmlFormat
from specexec_kernels.formats.gguf import GGUF_FORMATS
from torch import Tensor, nn
from transformers import PreTrainedModel

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf import families
from specexec_cli.gguf.names import Rows
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
        rows = restoration.rows.get(stored.rpartition(".")[0])
        if rows is not None and leaf == "weight":
            model.get_submodule(path).register_forward_hook(_in_order(rows))
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


def _in_order(rows: Rows) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return in_order(output, rows)

    return hook


def in_order(outputs: Tensor, rows: Rows) -> Tensor:
    """Reorders a linear's outputs from llama.cpp's order to transformers'; see RowOrder.

    Args:
        outputs: (..., rows of the linear).
    """
    before, heads, groups = outputs.shape[:-1], rows.heads, rows.groups
    if rows.order == "pairs":
        pairs = outputs.view(*before, heads, outputs.shape[-1] // heads // 2, 2)
        return pairs.transpose(-1, -2).reshape(outputs.shape)
    if rows.order == "thirds":
        thirds = outputs.view(*before, 3, heads, outputs.shape[-1] // heads // 3)
        return thirds.transpose(-2, -3).reshape(outputs.shape)
    size = outputs.shape[-1] // (heads + 2 * groups)
    each = outputs.view(*before, heads + 2 * groups, size)
    queries, keys, values = torch.split(each, [heads, groups, groups], dim=-2)
    queries = queries.reshape(*before, groups, heads // groups, size)
    together = torch.cat((queries, keys.unsqueeze(-2), values.unsqueeze(-2)), dim=-2)
    return together.reshape(outputs.shape)


@dataclass(frozen=True, slots=True)
class Making:
    """A parameter that is made of a GGUF file's tensors, as Conversion is of safetensors'."""

    first: str  # the parameter's name in the model
    names: list[str]  # of the tensors that it is made of
    how: families.Making
    formats: Mapping[str, GgmlFormat]  # of those that are packed

    def targets(self) -> set[str]:
        """The one parameter."""
        return {self.first}

    def parameters(self, stored: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Makes the parameter, in float32 where its tensors are packed.

        Args:
            stored: tensors by their names in the checkpoint.
        """
        return {self.first: made_of([self._plain(name, stored[name]) for name in self.names],
                                    self.how)}  # fmt: skip

    def fits(self, checkpoint: Checkpoint, shape: Sequence[int]) -> bool:
        """Whether the checkpoint's tensors have the shapes of which this parameter is made."""
        shapes = [checkpoint[name].shape for name in self.names]
        for number, name in enumerate(self.names):
            if (fmt := self.formats.get(name)) is not None:
                weights = shapes[number][-1] // fmt.block_bytes * fmt.unit
                shapes[number] = (*shapes[number][:-1], weights)
        try:
            made = made_of([torch.empty(each, device="meta") for each in shapes], self.how)
        except (RuntimeError, IndexError):  # shapes that cannot be put together
            return False
        return made.shape == torch.Size(shape)

    def _plain(self, name: str, tensor: Tensor) -> Tensor:
        fmt = self.formats.get(name)
        if fmt is None:
            return tensor
        outputs = tensor.numel() // tensor.shape[-1]
        inputs = tensor.shape[-1] // fmt.block_bytes * fmt.unit
        return fmt.unpack({"weight": tensor}, outputs, inputs).view(*tensor.shape[:-1], inputs)


def made_of(parts: Sequence[Tensor], how: families.Making) -> Tensor:
    """A parameter in transformers' shape.

    Args:
        parts: of experts (experts, outputs, inputs); of a latent projection, for each head, keys
            (heads, latent, keys) and values (heads, values, latent); else (outputs, inputs).
    """
    if how == "latent":
        keys, values = parts
        return torch.cat((keys.transpose(1, 2), values.to(keys.dtype)), dim=1).flatten(0, 1)
    joined = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-2)
    if how.endswith("transposed"):
        joined = joined.transpose(-1, -2).contiguous()
    return joined.flatten(0, 1) if how.startswith("flat") else joined


def makings(model: nn.Module, checkpoint: Checkpoint) -> list[Making]:
    """The parameters of a model that have to be made of a GGUF file's tensors.

    Raises:
        CheckpointError: a tensor is missing, or has another shape than the config says.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        return []
    found = []
    wanted = model.state_dict()
    for parameter, (how, parts) in checkpoint.restoration.made.items():
        if missing := [name for name in parts if name not in checkpoint]:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor '{missing[0]}' is missing: the file is damaged, "
                "download it again"
            )
        blocks = checkpoint.blocks
        formats = {name: GGUF_FORMATS[blocks[name]] for name in parts if name in blocks}
        making = Making(parameter, list(parts), how, formats)
        if parameter not in wanted or not making.fits(checkpoint, wanted[parameter].shape):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor '{parts[0]}' has shape "
                f"{list(checkpoint[parts[0]].shape)}, of which '{parameter}' of a "
                f"{checkpoint.config['model_type']} model cannot be made: the file is damaged, "
                "download it again"
            )
        found.append(making)
    return found
