"""Write a GGUF file anew, with its matrices in other types: what scripts/quality.py compares.

    python scripts/gguf_retype.py MODEL.gguf FOLDER Q8_0 Q5_0 Q4_0    (needs the package gguf)

Each type becomes FOLDER/TYPE.gguf, with everything else of the file as it is: matrices are unpacked
and packed again, by the package's own code. It packs BF16, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf


def retype(source: Path, out: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Writes the file with every matrix in the type `kind`; vectors stay as they are.

    Args:
        source: a GGUF file.
        out: the file to write.
    Raises:
        NotImplementedError: the package cannot pack this type.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue  # which the writer writes itself
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(plain, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "types", nargs="+", choices=["BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.types:
        retype(args.source, args.folder / f"{name}.gguf", gguf.GGMLQuantizationType[name])
