"""What a checkpoint of packed weights says, held against its tensors.

The formats themselves are specexec_kernels.formats; here their tensors are found in a checkpoint,
checked, and given to linears.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from specexec_kernels.formats import METHODS
from specexec_kernels.formats.base import Method, Part, Stored
from torch import Tensor

from specexec_cli.errors import CheckpointError
from specexec_cli.guarded import read_json
from specexec_cli.models.gguf_blocks import GgufBlocks
from specexec_cli.models.quant_checkpoint import Packing, Quantization
from specexec_cli.models.quant_config import Notice
from specexec_cli.models.quantized import QuantizedLinear
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint
from specexec_cli.offload.resident import TORCH_DTYPES, read_tensors
from specexec_cli.offload.store import Checkpoint, TensorRange

_MOST_LOADED_BYTES = 4_000_000  # of a table, an index of groups or a state, some times theirs
_MODELOPT_FILE = "hf_quant_config.json"


def read_packing(checkpoint: Checkpoint, notice: Notice) -> Packing | None:
    """How the weights of a checkpoint are packed; None for a plain one.

    Args:
        notice: told what is computed otherwise than the config says.
    Raises:
        CheckpointError: a method that cannot be read, or tensors that contradict the config.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        return GgufBlocks(checkpoint)
    source, settings = _settings(checkpoint)
    method = METHODS.get(str(settings.get("quant_method")).lower())
    if method is None:
        return Quantization.read(checkpoint, notice)
    rows = RowQuantization(checkpoint, source, settings, method)
    if not rows.packed:
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
    return rows


def _settings(checkpoint: Checkpoint) -> tuple[Path, Mapping[str, Any]]:
    """quantization_config and the file that it is in."""
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


@dataclass(frozen=True)
class RowQuantization:
    """A checkpoint whose linears are packed by one of METHODS."""

    checkpoint: Checkpoint
    source: Path  # the file that says so
    settings: Mapping[str, Any]  # quantization_config
    method: Method

    @cached_property
    def modules(self) -> Mapping[str, Mapping[str, str]]:
        """Tensors that the method knows: name in the checkpoint by module and leaf."""
        modules: dict[str, dict[str, str]] = {}
        known = sorted({*self.method.leaves, *self.method.unused}, key=len, reverse=True)
        for stored in self.checkpoint:
            leaf = next((leaf for leaf in known if stored.endswith(f".{leaf}")), None)
            if leaf is not None:
                modules.setdefault(stored.removesuffix(f".{leaf}"), {})[leaf] = stored
        return modules

    @cached_property
    def packed(self) -> Mapping[str, Mapping[str, str]]:
        """Those of packed linears."""
        return {name: found for name, found in self.modules.items() if self._is_packed(found)}

    @cached_property
    def leaves(self) -> Mapping[str, tuple[str, str]]:
        """See Packing. What products do not need belongs to a linear too, and is not asked for:
        beside plain ones to these, and beside attention to the first linear in it."""
        found = {}
        for name, tensors in self.modules.items():
            owner = name
            if not set(tensors) & set(self.method.leaves):
                inside = (other for other in self.modules if other.startswith(f"{name}."))
                owner = next(inside, name)
            for leaf, stored in tensors.items():
                if name in self.packed or leaf in self.method.unused:
                    found[stored] = owner, leaf
            if name in self.packed and f"{name}.bias" in self.checkpoint:
                found[f"{name}.bias"] = name, "bias"
        return found

    def _is_packed(self, tensors: Mapping[str, str]) -> bool:
        """Whether more than a plain weight is there, or a weight that is none."""
        needed = set(tensors) & set(self.method.leaves)
        if needed != {"weight"}:
            return bool(needed)
        return self.checkpoint[tensors["weight"]].dtype not in ("F16", "BF16", "F32", "F64")

    def linear(self, name: str, in_features: int, out_features: int) -> QuantizedLinear | None:
        """See Packing.

        Raises:
            CheckpointError: its tensors do not fit each other, the config, or the layer.
        """
        if name not in self.packed:
            return None
        tensors = {leaf: self.checkpoint[stored] for leaf, stored in self.packed[name].items()}

        def load(leaf: str) -> Tensor:
            if tensors[leaf].n_bytes > _MOST_LOADED_BYTES:
                raise ValueError(f"tensor '{tensors[leaf].name}' is too large: download it again")
            return next(iter(read_tensors([tensors[leaf]]).values()))

        shapes = {leaf: (tensor.dtype, tensor.shape) for leaf, tensor in tensors.items()}
        try:
            fmt = self.method.read(
                Stored(name, out_features, in_features, shapes, load), self.settings
            )
            if fmt is None:
                raise ValueError("its tensors are of no known format of this method")
            for part in fmt.parts:
                _check(part, tensors.get(part.leaf), name, out_features, in_features)
        except ValueError as error:
            raise CheckpointError(f"{self.source}: '{name}': {error}") from error
        stored = {
            part.leaf: (tensors[part.leaf].shape, TORCH_DTYPES[part.dtype]) for part in fmt.parts
        }
        bias = f"{name}.bias" in self.checkpoint
        return QuantizedLinear(in_features, out_features, fmt, stored, bias=bias)


def _check(part: Part, tensor: TensorRange | None, name: str, outputs: int, inputs: int) -> None:
    """Holds a tensor against what its format says of it.

    Raises:
        ValueError: it is missing, or of another dtype or shape.
    """
    if tensor is None:
        raise ValueError(f"tensor '{name}.{part.leaf}' is missing: download the checkpoint again")
    if tensor.dtype != part.dtype:
        raise ValueError(f"tensor '{tensor.name}' is {tensor.dtype}, expected {part.dtype}")
    expected = part.shape(outputs, inputs)
    # sizes of 1 come and go, and some tools store a matrix as one long column
    kept = [size for size in tensor.shape if size != 1]
    if kept not in ([size for size in expected if size != 1], [prod(expected)]):
        raise ValueError(
            f"tensor '{tensor.name}' has shape {list(tensor.shape)}, the layer's sizes say "
            f"{list(expected)}. Are all files of the same model?"
        )
