"""Measures how fast this machine's CPU multiplies and how long the rest of a decoder layer takes.

Both are measured through the functions that the models call.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from specexec_kernels import dispatch
from torch import Tensor

from specexec_cli.models.linear import MixedLinear, mixed_linear
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.skeleton import Skeleton, build_skeleton
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.disk_probe import best_of
from specexec_cli.offload.resident import TORCH_DTYPES
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.machine_rates import (
    PROBED_HIDDEN,
    PROBED_INTERMEDIATE,
    FlopsByRows,
    LayerCost,
)

_ROW_COUNTS = (1, 128, 32, 8, 256)  # rows of the measured products, the most telling first
_RUN_S = 0.1  # aimed length of a run, at least one product
_WIDTH = 4096  # width and height of the weight matrices
_GROUP = 128  # inputs that share a scale in packed matrices
_LAYERS = 4  # layers of the probed model: the time of a pass outside its layers hardly counts
_ROWS, _PREFIX = 128, 256  # rows and prefix tokens of the measured passes
_SECONDS = 1.0  # no pass is repeated after this time
_HEADS, _VOCAB = 32, 64
_CONFIG = {
    "model_type": "llama", "hidden_size": PROBED_HIDDEN, "intermediate_size": PROBED_INTERMEDIATE,
    "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS,
    "vocab_size": _VOCAB, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "dtype": "bfloat16",
}  # fmt: skip
# Layers so small that their products hardly take time.
_SMALL = {
    **_CONFIG, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def probe_memory(n_bytes: int = 128 << 20, repeats: int = 4) -> float:
    """Speed of a copy within RAM, in bytes per second; each copied byte counts once."""
    source = torch.ones(n_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    return n_bytes / best_of(repeats, lambda: target.copy_(source))


def probe_flops(
    stored: torch.dtype | int,
    compute: torch.dtype,
    linear: Callable[[Tensor, Any], Tensor],
    rows: Sequence[int] = _ROW_COUNTS,
    weight_bytes: int = 128 << 20,
    seconds: float = 1.2,
    width: int = _WIDTH,
) -> FlopsByRows:
    """Measures the FLOP/s of multiplying rows by a weight matrix.

    Args:
        stored: dtype of the weights, or the bits of a packed weight.
        compute: dtype of the rows.
        linear: the function to measure: (rows, in), a weight -> (rows, out). The weight is
            (out, in), or a PackedWeight.
        weight_bytes: bytes of all weight matrices together. Matrices of this size take turns, so
            that no cache holds the next one.
        rows: the numbers of rows to measure; the first two are always measured.
        seconds: after this time no further number of rows is begun and no run is repeated. The
            last product may exceed it by the time its kernel takes to compile.
        width: rows and columns of a weight matrix.
    Returns:
        (rows, FLOP/s) pairs by rising number of rows.
    """
    deadline = time.perf_counter() + seconds
    bits = stored if isinstance(stored, int) else 8 * stored.itemsize
    count = max(1, 8 * weight_bytes // (width * width * bits))
    weights = [probe_weight(stored, width) for _ in range(count)]
    points: list[tuple[int, float]] = []
    for n_rows in rows:
        if len(points) >= 2 and time.perf_counter() > deadline:
            break
        inputs = torch.full((n_rows, width), 0.5, dtype=compute)
        linear(inputs, weights[0])  # compiles the kernel if need be
        one_s = best_of(1, partial(linear, inputs, weights[0]))
        # Fast products run over all matrices, so that none of them is in a cache. Slow products
        # run over fewer: for them a cached matrix hardly changes the time.
        chosen = weights[: max(1, int(_RUN_S / max(one_s, 1e-9)))]

        def run(inputs: Tensor = inputs, chosen: list[Any] = chosen) -> None:
            for weight in chosen:
                linear(inputs, weight)

        flop = 2.0 * n_rows * width * width * len(chosen)
        points.append((n_rows, flop / best_of(3, run, deadline)))
    return tuple(sorted(points))


def probe_weight(stored: torch.dtype | int, width: int) -> Any:
    """A square weight matrix without zeros or denormal numbers, which might change the time."""
    if not isinstance(stored, int):
        return torch.full((width, width), 0.5, dtype=stored)
    from specexec_kernels.formats.base import PackedWeight
    from specexec_kernels.formats.gptq import Gptq

    groups = width // _GROUP

    def words(rows: int, columns: int) -> Tensor:
        return torch.full((rows, columns), 0x35353535, dtype=torch.int32)

    tensors = {
        "qweight": words(width * stored // 32, width),
        "qzeros": words(groups, width * stored // 32),
        "scales": torch.full((groups, width), 0.5, dtype=torch.float16),
    }
    return PackedWeight(Gptq(stored, _GROUP), width, width, tensors)


def probe_arithmetic(dtype: str, packed_bits: int = 0, eight_bit_rows: bool = False) -> FlopsByRows:
    """Measures the CPU's FLOP/s by number of rows, in less than two seconds on an idle machine.

    Args:
        dtype: dtype of the rows.
        packed_bits: bits of the packed weights; 0 measures plain bfloat16 weights.
        eight_bit_rows: whether rows are rounded to 8 bits for packed weights.
    """

    def product(rows: Tensor, weight: Any) -> Tensor:
        rounded = replace(weight, eight_bit_rows=eight_bit_rows)
        return dispatch.quantized_matmul(rows, rounded)

    if packed_bits:
        return probe_flops(packed_bits, getattr(torch, dtype), product)
    return probe_flops(torch.bfloat16, getattr(torch, dtype), _linear)


def _linear(rows: Tensor, weight: Tensor) -> Tensor:
    return mixed_linear(rows, weight, None)


def probe_layer(
    dtype: str, rows: int = _ROWS, prefix: int = _PREFIX, seconds: float = _SECONDS
) -> LayerCost:
    """Measures the time that a layer takes besides its products; this needs about a second.

    Passes run through a Llama without weights: its linears return zeros, and all other parts are
    computed as in any model that streams its layers. Its layers are no single call therefore; what
    such a call takes is measured on a small Llama with weights.

    Args:
        dtype: compute dtype.
        rows, prefix: rows of the longer passes, and tokens that the last one has before them.
        seconds: no pass is repeated after this time.
    """
    with tempfile.TemporaryDirectory(prefix="specexec-probe-") as folder:
        model = _hollow_model(Path(folder), getattr(torch, dtype))
        deadline = time.perf_counter() + seconds
        one_s, many_s, far_s = (
            _layer_s(model, *each, deadline) for each in ((1, 0), (rows, 0), (rows, prefix))
        )
    cost = layer_cost(one_s, many_s, far_s, rows, prefix)
    return replace(cost, call_s=_call_s(deadline))


def _call_s(deadline: float) -> float:
    """Seconds of one row in a small layer, which is one compiled call.

    It computes in float32: not every CPU has such calls of plain weights in bfloat16.
    """
    with tempfile.TemporaryDirectory(prefix="specexec-probe-") as folder:
        _write(Path(folder), _SMALL)
        spec = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers="ram")
        model = spec.open(read_checkpoint(Path(folder)))
        try:
            return _layer_s(model, 1, 0, deadline)
        finally:
            model.close()


def layer_cost(one_s: float, many_s: float, far_s: float, rows: int, prefix: int) -> LayerCost:
    """What a layer, a row and a slot take, from the seconds of three passes.

    Args:
        one_s: of a pass of one row.
        many_s: of a pass of `rows` rows.
        far_s: of a pass of `rows` rows behind `prefix` tokens.
    """
    rows_s = max(0.0, many_s - one_s)
    # Without a prefix every row attends to as many slots as there are rows. That time is part of
    # rows_s, so it bounds the time of a slot.
    slot_s = min(max(0.0, far_s - many_s) / (rows * prefix), rows_s / rows**2)
    row_s = (rows_s - rows**2 * slot_s) / (rows - 1)
    return LayerCost(layer_s=max(0.0, one_s - row_s), row_s=row_s, slot_s=slot_s)


def _layer_s(model: StreamedModel, rows: int, prefix: int, deadline: float) -> float:
    """Seconds that one layer takes in a pass of `rows` rows behind `prefix` cached tokens."""
    state = model.new_state()
    if prefix:
        model.forward(PassRows.chain([0] * prefix, 0), state, [])
    chain = PassRows.chain([0] * rows, prefix)

    def run() -> None:
        model.forward(chain, state, [])
        state.crop(prefix)

    run()  # compiles kernels if need be
    return best_of(3, run, deadline) / len(model.layers)


def _hollow_model(folder: Path, dtype: torch.dtype) -> StreamedModel:
    """A model of the probed shape whose linears return zeros.

    Args:
        folder: an empty folder, which must exist as long as the model is used.
    """
    _write(folder, _CONFIG)
    skeleton = build_skeleton(read_checkpoint(folder))
    model = StreamedModel(skeleton, torch.device("cpu"), dtype)
    model.source = _Weightless(skeleton)
    for module in skeleton.layers.modules():
        if isinstance(module, MixedLinear):
            module.forward = _nothing(module.out_features)  # type: ignore[method-assign]
    return model


def _write(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes a checkpoint of zeros in bfloat16, whose weight file is sparse, into a folder."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    linears: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"},
        "mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": (_VOCAB, hidden), "model.norm.weight": (hidden,)} | {
        f"model.layers.{index}.{name}.weight": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in linears.items()
    }
    header: dict[str, Any] = {}
    stop = 0
    for name, shape in tensors.items():
        start, stop = stop, stop + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + stop)


def _nothing(outputs: int) -> Any:
    return lambda rows: rows.new_zeros((*rows.shape[:-1], outputs))


class _Weightless:
    """A LayerSource of tensors with the right shapes but only one element in memory."""

    bytes_streamed = 0
    failed = False

    def __init__(self, skeleton: Skeleton) -> None:
        self._layers = [
            {
                tensor.name: torch.ones(1, dtype=TORCH_DTYPES[tensor.dtype]).expand(tensor.shape)
                for tensor in tensors.values()
            }
            for tensors in skeleton.layer_tensors
        ]

    @contextmanager
    def layer(self, index: int) -> Iterator[Mapping[str, Tensor]]:
        yield self._layers[index]

    def restart(self) -> None:
        """Nothing was read ahead."""

    def close(self) -> None:
        """Nothing is open."""
