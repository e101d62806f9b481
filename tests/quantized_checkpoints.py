"""Tiny GPTQ and AWQ checkpoints, and the plain checkpoint that computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoints import architecture, edit_json, save_checkpoint
from safetensors.torch import load_file, save_file
from specexec_kernels.formats.awq import Awq
from specexec_kernels.formats.base import PackedWeight
from specexec_kernels.formats.gptq import Gptq
from specexec_kernels.packing import pack_awq, pack_rows, store_zeros
from torch import Tensor

GROUP = 16
V1 = Gptq(4, GROUP, stored_minus_one=True)
Choose = Callable[[str], Gptq | Awq | None]


def random_packed(
    shape: tuple[int, ...], fmt: Gptq | Awq, *, sym: bool, shuffled: bool, seed: int
) -> PackedWeight:
    """A packed weight of (outputs, inputs) with values of a sensible size."""
    rng = torch.Generator().manual_seed(seed)
    outputs, inputs = shape
    groups = -(-inputs // GROUP)
    codes = torch.randint(0, 2**fmt.bits, (inputs, outputs), generator=rng)
    zeros = torch.full((groups, outputs), 2 ** (fmt.bits - 1))
    if not sym:
        zeros = torch.randint(0, 2**fmt.bits, (groups, outputs), generator=rng)
    scales = (torch.rand(groups, outputs, generator=rng) + 0.5) / 2**fmt.bits
    g_idx = torch.arange(inputs, dtype=torch.int32) // GROUP
    if shuffled:
        g_idx = g_idx[torch.randperm(inputs, generator=rng)]
    if isinstance(fmt, Awq):
        tensors = {"qweight": pack_awq(codes), "qzeros": pack_awq(zeros)}
    else:
        fmt = replace(fmt, shuffled=True)  # the index is stored whatever it says
        stored = store_zeros(zeros, fmt.bits, minus_one=fmt.stored_minus_one)
        tensors = {"qweight": pack_rows(codes, fmt.bits), "qzeros": stored, "g_idx": g_idx}
    return PackedWeight(fmt, inputs, outputs, {**tensors, "scales": scales.half()})


def is_linear(name: str) -> bool:
    """A linear of a decoder layer; routers of mixtures of experts stay plain."""
    return ".layers." in name and "norm" not in name and not name.endswith(".gate.weight")


def save_quantized(
    folder: Path,
    name: str = "llama",
    choose: Choose = lambda linear: V1,
    *,
    sym: bool = True,
    desc_act: bool = False,
    extra: Mapping[str, Any] | None = None,
    shard: bool = False,
    lm_head: bool = False,
) -> tuple[Path, Path]:
    """Write `folder`/plain and `folder`/packed, which compute the same.

    Args:
        name: see checkpoints.ARCHITECTURES.
        choose: the format of each linear, None to leave it plain.
        extra: more keys of quantization_config.
    """
    plain, packed = folder / "plain", folder / "packed"
    config = architecture(name)
    # 3-bit zero points of a linear are whole words from 32 outputs on
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 96, 16
    save_checkpoint(plain, config)
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for index, (key, tensor) in enumerate(sorted(tensors.items())):
        linear = key.removesuffix(".weight")
        wanted = is_linear(key) or (lm_head and key == "lm_head.weight")
        fmt = choose(linear) if wanted and key.endswith(".weight") else None
        if fmt is None:
            stored[key] = tensor
            continue
        weight = random_packed(tuple(tensor.shape), fmt, sym=sym, shuffled=desc_act, seed=index)
        tensors[key] = weight.unpack()
        stored |= {f"{linear}.{leaf}": part for leaf, part in weight.tensors.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    packed.mkdir()
    _save(packed, stored, shard)
    main = choose("") or V1
    method: dict[str, Any] = {"quant_method": "awq"}
    if isinstance(main, Gptq):
        version = "gptq" if main.stored_minus_one else "gptq_v2"
        method = {"quant_method": "gptq", "checkpoint_format": version}
    quantization = {
        **method, "bits": main.bits, "group_size": GROUP, "desc_act": desc_act, "sym": sym,
        **(extra or {}),
    }  # fmt: skip
    content = json.loads((plain / "config.json").read_text())
    content["quantization_config"] = quantization
    (packed / "config.json").write_text(json.dumps(content))
    return plain, packed


def _save(folder: Path, tensors: dict[str, Tensor], shard: bool) -> None:
    if not shard:
        save_file(tensors, folder / "gptq_model-4bit-16g.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, part in halves.items() for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Let `change` alter the tensors of a checkpoint written in one file."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def edit_quantization(folder: Path, **changes: Any) -> None:
    """Overrides keys of quantization_config; None removes a key."""
    path = folder / "config.json"
    keys = {**json.loads(path.read_text())["quantization_config"], **changes}
    edit_json(path, quantization_config={k: v for k, v in keys.items() if v is not None})


def mixed_bits(bits: int) -> Gptq:
    """V1 with other bits."""
    return replace(V1, bits=bits)
