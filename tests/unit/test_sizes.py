import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specexec_cli.errors import ConfigError
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.built_sizes import own_tensors
from specexec_cli.planning.sizes import architecture_bytes, checkpoint_bytes

SMALL = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "pad_token_id": 0,
}  # fmt: skip
DENSE_FIRST = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    **DENSE_FIRST, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10,
}  # fmt: skip
LLAMA4 = {
    "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64,
}  # fmt: skip
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}  # fmt: skip
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 16}),
    ("phi3", {}),
    ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("gemma2", {"head_dim": 16}),
    ("gemma3_text", {"head_dim": 16}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                   "shared_expert_intermediate_size": 56, "mlp_only_layers": [1]}),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 2}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": 20, "topk_method": "greedy"}),
    ("glm4_moe", {**DENSE_FIRST, "head_dim": 16, "attention_bias": True}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 20, "first_k_dense_replace": 2}),
    ("glm4_moe_lite", {**LATENT, "q_lora_rank": 20}),
    ("minimax_m2", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("llama4_text", {**LLAMA4, "interleave_moe_layer_step": 1}),
    ("llama4_text", {**LLAMA4, "interleave_moe_layer_step": 2}),
    ("llama4_text", {**LLAMA4, "moe_layers": [0]}),
    ("gemma4_text", {**GEMMA4, "hidden_size_per_layer_input": 0}),
    ("gemma4_text", {**GEMMA4, "num_hidden_layers": 7, "hidden_size_per_layer_input": 0}),
    ("gemma4_text", {**GEMMA4, "attention_k_eq_v": False, "hidden_size_per_layer_input": 12,
                     "vocab_size_per_layer_input": 50, "num_hidden_layers": 6,
                     "layer_types": ["sliding_attention", "full_attention"] * 3,
                     "num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
    ("gemma4_text", {**GEMMA4, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
                     "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}),
    ("cohere2", {}),
    ("seed_oss", {"head_dim": 16, "attention_bias": True}),
    ("ministral3", {"head_dim": 16}),
    ("granite", {}),
    ("smollm3", {}),
    ("olmo2", {}),
    ("glm4", {"head_dim": 16, "attention_bias": True}),
    ("glm4", {"head_dim": 16, "attention_bias": False}),
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
]  # fmt: skip


def assert_same_as_transformers(config: dict[str, Any]) -> None:
    kind = config["model_type"]
    with torch.device("meta"):
        built = AutoConfig.for_model(**config)
        model = AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16)
    by_name = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    ends = "correction_bias", "layer_scalar"  # buffers that checkpoints hold
    stored = (name for name, _ in own_tensors(model) if name.endswith(ends))
    by_name |= {name: 2 * model.get_buffer(name).numel() for name in stored}
    sizes = architecture_bytes({**config, "dtype": "bfloat16"})
    in_layers = {
        name: size for name, size in by_name.items() if ".layers." in name or ".h." in name
    }
    assert sizes.resident == sum(by_name.values()) - sum(in_layers.values()), kind
    for index, layer in enumerate(sizes.layers):
        expected = sum(size for name, size in in_layers.items() if f".{index}." in name[:24])
        assert layer == expected, (kind, index)
    assert 2 * sizes.layer_params == sum(sizes.layers)
    assert sizes.total == sum(by_name.values())


@pytest.mark.parametrize(("kind", "changes"), CONFIGS)
def test_sizes_are_those_of_transformers_models(kind: str, changes: dict[str, Any]) -> None:
    assert_same_as_transformers({"model_type": kind, **SMALL, **changes})


@pytest.mark.parametrize("multi_query", [True, False])
def test_gpt_bigcode_has_its_own_names(multi_query: bool) -> None:
    assert_same_as_transformers({
        "model_type": "gpt_bigcode", "n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 80,
        "n_positions": 64, "vocab_size": 101, "multi_query": multi_query,
    })  # fmt: skip


def test_a_row_goes_through_its_experts_only() -> None:
    config = {"model_type": "mixtral", **SMALL, "num_local_experts": 8, "num_experts_per_tok": 2}
    sizes = architecture_bytes(config)
    experts = 3 * 3 * 48 * 80  # layers, matrices, weights
    assert sizes.layer_params - sizes.active_params == 6 * experts + 3 * 2 * 48  # and norms
    # two linears and the product of their halves, each as wide as the expert, then the row itself
    assert sizes.experts is not None
    assert sizes.experts.row_elements == 4 * 80 + 48


def test_keys_and_values_of_a_token() -> None:
    assert architecture_bytes({"model_type": "llama", **SMALL}).kv_elements == 2 * 2 * 12 * 3


@pytest.mark.parametrize(("group_size", "groups"), [(16, (3, 5)), (-1, (1, 1))])
def test_gptq_layers_hold_codes_scales_zeros_and_group_index(
    group_size: int, groups: tuple[int, int]
) -> None:
    config = {"model_type": "llama", **SMALL, "num_key_value_heads": 4, "dtype": "float16"}
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": group_size}
    hidden, wide = groups

    def linear(inputs: int, outputs: int, n_groups: int) -> int:
        return inputs * outputs // 2 + n_groups * outputs * (2 + 0.5) + 4 * inputs

    layer = 4 * linear(48, 48, hidden) + 2 * linear(48, 80, hidden) + linear(80, 48, wide)
    assert architecture_bytes(config).layers[0] == layer + 2 * 48 * 2
    assert architecture_bytes(config).resident == (2 * 101 * 48 + 48) * 2
    assert architecture_bytes(config).packed_bits == 4
    config["quantization_config"]["bits"] = 8
    assert architecture_bytes(config).packed_bits == 8
    del config["quantization_config"]
    assert architecture_bytes(config).packed_bits == 0


def test_text_config_of_a_multimodal_model_counts() -> None:
    text = {"model_type": "gemma3_text", **SMALL}
    outer = {"model_type": "gemma3", "text_config": text}
    assert architecture_bytes(outer) == architecture_bytes(text)


def test_headers_decide_when_there_is_a_checkpoint(tmp_path: Path) -> None:
    config = {"model_type": "llama", **SMALL, "num_hidden_layers": 2}
    save_file(
        {
            "model.embed_tokens.weight": torch.zeros(10),
            "model.layers.0.a": torch.zeros(3),
            "model.layers.1.b": torch.zeros(5, dtype=torch.int32),
            "model.layers.1.c": torch.zeros(1, dtype=torch.bfloat16),
            "lm_head.weight": torch.zeros(7),
        },
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = checkpoint_bytes(read_checkpoint(tmp_path))
    assert sizes.layers == (12, 22)
    assert sizes.resident == 68
    assert sizes.vocab == 101


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "rwkv"}, "the model's size cannot be told: .* not supported"),
        ({}, "names no model_type"),
        ({"model_type": "llama", "hidden_size": "wide"}, "config.json describes no model: "),
        ({"model_type": "llama", "text_config": [1]}, "'text_config' is no object"),
    ],
)
def test_what_is_not_known_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture_bytes(config)


def test_llama_2_7b_is_as_big_as_on_the_hub() -> None:
    config = json.loads(
        '{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, '
        '"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000, '
        '"torch_dtype": "float16"}'
    )
    assert architecture_bytes(config).total == 13_476_831_232
