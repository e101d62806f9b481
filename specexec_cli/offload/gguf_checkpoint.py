"""A GGUF file as a Checkpoint: its tensors under the names that safetensors checkpoints use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Self

from specexec_cli.catalog.architectures import text_config
from specexec_cli.gguf.config import gguf_config
from specexec_cli.gguf.container import GgufFile, GgufTensor, read_gguf
from specexec_cli.gguf.names import Restoration, mtp_file, translate
from specexec_cli.offload.checkpoint import Checkpoint, TensorRange, TrainedHead


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """A model in a GGUF file, or in the parts of a split one; `folder` is the file's path.

    A tensor of packed blocks is a matrix of bytes: a row holds the blocks of one row of weights.
    """

    file: GgufFile
    blocks: Mapping[str, str]  # name of a tensor of packed blocks -> name of its type
    restoration: Restoration  # changes that the converter made and that have to be undone
    described: Mapping[str, Any]  # what gguf_config() makes of the file

    @property
    def config(self) -> Mapping[str, Any]:
        """The values that config.json would have, made from the file's metadata."""
        return self.described if self.head is None else self.head.config

    def as_head(self, head: TrainedHead, names: Mapping[str, str]) -> Self:
        """See Checkpoint."""
        blocks = {new: self.blocks[old] for old, new in names.items() if old in self.blocks}
        return replace(super().as_head(head, names), blocks=blocks)

    @property
    def config_path(self) -> Path:
        """The file that the config comes from, for messages."""
        return self.folder


def read_gguf_checkpoint(path: Path) -> GgufCheckpoint:
    """The tensors of a GGUF file and of its other parts, if it was split.

    Raises:
        CheckpointError: a file is missing, damaged, or of an architecture that is not supported.
    """
    file = read_gguf(path)
    config = gguf_config(file)
    found, restoration = translate(file, text_config(config))
    return GgufCheckpoint(path, _ranges(found), file, _blocks(found), restoration, config)


def gguf_mtp(target: GgufCheckpoint, number: int, head: TrainedHead) -> GgufCheckpoint | None:
    """A file's layer that predicts further tokens, see mtp.py; None if it has none.

    Args:
        number: of the layer, counted from 0 behind the others.
        head: what makes it a head of its target.
    """
    text, config = text_config(target.config), text_config(head.config)
    layer = int(text["num_hidden_layers"]) + number
    file = mtp_file(target.file, layer, str(text["model_type"]), head.own_head)
    if file is None:
        return None
    found, restoration = translate(file, config)
    return GgufCheckpoint(
        target.folder, _ranges(found), file, _blocks(found), restoration, head.config, head=head
    )


def _ranges(tensors: Mapping[str, GgufTensor]) -> dict[str, TensorRange]:
    return {name: _range(name, tensor) for name, tensor in tensors.items()}


def _blocks(tensors: Mapping[str, GgufTensor]) -> dict[str, str]:
    return {
        name: tensor.type.name for name, tensor in tensors.items() if tensor.type.stored_as is None
    }


def _range(name: str, tensor: GgufTensor) -> TensorRange:
    dtype, shape = tensor.type.stored_as, tensor.shape
    if dtype is None:
        dtype, rows = "U8", prod(shape[:-1])
        shape = (*shape[:-1], (tensor.stop - tensor.start) // rows if rows else 0)
    return TensorRange(name, tensor.path, dtype, shape, tensor.start, tensor.stop)
