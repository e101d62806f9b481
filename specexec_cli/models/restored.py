"""Undoes the changes that llama.cpp's converter made to the weights of a GGUF file.

Weights whose rows were reordered stay as they are, and the products with them are reordered. Norms
and the parameters of recurrences are changed back when they are loaded. A few parameters have other
shapes in the file, such as the halves of DeepSeek's latent projection: they are made anew in each
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.models.stored_names import StoredNames
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint

_NEIGHBOURS = 2  # numbers on either side of a rounded logarithm that are tried


@dataclass(frozen=True, slots=True)
class Restored:
    """Changes to undo while weights are loaded; parameters have their names in the model."""

    # how a weight is made of what the file has, in float32; others are as stored
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    tables: Mapping[str, PackedFormat] = field(default_factory=dict)  # packed embedding tables


def restore(model: nn.Module, names: StoredNames, checkpoint: Checkpoint) -> Restored:
    """Prepares a model for a GGUF file's weights; other checkpoints need nothing.

    Linears get hooks that reorder their outputs or inputs if need be, and packed embedding tables
    get the shape that they have in the file.

    Raises:
        CheckpointError: the width of an embedding is no multiple of its packed format's blocks.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        return Restored()
    restoration = checkpoint.restoration
    tables, changes = {}, dict[str, Callable[[Tensor], Tensor]]()
    for parameter, stored in names.plain.items():
        path, _, leaf = parameter.rpartition(".")
        try:
            module = model.get_submodule(path)
        except AttributeError:  # of experts, whose modules are made of the first of their tensors
            raise CheckpointError(
                f"{checkpoint.folder}: what goes with '{stored}' is missing: download it again"
            ) from None
        rows = restoration.rows.get(stored)
        if rows is not None and not isinstance(module, MixedLinear | QuantizedLinear):
            changes[parameter] = _changed_back(rows, stored in restoration.decays)
        elif rows is not None and rows.order == "columns":
            module.register_forward_pre_hook(_tiled(rows))
        elif rows is not None and leaf == "weight":
            module.register_forward_hook(InOrder(rows))
        elif stored in restoration.decays:
            changes[parameter] = decay_logarithms
        elif stored in restoration.plus_one:
            changes[parameter] = _less_one
        if isinstance(module, nn.Embedding) and stored in checkpoint.blocks:
            tables[parameter] = _pack(module, checkpoint, stored)
    return Restored(changes, tables)


def _less_one(norm: Tensor) -> Tensor:
    return norm - 1


def _changed_back(rows: Rows, is_decay: bool) -> Callable[[Tensor], Tensor]:
    def changed(values: Tensor) -> Tensor:
        ordered = in_order(values.movedim(0, -1), rows).movedim(-1, 0).contiguous()
        return decay_logarithms(ordered) if is_decay else ordered

    return changed


def decay_logarithms(decays: Tensor) -> Tensor:
    """The logarithms that the converter stored as -exp(logarithm), in float32.

    A logarithm is rounded, so the numbers beside it are tried: of one of them the exponential has
    the very bits that are stored.
    """
    wanted = -decays.float()
    found = torch.log(wanted)
    up = down = found
    for _ in range(_NEIGHBOURS):
        up = torch.nextafter(up, torch.full_like(up, torch.inf))
        down = torch.nextafter(down, torch.full_like(down, -torch.inf))
        for other in (up, down):
            better = (torch.exp(found) != wanted) & (torch.exp(other) == wanted)
            found = torch.where(better, other, found)
    return found


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


def _tiled(rows: Rows) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tiled(args[0], rows), *args[1:]

    return hook


def tiled(inputs: Tensor, rows: Rows) -> Tensor:
    """Inputs of a linear, (..., value heads * size), in llama.cpp's order of value heads."""
    each = inputs.reshape(*inputs.shape[:-1], rows.groups, rows.heads // rows.groups, -1)
    return each.transpose(-2, -3).reshape(inputs.shape)


@dataclass(frozen=True, slots=True)
class InOrder:
    """The hook that reorders a linear's outputs."""

    rows: Rows

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """See in_order."""
        return in_order(output, self.rows)


def in_order(outputs: Tensor, rows: Rows) -> Tensor:
    """Reorders a linear's outputs from llama.cpp's order to transformers'; see RowOrder.

    Args:
        outputs: (..., rows of the linear).
    """
    before, heads, groups = outputs.shape[:-1], rows.heads, rows.groups
    if rows.order in ("tiles", "columns"):
        ahead, behind = outputs[..., : rows.first], outputs[..., rows.first :]
        each = behind.reshape(*before, heads // groups, groups, -1).transpose(-2, -3)
        return torch.cat((ahead, each.reshape(behind.shape)), dim=-1)
    if rows.order == "pairs":
        pairs = outputs.view(*before, heads, outputs.shape[-1] // heads // 2, 2)
        return pairs.transpose(-1, -2).reshape(outputs.shape)
    if rows.order == "halves":
        each = outputs.view(*before, heads, outputs.shape[-1] // heads)
        halves = each[..., : rows.turned].reshape(*before, heads, 2, rows.turned // 2)
        turned = halves.transpose(-1, -2).flatten(-2)
        return torch.cat((turned, each[..., rows.turned :]), dim=-1).view(outputs.shape)
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
    rows: Rows | None = None  # the order of the first tensor's rows

    def targets(self) -> set[str]:
        """The one parameter."""
        return {self.first}

    def parameters(self, stored: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Makes the parameter, in float32 where its tensors are packed.

        Args:
            stored: tensors by their names in the checkpoint.
        """
        parts = [self._plain(name, stored[name]) for name in self.names]
        return {self.first: made_of(parts, self.how, self.rows)}

    def fits(self, checkpoint: Checkpoint, shape: Sequence[int]) -> bool:
        """Whether the checkpoint's tensors have the shapes that this parameter is made of."""
        shapes = [checkpoint[name].shape for name in self.names]
        for number, name in enumerate(self.names):
            if (fmt := self.formats.get(name)) is not None:
                weights = shapes[number][-1] // fmt.block_bytes * fmt.unit
                shapes[number] = (*shapes[number][:-1], weights)
        try:
            parts = [torch.empty(each, device="meta") for each in shapes]
            made = made_of(parts, self.how, self.rows)
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


@dataclass(frozen=True, slots=True)
class Constant:
    """A parameter of one number, which a GGUF file's metadata say; no tensor has it."""

    first: str  # the parameter's name in the model
    number: float
    shape: Sequence[int]
    names: list[str] = field(default_factory=list)

    def targets(self) -> set[str]:
        """The one parameter."""
        return {self.first}

    def parameters(self, stored: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Makes the parameter in float32."""
        return {self.first: torch.full(tuple(self.shape), self.number, dtype=torch.float32)}


def made_of(parts: Sequence[Tensor], how: families.Making, rows: Rows | None = None) -> Tensor:
    """A parameter in transformers' shape.

    Args:
        parts: of experts (experts, outputs, inputs); of a latent projection, for each head, keys
            (heads, latent, keys) and values (heads, values, latent); else (outputs, inputs).
    """
    if how == "latent":
        keys, values = parts
        return torch.cat((keys.transpose(1, 2), values.to(keys.dtype)), dim=1).flatten(0, 1)
    if how == "columns":
        assert rows is not None
        return in_order(parts[0], rows)
    if how == "qkvz":
        assert rows is not None
        return _by_key_head(parts[0], parts[1], rows)
    joined = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-2)
    if how.endswith("transposed"):
        joined = joined.transpose(-1, -2).contiguous()
    return joined.flatten(0, 1) if how.startswith("flat") else joined


def _by_key_head(projection: Tensor, gate: Tensor, rows: Rows) -> Tensor:
    """Each key head's query, key, values and gates together, as Qwen3-Next has them.

    Args:
        projection: (queries, then keys, then values of all heads, inputs).
        gate: (values of all heads, inputs).
    """
    half = rows.first // 2
    parts = (projection[:half], projection[half : 2 * half], projection[2 * half :], gate)
    each = [part.to(gate.dtype).reshape(rows.groups, -1, gate.shape[1]) for part in parts]
    return torch.cat(each, dim=1).flatten(0, 1)


def makings(model: nn.Module, checkpoint: Checkpoint) -> list[Making | Constant]:
    """The parameters of a model that have to be made of a GGUF file's tensors or metadata.

    Raises:
        CheckpointError: a tensor is missing, or has another shape than the config says.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        return []
    wanted = model.state_dict()
    found: list[Making | Constant] = [
        Constant(parameter, number, wanted[parameter].shape)
        for parameter, number in checkpoint.restoration.constants.items()
    ]
    for parameter, (how, parts) in checkpoint.restoration.made.items():
        if missing := [name for name in parts if name not in checkpoint]:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor '{missing[0]}' is missing: the file is damaged, "
                "download it again"
            )
        blocks = checkpoint.blocks
        formats = {name: GGUF_FORMATS[blocks[name]] for name in parts if name in blocks}
        making = Making(
            parameter, list(parts), how, formats, checkpoint.restoration.rows.get(parts[0])
        )
        if parameter not in wanted or not making.fits(checkpoint, wanted[parameter].shape):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor '{parts[0]}' has shape "
                f"{list(checkpoint[parts[0]].shape)}, of which '{parameter}' of a "
                f"{checkpoint.config['model_type']} model cannot be made: the file is damaged, "
                "download it again"
            )
        found.append(making)
    return found
