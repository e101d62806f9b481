"""Compares the tensors of a GPTQ or AWQ checkpoint with its config files.

Decides how zero points are stored and to which group each input belongs. models.packing makes the
linears.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from specexec_kernels.formats.awq import Awq
from specexec_kernels.formats.base import Stored
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import unpack_rows

from specexec_cli.errors import CheckpointError
from specexec_cli.models.gptq_config import Notice, QuantConfig, QuantSpec
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.resident import read_tensors

_SAMPLED_LINEARS = 8  # the first linears, by which format v1 or v2 is recognized
_SCALE_DTYPES = ("F16", "BF16", "F32")
_AWQ_OUTPUTS = 8  # outputs packed in a word


@dataclass(frozen=True, slots=True)
class GptqTensors:
    """How the packed linears of a GPTQ or AWQ checkpoint are stored, by its config and tensors."""

    # g_idx is listed for all: some tools store it even where inputs are in order
    names: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    config: QuantConfig
    stored_minus_one: bool
    shuffled: frozenset[str]  # linears whose g_idx is not k // group_size

    @classmethod
    def read(cls, checkpoint: Checkpoint, notice: Notice) -> GptqTensors | None:
        """Reads and checks a checkpoint; None for one that is neither GPTQ nor AWQ.

        Raises:
            CheckpointError: the checkpoint is of an unsupported kind, or its tensors contradict
                its config.
        """
        quant = QuantConfig.from_checkpoint(checkpoint.folder, checkpoint.config, notice)
        names = [n.removesuffix(".qweight") for n in checkpoint if n.endswith(".qweight")]
        if quant is None and not names:
            return None
        if quant is None:
            raise CheckpointError(
                f"{checkpoint.folder} has packed weights ('{names[0]}.qweight') but no config says "
                "how they are quantized: download quantize_config.json as well"
            )
        if not names:
            raise CheckpointError(
                f"{quant.source} says {quant.spec.method}, but {checkpoint.folder} has no packed "
                "weights (*.qweight). Are both files of the same model?"
            )
        shuffled = _shuffled(checkpoint, names, quant)
        return cls(quant, _minus_one(checkpoint, names, quant, notice), shuffled)

    @staticmethod
    def is_packed(tensors: Mapping[str, str]) -> bool:
        """Whether a module with these tensors, by leaf, is packed."""
        return "qweight" in tensors

    def format(self, stored: Stored) -> Gptq | Awq:
        """The format of a packed linear.

        Raises:
            ValueError: the tensors do not fit the config.
        """
        spec = _spec(self.config, stored.name)
        group = 0 if spec.group_size == -1 else spec.group_size
        scales = stored.dtype("scales", *_SCALE_DTYPES)
        fmt: Gptq | Awq
        if spec.kind.layout == "gptq":
            shuffled = stored.name in self.shuffled
            fmt = Gptq(spec.bits, group, scales, self.stored_minus_one, shuffled)
            inputs, outputs = fmt.unit, fmt.unit  # codes and zero points are whole words
        elif stored.name in self.shuffled:
            raise ValueError(
                f"'{stored.name}.g_idx' puts inputs into groups out of order, which AWQ's layout "
                "does not have: convert the checkpoint to GPTQ"
            )
        else:
            fmt, inputs, outputs = Awq(group, scales), 1, _AWQ_OUTPUTS
        if stored.inputs % inputs or stored.outputs % outputs:
            raise ValueError(
                f"{stored.inputs} inputs and {stored.outputs} outputs cannot be packed in "
                f"{spec.bits} bits. Do both files fit the same model?"
            )
        return fmt


def _spec(config: QuantConfig, name: str) -> QuantSpec:
    """How a packed linear is quantized, even where the config calls the linear plain.

    The tensors decide whether a linear is packed; the config only says how.
    """
    return config.for_module(name) or config.spec


def _shuffled(checkpoint: Checkpoint, names: list[str], config: QuantConfig) -> frozenset[str]:
    """Linears whose g_idx is not k // group_size; a sequential g_idx need not be streamed."""
    stored = {name: checkpoint.tensors.get(f"{name}.g_idx") for name in names}
    ranges = {name: tensor for name, tensor in stored.items() if tensor is not None}
    if not ranges:
        return frozenset()
    loaded = read_tensors(list(ranges.values()))
    shuffled = set()
    for name, tensor in ranges.items():
        inputs = tensor.shape[0] if tensor.shape else 0
        if tensor.dtype != "I32" or tensor.shape != (inputs,):
            raise CheckpointError(
                f"{tensor.path}: tensor '{tensor.name}' is {tensor.dtype} of shape "
                f"{list(tensor.shape)}, expected I32 of one number for each input"
            )
        size = _spec(config, name).group_size
        size = inputs if size == -1 else size
        g_idx, groups = loaded[tensor.name], -(-inputs // size)
        if inputs and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
            raise CheckpointError(
                f"{tensor.path}: '{tensor.name}' names groups {int(g_idx.min())} to "
                f"{int(g_idx.max())}, but {inputs} inputs in groups of {size} have {groups} "
                "groups: the file is damaged or belongs to another config, download it again"
            )
        if not torch.equal(g_idx, torch.arange(inputs, dtype=torch.int32) // size):
            shuffled.add(name)
    return frozenset(shuffled)


def _minus_one(
    checkpoint: Checkpoint, names: list[str], config: QuantConfig, notice: Notice
) -> bool:
    """Whether zero points are stored minus one (GPTQ format v1).

    The zero points of a symmetric checkpoint show its format, and are believed more than its label:
    published labels have been wrong. An asymmetric v1 checkpoint can only be read if its writer
    kept zero points of 0 apart (see packing.unpack_zeros): in AutoGPTQ they became 0xFFFFFFFF and
    overwrote their neighbours.
    """
    if not config.spec.kind.zeros_minus_one:
        return False
    labelled_v1 = not config.spec.v2
    seen = _seen_zeros(checkpoint, names, config) if config.spec.sym is not False else None
    if seen in ("v1", "v2"):
        if (seen == "v1") != labelled_v1:
            notice(
                f"{config.source} says format {config.variant}, but the zero points of this "
                f"symmetric checkpoint are stored as in {seen}: it is read as {seen}"
            )
        return seen == "v1"
    if seen == "mixed" and config.spec.sym:
        notice(f"{config.source} says symmetric, but zero points differ: read as asymmetric")
    if labelled_v1 and not config.lossless_v1:
        raise CheckpointError(
            f"{config.source}: an asymmetric checkpoint in format v1 that was not written by "
            "GPTQModel 0.9.0 or later. AutoGPTQ lost zero points of 0 when it stored them, so the "
            "weights cannot be restored: use a symmetric or a gptq_v2 checkpoint"
        )
    return labelled_v1


def _seen_zeros(checkpoint: Checkpoint, names: list[str], config: QuantConfig) -> str:
    """The format that the first linears' zero points show: "v1" or "v2" (symmetric), or "mixed"."""
    ranges = {
        name: checkpoint.tensors[f"{name}.qzeros"]
        for name in names[:_SAMPLED_LINEARS]
        if f"{name}.qzeros" in checkpoint
    }
    loaded = read_tensors(list(ranges.values())) if ranges else {}
    kinds = set()
    for name, tensor in ranges.items():
        bits = _spec(config, name).bits
        middle = 2 ** (bits - 1)
        words = loaded[tensor.name]
        if words.dtype != torch.int32 or words.dim() != 2 or words.shape[1] * 32 % bits:
            return "mixed"  # Packing.linear reports this tensor's error
        fields = unpack_rows(words.T, bits)
        low, high = int(fields.min()), int(fields.max())
        kinds.add({(middle - 1,) * 2: "v1", (middle,) * 2: "v2"}.get((low, high), "mixed"))
    return kinds.pop() if len(kinds) == 1 else "mixed"
