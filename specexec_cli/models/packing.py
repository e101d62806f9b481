"""Finds the packed linears of a checkpoint and their formats: one reader for all kinds.

The formats themselves are in specexec_kernels.formats. Each kind of checkpoint (GGUF files, GPTQ
and AWQ, each of METHODS) gives the names of a linear's tensors and the format of one linear. This
module finds the tensors, checks them, and puts empty linears in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from specexec_kernels.formats import METHODS
from specexec_kernels.formats.base import SCALES, Method, PackedFormat, Part, Stored
from specexec_kernels.formats.gguf import GGUF_FORMATS
from torch import Tensor, nn

from specexec_cli.errors import CheckpointError
from specexec_cli.guarded import read_json
from specexec_cli.models.gptq_config import Notice
from specexec_cli.models.gptq_tensors import GptqTensors
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.offload.checkpoint import Checkpoint, TensorRange
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint
from specexec_cli.offload.resident import TORCH_DTYPES, read_tensors

_MOST_LOADED_BYTES = 4_000_000  # several times the largest tensor that choosing a format reads
_MODELOPT_FILE = "hf_quant_config.json"
_PLAIN_DTYPES = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class Packing:
    """The packed linears of a checkpoint."""

    checkpoint: Checkpoint
    source: Path  # the file that describes the packing, for messages
    names: tuple[str, ...]  # leaves (names behind a linear's name) of the tensors of a weight
    read: Callable[[Stored], PackedFormat | None]  # a linear's format; ValueError if it is invalid
    # whether a module with these tensors, by leaf, is packed
    is_packed: Callable[[Mapping[str, str]], bool]
    unused: tuple[str, ...] = ()  # leaves that products do not need, such as scales of inputs
    table: str | None = None  # end of the embedding table's name, which MixedEmbedding looks up

    @cached_property
    def modules(self) -> Mapping[str, Mapping[str, str]]:
        """The tensors with known leaves: module -> leaf -> name in the checkpoint."""
        modules: dict[str, dict[str, str]] = {}
        known = sorted({*self.names, *self.unused}, key=len, reverse=True)
        for stored in self.checkpoint:
            leaf = next((leaf for leaf in known if stored.endswith(f".{leaf}")), None)
            if leaf is not None:
                modules.setdefault(stored.removesuffix(f".{leaf}"), {})[leaf] = stored
        return modules

    @cached_property
    def packed(self) -> Mapping[str, Mapping[str, str]]:
        """The packed linears: name -> leaf -> name in the checkpoint."""
        return {name: found for name, found in self.modules.items() if self.is_packed(found)}

    @cached_property
    def leaves(self) -> Mapping[str, tuple[str, str]]:
        """The tensors of packed linears, biases included: name in the checkpoint -> (linear, leaf).

        Tensors with `unused` leaves are listed too, so that they count as known: with the linear
        that they stand beside, even a plain one, or with the first linear inside their module.
        """
        found = {}
        for name, tensors in self.modules.items():
            if self.table and name.endswith(self.table):
                continue
            owner = name
            if not set(tensors) & set(self.names):
                inside = (other for other in self.modules if other.startswith(f"{name}."))
                owner = next(inside, name)
            for leaf, stored in tensors.items():
                if name in self.packed or leaf in self.unused:
                    found[stored] = owner, leaf
            if name in self.packed and f"{name}.bias" in self.checkpoint:
                found[f"{name}.bias"] = name, "bias"
        return found

    def linear(self, name: str, in_features: int, out_features: int) -> QuantizedLinear | None:
        """An empty linear to replace `name` (a name in the checkpoint); None if it is plain.

        Raises:
            CheckpointError: the tensors do not fit each other, the config, or the layer.
        """
        if name not in self.packed:
            return None
        tensors = {leaf: self.checkpoint[stored] for leaf, stored in self.packed[name].items()}
        bias = self.checkpoint.tensors.get(f"{name}.bias")

        def load(leaf: str) -> Tensor:
            if tensors[leaf].n_bytes > _MOST_LOADED_BYTES:
                raise ValueError(f"tensor '{tensors[leaf].name}' is too large: download it again")
            return next(iter(read_tensors([tensors[leaf]]).values()))

        shapes = {leaf: (tensor.dtype, tensor.shape) for leaf, tensor in tensors.items()}
        try:
            fmt = self.read(Stored(name, out_features, in_features, shapes, load))
            if fmt is None:
                raise ValueError("its tensors are of no known format of this method")
            for part in fmt.parts:
                _check(part, tensors.get(part.leaf), name, out_features, in_features)
            if bias is not None and (bias.dtype not in SCALES or bias.shape != (out_features,)):
                raise ValueError(
                    f"tensor '{bias.name}' is {bias.dtype} of shape {list(bias.shape)}, expected "
                    f"{' or '.join(SCALES)} of [{out_features}]"
                )
        except ValueError as error:
            raise CheckpointError(f"{self.source}: '{name}': {error}") from error
        stored = {
            part.leaf: (tensors[part.leaf].shape, TORCH_DTYPES[part.dtype]) for part in fmt.parts
        }
        return QuantizedLinear(in_features, out_features, fmt, stored, bias=bias is not None)


def read_packing(checkpoint: Checkpoint, notice: Notice) -> Packing | None:
    """Finds how a checkpoint's weights are packed; None for a plain checkpoint.

    Args:
        notice: told where the computation differs from the config.
    Raises:
        CheckpointError: an unsupported kind of packing, or tensors that contradict the config.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        return _of_gguf(checkpoint)
    source, settings = _settings(checkpoint)
    method = METHODS.get(str(settings.get("quant_method")).lower())
    if method is not None:
        return _of_method(checkpoint, source, settings, method, notice)
    gptq = GptqTensors.read(checkpoint, notice)
    if gptq is None:
        return None
    return Packing(checkpoint, gptq.config.source, gptq.names, gptq.format, gptq.is_packed)


def replace_linears(
    module: nn.Module,
    kinds: type[nn.Module] | tuple[type[nn.Module], ...],
    stored_name: Callable[[str], str],
    packing: Packing,
) -> None:
    """Replaces each packed linear of `module` by an empty QuantizedLinear.

    Args:
        kinds: the classes of linears to replace, with in_features and out_features.
        stored_name: a linear's name within `module` -> its name in the checkpoint.
    Raises:
        CheckpointError: tensors of a linear do not fit, or its bias is missing.
    """
    for path, old in list(module.named_modules()):
        if not isinstance(old, kinds):
            continue
        name = stored_name(path)
        new = packing.linear(name, int(old.in_features), int(old.out_features))  # type: ignore[arg-type]
        if new is not None:
            if old.bias is not None and new.bias is None:
                raise CheckpointError(
                    f"tensor '{name}.bias' is missing, which the packed weight '{name}' goes with: "
                    "download the checkpoint again"
                )
            parent, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(parent), leaf, new)


def _of_gguf(checkpoint: GgufCheckpoint) -> Packing:
    """The packing of a GGUF file, in blocks."""

    def read(stored: Stored) -> PackedFormat:
        fmt = GGUF_FORMATS[checkpoint.blocks[f"{stored.name}.weight"]]
        if stored.inputs % fmt.unit:
            raise ValueError(
                f"{stored.inputs} inputs are no whole blocks of {fmt.name}: the file is damaged, "
                "download it again"
            )
        return fmt

    return Packing(
        checkpoint, checkpoint.folder, ("weight",), read,
        lambda tensors: tensors["weight"] in checkpoint.blocks, table="embed_tokens",
    )  # fmt: skip


def _of_method(
    checkpoint: Checkpoint,
    source: Path,
    settings: Mapping[str, Any],
    method: Method,
    notice: Notice,
) -> Packing:
    """The packing of one of METHODS: a linear is packed unless it only has a plain weight.

    Raises:
        CheckpointError: no weight is packed, or the settings are invalid.
    """

    def is_packed(tensors: Mapping[str, str]) -> bool:
        needed = set(tensors) & set(method.leaves)
        if needed != {"weight"}:
            return bool(needed)
        return checkpoint[tensors["weight"]].dtype not in _PLAIN_DTYPES

    def read(stored: Stored) -> PackedFormat | None:
        return method.read(stored, settings)

    packing = Packing(checkpoint, source, method.leaves, read, is_packed, method.unused)
    if not packing.packed:
        raise CheckpointError(
            f"{source} says {method.name}, but {checkpoint.folder} has no packed weights. Are both "
            "files of the same model?"
        )
    try:
        quantizes_rows = method.quantizes_rows(settings)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error
    if quantizes_rows:
        notice(
            f"{source} quantizes activations too: here they keep the compute dtype, and weights "
            "alone are as stored"
        )
    return packing


def _settings(checkpoint: Checkpoint) -> tuple[Path, Mapping[str, Any]]:
    """The quantization settings and the file that they are in; empty if there are none.

    Raises:
        CheckpointError: the file of the settings cannot be read.
    """
    path = checkpoint.folder / "config.json"
    settings = checkpoint.config.get("quantization_config")
    if isinstance(settings, Mapping):
        return path, settings
    path = checkpoint.folder / _MODELOPT_FILE
    if not path.is_file():
        return path, {}
    try:
        content = read_json(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    inside = content.get("quantization") if isinstance(content, dict) else None
    if not isinstance(inside, dict):
        raise CheckpointError(f"{path} has no 'quantization': download it again")
    return path, {**inside, "quant_method": "modelopt"}


def _check(part: Part, tensor: TensorRange | None, name: str, outputs: int, inputs: int) -> None:
    """Compares a tensor with its part of the format.

    Raises:
        ValueError: the tensor is missing, or of another dtype or shape.
    """
    if tensor is None:
        raise ValueError(f"tensor '{name}.{part.leaf}' is missing: download the checkpoint again")
    if tensor.dtype != part.dtype:
        raise ValueError(f"tensor '{tensor.name}' is {tensor.dtype}, expected {part.dtype}")
    expected = part.shape(outputs, inputs)
    # dimensions of size 1 do not matter, and some tools store a matrix as one long column
    kept = [size for size in tensor.shape if size != 1]
    if kept not in ([size for size in expected if size != 1], [prod(expected)]):
        raise ValueError(
            f"tensor '{tensor.name}' has shape {list(tensor.shape)}, the layer's sizes say "
            f"{list(expected)}. Are all files of the same model?"
        )
