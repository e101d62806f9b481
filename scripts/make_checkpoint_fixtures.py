"""Write tests/data/formats: tiny checkpoints as quantizers write them, with reference logits.

    pip install transformers accelerate
    python scripts/make_checkpoint_fixtures.py transformers-fp8
    pip install nvidia-modelopt
    python scripts/make_checkpoint_fixtures.py modelopt-fp8 modelopt-nvfp4
    pip install auto-round
    python scripts/make_checkpoint_fixtures.py auto-round-gptq auto-round-awq
    pip install gptqmodel
    python scripts/make_checkpoint_fixtures.py gptqmodel-desc-act

Each folder holds the checkpoint as the tool wrote it and `reference.safetensors`: `tokens`, and the
float32 `logits` of transformers' model with the weights that the tool itself unpacks. Its metadata
says tool and version and, of each linear's unpacked weight, dtype and SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "formats"
KEPT = ("*.safetensors", "config.json", "*quant*.json")  # files that are needed to read weights
TOKENS = [1, 5, 9, 3, 14, 7, 2, 11, 11, 4]
Weights = Mapping[str, Tensor]  # unpacked, by the name of the linear

os.environ["HF_HUB_OFFLINE"] = "1"


def small_llama(**settings: Any) -> PretrainedConfig:
    """One layer whose linears are a few thousand weights each."""
    return LlamaConfig(
        **{"vocab_size": 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
           **settings}
    )  # fmt: skip


def save_plain(folder: Path, config: PretrainedConfig) -> None:
    """Saves a random model in bfloat16, with inputs of different sizes as in trained models."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
            if parameter.dim() == 2:
                parameter *= torch.rand(parameter.shape[1]) + 0.5
    model.save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    """Saves a tokenizer that spells tokens as numbers, for tools that need one."""
    words = Tokenizer(models.WordLevel({f"<{token}>": token for token in range(16)}, "<0>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<0>", bos_token="<1>", eos_token="<2>", pad_token="<0>"
    ).save_pretrained(folder)


def unpacked_sha256(weight: Tensor) -> str:
    """Dtype and SHA-256 of a weight, row by row; zeros have no sign."""
    positive = (weight + 0).contiguous().view(torch.uint8).numpy()
    return f"{str(weight.dtype).removeprefix('torch.')} {hashlib.sha256(positive).hexdigest()}"


def keep(name: str, written: Path, tool: str, weights: Weights) -> None:
    """Copies a checkpoint to the fixtures, and writes its reference beside it."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in (path for pattern in KEPT for path in written.glob(pattern)):
        shutil.copyfile(path, folder / path.name)
    config = AutoConfig.from_pretrained(written)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stored = {key: tensor for path in written.glob("*.safetensors")
              for key, tensor in load_file(path).items()}  # fmt: skip
    linears = {f"{linear}.weight": weight for linear, weight in weights.items()}
    plain = {key: stored[key] for key in model.state_dict().keys() & stored.keys() - linears.keys()}
    missing = model.load_state_dict({**plain, **linears}, strict=False).missing_keys
    assert set(missing) <= set(model.all_tied_weights_keys), missing
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    meaning = {linear: unpacked_sha256(weight) for linear, weight in weights.items()}
    save_file(
        {"tokens": torch.tensor(TOKENS), "logits": logits},
        folder / "reference.safetensors",
        {"tool": tool, **meaning},
    )


def transformers_fp8(name: str, work: Path) -> None:
    """Packs and reads a model with transformers' own operations, which unpack on a CPU.

    The model has two matrices in its MLP, since three of more than one 128 x 128 tile would be
    large. The matrices of its attention are no whole tiles and stay plain.
    """
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config, Starcoder2Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = Starcoder2Config(
        vocab_size=16, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        use_bias=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    save_plain(work / "plain", config)
    quantization = FineGrainedFP8Config()
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=quantization))
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(work / "plain" / "model.safetensors").items():
        tensors |= quantize.convert({key: tensor})
    written = work / "written"
    config = AutoConfig.from_pretrained(work / "plain")
    config.quantization_config = quantization.to_dict()
    config.save_pretrained(written)
    save_file(tensors, written / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    packed = [key.removesuffix("_scale_inv") for key in tensors if key.endswith("_scale_inv")]
    weights = {key.removesuffix(".weight"): model.get_parameter(key).detach() for key in packed}
    keep(name, written, f"transformers {version('transformers')}", weights)


def modelopt(name: str, work: Path) -> None:
    """Quantizes, exports and unpacks a model with NVIDIA's Model Optimizer."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    save_plain(work / "plain", small_llama())
    model = AutoModelForCausalLM.from_pretrained(work / "plain", dtype=torch.bfloat16)
    settings = {
        "modelopt-fp8": mtq.FP8_DEFAULT_CFG, "modelopt-nvfp4": mtq.NVFP4_DEFAULT_CFG
    }[name]  # fmt: skip
    mtq.quantize(model, settings, lambda model: model(torch.tensor([TOKENS])))
    export_hf_checkpoint(model, export_dir=work / "written")
    stored = load_file(work / "written" / "model.safetensors")
    weights: dict[str, Tensor] = {}
    for linear in (key.removesuffix(".weight_scale") for key in stored
                   if key.endswith(".weight_scale")):  # fmt: skip
        codes, scale = stored[f"{linear}.weight"], stored[f"{linear}.weight_scale"]
        rows, columns = codes.shape
        if codes.dtype == torch.uint8:
            packed = NVFP4QTensor(torch.Size((rows, 2 * columns)), torch.float32, codes)
            factor = stored[f"{linear}.weight_scale_2"]
            weights[linear] = packed.dequantize(
                scale=scale, double_scale=factor, block_sizes={-1: 16}
            )
        else:
            packed = FP8QTensor(codes.shape, torch.float32, codes)
            weights[linear] = packed.dequantize(scale=scale)
    keep(name, work / "written", f"modelopt {version('nvidia-modelopt')}", weights)


def auto_round(name: str, work: Path) -> None:
    """Quantizes a model with auto-round, to nearest, and unpacks it with its layers in float32.

    Symmetric weights are packed as GPTQ does, with zero points minus one; others as AutoAWQ does.
    """
    from auto_round import AutoRound
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    awq, group = name == "auto-round-awq", 32
    save_plain(work / "plain", small_llama(intermediate_size=64))
    save_tokenizer(work / "plain")
    AutoRound(
        str(work / "plain"), scheme="W4A16", iters=0, disable_opt_rtn=True, device_map="cpu",
        sym=not awq, group_size=group,
    ).quantize_and_save(
        output_dir=str(work / "written"), format="auto_awq" if awq else "auto_round"
    )  # fmt: skip
    (written,) = (path.parent for path in (work / "written").rglob("config.json"))
    stored = load_file(written / "model.safetensors")
    weights: dict[str, Tensor] = {}
    for linear in (key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")):
        words, zeros, scales = (
            stored[f"{linear}.{leaf}"] for leaf in ("qweight", "qzeros", "scales")
        )
        if awq:
            unpacked = dequantize_gemm(words, zeros, scales.float(), 4, group)
        else:
            inputs, outputs = len(words) * 8, words.shape[1]
            layer = QuantLinear(4, group, inputs, outputs, bias=False)
            layer.qweight, layer.qzeros, layer.scales = words, zeros, scales.float()
            unpacked = layer(torch.eye(inputs))
        weights[linear] = unpacked.T.contiguous()
    keep(name, written, f"auto-round {version('auto-round')}", weights)


def gptqmodel_desc_act(name: str, work: Path) -> None:
    """Quantizes a model with GPTQModel in activation order, and unpacks it with its layers."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    save_plain(work / "plain", small_llama(intermediate_size=64))
    save_tokenizer(work / "plain")
    settings = QuantizeConfig(bits=4, group_size=32, desc_act=True, act_group_aware=False)
    model = GPTQModel.load(str(work / "plain"), settings, device="cpu")
    rng = torch.Generator().manual_seed(6)
    texts = [torch.randint(0, 16, (1, 48), generator=rng) for _ in range(16)]
    model.quantize([{"input_ids": text, "attention_mask": torch.ones_like(text)} for text in texts])
    written = work / "written"
    model.save(str(written))
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        model = GPTQModel.load(
            str(written), device="cpu", dtype=torch.float16, backend=BACKEND.GPTQ_TORCH
        ).model.float()
        weights = {
            linear: module.dequantize_weight().T.contiguous()
            for linear, module in model.named_modules() if hasattr(module, "dequantize_weight")
        }  # fmt: skip
    keep(name, written, f"gptqmodel {version('gptqmodel')}", weights)


WRITERS: dict[str, Callable[[str, Path], None]] = {
    "transformers-fp8": transformers_fp8,
    "modelopt-fp8": modelopt,
    "modelopt-nvfp4": modelopt,
    "auto-round-gptq": auto_round,
    "auto-round-awq": auto_round,
    "gptqmodel-desc-act": gptqmodel_desc_act,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+", choices=WRITERS)
    for chosen in parser.parse_args().checkpoints:
        with tempfile.TemporaryDirectory() as temporary:
            WRITERS[chosen](chosen, Path(temporary))
