"""Write a longer GGUF of a speed rig, with the rig's extra layers repeated.

    python gguf_rig.py RIG16 RIG.Q4_K_M.gguf Q4_K_M
    python gguf_repeat.py RIG.Q4_K_M.gguf LONG.Q4_K_M.gguf 32        (needs the package gguf)

Quantizing a large file takes many minutes; copying its bytes takes only as long as the disk needs.
A rig's layers after the source's (the demo target has 8; see --source-layers) add zero to the
residual stream. So the longer file generates the same text, and its passes take the time of a
larger model.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import gguf

_LAYER = re.compile(r"blk\.(\d+)\.")


def repeat(source: Path, out: Path, layers: int, source_layers: int) -> None:
    """Writes the longer file.

    Args:
        source: a GGUF of a rig.
        out: the file to write.
        layers: number of layers of the longer file.
        source_layers: number of first layers, which are not repeated.
    """
    reader = gguf.GGUFReader(source)
    kind = str(reader.fields["general.architecture"].contents())
    count_key = f"{kind}.block_count"
    count = int(reader.fields[count_key].contents())
    if not source_layers < count <= layers:
        raise SystemExit(
            f"{source} has {count} layers: it needs more than the source's {source_layers}, and "
            f"the longer file as many or more, not {layers}"
        )
    writer = gguf.GGUFWriter(out, kind)
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue  # which the writer writes itself
        value = layers if field.name == count_key else field.contents()
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    placed = list(_placed(reader.tensors, count, layers, source_layers))
    for name, tensor in placed:
        data = tensor.data
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in placed:
        writer.write_tensor_data(tensor.data)
    writer.close()


def _placed(
    tensors: list[gguf.ReaderTensor], count: int, layers: int, source_layers: int
) -> Iterator[tuple[str, gguf.ReaderTensor]]:
    """Yields the names of the longer file's tensors with the tensors, layer after layer."""
    by_layer: dict[int, list[gguf.ReaderTensor]] = {}
    for tensor in tensors:
        if found := _LAYER.match(tensor.name):
            by_layer.setdefault(int(found[1]), []).append(tensor)
        else:
            yield tensor.name, tensor
    for layer in range(layers):
        extra = layer - source_layers
        own = layer if extra < 0 else source_layers + extra % (count - source_layers)
        for tensor in by_layer[own]:
            yield _LAYER.sub(f"blk.{layer}.", tensor.name, count=1), tensor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("layers", type=int)
    parser.add_argument("--source-layers", type=int, default=8)
    args = parser.parse_args()
    repeat(args.source, args.out, args.layers, args.source_layers)
