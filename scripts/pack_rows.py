"""Write a copy of a checkpoint with packed linears, by our own round-to-nearest.

    python scripts/pack_rows.py SOURCE OUT --format mxfp4

For benchmarks. To get a packed rig, pack the output of make_rig.py, whose own source must be plain.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from quantize_columns import PACKERS
from quantize_rtn import LINEARS
from safetensors.torch import load_file, save_file

from specexec_cli.errors import ConfigError, SpecexecError
from specexec_cli.offload.store import read_checkpoint


def write_packed(source: Path, out: Path, recipe: str) -> Path:
    """Packs a checkpoint of a Llama-like model file by file; one file must fit in memory.

    Raises:
        ConfigError: `out` is there already.
        CheckpointError: the source cannot be read.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: give another folder, or remove it first")
    checkpoint = read_checkpoint(source)
    settings, pack = PACKERS[recipe].settings, PACKERS[recipe].pack
    out.mkdir(parents=True)
    weight_map = {}
    for file in checkpoint.files:
        packed = {}
        for name, tensor in load_file(file).items():
            linear, _, leaf = name.rpartition(".")
            if leaf == "weight" and linear.rpartition(".")[2] in LINEARS:
                leaves = pack(tensor.float())
                packed |= {f"{linear}.{leaf}": value for leaf, value in leaves.items()}
            else:
                packed[name] = tensor
        save_file(packed, out / file.name, {"format": "pt"})
        weight_map.update(dict.fromkeys(packed, file.name))
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, out / file.name)
    for index in out.glob("*.safetensors.index.json"):
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
    config = {**checkpoint.config, "quantization_config": dict(settings)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=PACKERS, required=True)
    args = parser.parse_args(argv)
    try:
        print(write_packed(args.source, args.out, args.format))
    except SpecexecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
