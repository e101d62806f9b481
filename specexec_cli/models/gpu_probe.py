"""Measures a GPU: its memory, products as a target makes them, and what starting kernels takes.

What runs on the GPU is replayed as a CUDA graph, so that its seconds are the GPU's own, however
slowly Python starts kernels; that is measured apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from specexec_kernels import dispatch
from specexec_kernels.formats.base import PackedWeight
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specexec_cli.errors import clear_shortage
from specexec_cli.models.arithmetic_probe import probe_weight
from specexec_cli.models.fused import fuse
from specexec_cli.models.linear import mixed_linear
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.models.resident_parts import frozen
from specexec_cli.offload.link import prepare_cuda, use_device
from specexec_cli.planning.machine_rates import PACKED_BITS, PROBED_ROWS, GpuRates, SecondsByRows
from specexec_cli.planning.memory import BLOCK_ROWS

_COPIED_BYTES = 1 << 30
_WEIGHT_BYTES = 512 << 20  # of the matrices that take turns: more than any GPU's cache
_WIDTH = 8192  # of square matrices
_LARGE = 8192  # rows of a product that waits for arithmetic alone
_STARTS = 300  # of which the time is averaged
_WAITS = 50
_REPEATS = 5
# What `probe_layer` starts: operations of PyTorch alone, and with kernels of ours among them.
LAYER_OPERATIONS, LAYER_STARTS = 34, 15
_SMALL = 256  # width of what takes no time but to be started


@clear_shortage("there is no room to measure the GPU")
def probe_gpu(
    device: torch.device,
    width: int = _WIDTH,
    weight_bytes: int = _WEIGHT_BYTES,
    copied_bytes: int = _COPIED_BYTES,
    starts: int = _STARTS,
) -> GpuRates:
    """The rates of a GPU, in some seconds and one more for each kernel that is not compiled yet.

    Args:
        width: rows and columns of the matrices.
        weight_bytes: of all matrices that take turns.
        copied_bytes: of the memory that is copied.
        starts: operations and kernels that are started one after another.
    Raises:
        OutOfMemoryError: no memory for the probe.
    """
    prepare_cuda()
    use_device(device)
    with torch.inference_mode():
        products = tuple(
            (bits, _product_seconds(device, bits, width, weight_bytes))
            for bits in (0, *PACKED_BITS)
        )
        rates = GpuRates(
            card=torch.cuda.get_device_name(device),
            memory_bytes_per_s=_memory_rate(device, copied_bytes),
            tensor_flops=_tensor_flops(device, width),
            products=products,
        )
        return _with_starts(rates, device, starts)


def _memory_rate(device: torch.device, n_bytes: int) -> float:
    """Bytes a second of a large copy, each of them counted as it is read and as it is written."""
    source = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / _replayed(device, lambda: target.copy_(source))


def _tensor_flops(device: torch.device, width: int) -> float:
    """Operations a second of a large product of float16."""
    rows = torch.randn(min(_LARGE, width), width, dtype=torch.float16, device=device)
    weight = torch.randn(width, width, dtype=torch.float16, device=device)
    return 2.0 * rows.shape[0] * width**2 / _replayed(device, lambda: rows @ weight)


def _product_seconds(
    device: torch.device, bits: int, width: int, weight_bytes: int
) -> SecondsByRows:
    """Seconds a weight of products as a target asks for them.

    Args:
        bits: of packed weights; 0 for plain ones of two bytes.
    """
    count = max(1, 8 * weight_bytes // (width * width * (bits or 16)))
    weights = [_on(probe_weight(bits or torch.float16, width), device) for _ in range(count)]
    found = []
    for n_rows in PROBED_ROWS:
        rows = torch.full((n_rows, width), 0.5, dtype=torch.float16, device=device)

        def run(rows: Tensor = rows) -> None:
            for weight in weights:
                if isinstance(weight, PackedWeight):
                    dispatch.quantized_matmul(rows, weight, block_rows=BLOCK_ROWS)
                else:
                    mixed_linear(rows, weight, None, BLOCK_ROWS)

        found.append((n_rows, _replayed(device, run) / (count * width * width)))
    return tuple(found)


def _on(weight: Tensor | PackedWeight, device: torch.device) -> Tensor | PackedWeight:
    if isinstance(weight, Tensor):
        return weight.to(device)
    moved = {leaf: tensor.to(device) for leaf, tensor in weight.tensors.items()}
    return replace(weight, tensors=moved)


def probe_layer(device: torch.device) -> Callable[[], object]:
    """A pass of one row through a small decoder layer, as a model with packed weights runs it."""
    config = LlamaConfig(hidden_size=_SMALL, intermediate_size=_SMALL, num_attention_heads=4,
                         num_hidden_layers=1)  # fmt: skip
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0).half().eval()
    if dispatch.uses_triton(device):
        fuse(layer, device, torch.float16)
        weight = probe_weight(PACKED_BITS[0], _SMALL)
        assert isinstance(weight, PackedWeight)
        for part in (layer.self_attn, layer.mlp):
            for name in [name for name, each in part.named_children() if type(each) is nn.Linear]:
                setattr(part, name, QuantizedLinear.of(weight))
    for part in layer.modules():
        for name, tensor in part.named_parameters(recurse=False):
            setattr(part, name, frozen(tensor.data.to(device)))
    hidden = torch.zeros(1, 1, _SMALL, dtype=torch.float16, device=device)
    angles = torch.ones(1, 1, _SMALL // 4, dtype=torch.float16, device=device)
    return partial(layer, hidden, position_embeddings=(angles, angles))


def _with_starts(rates: GpuRates, device: torch.device, starts: int) -> GpuRates:
    """The rates with what it takes to start an operation, a kernel of ours, and to wait."""
    hidden = torch.ones(1, _SMALL, dtype=torch.float16, device=device)
    # Of either with its share of the Python around it. By itself one took 8 to 12 us to start on an
    # H100, and a pass nearly three times what that comes to.
    fused = dispatch.uses_triton(device)
    of_a_layer = LAYER_STARTS if fused else LAYER_OPERATIONS
    layer_s = _host_seconds(probe_layer(device), max(1, starts // of_a_layer))
    operation_s = layer_s / of_a_layer

    def adds() -> None:
        for _ in range(starts):
            hidden.add_(0.0)

    start_s = _replayed(device, adds) / starts
    added_s = 3 * _host_seconds(adds, 1) / starts  # the add, the index and the copy
    began = time.perf_counter()
    for _ in range(_WAITS):
        hidden.add_(0.0)
        hidden[0, 0].item()
    waiting_s = (time.perf_counter() - began) / _WAITS
    return replace(
        rates, operation_s=operation_s, kernel_s=operation_s if fused else rates.kernel_s,
        start_s=start_s,
        wait_s=max(0.0, waiting_s - added_s),
    )  # fmt: skip


def _host_seconds(run: Callable[[], object], times: int) -> float:
    """Seconds of Python and the driver to start something, while the GPU keeps up or falls back."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        run()
    seconds = (time.perf_counter() - began) / times
    torch.cuda.synchronize()
    return seconds


def _replayed(device: torch.device, run: Callable[[], object]) -> float:
    """Median seconds of the GPU for what `run` starts."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compiles kernels and takes memory outside of the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, pool=torch.cuda.graph_pool_handle(), stream=side, capture_error_mode="thread_local"
    ):
        run()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times)
