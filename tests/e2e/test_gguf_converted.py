"""Files that llama.cpp's own converter wrote of small models, beside these models' safetensors.

scripts/gguf_goldens.py wrote tests/goldens/gguf_converted.tar.xz.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import (
    architecture,
    chain_logits,
    open_float32,
    random_tokens,
    save_checkpoint,
)
from gguf_files import rewritten
from gguf_toys import GOLDENS, TOYS, Toy, converted, save_toy, toy_config

from specexec_cli.errors import CheckpointError
from specexec_cli.gguf.architectures import ARCHITECTURES, NOT_READ
from specexec_cli.gguf.config import gguf_config
from specexec_cli.gguf.container import read_gguf
from specexec_cli.gguf.families import FAMILIES
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.restored import decay_logarithms
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import checkpoint_bytes

# written for types whose published name of the class is not transformers', or by their own key
_OTHER_NAMES = {"mistral4", "nemotron_h_moe", "phimoe"}
TOKENS = [3 + token % 45 for token in random_tokens(40)]


@pytest.mark.parametrize("name", TOYS)
def test_logits_are_those_of_the_safetensors(tmp_path: Path, name: str) -> None:
    path, plain = converted(name, tmp_path), tmp_path / "plain"
    save_toy(TOYS[name], plain)
    found, expected = (chain_logits(open_float32(each), TOKENS) for each in (path, plain))
    assert torch.equal(found, expected)
    checkpoints = [read_checkpoint(each) for each in (path, plain)]
    sizes, of_plain = map(checkpoint_bytes, checkpoints)
    layers = len(sizes.layers)
    said = 4 * len(checkpoints[0].restoration.constants) // layers  # bytes of no tensor
    assert [size + said for size in sizes.layers] == list(of_plain.layers)
    assert sizes.experts == of_plain.experts
    assert sizes.kv_elements == of_plain.kv_elements


@pytest.mark.parametrize(("dtype", "at_once"), [(torch.float32, True), (torch.bfloat16, False)])
def test_layers_that_stay_lie_where_they_were_read(
    tmp_path: Path, dtype: torch.dtype, at_once: bool
) -> None:
    """Without a copy, unless they are converted: then nothing keeps the file's bytes in memory."""
    weights = _weights(converted("llama", tmp_path), dtype)
    assert {weight.dtype for weight in weights} == {dtype}
    assert len(_storages(weights)) == (1 if at_once else len(weights))


def test_layers_that_begin_between_two_items_are_not_in_memory_twice(tmp_path: Path) -> None:
    """As in files whose header was not filled up; torch views no items that begin so."""
    save_checkpoint(tmp_path, architecture("llama"))
    path = tmp_path / "model.safetensors"
    assert len(_storages(_weights(tmp_path, torch.float32))) == 1
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    header += b" " * (3 - len(header) % 4)  # a byte too few for whole items of four
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    told: list[int] = []
    spec = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers=None)
    model = spec.open(read_checkpoint(tmp_path), progress=lambda done, total: told.append(done))
    assert len(told) == len(model.layers), "one layer at a time is read"


def _weights(path: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of the linears of all layers, on a CPU that keeps them."""
    spec = ModelSpec(device=torch.device("cpu"), dtype=dtype, tiers=None)
    layers = spec.open(read_checkpoint(path)).layers
    return [p.weight for each in layers for p in each.modules() if isinstance(p, MixedLinear)]


def _storages(weights: list[torch.Tensor]) -> set[int]:
    return {weight.untyped_storage().data_ptr() for weight in weights}


_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_BOTH = {"num_key_value_heads": 2, "rms_norm_eps": 1e-6}
_HALF_TURNED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_GLM = {**_BOTH, "hidden_size": 64, "rope_parameters": _HALF_TURNED}
_GLM_AXES = {"rope_parameters": {**_HALF_TURNED, "mrope_section": [2, 1, 1]}}


@pytest.mark.parametrize(
    ("seeing", "plain", "options", "own"),
    [
        ("qwen2_vl_text", "qwen2", _BOTH, {"rope_parameters": _AXES}),
        ("qwen2_5_vl_text", "qwen2", _BOTH, {"rope_parameters": _AXES}),
        ("qwen3_vl_text", "qwen3", _BOTH, {"rope_parameters": _AXES}),
        ("qwen3_vl_moe_text", "qwen3_moe", {**_BOTH, "norm_topk_prob": True},
         {"norm_topk_prob": None, "rope_parameters": _AXES}),
        ("hunyuan_vl_text", "hunyuan_v1_dense", _BOTH, {"rope_parameters": _AXES}),
        ("glm4v_text", "glm4", {**_GLM, "head_dim": 16, "attention_bias": True},
         {"head_dim": None, "attention_bias": None, **_GLM_AXES}),
        ("glm_ocr_text", "glm4", {**_GLM, "head_dim": 16, "attention_bias": False},
         {"head_dim": None, "attention_bias": None, **_GLM_AXES}),
        ("glm4v_moe_text", "glm4_moe", {**_GLM, "attention_bias": True}, _GLM_AXES),
        ("gemma4_unified_text", "gemma4_text",
         {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
         {"hidden_size_per_layer_input": None}),
    ],
)  # fmt: skip
def test_a_model_that_sees_reads_text_as_the_plain_type(
    seeing: str, plain: str, options: dict[str, Any], own: dict[str, Any]
) -> None:
    """Whose code runs its GGUF files; options that are None are of the plain type alone."""
    of_seeing = {name: value for name, value in {**options, **own}.items() if value is not None}
    models = [
        transformers.AutoModel.from_config(toy_config(Toy(name, each)), dtype=torch.float32).eval()
        for name, each in ((plain, options), (seeing, of_seeing))
    ]
    ours, theirs = models
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        found, expected = (each(torch.tensor([TOKENS]))[0] for each in models)
    assert torch.equal(found, expected)


def test_the_toys_are_of_every_architecture(tmp_path: Path) -> None:
    """And no family of tensors is without one."""
    files = [read_gguf(converted(name, tmp_path)) for name in TOYS]
    assert {file.metadata["general.architecture"] for file in files} == ARCHITECTURES.keys()
    assert {gguf_config(file)["model_type"] for file in files} == FAMILIES.keys()


def test_what_the_converter_writes_of_types_that_run_is_read_or_has_a_reason() -> None:
    names = json.loads((GOLDENS.parent / "llama_cpp.json").read_text("utf-8"))["architectures"]
    assert set(names.values()) == ARCHITECTURES.keys() - _OTHER_NAMES | NOT_READ.keys()
    assert not ARCHITECTURES.keys() & NOT_READ.keys()
    unread = {kind for kind, name in names.items() if name in NOT_READ}
    assert unread == {"bitnet", "chameleon", "glm5_next", "hy_v4"}


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        "llama4_text",
        "gemma4_text-experts",
        "gpt2",
        "granitemoeshared",
        "qwen3_5",
        "qwen3_next",
        "nemotron_h",
        "kimi_linear",
        "gemma3n_text",
        "jamba",
        "mamba-wide",
        "mistral4",
    ],
)
def test_parameters_are_made_of_packed_tensors(tmp_path: Path, name: str) -> None:
    """As of what the blocks mean, where a parameter has another shape or order than the tensors."""
    path = converted(name, tmp_path)
    logits = [
        chain_logits(open_float32(rewritten(path, tmp_path / f"{packs}.gguf", packs)), TOKENS)
        for packs in (True, False)
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5 * float(logits[1].abs().max()))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("deepseek_v3", (b"blk.1.attn_v_b.weight", b"blk.1.attn_9_b.weight"), "weight' is missing"),
        ("deepseek_v3", (b".key_length_mla\x04\0\0\0\x10", b".key_length_mla\x04\0\0\0\x14"),
         "of which 'model.layers.*' of a deepseek_v3 model cannot be made"),
        ("falcon-40b", (b".head_count_kv\x04\0\0\0\x02", b".head_count_kv\x04\0\0\0\x03"),
         "it has 3 groups of heads"),
        ("qwen3_5", (b".group_count\x04\0\0\0\x02", b".group_count\x04\0\0\0\x04"),
         "6 heads of a recurrent layer, in 4 groups"),
        ("qwen3_5", (b".ssm.state_size\x04\0\0\0\x08", b".ssm.state_size\x04\0\0\0\x10"),
         "has shape"),
        ("qwen3_5", (b".ssm.state_size", b".ssm.state_syze"), "ssm.state_size"),
        ("granitemoehybrid", (b"t_used_count\x04\0\0\0\x02", b"t_used_count\x04\0\0\0\x63"),
         "99 of . experts are chosen"),
        ("apertus", (b"xielu.beta", b"xielu.bota"), "has no 'apertus.xielu.beta'"),
        ("gemma3n_text", (b"blk.0.laurel_l", b"blk.0.laurel_i"), "or no 'laurel_l'"),
        ("gemma3n_text", (b".active_idx\x04\0\0\0\0", b".active_idx\x04\0\0\0\x05"),
         "number 5 is active"),
        ("kimi_linear", (b"blk.1.ssm_conv1d_v", b"blk.1.ssm_conv1d_w"), "lacks one of"),
        ("jamba", (b"blk.3.attn_q.", b"blk.2.attn_q."), "'attn_q' are not equally far apart"),
        ("kimi_linear", (b"1d_q.weight\x04\0\0\0\x04", b"1d_q.weight\x04\0\0\0\x02"),
         "where 4 rows are convolved"),
        ("phimoe-long", (b"_long.weight\x01\0\0\0\x04", b"_long.weight\x01\0\0\0\x03"),
         "long and short texts are not as many"),
        ("mamba", (b".inner_size\x04\0\0\0\x40", b".inner_size\x04\0\0\0\x48"),
         "recurrent layers are 72 wide"),
        ("minicpm3", (b"blk.0.attn_kv_b", b"blk.0.attn_kv_o"), "no 'attn_kv_b' for that many"),
        ("mistral4", (b"\x04\0\0\0\0\0\0\0yarn", b"\x04\0\0\0\0\0\0\0none"), "not scaled by YaRN"),
        ("granitemoehybrid", (b".inner_size\x04\0\0\0\x40", b".inner_size\x04\0\0\0\x48"),
         "recurrent layers are 72 wide"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_in_a_line(
    tmp_path: Path, name: str, damage: tuple[bytes, bytes], message: str
) -> None:
    path = converted(name, tmp_path)
    raw = path.read_bytes()
    assert damage[0] in raw
    path.write_bytes(raw.replace(*damage))
    with pytest.raises(CheckpointError, match=message):
        open_float32(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decays_are_those_of_the_safetensors(dtype: torch.dtype) -> None:
    """The file has -exp of a logarithm; a logarithm with the same exponential is found."""
    made = torch.Generator().manual_seed(0)
    logarithms = torch.empty(20_000).uniform_(1e-3, 32, generator=made).log().to(dtype).float()
    decays = -torch.exp(logarithms)
    assert torch.equal(-torch.exp(decay_logarithms(decays)), decays)
