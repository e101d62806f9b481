"""Write a GPTQ-format copy of a plain checkpoint, rounded to the nearest code.

    python scripts/quantize_rtn.py specexec_cli/demo/target specexec_cli/demo/target-gptq

This is quick and needs no calibration data, but is less accurate than GPTQ itself: it is for the
demo, for rigs and for tests. The linears of the decoder layers are quantized; all else is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from quantize_gptq import quantize
from safetensors.torch import save_file
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import BITS
from torch import Tensor

from specexec_cli.errors import ConfigError, SpecexecError
from specexec_cli.offload.resident import read_tensors
from specexec_cli.offload.store import read_checkpoint

GROUP_SIZE = 128
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantization_config(bits: int, group_size: int) -> dict[str, Any]:
    """The quantization_config of such a checkpoint."""
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False,
        "sym": True, "lm_head": False, "checkpoint_format": "gptq", "pack_dtype": "int32",
        "meta": {"quantizer": ["specexec:round-to-nearest"]},
    }  # fmt: skip


def quantize_tensors(tensors: dict[str, Tensor], bits: int, group_size: int) -> dict[str, Tensor]:
    """A checkpoint's tensors with the layers' linears packed."""
    result = {}
    for name, tensor in tensors.items():
        linear = name.removesuffix(".weight")
        if linear.rpartition(".")[2] not in LINEARS or not name.endswith(".weight"):
            result[name] = tensor.clone()
            continue
        fmt = Gptq(bits, min(group_size, tensor.shape[1]), stored_minus_one=True)
        packed = quantize(tensor, fmt)
        result |= {f"{linear}.{leaf}": stored for leaf, stored in packed.tensors.items()}
    return result


def write_quantized(source: Path, out: Path, bits: int = 4, group_size: int = GROUP_SIZE) -> None:
    """Quantizes the checkpoint `source` into the new folder `out`.

    Raises:
        ConfigError: `out` is there already.
        CheckpointError: the source cannot be read.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: give another folder, or remove it first")
    tensors = read_tensors(list(read_checkpoint(source).tensors.values()))
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["quantization_config"] = quantization_config(bits, group_size)
    out.mkdir(parents=True)
    save_file(
        quantize_tensors(tensors, bits, group_size), out / "model.safetensors", {"format": "pt"}
    )
    (out / "model.safetensors").chmod(0o644)  # save_file makes it private
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name not in (
            "config.json", "model.safetensors.index.json",
        ):  # fmt: skip
            shutil.copy(path, out / path.name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of a plain checkpoint")
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--bits", type=int, choices=BITS, default=4)
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE)
    args = parser.parse_args(argv)
    try:
        write_quantized(args.source, args.out, args.bits, args.group_size)
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
