"""How fast this machine's CPU computes, measured as the models call it: products, and the rest of
a decoder layer."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from specexec_kernels import dispatch
from torch import Tensor

from specexec_cli.models.linear import MixedLinear, mixed_linear
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.skeleton import Skeleton, build_skeleton
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.disk_probe import best_of
from specexec_cli.offload.resident import TORCH_DTYPES
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.measured_rates import (
    PROBED_HIDDEN,
    PROBED_INTERMEDIATE,
    FlopsByRows,
    LayerCost,
)

_ROW_COUNTS = (1, 128, 32, 8, 256)  # of measured products, the most telling first
_RUN_S = 0.1  # that a run may take; the first of few rows may take longer
_WIDTH = 4096  # of the square matrices that products are measured on
_GROUP = 128  # inputs that share a scale in packed ones
_LAYERS = 4  # enough that what a pass takes beside its layers hardly counts
_ROWS, _PREFIX = 128, 256  # of the passes that are measured
_SECONDS = 1.0  # after which no pass is repeated
_HEADS, _VOCAB = 32, 64
_CONFIG = {
    "model_type": "llama", "hidden_size": PROBED_HIDDEN, "intermediate_size": PROBED_INTERMEDIATE,
    "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS,
    "vocab_size": _VOCAB, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "dtype": "bfloat16",
}  # fmt: skip
_LINEARS: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj": (PROBED_HIDDEN, PROBED_HIDDEN),
    "self_attn.k_proj": (PROBED_HIDDEN, PROBED_HIDDEN),
    "self_attn.v_proj": (PROBED_HIDDEN, PROBED_HIDDEN),
    "self_attn.o_proj": (PROBED_HIDDEN, PROBED_HIDDEN),
    "mlp.gate_proj": (PROBED_INTERMEDIATE, PROBED_HIDDEN),
    "mlp.up_proj": (PROBED_INTERMEDIATE, PROBED_HIDDEN),
    "mlp.down_proj": (PROBED_HIDDEN, PROBED_INTERMEDIATE),
}


def probe_memory(n_bytes: int = 128 << 20, repeats: int = 4) -> float:
    """Bytes per second that a copy in RAM moves, each byte counted once."""
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
) -> FlopsByRows:
    """FLOP/s of rows times a weight matrix, by rising number of rows.

    Args:
        stored: dtype of the weights, or the bits of packed ones; `compute`: of the rows.
        linear: (rows, in), a weight -> (rows, out), as the model will call it. The weight is
            (out, in), or a PackedWeight.
        weight_bytes: as many matrices take turns, so that no cache holds the weights.
        rows: the first two are always measured.
        seconds: after this time no further one is begun, and none is repeated. Kernels may have to
            be compiled, which comes on top for the last one.
    """
    deadline = time.perf_counter() + seconds
    bits = stored if isinstance(stored, int) else 8 * stored.itemsize
    count = max(1, 8 * weight_bytes // (_WIDTH * _WIDTH * bits))
    weights = [_weight(stored) for _ in range(count)]
    points: list[tuple[int, float]] = []
    for n_rows in rows:
        if len(points) >= 2 and time.perf_counter() > deadline:
            break
        inputs = torch.full((n_rows, _WIDTH), 0.5, dtype=compute)
        linear(inputs, weights[0])  # its kernel may have to be compiled
        one_s = best_of(1, partial(linear, inputs, weights[0]))
        # where products are fast, so that the weights of later ones are in no cache; where they
        # are slow that hardly matters
        chosen = weights[: max(1, int(_RUN_S / max(one_s, 1e-9)))]

        def run(inputs: Tensor = inputs, chosen: list[Any] = chosen) -> None:
            for weight in chosen:
                linear(inputs, weight)

        flop = 2.0 * n_rows * _WIDTH * _WIDTH * len(chosen)
        points.append((n_rows, flop / best_of(3, run, deadline)))
    return tuple(sorted(points))


def _weight(stored: torch.dtype | int) -> Any:
    """A square matrix; values do not matter to the time, but zeros and denormal numbers might."""
    if not isinstance(stored, int):
        return torch.full((_WIDTH, _WIDTH), 0.5, dtype=stored)
    from specexec_kernels.formats.base import PackedWeight
    from specexec_kernels.formats.gptq import Gptq

    groups = _WIDTH // _GROUP

    def words(rows: int, columns: int) -> Tensor:
        return torch.full((rows, columns), 0x35353535, dtype=torch.int32)

    tensors = {
        "qweight": words(_WIDTH * stored // 32, _WIDTH),
        "qzeros": words(groups, _WIDTH * stored // 32),
        "scales": torch.full((groups, _WIDTH), 0.5, dtype=torch.float16),
    }
    return PackedWeight(Gptq(stored, _GROUP), _WIDTH, _WIDTH, tensors)


def probe_arithmetic(dtype: str, packed_bits: int = 0) -> FlopsByRows:
    """FLOP/s of a CPU by rising number of rows, in less than two seconds where nothing disturbs.

    Args:
        dtype: of the rows.
        packed_bits: of the weights; 0 are weights of two bytes.
    """
    if packed_bits:
        return probe_flops(packed_bits, getattr(torch, dtype), dispatch.quantized_matmul)
    return probe_flops(torch.bfloat16, getattr(torch, dtype), _linear)


def _linear(rows: Tensor, weight: Tensor) -> Tensor:
    return mixed_linear(rows, weight, None)


def probe_layer(dtype: str) -> LayerCost:
    """What a layer takes besides its products, in about a second.

    Passes run through a Llama whose linears multiply nothing, so that it needs no weights; all else
    is computed as in any model whose layers are streamed.

    Args:
        dtype: to compute in.
    """
    with tempfile.TemporaryDirectory(prefix="specexec-probe-") as folder:
        model = _hollow_model(Path(folder), getattr(torch, dtype))
        deadline = time.perf_counter() + _SECONDS
        one_s, many_s, far_s = (
            _layer_s(model, rows, prefix, deadline)
            for rows, prefix in ((1, 0), (_ROWS, 0), (_ROWS, _PREFIX))
        )
    rows_s = max(0.0, many_s - one_s)
    # without a prefix each row attends to the slots of all, which cannot take longer than the rows
    slot_s = min(max(0.0, far_s - many_s) / (_ROWS * _PREFIX), rows_s / _ROWS**2)
    row_s = (rows_s - _ROWS**2 * slot_s) / (_ROWS - 1)
    return LayerCost(layer_s=max(0.0, one_s - row_s), row_s=row_s, slot_s=slot_s)


def _layer_s(model: StreamedModel, rows: int, prefix: int, deadline: float) -> float:
    """Seconds of a layer in a pass of so many rows behind a prefix."""
    state = model.new_state()
    if prefix:
        model.forward(PassRows.chain([0] * prefix, 0), state, [])
    chain = PassRows.chain([0] * rows, prefix)

    def run() -> None:
        model.forward(chain, state, [])
        state.crop(prefix)

    run()  # kernels may have to be compiled
    return best_of(3, run, deadline) / _LAYERS


def _hollow_model(folder: Path, dtype: torch.dtype) -> StreamedModel:
    """A model of the probed shape whose linears give zeros; its file is a hole.

    Args:
        folder: an empty one, that must last as long as the model.
    """
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCAB, PROBED_HIDDEN),
        "model.norm.weight": (PROBED_HIDDEN,),
    }
    for index in range(_LAYERS):
        for name, shape in _LINEARS.items():
            tensors[f"model.layers.{index}.{name}.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{index}.{name}.weight"] = (PROBED_HIDDEN,)
    header: dict[str, Any] = {}
    stop = 0
    for name, shape in tensors.items():
        start, stop = stop, stop + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + stop)
    skeleton = build_skeleton(read_checkpoint(folder))
    model = StreamedModel(skeleton, torch.device("cpu"), dtype)
    model.source = _Weightless(skeleton)
    for module in skeleton.layers.modules():
        if isinstance(module, MixedLinear):
            module.forward = _nothing(module.out_features)  # type: ignore[method-assign]
    return model


def _nothing(outputs: int) -> Any:
    return lambda rows: rows.new_zeros((*rows.shape[:-1], outputs))


class _Weightless:
    """A LayerSource of tensors that have one element and the shape of all."""

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
