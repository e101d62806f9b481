"""Write a speed rig: a checkpoint of real size that computes a small model's function exactly.

    python scripts/make_rig.py --shape llama2-7b --out /var/tmp/rig-7b
    python scripts/make_rig.py --source smollm2 --times 4 --out /var/tmp/rig-smollm2

With a rig, end-to-end tokens/s of a 13 GB model can be measured without a download, and drafts are
accepted as a real pair's are. The text of a rig is the small model's own; the second command takes
a model that people trained (real_models.py). rig_tensors.py says how a rig's tensors are made. Rigs
of architectures that cannot hold the small model are random: their passes can be timed, but their
text means nothing (rig_random.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantize_columns import PACKERS
from real_models import MODELS as REAL_MODELS
from real_models import default_folder, safetensors_folder
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rig_gpt_oss import FORMAT as GPT_OSS
from rig_gpt_oss import GptOssRig
from rig_gptq import GptqRig
from rig_hybrid import HybridRig
from rig_random import RandomRig
from rig_routing import Routers, Routing
from rig_rows import RowRig
from rig_shapes import MODELS, SHAPES, Shape, parse_shape
from rig_tensors import RandomPool, Rig, Source, read_config, shape_of
from specexec_kernels.packing import BITS

from specexec_cli.device import format_bytes
from specexec_cli.errors import INTERRUPTED_EXIT_CODE, ConfigError, SpecexecError
from specexec_cli.offload.checkpoint import ITEM_BYTES

SHARD_BYTES = 5_000_000_000  # the size of shards on the hub
COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
          "chat_template.*", "generation_config.json", "LICENSE*", "tiktoken.model")  # fmt: skip
DEMO = Path(__file__).parents[1] / "specexec_cli" / "demo" / "target"
TEXTS = DEMO.parent / "heldout_prompts.json"

AnyRig = Rig | GptqRig | GptOssRig | RowRig | RandomRig | HybridRig


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place in its shard."""

    name: str
    size: tuple[int, ...]
    dtype: str
    start: int = 0

    @property
    def n_bytes(self) -> int:
        return math.prod(self.size) * ITEM_BYTES[self.dtype]

    @property
    def stop(self) -> int:
        return self.start + self.n_bytes


def cut_shards(rig: AnyRig, shard_bytes: int) -> list[list[Entry]]:
    """The tensors of each shard: cut as transformers does, and sorted as safetensors does."""
    shards: list[list[Entry]] = [[]]
    room = shard_bytes
    for name, size, dtype in rig.tensors():
        entry = Entry(name, size, dtype)
        if entry.n_bytes > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= entry.n_bytes
    for shard in shards:
        shard.sort(key=lambda entry: entry.name)
        start = 0
        for index, entry in enumerate(shard):
            shard[index] = replace(entry, start=start)
            start = shard[index].stop
    return shards


def write_shard(path: Path, entries: list[Entry], rig: AnyRig, done: Callable[[int], None]) -> None:
    """Writes one safetensors file, tensor after tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.size,
                              "data_offsets": [entry.start, entry.stop]}  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            _write_all(file.fileno(), memoryview(rig.array(entry.name, entry.size)).cast("B"))
            done(entry.n_bytes)
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # the page cache is of no use to what reads directly
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):  # Linux writes at most 2 GiB at once
        view = view[os.write(fd, view) :]


def write_rig(
    source_folder: Path,
    shape_name: str,
    out: Path,
    *,
    layers: int | None = None,
    bits: int = 16,
    row_format: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
    routing: Routing | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Writes the checkpoint to `out`, which appears when it is complete.

    Args:
        shape_name: see parse_shape(), or one of rig_shapes.MODELS.
        layers: number of layers; the shape's own where not given.
        bits: 16 writes bfloat16, fewer bits a GPTQ checkpoint of the quantized source.
        row_format: one of quantize_columns.PACKERS, or "gpt-oss" for experts as in
            gpt-oss's own checkpoints; replaces `bits`.
        routing: how a mixture routes the held-out prompts; random routers where not given.
    Raises:
        ConfigError: `out` is there already, the source does not fit, or the disk has no room.
        CheckpointError: the source cannot be used.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: give another --out, or remove it first")
    source, pool = Source(source_folder), RandomPool(seed)
    if shape_name in MODELS and not (row_format == GPT_OSS and shape_name in SHAPES):
        if bits != 16 or row_format is not None or routing is not None:
            raise ConfigError(
                f"--shape {shape_name} is random, in bfloat16: leave --bits, --format, --skew away"
            )
        rig: AnyRig = RandomRig(source, shape_name, pool, layers)
    else:
        shape = parse_shape(shape_name)
        shape = shape if layers is None else replace(shape, layers=layers)
        routers = _routers(source_folder, shape_name, shape, routing, seed)
        rig = _rig_of_source(source, shape, pool, bits, row_format, routers)
    shards = cut_shards(rig, shard_bytes)
    total = sum(entry.n_bytes for shard in shards for entry in shard)
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if total > free:
        raise ConfigError(
            f"the rig needs {format_bytes(total)} but {out.parent} has {format_bytes(free)} free: "
            "lower --layers, or give an --out on a larger disk"
        )
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        _write_folder(rig, shape_name, shards, partial, lambda count: progress(count, total))
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def _rig_of_source(
    source: Source, shape: Shape, pool: RandomPool, bits: int, row_format: str | None,
    routers: Routers | None,
) -> AnyRig:  # fmt: skip
    """A rig that computes the source; the arguments are those of write_rig()."""
    if shape.state_heads:
        if bits != 16 or row_format is not None:
            raise ConfigError(
                "layers that keep a state are written in bfloat16: leave --bits and --format away"
            )
        return HybridRig(source, shape, pool)
    if row_format == GPT_OSS:
        return GptOssRig(source, shape, pool, routers)
    if row_format is not None:
        return RowRig(source, shape, pool, row_format, routers)
    if bits != 16:
        return GptqRig(source, shape, pool, bits, routers)
    return Rig(source, shape, pool, routers)


def _routers(
    source: Path, shape_name: str, shape: Shape, routing: Routing | None, seed: int
) -> Routers | None:
    """Routers that follow `routing` on the held-out prompts; None without it."""
    if routing is None:
        return None
    if shape.experts == 1:
        raise ConfigError(f"--shape {shape_name} has no experts to choose: leave --skew away")
    texts = [prompt["prompt"] for prompt in json.loads(TEXTS.read_text("utf-8"))]
    return Routers(source, texts, shape.experts, shape.chosen, routing, seed)


def _write_folder(
    rig: AnyRig,
    shape_name: str,
    shards: list[list[Entry]],
    folder: Path,
    done: Callable[[int], None],
) -> None:
    for pattern in COPIED:
        for path in rig.source.folder.glob(pattern):
            shutil.copy(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(rig.config(shape_name), indent=2) + "\n")
    weight_map, written = {}, 0

    def count(n_bytes: int) -> None:
        nonlocal written
        written += n_bytes
        done(written)

    for number, entries in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            name = "model.safetensors"
        write_shard(folder / name, entries, rig, count)
        weight_map.update({entry.name: name for entry in entries})
    if len(shards) > 1:
        index = {"metadata": {"total_size": written}, "weight_map": weight_map}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument(
        "--shape",
        metavar="NAME",
        help=f"{', '.join(dict.fromkeys((*SHAPES, *MODELS)))}, or hidden=1024,"
        "layers=4,heads=8,kv_heads=8,head_dim=128,intermediate=2048",
    )
    sizes.add_argument(
        "--times",
        type=int,
        choices=(4, 16),  # whose square roots, which norms are scaled by, are powers of two
        help="the source's own shape, so many times as wide",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="instead of the shape's own number")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="must not exist")
    parser.add_argument("--source", type=Path, default=DEMO, metavar="FOLDER",
                        help="checkpoint to compute, or smollm2, which real_models.py brings; the "
                             "demo target by default")  # fmt: skip
    parser.add_argument(
        "--bits",
        type=int,
        choices=(16, *BITS),
        default=16,
        help="per weight; below 16 in GPTQ format",
    )
    parser.add_argument("--format", choices=(*PACKERS, GPT_OSS), metavar="NAME",
                        help=f"in place of --bits: {', '.join(PACKERS)}, or {GPT_OSS}, whose "
                             "experts alone are packed")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--skew", type=float, metavar="SHARE",
                        help="of a mixture's experts, which hold 80 %% of the choices")  # fmt: skip
    parser.add_argument(
        "--locality",
        type=float,
        default=0.3,
        metavar="SHARE",
        help="with --skew: of a token's experts, which the next token uses again",
    )
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    bar = Progress(TextColumn("writing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                   TimeRemainingColumn(), console=console, transient=True)  # fmt: skip
    try:
        with bar:
            task = bar.add_task("rig", total=None)
            source = args.source
            if str(source) in REAL_MODELS:
                source = safetensors_folder(str(source), default_folder())
            shape = args.shape or shape_of(read_config(source)).widened(args.times)
            write_rig(
                source, shape, args.out, layers=args.layers, bits=args.bits,
                row_format=args.format,
                seed=args.seed,
                routing=args.skew and Routing(skew=args.skew, locality=args.locality),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )  # fmt: skip
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
