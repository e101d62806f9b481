"""What a quantized checkpoint's tensors say, held against the claims of its config files.

Decides which linears are packed, how zero points are stored, and which group an input is in; puts
an empty QuantizedLinear in the place of every packed linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from specexec_kernels.formats.awq import Awq
from specexec_kernels.formats.base import Part
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import unpack_rows
from torch import nn

from specexec_cli.errors import CheckpointError
from specexec_cli.models.quant_config import Notice, QuantConfig, QuantSpec
from specexec_cli.models.quantized import QuantizedLinear
from specexec_cli.offload.resident import TORCH_DTYPES, read_tensors
from specexec_cli.offload.store import Checkpoint, TensorRange

_SAMPLED_LINEARS = 8  # whose zero points decide between format v1 and v2
_SCALE_DTYPES = ("F16", "BF16", "F32")
_AWQ_OUTPUTS = 8  # of a word


class Packing(Protocol):
    """What a model's skeleton needs to know of packed weights."""

    @property
    def leaves(self) -> Mapping[str, tuple[str, str]]:
        """Tensors of packed linears, biases too: name in the checkpoint -> (linear, leaf)."""

    def linear(self, name: str, in_features: int, out_features: int) -> QuantizedLinear | None:
        """An empty linear in the place of `name` (of the checkpoint); None where it is plain."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """A checkpoint's quantization by GPTQ or AWQ, checked against its tensors."""

    config: QuantConfig
    checkpoint: Checkpoint
    stored_minus_one: bool
    shuffled: frozenset[str]  # linears whose g_idx is not k // group_size

    @classmethod
    def read(cls, checkpoint: Checkpoint, notice: Notice) -> Quantization | None:
        """The quantization of a checkpoint, checked; None for a plain one.

        Raises:
            CheckpointError: a kind that cannot be read, or tensors that contradict the config.
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
        for name in names:
            for leaf in quant.spec.kind.tensors:
                if leaf != "g_idx":
                    _find(checkpoint, name, leaf)
        shuffled = _shuffled(checkpoint, names, quant)
        return cls(quant, checkpoint, _minus_one(checkpoint, names, quant, notice), shuffled)

    @property
    def leaves(self) -> Mapping[str, tuple[str, str]]:
        """See Packing."""
        found = {}
        for stored in self.checkpoint:
            name, _, leaf = stored.rpartition(".")
            # tools that sort nothing by groups may store a g_idx all the same
            own = leaf in (*self.config.spec.kind.tensors, "g_idx", "bias")
            if own and f"{name}.qweight" in self.checkpoint:
                found[stored] = name, leaf
        return found

    def linear(self, name: str, in_features: int, out_features: int) -> QuantizedLinear | None:
        """An empty linear in the place of `name` of the checkpoint; None if it is plain.

        Raises:
            CheckpointError: its tensors do not fit each other, the config, or the layer.
        """
        if f"{name}.qweight" not in self.checkpoint:
            return None
        spec = _spec(self.config, name)
        fmt = self._format(name, spec)
        # codes and zero points are whole words
        multiples = (1, _AWQ_OUTPUTS) if isinstance(fmt, Awq) else (fmt.unit, fmt.unit)
        if in_features % multiples[0] or out_features % multiples[1]:
            raise CheckpointError(
                f"{self.config.source}: '{name}' with {in_features} inputs and {out_features} "
                f"outputs cannot be packed in {spec.bits} bits. Do both files fit the same model?"
            )
        stored = {
            part.leaf: (self._shape(part, out_features, in_features), TORCH_DTYPES[part.dtype])
            for part in fmt.parts
        }
        for leaf, (shape, _) in stored.items():
            _check_tensor(self.checkpoint, name, leaf, shape)
        bias = f"{name}.bias" in self.checkpoint
        if bias:
            _check_tensor(self.checkpoint, name, "bias", (out_features,))
        return QuantizedLinear(in_features, out_features, fmt, stored, bias=bias)

    def _format(self, name: str, spec: QuantSpec) -> Gptq | Awq:
        """How the tensors of a linear are meant."""
        group = 0 if spec.group_size == -1 else spec.group_size
        scales = _find(self.checkpoint, name, "scales").dtype
        shuffled = name in self.shuffled
        if spec.kind.layout == "gptq":
            return Gptq(spec.bits, group, scales, self.stored_minus_one, shuffled)
        if shuffled:
            raise CheckpointError(
                f"{self.checkpoint.folder}: '{name}.g_idx' puts inputs of '{name}' into groups out "
                "of order, which AWQ's layout does not have: convert the checkpoint to GPTQ"
            )
        return Awq(group, scales)

    @staticmethod
    def _shape(part: Part, outputs: int, inputs: int) -> tuple[int, ...]:
        """Of the tensor of a part in the file, where the index of groups is a list."""
        shape = part.shape(outputs, inputs)
        return shape if part.down else shape[1:]


def replace_linears(
    module: nn.Module,
    kinds: type[nn.Module] | tuple[type[nn.Module], ...],
    stored_name: Callable[[str], str],
    quantization: Packing,
) -> None:
    """Swap each linear of `module` whose weight is packed for an empty QuantizedLinear.

    Args:
        kinds: classes of linears, with in_features and out_features.
        stored_name: a linear's name within `module` -> its name in the checkpoint.
    Raises:
        CheckpointError: tensors of a linear do not fit, or its bias is missing.
    """
    for path, old in list(module.named_modules()):
        if not isinstance(old, kinds):
            continue
        name = stored_name(path)
        new = quantization.linear(name, int(old.in_features), int(old.out_features))  # type: ignore[arg-type]
        if new is not None:
            if old.bias is not None and new.bias is None:
                raise CheckpointError(
                    f"tensor '{name}.bias' is missing, which the packed weight '{name}' goes with: "
                    "download the checkpoint again"
                )
            parent, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(parent), leaf, new)


def _spec(config: QuantConfig, name: str) -> QuantSpec:
    """The tensors decide that a linear is packed, the config only how."""
    return config.for_module(name) or config.spec


def _find(checkpoint: Checkpoint, linear: str, leaf: str) -> TensorRange:
    tensor = checkpoint.tensors.get(f"{linear}.{leaf}")
    if tensor is None:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor '{linear}.{leaf}' is missing, which the packed weight "
            f"'{linear}.qweight' needs: download the checkpoint again"
        )
    return tensor


def _check_tensor(
    checkpoint: Checkpoint, linear: str, leaf: str, shape: tuple[int, ...]
) -> TensorRange:
    tensor = _find(checkpoint, linear, leaf)
    name = tensor.name
    dtypes = ("I32",) if leaf in ("qweight", "qzeros", "g_idx") else _SCALE_DTYPES
    if tensor.dtype not in dtypes:
        raise CheckpointError(
            f"{tensor.path}: tensor '{name}' is {tensor.dtype}, expected {' or '.join(dtypes)}"
        )
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: tensor '{name}' has shape {list(tensor.shape)}, the quantization "
            f"config and the layer's sizes say {list(shape)}. Are all files of the same model?"
        )
    return tensor


def _shuffled(checkpoint: Checkpoint, names: list[str], config: QuantConfig) -> frozenset[str]:
    """Linears whose g_idx says more than k // group_size; a sequential one need not be streamed."""
    stored = {name: checkpoint.tensors.get(f"{name}.g_idx") for name in names}
    ranges = {name: tensor for name, tensor in stored.items() if tensor is not None}
    if not ranges:
        return frozenset()
    loaded = read_tensors(list(ranges.values()))
    shuffled = set()
    for name, tensor in ranges.items():
        inputs = tensor.shape[0] if tensor.shape else 0
        _check_tensor(checkpoint, name, "g_idx", (inputs,))
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

    A symmetric checkpoint shows it by itself, and labels have been wrong in the wild. An
    asymmetric v1 one can only be read if its writer kept zero points of 0 apart (see
    packing.unpack_zeros); AutoGPTQ's became 0xFFFFFFFF and overwrote their neighbours.
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
    """What the first linears' zero points look like: symmetric "v1", symmetric "v2", or "mixed"."""
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
            return "mixed"  # `linear` tells what is wrong with it
        fields = unpack_rows(words.T, bits)
        low, high = int(fields.min()), int(fields.max())
        kinds.add({(middle - 1,) * 2: "v1", (middle,) * 2: "v2"}.get((low, high), "mixed"))
    return kinds.pop() if len(kinds) == 1 else "mixed"
