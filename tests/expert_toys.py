"""Files of small experts, each with bytes that no other expert has."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.store import read_header

Layers = list[list[list[TensorRange]]]
LAYERS, EXPERTS = 3, 5


def write(folder: Path, seed: int, gap: int, order: str = "random") -> Layers:
    """Experts of two tensors each, in an order with gaps up to a size; the second layer is dense.

    Args:
        order: "random", or "rising" as checkpoints have them.
    """
    rng = np.random.default_rng(seed)
    header, data = {}, bytearray()
    places = range(LAYERS * EXPERTS)
    for place in rng.permutation(places) if order == "random" else places:
        layer, expert = divmod(int(place), EXPERTS)
        for leaf in "ab":
            data += bytes(int(rng.integers(0, gap + 1)))
            size = int(rng.integers(1, 9000))
            offsets = [len(data), len(data) + size]
            header[f"{layer}.{expert}.{leaf}"] = {
                "dtype": "U8", "shape": [size], "data_offsets": offsets,
            }  # fmt: skip
            data += rng.bytes(size)
    raw = json.dumps(header).encode()
    path = folder / "experts.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    stored = read_header(path)
    return [
        [[stored[f"{layer}.{expert}.{leaf}"] for leaf in "ab"] for expert in range(EXPERTS)]
        if layer != 1
        else []
        for layer in range(LAYERS)
    ]
