"""Linears over the blocks of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from specexec_kernels.formats.gguf import GGUF_FORMATS

from specexec_cli.errors import CheckpointError
from specexec_cli.models.quantized import QuantizedLinear
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint

_TABLE = "embed_tokens.weight"  # its rows are looked up, not multiplied; see MixedEmbedding


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """A GGUF file's packed weights; see Packing."""

    checkpoint: GgufCheckpoint

    @property
    def leaves(self) -> Mapping[str, tuple[str, str]]:
        """See Packing."""
        linears = {
            name.removesuffix(".weight")
            for name in self.checkpoint.blocks
            if not name.endswith(_TABLE)
        }
        return {
            f"{linear}.{leaf}": (linear, leaf)
            for linear in linears
            for leaf in ("weight", "bias")
            if f"{linear}.{leaf}" in self.checkpoint
        }

    def linear(self, name: str, in_features: int, out_features: int) -> QuantizedLinear | None:
        """An empty linear in the place of `name`; None where it is plain.

        Raises:
            CheckpointError: its blocks are of a matrix of another size.
        """
        kind = self.checkpoint.blocks.get(f"{name}.weight")
        if kind is None:
            return None
        fmt, tensor = GGUF_FORMATS[kind], self.checkpoint[f"{name}.weight"]
        columns = in_features // fmt.unit * fmt.block_bytes
        if in_features % fmt.unit or tensor.shape != (out_features, columns):
            raise CheckpointError(
                f"{tensor.path}: tensor '{tensor.name}' has {list(tensor.shape)} bytes of {kind}, "
                f"of which the metadata makes a matrix of {out_features} x {in_features}: "
                "the file is damaged, download it again"
            )
        stored = {"weight": (tensor.shape, torch.uint8)}
        return QuantizedLinear(
            in_features, out_features, fmt, stored, bias=f"{name}.bias" in self.checkpoint
        )
