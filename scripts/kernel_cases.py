"""The cases of bench_kernels.py: implementations of one operation on one device, by name.

Each case has functions over tensors that are made beforehand; the first is the baseline. Knows
nothing of clocks and tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from quantize_columns import COLUMN_RECIPES, packed_weight
from quantize_rows import RECIPES
from specexec_kernels import cpu_attention, cpu_gumbel, dispatch
from specexec_kernels.compact_kv import compact_kv_ref
from specexec_kernels.cpu_matmul_plan import rounds_rows
from specexec_kernels.formats import METHODS
from specexec_kernels.formats.base import PackedWeight, Stored, described
from specexec_kernels.formats.gguf import GGUF_FORMATS
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.gumbel import gumbel_noise_ref
from specexec_kernels.log_softmax_topk import log_softmax_topk_ref
from specexec_kernels.packing import unpack_rows, unpack_zeros
from specexec_kernels.tree_attention import tree_attention_ref
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper

from specexec_cli.config import SamplingConfig
from specexec_cli.core import DraftTree
from specexec_cli.models.attention import tree_mask
from specexec_cli.models.linear import mixed_linear
from specexec_cli.sampling import Sampler
from specexec_cli.verify.masks import verification_rows

Run = Callable[[], object]
# The most rows for PyTorch's int4 product in float32; it has no vector code, so more take seconds.
_INT4_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation at one size."""

    name: str
    runs: dict[str, Run]  # the first is the baseline
    n_bytes: int  # bytes that must be moved at least once
    wider: dict[str, int] = field(default_factory=dict)  # bytes of runs that read more, by name
    flops: int = 0
    sizes: dict[str, int] = field(default_factory=dict)


def random_weight(inputs: int, outputs: int, bits: int, device: torch.device) -> PackedWeight:
    """A GPTQ weight of random words, with groups of 128 and symmetric zero points (v1)."""
    groups = inputs // 128
    words = torch.randint(-(2**31), 2**31, (inputs * bits // 32, outputs), dtype=torch.int64)
    zeros = torch.randint(-(2**31), 2**31, (groups, outputs * bits // 32), dtype=torch.int64)
    scales = torch.rand(groups, outputs) * 0.01 + 0.001
    tensors = {"qweight": words.int(), "qzeros": zeros.int(), "scales": scales.half()}
    return PackedWeight(
        Gptq(bits, 128, stored_minus_one=True), inputs, outputs,
        {leaf: tensor.to(device) for leaf, tensor in tensors.items()},
    )  # fmt: skip


def packed_bytes(weight: PackedWeight) -> int:
    return sum(tensor.nbytes for tensor in weight.tensors.values())


def cpu_linear(weight: PackedWeight, rows: int) -> Case:
    """A product on the CPU in both dtypes, with a packed weight and with that weight unpacked."""
    dense = weight.unpack()
    runs: dict[str, Run] = {}
    wider: dict[str, int] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, own, name = torch.randn(rows, weight.in_features).to(dtype), dense.to(dtype), str(dtype)
        name = name.removeprefix("torch.")
        runs[f"{name}, PyTorch"] = partial(torch.nn.functional.linear, x, own)
        wider[f"{name}, PyTorch"] = own.nbytes
        runs[f"{name}, packed"] = partial(dispatch.quantized_matmul, x, weight)
        for stored in (torch.bfloat16, torch.float16, torch.float32):
            label, kept = f"{name}, {str(stored).removeprefix('torch.')} weights", dense.to(stored)
            runs[label] = partial(mixed_linear, x, kept, None)
            wider[label] = kept.nbytes
        if dtype == torch.float32 and _bits(weight) == 4 and rows <= _INT4_ROWS:
            runs["PyTorch int4 GEMM"] = _int4(weight, x)
    return _linear_case(f"linear, {rows} rows", runs, weight, rows, wider)


def row_weight(name: str, plain: Tensor) -> PackedWeight:
    """A weight in a packed format.

    Args:
        name: a recipe, or a GGUF block type.
        plain: (outputs, inputs) float32, which a recipe quantizes; GGUF blocks have random bytes.
    """
    outputs, inputs = plain.shape
    if name in GGUF_FORMATS:
        shape = GGUF_FORMATS[name].parts[0].shape(outputs, inputs)
        # with all bytes below 64, every float16 scale is below 2, wherever it lies
        blocks = torch.randint(64, shape, dtype=torch.uint8)
        return PackedWeight(GGUF_FORMATS[name], inputs, outputs, {"weight": blocks})
    tensors, settings = RECIPES[name].pack(plain), RECIPES[name].settings
    stored = Stored("linear", outputs, inputs, described(tensors), tensors.__getitem__)
    fmt = METHODS[settings["quant_method"]].read(stored, settings)
    assert fmt is not None
    return PackedWeight(fmt, inputs, outputs, {part.leaf: tensors[part.leaf] for part in fmt.parts})


def narrow_linear(inputs: int, outputs: int, rows: int, names: Sequence[str]) -> Case:
    """A product on the CPU in both dtypes, for each packed format and for weights of two bytes; and
    with rows in 8 bits, for formats that are multiplied so."""
    plain = torch.randn(outputs, inputs) * 0.02
    two_bytes = plain.bfloat16()
    runs: dict[str, Run] = {}
    n_bytes: dict[str, int] = {}
    weights: dict[str, PackedWeight] = {}
    for each in names:
        own = each in COLUMN_RECIPES
        weights[each] = packed_weight(each, plain) if own else row_weight(each, plain)
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        x = torch.randn(rows, inputs).to(dtype)
        runs[f"{name}, bfloat16 weights"] = partial(mixed_linear, x, two_bytes, None)
        n_bytes[f"{name}, bfloat16 weights"] = two_bytes.nbytes
        for each, weight in weights.items():
            runs[f"{name}, {each}"] = partial(dispatch.quantized_matmul, x, weight)
            n_bytes[f"{name}, {each}"] = packed_bytes(weight)
    x = torch.randn(rows, inputs)
    for each, weight in weights.items():
        if rounds_rows(weight.format):
            rounded = replace(weight, eight_bit_rows=True)
            runs[f"8 bits, {each}"] = partial(dispatch.quantized_matmul, x, rounded)
            n_bytes[f"8 bits, {each}"] = packed_bytes(weight)
    return Case(
        name=f"packed linear, {rows} rows", runs=runs, n_bytes=min(n_bytes.values()),
        wider=n_bytes, flops=2 * rows * inputs * outputs,
        sizes={"rows": rows, "inputs": inputs, "outputs": outputs},
    )  # fmt: skip


def _int4(weight: PackedWeight, x: Tensor) -> Run:
    """PyTorch's own int4 product; the repacking that it needs is not timed."""
    tensors = weight.tensors
    codes = unpack_rows(tensors["qweight"], 4).T.contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    zeros = unpack_zeros(tensors["qzeros"], 4, minus_one=True)
    scales = tensors["scales"].float()
    pairs = torch.stack([scales, scales * (8 - zeros)], dim=2).contiguous()
    return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 128, pairs)


def _bits(weight: PackedWeight) -> int:
    assert isinstance(weight.format, Gptq)
    return weight.format.bits


def _device(weight: PackedWeight) -> torch.device:
    return next(iter(weight.tensors.values())).device


def gpu_linear(weight: PackedWeight, rows: int) -> Case:
    """A product with a packed weight on the GPU, in bfloat16."""
    from specexec_kernels import triton_rows

    x = torch.randn(rows, weight.in_features, device=_device(weight)).bfloat16()
    dense = weight.unpack().T.bfloat16()
    runs: dict[str, Run] = {
        "bfloat16 GEMM": lambda: x @ dense,
        "fused": lambda: triton_rows.quantized_matmul(x, weight),
        "dequantize + GEMM": lambda: x @ triton_rows.unpack(weight, torch.bfloat16).t(),
        "chosen": lambda: dispatch.quantized_matmul(x, weight),
    }
    wider = {"bfloat16 GEMM": dense.nbytes}
    return _linear_case(f"linear, {rows} rows", runs, weight, rows, wider)


def _linear_case(
    name: str, runs: dict[str, Run], weight: PackedWeight, rows: int, wider: dict[str, int]
) -> Case:
    sizes = {"rows": rows, "inputs": weight.in_features, "outputs": weight.out_features,
             "bits": _bits(weight)}  # fmt: skip
    flops = 2 * rows * weight.in_features * weight.out_features
    n_bytes = packed_bytes(weight)
    return Case(name=name, runs=runs, n_bytes=n_bytes, flops=flops, sizes=sizes, wider=wider)


def dequantize_case(weight: PackedWeight) -> Case:
    """Unpacks a whole weight to bfloat16 on a GPU; on a CPU no code does that."""
    from specexec_kernels import triton_rows

    dtype = torch.bfloat16
    runs: dict[str, Run] = {
        "PyTorch": lambda: weight.unpack().to(dtype),
        "Triton": lambda: triton_rows.unpack(weight, dtype),
    }
    count = weight.in_features * weight.out_features
    written = count * (torch.finfo(dtype).bits // 8)
    return Case(name="dequantize", runs=runs, n_bytes=packed_bytes(weight) + written,
                sizes={"bits": _bits(weight), "weights": count})  # fmt: skip


def attention_case(prefix: int, nodes: int, device: torch.device, dtype: torch.dtype) -> Case:
    """Tree attention of Llama-2-70B's heads: 64 query heads over 8 key/value heads of 128."""
    heads, kv_heads, head_dim = 64, 8, 128
    queries = torch.randn(nodes, heads, head_dim, device=device, dtype=dtype)
    shape = (kv_heads, prefix + nodes, head_dim)
    keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    parents = np.array([(node - 1) // 2 for node in range(nodes)])
    parents[0] = -1
    depths = np.array([(node + 1).bit_length() for node in range(nodes)])
    tree = DraftTree(np.arange(nodes), parents, depths, np.zeros(nodes))
    rows = verification_rows([0], tree, prefix - 1)
    own = tree_mask(rows, 1, nodes + 1, None, device)
    seen = own.seen(prefix + nodes)
    mask = torch.zeros(seen.shape, device=device, dtype=dtype).masked_fill(~seen, -torch.inf)

    def dense() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask[None, None],
            enable_gqa=True,
        )  # fmt: skip

    runs: dict[str, Run] = {"SDPA, dense mask": dense}
    runs["PyTorch reference"] = lambda: tree_attention_ref(queries, keys, values, own)
    sinks = torch.zeros(heads, device=device)
    forms = {"": (None, None), ", soft-capped": (50.0, None), ", sinks": (None, sinks)}
    for form, options in forms.items():
        if device.type == "cuda":
            from specexec_kernels.triton_tree_attention import tree_attention

            runs[f"Triton{form}"] = partial(
                tree_attention, queries, keys, values, own, None, *options
            )
        else:
            runs[f"compiled{form}"] = partial(
                cpu_attention.attend, queries.transpose(0, 1), keys, values, seen, None, *options
            )
    return Case(name="tree attention", runs=runs,
                n_bytes=2 * keys.numel() * keys.element_size(),
                flops=4 * nodes * (prefix + nodes) * heads * head_dim,
                sizes={"prefix": prefix, "nodes": nodes})  # fmt: skip


def topk_case(rows: int, vocab: int, k: int, device: torch.device) -> Case:
    """The choice of children by a drafter: log-softmax and top-k."""
    logits = torch.randn(rows, vocab, device=device)
    runs: dict[str, Run] = {
        "log_softmax, topk": lambda: torch.log_softmax(logits, -1).topk(k),
        "reference": lambda: log_softmax_topk_ref(logits, k),
    }
    if device.type == "cuda":
        from specexec_kernels.triton_topk import log_softmax_topk

        runs["Triton"] = lambda: log_softmax_topk(logits, k)
    return Case(name="log-softmax + top-k", runs=runs, n_bytes=logits.numel() * 4,
                sizes={"rows": rows, "vocab": vocab, "k": k})  # fmt: skip


def sampling_case(vocab: int) -> Case:
    """One row's token on a CPU, of logits as peaked as a trained model's: filters and noise."""
    logits, position = 4 * torch.randn(vocab), itertools.count()
    drawn = {
        f"token, {name}": Sampler(SamplingConfig(temperature=0.7, **kept)) for name, kept in (
            ("T = 0.7", {}), ("top-p 0.9", {"top_p": 0.9}), ("top-k 40", {"top_k": 40}))
    }  # fmt: skip
    whole, ids = TopPLogitsWarper(0.9), torch.empty(1, 0, dtype=torch.int64)
    runs: dict[str, Run] = {
        "noise, numpy": lambda: gumbel_noise_ref(0, next(position), vocab),
        "noise, compiled": lambda: cpu_gumbel.gumbel_noise(0, next(position), vocab),
        "top-p 0.9, transformers": lambda: whole(ids, logits[None] / 0.7),
        **{name: lambda own=own: own.token(logits, [0] * next(position))
           for name, own in drawn.items()},
    }  # fmt: skip
    return Case(name="one row's token", runs=runs, n_bytes=4 * vocab, sizes={"vocab": vocab})


def compact_case(slots: int, kept: int, device: torch.device, dtype: torch.dtype) -> Case:
    """Compacts one layer's cache of a 70B model: `kept` of 256 tree slots move to the front."""
    keys, values = (torch.randn(8, slots + 256, 128, device=device, dtype=dtype) for _ in range(2))
    rows = torch.arange(kept, device=device) * (256 // kept) + slots
    runs: dict[str, Run] = {"index_select": lambda: compact_kv_ref(keys, values, rows, slots)}
    if device.type == "cuda":
        from specexec_kernels.triton_compact_kv import compact_kv

        runs["Triton"] = lambda: compact_kv(keys, values, rows, slots)
    return Case(name="cache compaction", runs=runs,
                n_bytes=4 * 8 * kept * 128 * keys.element_size(),
                sizes={"slots": slots, "kept": kept})  # fmt: skip
