"""Layers that run as one compiled call have the bits of transformers' way, which others go."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import VOCAB, architecture, random_tokens, save_checkpoint
from gguf import GGMLQuantizationType as Kind
from gguf_files import all_of, write_gguf
from other_cpu import other_cpu
from quantized_checkpoints import save_quantized
from specexec_kernels import cpu_jit, cpu_layer
from torch import Tensor
from transformers.models.gemma3 import modeling_gemma3

from specexec_cli.catalog.architectures import ONE_CALL
from specexec_cli.config import DtypeName
from specexec_cli.core import DraftTree
from specexec_cli.models import decoder_layer, usual_layer
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.dtype_choice import has_arithmetic
from specexec_cli.planning.machine import described_site
from specexec_cli.planning.machine_rates import CALLED_DTYPES, CALLED_ROWS, USUAL_CALL_S
from specexec_cli.planning.memory import Work
from specexec_cli.planning.pass_time import layers_seconds
from specexec_cli.planning.sizes import checkpoint_bytes
from specexec_cli.verify.verifier import LocalTarget

# heads of two vectors on every CPU, and weights that fill the kernels' strips
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}  # fmt: skip

LLAMAS, GEMMAS = ("llama", "mistral", "qwen2", "qwen3"), ("gemma", "gemma2", "gemma3")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of every layer that ran as one call."""
    found: list[int] = []
    run = cpu_layer.Program.run

    def counted(self: cpu_layer.Program, *args: Any) -> Tensor:
        found.append(self.rows)
        return run(self, *args)

    monkeypatch.setattr(cpu_layer.Program, "run", counted)
    return found


def saved(folder: Path, name: str, **settings: Any) -> Path:
    config = transformers.GemmaConfig(vocab_size=VOCAB) if name == "gemma" else architecture(name)
    for key, value in {**WIDE, **settings}.items():
        setattr(config, key, value)
    config.layer_types = settings.get("layer_types")
    save_checkpoint(folder, type(config)(**config.to_diff_dict()), std=0.1)
    return folder


def opened(folder: Path, tiers: Any = "ram", **settings: Any) -> StreamedModel:
    settings = {"dtype": torch.float32, **settings}
    spec = ModelSpec(device=torch.device("cpu"), tiers=tiers, **settings)
    return spec.open(read_checkpoint(folder))


def passes(model: StreamedModel) -> list[Tensor]:
    """Logits, keys and values of a prompt, of single tokens behind it, of trees, and of a tree
    whose path was committed."""
    target, found, prompt = LocalTarget(model), [], random_tokens(21)
    tree = DraftTree(np.array([3, 5, 7]), np.array([-1, -1, 1]), np.array([1, 1, 2]), np.zeros(3))
    for pending, nodes, path in (
        (prompt, DraftTree.empty(), []), ([4], DraftTree.empty(), []), ([6], tree, [1, 2]),
        ([9, 8], DraftTree.chain([1]), []), ([2], DraftTree.empty(), []),
        ([5], DraftTree.chain(random_tokens(12)), [0]),
    ):  # fmt: skip
        found.append(target.verify(pending, nodes))
        target.commit(path)
        found += [
            part[:, :, : len(target.tokens)].clone()
            for layer in target.state.layers
            for part in (layer.keys, layer.values)
        ]
    return found


def assert_same(folder: Path, patch: pytest.MonkeyPatch, **how: Any) -> None:
    ours = passes(opened(folder, **how))
    with patch.context() as usual:
        usual.setattr(decoder_layer, "is_usual", lambda *layer: False)
        expected = passes(opened(folder, **how))
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LLAMAS)
def test_the_bits_of_transformers_way(
    name: str, dtype: torch.dtype, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of one row, of trees, and of several pending tokens; weights in RAM."""
    folder = saved(tmp_path, name)
    assert_same(folder, monkeypatch, dtype=dtype)
    if cpu_jit.has_dot() or dtype == torch.float32:
        assert calls == [1, 1, 4, 4, 3, 3, 1, 1, 13, 13]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GEMMAS)
def test_gemma_s_norms_and_capped_scores(
    name: str, dtype: torch.dtype, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a window, which most rows of the prompt have left, and without one."""
    kinds = None if name == "gemma" else ["sliding_attention", "full_attention"]
    folder = saved(tmp_path, name, layer_types=kinds, sliding_window=8, attn_logit_softcapping=2.0)
    assert_same(folder, monkeypatch, dtype=dtype)
    if cpu_jit.has_dot() or dtype == torch.float32:
        assert calls == [1, 1, 4, 4, 3, 3, 1, 1, 13, 13]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_8_bits(
    dtype: torch.dtype, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = saved(tmp_path / "plain", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    file = write_gguf(model, tmp_path / "model.gguf", all_of(Kind.Q4_0))
    assert_same(file, monkeypatch, dtype=dtype, eight_bit_rows=True)
    assert set(calls) == {1, 3, 4, 13}


@pytest.mark.parametrize("tiers", [None, "ssd", "ram"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.BF16])
def test_gguf_files_in_their_order_of_rows(
    kind: Kind, tiers: Any, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys of Llama lie in pairs there; weights that move have new addresses."""
    plain = saved(tmp_path / "plain", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    file = write_gguf(model, tmp_path / "model.gguf", all_of(kind))
    assert_same(file, monkeypatch, tiers=tiers)
    assert set(calls) == {1, 3, 4, 13}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("mixtral", {}), ("qwen3-moe-mixed", {}), ("qwen2-moe", {"mlp_only_layers": []}),
     ("gpt-oss", {"sliding_window": 8}), ("llama", {"mlp_bias": True}),
     ("llama", {"hidden_act": "relu"}),
     ("llama", {"hidden_act": "gelu_python_tanh"})],
)  # fmt: skip
def test_the_call_ends_in_front_of_another_mlp(
    name: str,
    settings: dict[str, Any],
    dtype: torch.dtype,
    tmp_path: Path,
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as routed experts, of all layers or of some."""
    folder = saved(tmp_path, name, moe_intermediate_size=64, **settings)
    assert_same(folder, monkeypatch, dtype=dtype)
    if cpu_jit.has_dot() or dtype == torch.float32:
        assert calls == [1, 1, 4, 4, 3, 3, 1, 1, 13, 13]


def test_a_norm_that_differs_in_a_method_is_another_form(
    tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubled(modeling_gemma3.Gemma3RMSNorm):
        def _norm(self, x: Tensor) -> Tensor:
            return 2.0 * super()._norm(x)

    monkeypatch.setattr(modeling_gemma3, "Gemma3RMSNorm", Doubled)
    assert_same(saved(tmp_path, "gemma3"), monkeypatch)
    assert not calls


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_are_rotated_in_part(
    dtype: torch.dtype,
    normed: bool,
    tmp_path: Path,
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GLM-4.5's layers, the first with a dense MLP, the second with shared and routed experts."""
    config = transformers.Glm4MoeConfig(
        **{**WIDE, "head_dim": 64}, vocab_size=VOCAB, pad_token_id=0, bos_token_id=None,
        eos_token_id=None, moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, use_qk_norm=normed, attention_bias=True,
    )  # fmt: skip
    save_checkpoint(tmp_path, config, std=0.1)
    assert_same(tmp_path, monkeypatch, dtype=dtype)
    if cpu_jit.has_dot() or dtype == torch.float32:
        assert calls == [1, 1, 4, 4, 3, 3, 1, 1, 13, 13]


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.BF16])
def test_biases_behind_packed_weights(
    kind: Kind, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are added to the rounded sums, those of plain weights before."""
    plain = saved(tmp_path / "plain", "llama", attention_bias=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    file = write_gguf(model, tmp_path / "model.gguf", all_of(kind))
    assert_same(file, monkeypatch, dtype=torch.bfloat16)
    if cpu_jit.has_dot():
        assert set(calls) == {1, 3, 4, 13}


@pytest.mark.parametrize("lanes", [8, 16])
def test_packed_weights_on_a_cpu_without_bfloat16(
    lanes: int, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of bfloat16 are multiplied as int16, with several threads as with one."""
    if cpu_jit.lanes() < lanes:
        pytest.skip("registers are narrower here")
    other_cpu(monkeypatch, lanes=lanes, matmul=False, dot=False)
    plain = saved(tmp_path / "plain", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    file = write_gguf(model, tmp_path / "model.gguf", all_of(Kind.Q4_0))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert_same(file, monkeypatch, dtype=torch.bfloat16)
    finally:
        torch.set_num_threads(before)
    assert set(calls) == {1, 3, 4, 13}


@pytest.mark.parametrize(
    "save",
    [
        lambda folder: saved(folder, "qwen3-moe", head_dim=8),
        lambda folder: saved(folder, "llama", head_dim=16),  # half a head is no vector
        lambda folder: save_quantized(folder)[1],  # sizes of 96
    ],
)  # fmt: skip
def test_other_layers_go_transformers_way(
    save: Callable[[Path], Path], tmp_path: Path, calls: list[int]
) -> None:
    model = opened(save(tmp_path))
    assert all(logits.isfinite().all() for logits in passes(model))
    if cpu_jit.lanes() == 16:
        assert not calls


def test_code_that_differs_in_what_it_calls_is_another_form(
    tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM's attention reads as Llama's does, and rotates otherwise."""
    config = transformers.GlmConfig(
        vocab_size=VOCAB, pad_token_id=0, bos_token_id=None, eos_token_id=None, **WIDE
    )
    save_checkpoint(tmp_path, config, std=0.1)
    passes(opened(tmp_path))
    assert not calls


def test_an_unknown_order_of_sums_goes_transformers_way(
    tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_layer, "sum_lanes", lambda width: 0)
    passes(opened(saved(tmp_path, "llama")))
    assert not calls


def test_a_hook_on_a_linear_sees_its_rows(tmp_path: Path, calls: list[int]) -> None:
    """As the measuring of inputs for a low-bit copy needs."""
    model, seen = opened(saved(tmp_path, "llama")), list[int]()
    passes(model)
    calls.clear()
    linear = model.layers[0].layer.mlp.down_proj
    linear.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    passes(model)
    assert seen == [21, 1, 4, 3, 1, 13]
    assert calls == [1, 4, 3, 1, 13]  # of the other layer


@pytest.mark.parametrize(("tiers", "times"), [("ram", 1), ("ssd", 3)])
def test_norms_of_a_layer_in_ram_are_converted_once(
    tiers: Any, times: int, tmp_path: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay bound until the model is closed; those of layers that move do not."""
    converted: list[int] = []
    changed = decoder_layer.DecoderLayer._changed

    def counted(self: decoder_layer.DecoderLayer, *args: Any) -> dict[str, Tensor]:
        converted.append(self.index)
        return changed(self, *args)

    monkeypatch.setattr(decoder_layer.DecoderLayer, "_changed", counted)
    model = opened(saved(tmp_path, "llama"), tiers)
    target = LocalTarget(model)
    for token in (3, 5, 7):
        target.verify([token], DraftTree.empty())
        target.commit([])
    assert converted == [0, 1] * times
    assert calls == [1] * 4  # the first pass makes the room for keys
    model.close()
    assert {part.device.type for layer in model.layers for part in layer.parameters()} == {"meta"}


def test_plans_know_which_types_have_such_layers() -> None:
    types = {architecture(name).model_type for name in (*LLAMAS, *GEMMAS[1:])} | {"gemma"}
    assert types == ONE_CALL
    assert cpu_layer.MOST_ROWS == CALLED_ROWS
    assert {getattr(torch, name) for name in CALLED_DTYPES} == set(cpu_layer.DTYPES)


def test_no_two_of_the_classes_that_are_compared_with_are_alike() -> None:
    """So which files were imported first decides nothing."""
    for references in (usual_layer._FORMS, usual_layer._ATTENTION, usual_layer._NORM_KINDS):
        for one in references:
            code = getattr(importlib.import_module(usual_layer._file(one)), one.split(".")[1])
            assert [each for each in references if usual_layer._alike((code, each))] == [one]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("eight_bit_kv", [False, True])
def test_plans_count_calls_where_layers_are_calls(
    dtype: DtypeName, packed: bool, eight_bit_kv: bool, tmp_path: Path, calls: list[int]
) -> None:
    """By the dtype, by the weights, and by how keys are kept."""
    folder = save_quantized(tmp_path)[1] if packed else saved(tmp_path, "llama")
    model = opened(folder, dtype=getattr(torch, dtype), eight_bit_kv=eight_bit_kv)
    target = LocalTarget(model)
    for token in (3, 5):
        target.verify([token], DraftTree.empty())
        target.commit([])
    model.close()
    site = described_site(ram_bytes=64 * 10**9, vram_bytes=0)
    machine = replace(site, layers={}).machine(dtype)
    work = Work(
        eight_bit_kv=eight_bit_kv, widened=dtype != "float32" and not has_arithmetic(dtype)
    )  # fmt: skip
    sizes = checkpoint_bytes(read_checkpoint(folder))
    seconds = layers_seconds(sizes, 1, work, machine) / len(sizes.layers)
    assert (seconds == USUAL_CALL_S) == bool(calls)
