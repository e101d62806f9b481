"""GGUF files of small models, written as llama.cpp's converter does, beside their safetensors."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specexec_cli.models.skeleton import load_config
from specexec_cli.offload.store import read_checkpoint
from tests.checkpoints import architecture, chain_logits, open_float32, random_tokens
from tests.checkpoints import save_checkpoint as save
from tests.gguf_files import write_gguf

_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "long_factor": [1.5, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3],
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
# what GGUF files leave to llama.cpp, which knows it of the real models
_GEMMA = {"query_pre_attn_scalar": 8}
_SIX = {"num_hidden_layers": 7, "layer_types": [*["sliding_attention"] * 5, "full_attention",
                                                "sliding_attention"]}  # fmt: skip
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama-tied", {}),
    ("llama-biases", {}),
    ("llama", {"rope_parameters": _LLAMA3, "head_dim": 16}),
    ("llama", {"rope_parameters": _YARN}),
    ("mistral-full", {}),
    ("mixtral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3-moe", {"norm_topk_prob": True}),
    ("phi3", {}),
    ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 64}),
    ("gemma2", _GEMMA),
    ("gemma3", {**_GEMMA, **_SIX}),
]


@pytest.mark.parametrize(("name", "changes"), MODELS)
def test_logits_of_a_float32_file_are_those_of_the_safetensors(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    base = architecture(name)
    config = type(base)(**{**base.to_dict(), **changes})
    model = save(tmp_path / "plain", config)
    write_gguf(model, tmp_path / "m.gguf")
    tokens = random_tokens(40)
    found, expected = (
        chain_logits(open_float32(path), tokens)
        for path in (tmp_path / "m.gguf", tmp_path / "plain")
    )
    assert torch.equal(found, expected)


def test_factors_that_are_nobodys_rule_are_taken_as_they_are(tmp_path: Path) -> None:
    """Llama 3's rule over another length of context, of which the list alone tells."""
    config = architecture("llama3-rope")
    model = save(tmp_path / "plain", config)
    write_gguf(model, tmp_path / "m.gguf")
    rope = load_config(read_checkpoint(tmp_path / "m.gguf")).rope_parameters
    assert rope["rope_type"] == "longrope"
    tokens = random_tokens(40)
    found, expected = (
        chain_logits(open_float32(path), tokens)
        for path in (tmp_path / "m.gguf", tmp_path / "plain")
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tokens_of_padding_beyond_a_pass_do_no_harm(tmp_path: Path) -> None:
    """An embedding's padding row may have a higher number than a pass has rows (Phi-3's 32000)."""
    config = architecture("llama")
    config.pad_token_id = 60
    save(tmp_path / "plain", config)
    logits = chain_logits(open_float32(tmp_path / "plain"), random_tokens(2))
    assert logits.shape == (2, config.vocab_size)
