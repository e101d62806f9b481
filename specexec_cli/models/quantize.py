"""Writes a quantized copy of a checkpoint in GPTQ's format, with fitted scales and zero points.

The linears of the decoder layers are quantized one after another, and everything else is copied
byte for byte, so only one linear is in memory at a time. With a calibration text, a layer's linears
are quantized after the text has gone through the layer, by the moments of their inputs. The copy
has the names, dtypes and shapes of GPTQModel's gptq_v2, and is opened like any other checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from specexec_kernels.calibrated import quantize_calibrated
from specexec_kernels.cpu_jit import has_matmul
from specexec_kernels.fitted import quantize_fitted
from specexec_kernels.formats.gptq import Gptq
from torch import Tensor

from specexec_cli import __version__
from specexec_cli.device import format_bytes
from specexec_cli.errors import (
    CheckpointError,
    ConfigError,
    NotFetchedError,
    OutOfMemoryError,
)
from specexec_cli.guarded import parse_json
from specexec_cli.models.calibration_text import run_calibration
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.skeleton import build_skeleton, load_config
from specexec_cli.offload.checkpoint import Checkpoint, TensorRange
from specexec_cli.offload.resident import read_tensors
from specexec_cli.offload.writer import SHARD_BYTES, CheckpointWriter, NewTensor
from specexec_cli.planning.draft_sizes import quantization_keys

Progress = Callable[[int, int], None]  # called with the source's bytes done and its total bytes

_KEPT = (  # files that are copied besides the weights
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template*", "preprocessor_config.json", "LICENSE*",
    "NOTICE*", "tiktoken.model",
)  # fmt: skip
_DONE = "layers-done.json"  # in a copy that is being made
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """The contents of a quantized copy, known before it is written."""

    source: Checkpoint
    format: Gptq
    linears: Mapping[str, TensorRange]  # weights to quantize, by name
    layers: Sequence[Sequence[str]]  # names of the weights to quantize, layer by layer
    plain: tuple[str, ...]  # linears of layers that stay plain, as patterns of their names

    def tensors(self, name: str) -> list[NewTensor]:
        """The tensors that a source tensor becomes: four of a packed linear, or the same one."""
        tensor = self.source.tensors[name]
        if name not in self.linears:
            return [NewTensor(name, tensor.dtype, tensor.shape)]
        outputs, inputs = tensor.shape
        linear, bits, groups = _linear(name), self.format.bits, inputs // self.format.group
        return [
            NewTensor(f"{linear}.qweight", "I32", (inputs * bits // 32, outputs)),
            NewTensor(f"{linear}.qzeros", "I32", (groups, outputs * bits // 32)),
            NewTensor(f"{linear}.scales", "F16", (groups, outputs)),
            NewTensor(f"{linear}.g_idx", "I32", (inputs,)),
        ]

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights that will be written."""
        return sum(new.n_bytes for name in self.source for new in self.tensors(name))

    def config(self) -> dict[str, Any]:
        """The contents of config.json's quantization_config and of quantize_config.json."""
        keys = quantization_keys(self.format.bits, self.format.group)
        meta = {"quantizer": [f"specexec:{__version__}"]}
        dynamic: dict[str, Any] = {f"-:{pattern}": {} for pattern in self.plain}
        return {**keys, "meta": meta, **({"dynamic": dynamic} if dynamic else {})}


def plan_quantization(checkpoint: Checkpoint, bits: int, group_size: int) -> QuantizationPlan:
    """Finds the linears to quantize.

    Args:
        bits: 2, 3, 4 or 8.
        group_size: inputs that share a scale and a zero point.
    Raises:
        CheckpointError: the checkpoint is quantized already, its architecture is unknown, or it
            stores linears as parts of other tensors.
        ConfigError: a linear's sizes do not suit `bits` or `group_size`. The message leaves it to
            the caller to say which setting to change.
    """
    if checkpoint.config.get("quantization_config") is not None or any(
        name.endswith(".qweight") for name in checkpoint
    ):
        raise CheckpointError(
            f"{checkpoint.folder} is quantized already: quantize the original weights"
        )
    if checkpoint.config_path.suffix != ".json":
        raise CheckpointError(
            f"{checkpoint.config_path}: only safetensors checkpoints are quantized, not GGUF files"
        )
    config = load_config(checkpoint)
    experts = {getattr(config, name, None) for name in _EXPERT_COUNTS}
    skeleton = build_skeleton(checkpoint)
    if any(skeleton.conversions):
        raise CheckpointError(
            f"{checkpoint.folder}: a {config.model_type} model stores weights of its layers in "
            "another form than they are multiplied in, which quantization does not support"
        )
    fmt = Gptq(bits, group_size)
    linears: dict[str, TensorRange] = {}
    layers: list[list[str]] = []
    plain: dict[str, None] = {}
    for layer, tensors in zip(skeleton.layers, skeleton.layer_tensors, strict=True):
        layers.append([])
        for path, module in layer.named_modules():
            if not isinstance(module, MixedLinear):
                continue
            tensor = tensors[f"{path}.weight"]
            if tensor.name in linears:
                continue  # an earlier layer has the same weight
            if tensor.name not in checkpoint:
                raise CheckpointError(
                    f"{tensor.path}: '{tensor.name}' is a part of a tensor, which is not quantized "
                    "by itself: use a checkpoint that stores every expert apart"
                )
            if module.out_features in experts or module.out_features < fmt.unit:
                plain[_pattern(tensor.name)] = None  # a router or a small gate
                continue
            _check_sizes(module, _linear(tensor.name), fmt)
            linears[tensor.name] = tensor
            layers[-1].append(tensor.name)
    if not linears:
        raise CheckpointError(
            f"{checkpoint.folder}: the layers of a {config.model_type} model have no linears that "
            "could be quantized"
        )
    return QuantizationPlan(checkpoint, fmt, linears, layers, tuple(plain))


def write_quantized(
    plan: QuantizationPlan,
    out: Path,
    progress: Progress = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
    pieces: Sequence[Sequence[int]] = (),
    drafts: bool = False,
    left: Path | None = None,
    stays: bool = False,
) -> None:
    """Writes the quantized copy to a new folder, which appears only when it is complete.

    Args:
        pieces: pieces of a calibration text, as tokens; without any, scales and zero points are
            fitted to the weights alone.
        drafts: whether the copy is to draft behind its target's own keys and values, not to stand
            alone: it then never computes a text's first token, which weighs much in another one.
        left: what a process that was ended left of this copy, see layers_there; its layers are not
            quantized again.
        stays: whether Ctrl-C, or a lack of RAM, leaves whole layers, as a killed process does.
    Raises:
        ConfigError: `out` exists.
        OutOfMemoryError: the calibration text needs more RAM than there is.
        NotFetchedError: the disk is too small, or the folder cannot be written; nothing is left.
        StreamError: the source cannot be read.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: give another folder, or remove it first")
    digest = _digest(plan, shard_bytes, pieces, drafts)
    with _partial(out, plan.n_bytes, left, stays) as folder:
        _write(plan, folder, progress, shard_bytes, pieces, drafts, digest)


def layers_there(
    plan: QuantizationPlan, left: Path, pieces: Sequence[Sequence[int]], drafts: bool
) -> int:
    """Layers of this very copy that are whole in a folder that an ended process left; 0: none."""
    return _layers_done(plan, left, _digest(plan, SHARD_BYTES, pieces, drafts))


def _digest(
    plan: QuantizationPlan, shard_bytes: int, pieces: Sequence[Sequence[int]], drafts: bool
) -> str:
    """What two copies have in common of which one can go on where the other was ended."""
    tensors = _of_layers(plan, len(plan.layers))
    text = [list(piece) for piece in pieces]
    what = (__version__, plan.config(), tensors, shard_bytes, text, drafts, _rows_dtype())
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _layers_done(plan: QuantizationPlan, folder: Path, digest: str) -> int:
    try:
        done = parse_json((folder / _DONE).read_bytes())
        written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    except (OSError, ValueError):  # it was ended before the first layer, or is no such folder
        return 0
    layers = done.get("layers") if isinstance(done, dict) and done.get("digest") == digest else 0
    if not isinstance(layers, int) or not 0 < layers <= len(plan.layers):
        return 0
    whole = sum(new.n_bytes for new in _of_layers(plan, layers))
    return layers if whole <= written else 0


def _of_layers(plan: QuantizationPlan, count: int) -> list[NewTensor]:
    """What is written of the first layers."""
    return [new for layer in plan.layers[:count] for name in layer for new in plan.tensors(name)]


@contextmanager
def _partial(out: Path, needed_bytes: int, left: Path | None, stays: bool) -> Iterator[Path]:
    """A folder beside `out` that is renamed to `out` at the end, or removed after an error.

    A process that is killed leaves the folder behind, with `.partial-` in its name.

    Args:
        left: such a folder, to go on in; None: an empty one.
        stays: whether Ctrl-C and a lack of RAM leave it too, where a layer is whole in it.
    Raises:
        NotFetchedError: the disk is too small, or the folder cannot be written.
    """
    folder = out.parent / f"{out.name}.partial-{os.getpid()}"
    ends_here = True
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if left is not None:
            left.rename(folder)
            needed_bytes -= sum(path.stat().st_size for path in folder.iterdir())
        if needed_bytes > free:
            raise NotFetchedError(
                f"{out} takes {format_bytes(needed_bytes)}, but its disk has {format_bytes(free)} "
                "free: make room, or use another disk"
            )
        folder.mkdir(exist_ok=True)
        yield folder
        folder.rename(out)
    except (KeyboardInterrupt, OutOfMemoryError):
        ends_here = not (stays and (folder / _DONE).exists())
        raise
    except OSError as error:
        raise NotFetchedError(
            f"{out} cannot be written ({error.strerror or error}): make room, or use another folder"
        ) from error
    finally:
        if ends_here:
            shutil.rmtree(folder, ignore_errors=True)


def _write(
    plan: QuantizationPlan,
    folder: Path,
    progress: Progress,
    shard_bytes: int,
    pieces: Sequence[Sequence[int]],
    drafts: bool,
    digest: str,
) -> None:
    source = plan.source
    copied = [name for name in source if name not in plan.linears]
    names = [*(name for layer in plan.layers for name in layer), *copied]
    begun = _layers_done(plan, folder, digest)
    writer = CheckpointWriter(
        folder, [new for name in names for new in plan.tensors(name)], shard_bytes,
        len(_of_layers(plan, begun)),
    )  # fmt: skip
    done = 0

    def told(name: str) -> None:
        nonlocal done
        done += source.tensors[name].n_bytes
        progress(done, source.total_bytes)

    def layer_done(index: int, moments: Mapping[str, Tensor]) -> None:
        for name in plan.layers[index]:
            if index >= begun:
                for leaf, tensor in _packed(plan, name, moments.get(name)).items():
                    writer.write(f"{_linear(name)}.{leaf}", [tensor.numpy().tobytes()])
            told(name)
        if index >= begun:
            writer.flush()  # first the weights, then what says that they are there
            _write_json(folder / f"{_DONE}.new", {"layers": index + 1, "digest": digest})
            (folder / f"{_DONE}.new").replace(folder / _DONE)

    try:
        if pieces:
            try:
                run_calibration(source, pieces, layer_done, _rows_dtype(), drafts, begun)
            except OutOfMemoryError:  # its advice is meant for sessions
                raise OutOfMemoryError(
                    f"RAM is too small: it ran out while {sum(map(len, pieces))} tokens of "
                    f"calibration text went through {source.folder.name}. Close other programs, or "
                    "quantize without a text (`specexec quantize --calibration none`)"
                ) from None
        else:
            for index in range(len(plan.layers)):
                layer_done(index, {})
        for name in copied:
            writer.copy(source.tensors[name], name)
            told(name)
        writer.finish()
    finally:
        writer.close()
    _write_configs(plan, folder)
    (folder / _DONE).unlink()


def _write_configs(plan: QuantizationPlan, folder: Path) -> None:
    """Writes what says how the copy is packed, and copies the source's tokenizer."""
    source, keys = plan.source, plan.config()
    _write_json(folder / "config.json", {**source.config, "quantization_config": keys})
    _write_json(folder / "quantize_config.json", keys)
    for pattern in _KEPT:
        for path in sorted(source.folder.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def _rows_dtype() -> torch.dtype:
    """Of the calibration text's rows: half the time where the CPU multiplies in bfloat16."""
    return torch.bfloat16 if has_matmul(torch.bfloat16) else torch.float32


def _packed(plan: QuantizationPlan, name: str, moments: Tensor | None) -> dict[str, Tensor]:
    """The four tensors of a packed linear; `moments` of its inputs come from a calibration text."""
    weight = read_tensors([plan.linears[name]])[name]
    if moments is None:
        packed = quantize_fitted(weight, plan.format)
    else:
        packed = quantize_calibrated(weight, moments, plan.format)
    return {
        **packed.tensors,
        # the loaders of GPTQModel and vLLM want every input's group, even where it is k // group
        "g_idx": torch.arange(packed.in_features, dtype=torch.int32) // plan.format.group,
    }


def _check_sizes(module: MixedLinear, name: str, fmt: Gptq) -> None:
    inputs, outputs = module.in_features, module.out_features
    if inputs % fmt.group:
        raise ConfigError(
            f"'{name}' has {inputs} inputs, which are no whole number of groups of {fmt.group}"
        )
    if inputs % fmt.unit or outputs % fmt.unit:
        raise ConfigError(
            f"'{name}' with {inputs} inputs and {outputs} outputs cannot be packed in "
            f"{fmt.bits} bits"
        )


def _linear(name: str) -> str:
    return name.removesuffix(".weight")


def _pattern(name: str) -> str:
    """A regex for this linear's names in all layers, as used in GPTQModel's `dynamic` rules."""
    return re.sub(r"\d+", r"\\d+", re.escape(_linear(name))) + "$"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
