"""Streamed logits equal transformers' own forward in float32, for chains and for trees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import (
    ARCHITECTURES,
    VOCAB,
    architecture,
    chain_logits,
    edit_json,
    open_float32,
    random_tokens,
    random_tree,
    save_byte_tokenizer,
    save_checkpoint,
)
from gguf_toys import Toy, toy_config
from interpreter import only_kernels_attend
from specexec_kernels import triton_tree_attention
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from specexec_cli.core import DraftTree
from specexec_cli.errors import CheckpointError
from specexec_cli.models import attention
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.skeleton import load_config
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.verify.masks import verification_rows


@torch.no_grad()
def own_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """transformers' forward, (len(tokens), vocab)."""
    return model(torch.tensor([tokens])).logits[0]


def expected_logits(model: PreTrainedModel, context: list[int], tree: DraftTree) -> Tensor:
    """Row 0: behind the context; row i + 1: behind node i's path. One forward per leaf."""
    rows: list[Tensor | None] = [None] * (1 + len(tree))
    for leaf in sorted(set(range(-1, len(tree))) - {-1, *tree.parents.tolist()}) or [-1]:
        path, node = [], leaf
        while node >= 0:
            path.insert(0, node)
            node = int(tree.parents[node])
        logits = own_logits(model, context + tree.tokens[path].tolist())
        rows[0] = logits[len(context) - 1]
        for offset, node in enumerate(path):
            rows[node + 1] = logits[len(context) + offset]
    return torch.stack([row for row in rows if row is not None])


def assert_close(ours: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5 * max(1.0, scale))


def two_passes(model: StreamedModel, tokens: list[int], first: int, tree: DraftTree) -> Tensor:
    """The tokens in two passes, the second with a tree behind them."""
    cache = model.new_state()
    model.forward(PassRows.chain(tokens[:first], 0), cache, [])
    rows = verification_rows(tokens[first:], tree, first)
    root = len(tokens) - first - 1
    return model.forward(rows, cache, range(root, len(rows.tokens)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chains_and_trees_match_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = save_checkpoint(tmp_path, architecture(name), shard_bytes=20_000)
    shards_of_layer = {
        place.path for key, place in read_checkpoint(tmp_path).items() if "layers.1." in key
    } or {place.path for key, place in read_checkpoint(tmp_path).items() if "h.1." in key}
    assert len(shards_of_layer) > 1, "the test wants a layer split over shards"
    model = open_float32(tmp_path)
    try:
        tokens, tree = random_tokens(31), random_tree(17, seed=1)
        expected = expected_logits(own, tokens, tree)
        assert float(expected.abs().max()) > 0.1, "the logits carry a signal"
        assert_close(chain_logits(model, tokens), own_logits(own, tokens))
        assert_close(two_passes(model, tokens, 20, tree), expected)
        model.context.chunk_rows = 7  # chunk borders in pending rows and tree
        assert_close(two_passes(model, tokens, 3, tree), expected)
    finally:
        model.close()


def test_a_stream_that_is_alone_lies_as_several_do(tmp_path: Path) -> None:
    """Gemma-3n's layers get (streams, 1, rows, hidden), with one stream too."""
    config = toy_config(Toy("gemma3n_text", {"altup_num_inputs": 1}))
    own, tokens = save_checkpoint(tmp_path, config), random_tokens(31)
    model = open_float32(tmp_path)
    model.context.chunk_rows = 7
    assert_close(chain_logits(model, tokens), own_logits(own, tokens))
    model.close()


@pytest.mark.parametrize("name", ["llama", "mistral", "phi3", "gpt-bigcode", "gemma2", "gemma3"])
def test_the_kernels_of_a_gpu_match_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tree attention as the layers of a GPU call it, in Triton's interpreter, and no other."""
    only_kernels_attend(monkeypatch, attention)
    attended: list[int] = []
    kernel = triton_tree_attention.tree_attention

    def counted(queries: Tensor, *args: object) -> Tensor:
        attended.append(queries.shape[0])
        return kernel(queries, *args)

    monkeypatch.setattr(triton_tree_attention, "tree_attention", counted)
    own = save_checkpoint(tmp_path, architecture(name))
    model = open_float32(tmp_path)
    try:
        tokens, tree = random_tokens(31), random_tree(17, seed=1)
        expected = expected_logits(own, tokens, tree)
        assert_close(two_passes(model, tokens, 20, tree), expected)
        assert attended
        model.context.chunk_rows = 7
        assert_close(two_passes(model, tokens, 3, tree), expected)
    finally:
        model.close()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3-moe", "gpt-bigcode", "gemma2"])
@pytest.mark.parametrize("tier", ["ram", None])
def test_other_tiers_compute_the_same(name: str, tier: str | None, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture(name))
    tokens = random_tokens(20)
    logits = []
    for each in ("ssd", tier):
        model = open_float32(tmp_path, each)
        logits.append(chain_logits(model, tokens))
        model.close()
    assert torch.equal(logits[0], logits[1])


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


@pytest.mark.parametrize(("dtype", "tier"), [(torch.bfloat16, "ssd"), (torch.float16, None)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_in_two_bytes_what_runs_through_and_the_logits_are_float32(
    name: str, dtype: torch.dtype, tier: str | None, tmp_path: Path
) -> None:
    own = save_checkpoint(tmp_path, architecture(name), dtype=dtype)
    model = ModelSpec(device=torch.device("cpu"), dtype=dtype, tiers=tier).open(
        read_checkpoint(tmp_path)
    )
    between: list[Tensor] = []
    for layer in model.skeleton.layers:
        layer.register_forward_hook(lambda module, args, output: between.append(output))
    tokens = random_tokens(31)
    logits = chain_logits(model, tokens)
    model.close()
    # a sum of a few numbers of two bytes is one of them by chance, a product of rows hardly ever
    for result, by_chance in ((logits, 0.01), *((rows, 0.6) for rows in between)):
        assert result.dtype == torch.float32
        assert float((result == result.to(dtype)).float().mean()) < by_chance
    exact = own_logits(own, tokens)
    error = float((logits - exact).norm() / exact.norm())
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01)
    # the norm, the head and the soft-capping behind it, over the very rows of our last layer
    decoder_layers(own)[-1].register_forward_hook(lambda module, args, output: between[-1])
    assert_close(logits, own_logits(own, tokens))


@pytest.mark.parametrize("name", ["llama-tied", "llama-biases", "mixtral", "phi3", "gemma3"])
@pytest.mark.parametrize("tier", ["ssd", None])
def test_bfloat16_weights_computed_in_float32(name: str, tier: str | None, tmp_path: Path) -> None:
    own = save_checkpoint(tmp_path, architecture(name), dtype=torch.bfloat16)
    assert {place.dtype for place in read_checkpoint(tmp_path).values()} == {"BF16"}
    model = open_float32(tmp_path, tier)
    tokens = random_tokens(20)
    assert_close(chain_logits(model, tokens), own_logits(own, tokens))
    model.close()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3"])
def test_prompts_longer_than_2048_tokens(name: str, tmp_path: Path) -> None:
    """Several chunks, and row counts that a float16 sum could no longer tell apart."""
    own = save_checkpoint(tmp_path, architecture(name))
    model = open_float32(tmp_path)
    tokens, tree = random_tokens(2100), random_tree(4, seed=3)
    assert len(tokens) > 4 * model.context.chunk_rows
    expected = expected_logits(own, tokens, tree)
    assert_close(two_passes(model, tokens, 2060, tree), expected)
    rows = verification_rows(tokens, tree, 0)  # prompt and tree in one pass
    ours = model.forward(rows, model.new_state(), range(len(tokens) - 1, len(rows.tokens)))
    assert_close(ours, expected)
    model.close()


def test_longrope_ends_the_window_where_its_frequencies_change(tmp_path: Path) -> None:
    """Beyond it transformers turns all positions to other frequencies; cached keys cannot."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = transformers.Phi3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=None, bos_token_id=1,
        eos_token_id=2, max_position_embeddings=128, original_max_position_embeddings=32,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )  # fmt: skip
    own = save_checkpoint(tmp_path, config)
    model = open_float32(tmp_path)
    assert model.context_length == 32
    tokens, tree = random_tokens(32), random_tree(0, seed=0)
    assert_close(two_passes(model, tokens, 20, tree)[0], own_logits(own, tokens)[-1])
    assert not torch.allclose(own_logits(own, random_tokens(33))[31], own_logits(own, tokens)[31])
    model.close()


def test_weights_saved_without_the_head_s_prefix(tmp_path: Path) -> None:
    """Checkpoints saved from the bare base model name their tensors without "model."."""
    config = architecture("llama-tied")
    own = save_checkpoint(tmp_path / "whole", config)
    own.model.save_pretrained(tmp_path / "bare")
    assert all(not name.startswith("model.") for name in read_checkpoint(tmp_path / "bare"))
    model = open_float32(tmp_path / "bare")
    tokens = random_tokens(12)
    assert_close(chain_logits(model, tokens), own_logits(own, tokens))
    model.close()


@pytest.mark.parametrize(
    ("config", "near", "reason"),
    [
        (transformers.MiniMaxConfig(), "minimax_m2", "recurrent"),
        (transformers.RwkvConfig(), None, "recurrent"),
        (transformers.T5Config(), None, None),
    ],
    ids=lambda config: getattr(config, "model_type", ""),
)
def test_other_architectures_are_refused_by_name(
    config: PretrainedConfig, near: str | None, reason: str | None, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_config(Checkpoint(tmp_path, {}))
    told = str(error.value)
    assert f"'{config.model_type}' is not supported" in told
    assert reason is None or f"not supported: {reason}" in told
    assert near is None or near in told.partition("Nearest of those that run: ")[2]
    assert "\n" not in told


def test_an_architecture_transformers_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "grok9"}))
    with pytest.raises(CheckpointError, match="'grok9' is not supported"):
        load_config(Checkpoint(tmp_path, {}))


@pytest.mark.parametrize("model_type", ["llama", "evil", None])
def test_no_code_of_a_checkpoint_runs(tmp_path: Path, model_type: str | None) -> None:
    """Neither a config nor a tokenizer may bring its own Python, whatever auto_map says."""
    marker = tmp_path / "executed"
    folder = tmp_path / "model"
    save_checkpoint(folder, architecture("llama"))
    save_byte_tokenizer(folder)
    evil = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    for module in ("configuration_evil", "tokenization_evil", "modeling_evil"):
        (folder / f"{module}.py").write_text(evil)
    auto_map = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilModel",
    }
    edit_json(folder / "config.json", model_type=model_type, auto_map=auto_map)
    tokenizer_map = {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}
    edit_json(
        folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=tokenizer_map
    )
    errors = [
        refusal(lambda: open_float32(folder).close()),
        refusal(lambda: load_tokenizer(folder)),
    ]
    assert not marker.exists()
    assert (errors[0] is None) == (model_type == "llama"), "only a known architecture may load"
    for error in filter(None, errors):
        assert "\n" not in error
        assert "trust_remote_code" not in error, "we have no such option"


def refusal(call: Callable[[], object]) -> str | None:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return None
