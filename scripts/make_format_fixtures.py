"""Write tests/data/formats: small weights as the tools that define the formats store and read them.

    pip install compressed-tensors bitsandbytes transformers
    python scripts/make_format_fixtures.py compressed_tensors bitsandbytes transformers_fp8
    pip install compressed-tensors==0.14.0    # before activation order by group was dropped
    python scripts/make_format_fixtures.py compressed_tensors_order

Each file holds `case.leaf` tensors and `case.reference`, the weight that the tool itself unpacks
them to. Its metadata says tool and version, and the quantization_config of each case.
scripts/make_checkpoint_fixtures.py writes whole checkpoints beside them.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "formats"
OUTPUTS, INPUTS = 16, 128


def weight() -> Tensor:
    """A weight with values of the size of a trained model's."""
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(5)) * 0.05


def compressed_cases() -> dict[str, dict[str, Any]]:
    """The `weights` of quantization_config, by case."""
    integers = {"type": "int", "symmetric": True}
    floats = {"type": "float", "symmetric": True}
    return {
        "w4a16-group": {**integers, "num_bits": 4, "strategy": "group", "group_size": 32},
        "w4a16-channel": {**integers, "num_bits": 4, "strategy": "channel"},
        "w4a16-zeros": {
            **integers, "num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False,
        },
        "w8a16-zeros": {
            **integers, "num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False,
        },
        "w8a16-channel": {**integers, "num_bits": 8, "strategy": "channel"},
        "w3a16-group": {**integers, "num_bits": 3, "strategy": "group", "group_size": 32},
        "w8a8": {**integers, "num_bits": 8, "strategy": "channel", "rows": True},
        "fp8-channel": {**floats, "num_bits": 8, "strategy": "channel", "rows": True},
        "fp8-tensor": {**floats, "num_bits": 8, "strategy": "tensor", "rows": True},
        "fp8-block": {
            **floats, "num_bits": 8, "strategy": "block", "block_structure": [8, 64], "rows": True,
        },
        "nvfp4": {**floats, "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
        "mxfp4": {**floats, "num_bits": 4, "strategy": "group", "group_size": 32},
    }  # fmt: skip


def compressed_tensors() -> None:
    """Writes the cases with compressed-tensors' own compressors and its observers' scales."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    tensors: dict[str, Tensor] = {}
    metadata = {"tool": f"compressed-tensors {version('compressed-tensors')}"}
    for case, settings in compressed_cases().items():
        settings = dict(settings)
        rows = settings.pop("rows", False)
        args = QuantizationArgs(**settings)
        activations = QuantizationArgs(num_bits=8, type=args.type, strategy="token", dynamic=True)
        scheme = QuantizationScheme(
            targets=["Linear"], weights=args, input_activations=activations if rows else None
        )
        plain = weight().bfloat16()
        runs = _runs(plain.float(), settings)
        low, high = runs.amin(-1), runs.amax(-1)
        state = {"weight": plain}
        factor = None
        if case == "nvfp4":
            factor = generate_gparam(plain.min(), plain.max())
            state["weight_global_scale"] = factor.reshape(1)
        scale, zero = calculate_qparams(low, high, args, global_scale=factor)
        state["weight_scale"] = scale if case == "nvfp4" else scale.bfloat16()
        if not args.symmetric:
            state["weight_zero_point"] = zero.to(torch.int8)
        layout = infer_module_format(torch.nn.Linear, scheme).value
        compressor = BaseCompressor.get_value_from_registry(layout)
        packed = compressor.compress(state, scheme)
        reference = compressor.decompress(dict(packed), scheme)["weight"]
        group = {"targets": ["Linear"], "weights": settings}
        if rows:
            group["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
        config = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
                  "config_groups": {"group_0": group}}  # fmt: skip
        tensors |= {f"{case}.{leaf}": tensor.contiguous() for leaf, tensor in packed.items()}
        tensors[f"{case}.reference"] = reference.contiguous()
        metadata[case] = json.dumps(config)
    save_file(tensors, FOLDER / "compressed_tensors.safetensors", metadata)


def _runs(plain: Tensor, settings: dict[str, Any]) -> Tensor:
    """The weights that share a scale, along the last dimension."""
    if settings["strategy"] == "tensor":
        return plain.view(1, -1)
    if settings["strategy"] == "block":
        rows, columns = settings["block_structure"]
        tiles = plain.view(OUTPUTS // rows, rows, INPUTS // columns, columns)
        return tiles.transpose(1, 2).reshape(OUTPUTS // rows, INPUTS // columns, -1)
    return (
        plain.view(OUTPUTS, -1, settings.get("group_size", INPUTS)).squeeze(1)
        if (settings["strategy"] != "channel")
        else plain.view(OUTPUTS, 1, INPUTS)
    )


def compressed_tensors_order() -> None:
    """Writes groups in activation order (`weight_g_idx`), which later versions dropped.

    llm-compressor's GPTQ sorts the inputs by importance, gives each run of them a group, and stores
    the codes in the model's order.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    integers = {"type": "int", "strategy": "group", "group_size": 32, "actorder": "group"}
    tensors: dict[str, Tensor] = {}
    metadata = {"tool": f"compressed-tensors {version('compressed-tensors')}"}
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")()
    for case, settings in (
        ("w4a16-order", {**integers, "num_bits": 4, "symmetric": True}),
        ("w4a16-order-zeros", {**integers, "num_bits": 4, "symmetric": False}),
        ("w8a16-order", {**integers, "num_bits": 8, "symmetric": True}),
    ):
        args = QuantizationArgs(**settings)
        plain = weight().bfloat16()
        order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(6))
        g_idx = torch.empty(INPUTS, dtype=torch.int32)
        g_idx[order] = torch.arange(INPUTS, dtype=torch.int32) // args.group_size
        runs = plain.float()[:, order].view(OUTPUTS, -1, args.group_size)
        scale, zero = calculate_qparams(runs.amin(-1), runs.amax(-1), args)
        state = {"weight_scale": scale.bfloat16(), "weight_g_idx": g_idx}
        zero = zero.to(torch.int8)
        state |= compressor.compress_weight(plain, state["weight_scale"], args, zero, g_idx)
        reference = compressor.decompress_weight(dict(state), args)
        group = {"targets": ["Linear"], "weights": settings}
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                  "config_groups": {"group_0": group}}  # fmt: skip
        tensors |= {f"{case}.{leaf}": tensor.contiguous() for leaf, tensor in state.items()}
        tensors[f"{case}.reference"] = reference.contiguous()
        metadata[case] = json.dumps(config)
    save_file(tensors, FOLDER / "compressed_tensors_order.safetensors", metadata)


def transformers_fp8() -> None:
    """Writes FP8 as transformers itself quantizes and reads it, with both kinds of scales."""
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    tensors: dict[str, Tensor] = {}
    metadata = {"tool": f"transformers {version('transformers')}"}
    for case, block, scales in (
        ("tiles", (8, 64), "float"),
        ("tiles-ue8m0", (8, 64), "ue8m0"),
        ("tensor", None, "float"),
    ):
        config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scales)
        quantizer = SimpleNamespace(quantization_config=config)
        packed = Fp8Quantize(quantizer).convert({"weight": weight()})
        unpacked = Fp8Dequantize(quantizer).convert(dict(packed))["weight"]
        tensors |= {f"{case}.{leaf}": tensor.contiguous() for leaf, tensor in packed.items()}
        tensors[f"{case}.reference"] = unpacked.contiguous()
        metadata[case] = json.dumps(config.to_dict())
    save_file(tensors, FOLDER / "transformers_fp8.safetensors", metadata)


def bitsandbytes() -> None:
    """Writes the cases with bitsandbytes' own functions, on a CPU."""
    from bitsandbytes import functional

    tensors: dict[str, Tensor] = {}
    metadata = {"tool": f"bitsandbytes {version('bitsandbytes')}"}
    for case, kind, nested in (("nf4", "nf4", False), ("nf4-double", "nf4", True),
                               ("fp4-double", "fp4", True)):  # fmt: skip
        packed, state = functional.quantize_4bit(
            weight(), blocksize=64, quant_type=kind, compress_statistics=nested
        )
        beside = state.as_dict(packed=True)
        tensors[f"{case}.weight"] = packed
        tensors |= {f"{case}.weight.{leaf}": tensor for leaf, tensor in beside.items()}
        tensors[f"{case}.reference"] = functional.dequantize_4bit(packed, state)
        metadata[case] = json.dumps({"quant_method": "bitsandbytes", "load_in_4bit": True,
                                     "bnb_4bit_quant_type": kind})  # fmt: skip
    codes, stats, _ = functional.int8_vectorwise_quant(weight().half())
    tensors |= {"int8.weight": codes, "int8.SCB": stats,
                "int8.reference": functional.int8_vectorwise_dequant(codes, stats)}  # fmt: skip
    metadata["int8"] = json.dumps({"quant_method": "bitsandbytes", "load_in_8bit": True})
    save_file(tensors, FOLDER / "bitsandbytes.safetensors", metadata)


WRITERS = {
    writer.__name__: writer
    for writer in (compressed_tensors, compressed_tensors_order, transformers_fp8, bitsandbytes)
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", choices=WRITERS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().files:
        WRITERS[name]()
