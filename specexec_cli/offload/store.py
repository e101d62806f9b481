"""Reading checkpoints: headers say where the bytes of each tensor are.

Reads headers only, no weights, and each file once. Source of the format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from specexec_cli.catalog.models_file import TORCH_FILE
from specexec_cli.errors import CheckpointError
from specexec_cli.guarded import parse_json, read_json
from specexec_cli.offload.checkpoint import ITEM_BYTES, Checkpoint, TensorRange
from specexec_cli.offload.gguf_checkpoint import read_gguf_checkpoint
from specexec_cli.offload.mxfp4_experts import experts_apart

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
# Most dimensions of a tensor, and most items along one; PyTorch has the first limit too.
_MOST_DIMENSIONS, _MOST_SIZE = 64, 1 << 48


def read_checkpoint(folder: Path) -> Checkpoint:
    """Find the weights of `folder` and read their headers.

    Prefers model.safetensors, then a *.safetensors.index.json with its shards, then the only
    *.safetensors file there is (GPTQ checkpoints name it freely), then pytorch_model.bin. If
    `folder` is a file, it is read as a GGUF file. The experts of gpt-oss, packed in tensors of a
    whole layer, become tensors of their own, see mxfp4_experts.

    Raises:
        CheckpointError: weights missing, damaged, ambiguous, or in no format that is read.
    """
    if folder.is_file():
        return read_gguf_checkpoint(folder)
    return Checkpoint(folder, experts_apart(_read_headers(folder)))


def _read_headers(folder: Path) -> dict[str, TensorRange]:
    single = folder / "model.safetensors"
    if single.is_file():
        return read_header(single)
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        return _read_index(_only(indexes, "index", folder))
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return read_header(_only(files, "weights", folder))
    if (folder / TORCH_FILE).is_file():
        # imported here: it imports pickletools, and few models need it
        from specexec_cli.offload.torch_files import read_torch_file

        return read_torch_file(folder / TORCH_FILE)
    raise CheckpointError(_nothing_found(folder))


def read_header(path: Path) -> dict[str, TensorRange]:
    """The tensors of one safetensors file, fully validated, in file order.

    Raises:
        CheckpointError: the file is missing or truncated, or its header does not fit the file.
    """
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise CheckpointError(_bad_length(path, file_bytes, header_bytes))
            raw = file.read(header_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"no file {path}: download the checkpoint again") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        header = _object(parse_json(raw, unique_names=True), path)
    except ValueError as error:
        raise CheckpointError(_no_json(path, error)) from None
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = [
        _parse_entry(name, entry, path, data_start, file_bytes) for name, entry in header.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    for before, after in pairwise(tensors):
        if after.start < before.stop:
            raise CheckpointError(
                f"{path}: tensors '{before.name}' and '{after.name}' overlap; "
                "the file is damaged, download it again"
            )
    return {tensor.name: tensor for tensor in tensors}


def _only(paths: list[Path], kind: str, folder: Path) -> Path:
    if len(paths) == 1:
        return paths[0]
    names = ", ".join(path.name for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
    raise CheckpointError(
        f"{folder} holds {len(paths)} {kind} files ({names}) but neither model.safetensors nor one "
        "model.safetensors.index.json that says which to load: download the index as well"
    )


def _nothing_found(folder: Path) -> str:
    if not folder.is_dir():
        return f"no folder {folder}: give a checkpoint folder or a hub id"
    if found := sorted(folder.glob("*.gguf")):
        return f"{folder} holds GGUF files: name one, as in {found[0]}"
    for pattern in ("*.bin", "*.pt", "*.pth"):
        if found := sorted(folder.glob(pattern)):
            return (
                f"{folder} holds {found[0].name} but no *.safetensors. Only safetensors and GGUF "
                f"are read, and {TORCH_FILE} in one piece: load it once with transformers and "
                "save_pretrained() it to a new folder"
            )
    return f"no *.safetensors in {folder}: download the weights first"


def _read_index(path: Path) -> dict[str, TensorRange]:
    """Resolve a sharded checkpoint's index against its shards' own headers."""
    try:
        weight_map = _object(read_json(path, unique_names=True), path).get("weight_map")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(_no_json(path, error)) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no 'weight_map': download the index again")
    shards: dict[str, dict[str, TensorRange]] = {}
    tensors = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{path}: tensor '{name}' is said to be in {shard!r}, "
                "which is not the name of a file beside the index"
            )
        if shard not in shards:
            shard_path = path.parent / shard
            if not _is_there(shard_path):
                raise CheckpointError(
                    f"no shard {shard_path}, named by {path.name}: download it again"
                )
            shards[shard] = read_header(shard_path)
        if name not in shards[shard]:
            raise CheckpointError(
                f"{path.parent / shard} has no tensor '{name}', which {path.name} says is there: "
                "index and shards are from different checkpoints, download both again"
            )
        tensors[name] = shards[shard][name]
    return tensors


def _bad_length(path: Path, file_bytes: int, header_bytes: int) -> str:
    if file_bytes < 8:
        return f"{path} has only {file_bytes} bytes: the download is truncated, repeat it"
    return (
        f"{path}: a header of {header_bytes} bytes is impossible in a file of {file_bytes} bytes "
        f"(limit {MAX_HEADER_BYTES}); it is truncated or not safetensors, download it again"
    )


def _no_json(path: Path, error: ValueError) -> str:
    return f"{path}: its JSON cannot be read ({error}); the file is damaged, download it again"


def _object(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: its JSON is not an object; download it again")
    return value


def _parse_entry(
    name: str, entry: object, path: Path, data_start: int, file_bytes: int
) -> TensorRange:
    where = f"{path}: tensor '{name}'"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} has no dtype, shape and offsets; download it again")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where} has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or not _are_sizes(shape):
        raise CheckpointError(f"{where} has shape {shape!r}, which is not a list of sizes")
    if not (isinstance(offsets, list) and _are_counts(offsets) and len(offsets) == 2) or (
        offsets[0] > offsets[1]
    ):
        raise CheckpointError(f"{where} has data_offsets {offsets!r}, which are not [begin, end]")
    start, stop = data_start + offsets[0], data_start + offsets[1]
    if stop > file_bytes:
        raise CheckpointError(
            f"{where} ends at byte {stop} but the file has only {file_bytes}: "
            "the download is truncated, repeat it"
        )
    needed = prod(shape) * ITEM_BYTES[dtype]
    if stop - start != needed:
        raise CheckpointError(
            f"{where} holds {stop - start} bytes but its shape {shape} in {dtype} takes {needed}: "
            "the header is damaged, download it again"
        )
    return TensorRange(name, path, dtype, tuple(shape), start, stop)


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than a file can have
        return False


def _are_sizes(values: list[Any]) -> bool:
    few = len(values) <= _MOST_DIMENSIONS
    return few and _are_counts(values) and max(values, default=0) <= _MOST_SIZE


def _are_counts(values: list[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)  # True is no size
