"""Tiny random checkpoints, written as their makers would: config, safetensors, tokenizer."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from uncounted import uncounted

from specexec_cli.core import DraftTree
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.recurrent import RecurrentState
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint

HELD_OUT = Path(__file__).parents[1] / "specexec_cli" / "demo" / "heldout_prompts.json"
VOCAB = 64
BYTE_VOCAB = 260  # <pad> <s> </s> <unk> and the 256 bytes

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
_GPT_BIGCODE = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 4096,
    "n_inner": 48, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# name -> (config class, settings); each exercises what sets its architecture apart
ARCHITECTURES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (transformers.LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 8}),
    "mistral-full": (transformers.MistralConfig, {"sliding_window": None}),
    "mixtral": (
        transformers.MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-windows": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen2-moe": (
        transformers.Qwen2MoeConfig,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "qwen3-moe-mixed": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "gpt-oss": (
        transformers.GptOssConfig,
        {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "phi3": (transformers.Phi3Config, {"sliding_window": 9}),
    "starcoder2": (transformers.Starcoder2Config, {"sliding_window": 7}),
    "gpt-bigcode": (transformers.GPTBigCodeConfig, _GPT_BIGCODE),
    "gemma2": (
        transformers.Gemma2Config,
        # caps low enough to bite, so that attention without soft-capping would show
        {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 1.0,
         "final_logit_softcapping": 2.0, "tie_word_embeddings": True},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"head_dim": 8, "sliding_window": 8, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}  # fmt: skip


def architecture(name: str) -> PretrainedConfig:
    kind, settings = ARCHITECTURES[name]
    common = {} if name == "gpt-bigcode" else _COMMON
    return kind(**{**common, **settings})


@uncounted
def save_checkpoint(
    folder: Path,
    config: PretrainedConfig,
    *,
    seed: int = 0,
    std: float = 0.3,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int | None = None,
    noise_of: PreTrainedModel | None = None,
    noise: float = 0.0,
) -> PreTrainedModel:
    """Writes random weights; returns transformers' own model of them, computing in float32.

    Args:
        noise_of: take these weights plus `noise` times normal noise instead; a smaller vocabulary
            takes the first rows.
    """
    torch.manual_seed(seed)
    # PyTorch's attention knows neither sinks nor soft-caps
    eager = config.model_type == "gpt_oss" or (
        getattr(config, "attn_logit_softcapping", None) is not None
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if eager else "sdpa", dtype=torch.float32
    )
    with torch.no_grad():
        sources = dict(noise_of.named_parameters()) if noise_of is not None else {}
        for name, parameter in model.named_parameters():
            if noise_of is None:
                parameter.normal_(std=std)
            else:
                source = sources[name][: len(parameter)]
                parameter.copy_(source + noise * torch.randn_like(parameter))
    model.tie_weights()
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_bytes or "50GB")
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager" if eager else "sdpa"
    ).eval()


def byte_llama(**settings: Any) -> PretrainedConfig:
    """A small Llama over the byte tokenizer."""
    return transformers.LlamaConfig(
        **{**_COMMON, "vocab_size": BYTE_VOCAB, "num_hidden_layers": 4, **settings}
    )


@uncounted
def save_byte_tokenizer(folder: Path, **settings: Any) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
    vocab |= {character: len(vocab) + index for index, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **settings
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_pair(
    folder: Path, *, noise: float = 0.02, target: PretrainedConfig | None = None, std: float = 0.12
) -> tuple[Path, Path]:
    """A target and a draft model that is a noisy copy of it, with byte tokenizers."""
    config = target or byte_llama()
    model = save_checkpoint(folder / "target", config, std=std)
    save_checkpoint(folder / "draft", config, noise_of=model, noise=noise)
    for name in ("target", "draft"):
        save_byte_tokenizer(folder / name)
    return folder / "target", folder / "draft"


def spoil_logits(folder: Path, token: int | None) -> None:
    """Makes a Llama's logits infinite right behind one token, and there alone.

    The last dimension of the residual stream is cleared for every other token, and the head would
    overflow if it were not. Keys and values stay finite, so no other position is spoilt.

    Args:
        token: None clears the dimension alone: what the model writes without the spoilt token.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[-1] = 0.0
    tensors["model.norm.weight"][-1] = 1.0
    tensors["model.embed_tokens.weight"][:, -1] = 0.0
    tensors["lm_head.weight"][0, -1] = torch.finfo(torch.float32).max
    if token is not None:
        tensors["model.embed_tokens.weight"][token, -1] = 1000.0
    save_file(tensors, path, metadata={"format": "pt"})


def edit_json(path: Path, **changes: Any) -> None:
    """Overrides keys of a JSON file; None as a value removes the key."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def open_float32(folder: Path, tier: str | None = "ssd", **options: Any) -> StreamedModel:
    """The checkpoint on the CPU in float32, every layer on one tier (None: loaded to stay).

    Args:
        options: of ModelSpec, or of its `open`.
    """
    opening = {name: options.pop(name) for name in ("shared", "notice") if name in options}
    spec = ModelSpec(device=torch.device("cpu"), dtype=torch.float32, tiers=tier, **options)
    return spec.open(read_checkpoint(folder), **opening)


def chain_logits(model: StreamedModel, tokens: list[int]) -> Tensor:
    """(len(tokens), vocab) in one pass from an empty cache."""
    return model.forward(PassRows.chain(tokens, 0), model.new_state(), range(len(tokens)))


def assert_fresh(model: StreamedModel, state: ModelState, tokens: list[int]) -> None:
    """The state is exactly what a prefill of `tokens` would leave."""
    assert state.length == len(tokens)
    fresh, count = model.new_state(), len(tokens)
    if tokens:
        model.forward(PassRows.chain(tokens, 0), fresh, [])
        fresh.commit(count, [])
    for ours, expected in zip(state.layers, fresh.layers, strict=True):
        assert ours.length == count
        if not tokens:
            continue
        kept = [[*each.kept_rows(0, count), *each.kept_state(count)] for each in (ours, expected)]
        for found, wanted in zip(*kept, strict=True):
            torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=0, atol=5e-5)


def recurrent_parts(state: ModelState) -> list[RecurrentState]:
    """The states of recurrent layers, also of those that keep several."""
    parts = [part for layer in state.layers for part in getattr(layer, "parts", (layer,))]
    return [part for part in parts if isinstance(part, RecurrentState)]


@uncounted
def sentencepiece_model() -> bytes:
    """A BPE model with byte fallback, as Llama-2 and Mistral ship, trained in a moment."""
    import sentencepiece  # its import is slow and few tests need it

    # of the repository's own, not of the standard library: Python's versions differ
    held_out = json.loads(HELD_OUT.read_text())
    lines = [line for item in held_out for line in item["prompt"].splitlines() if line.strip()]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, vocab_size=600, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, num_threads=1, minloglevel=2,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
    )  # fmt: skip
    return written.getvalue()


def save_sentencepiece_tokenizer(folder: Path, config: dict[str, Any] | None) -> None:
    """tokenizer.model alone, beside `config` as tokenizer_config.json; no tokenizer.json."""
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def random_tree(nodes: int, seed: int, depth: int = 6) -> DraftTree:
    rng = np.random.default_rng(seed)
    parents, depths = [], []
    for node in range(nodes):
        parent = int(rng.integers(-1, node)) if node else -1
        while parent >= 0 and depths[parent] == depth:
            parent = int(rng.integers(-1, node))
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return DraftTree(
        rng.integers(0, VOCAB, nodes), np.array(parents), np.array(depths), np.zeros(nodes)
    )


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
