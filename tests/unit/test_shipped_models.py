"""models.toml as it ships: every entry is right, and enough for a plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from computer import Computer

from specexec_cli.catalog.registry import Registry, load_registry, user_models_file
from specexec_cli.planning.sizes import architecture_bytes


@pytest.fixture(autouse=True)
def user_file(computer: Computer) -> Path:
    """The user's models.toml, absent unless a test writes it; never the real one."""
    user_models_file().parent.mkdir(parents=True)
    return user_models_file()


@pytest.fixture
def shipped() -> Registry:
    return load_registry()


def test_every_pair_has_its_tasks(shipped: Registry) -> None:
    """But for the demo, which is there to show the machinery; base models go on with a text."""
    for pair in shipped.pairs.values():
        chats = shipped.models[pair.target].chat
        if pair.name.startswith("demo"):
            assert pair.tasks == ()
        else:
            assert pair.tasks == ("text",) if not chats else set(pair.tasks) & {"chat", "code"}
            assert chats is not None


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("meta-llama/Llama-2-70b-chat-hf", "meta-llama/Llama-2-7b-chat-hf"),
        ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-7b-hf"),
        ("TheBloke/Llama-2-70B-Chat-GPTQ", "meta-llama/Llama-2-7b-chat-hf"),
        ("TheBloke/Llama-2-70B-GPTQ", "meta-llama/Llama-2-7b-hf"),
        ("TheBloke/Llama-2-70B-Chat-GPTQ", "princeton-nlp/Sheared-LLaMA-1.3B"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ", "TheBloke/Mistral-7B-Instruct-v0.2-GPTQ"),
        ("lmsys/vicuna-7b-v1.3", "double7/vicuna-68m"),
        ("lmsys/vicuna-13b-v1.3", "double7/vicuna-68m"),
        ("bigcode/starcoder", "bigcode/tiny_starcoder_py"),
        ("microsoft/Phi-3-medium-128k-instruct", "microsoft/Phi-3-mini-128k-instruct"),
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-1.7B"),
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-4B"),
        ("TheBloke/Llama-2-70B-Chat-GPTQ", "TheBloke/Llama-2-7B-Chat-GPTQ"),
        ("meta-llama/Llama-2-70b-chat-hf", "meta-llama/Llama-2-13b-chat-hf"),
        ("meta-llama/Llama-2-70b-chat-hf", "JackFram/llama-160m"),
        ("lmsys/vicuna-33b-v1.3", "princeton-nlp/Sheared-LLaMA-1.3B"),
        ("Qwen/Qwen3-32B-AWQ", "Qwen/Qwen3-1.7B"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3-0.6B"),
        ("google/gemma-3-27b-it", "google/gemma-3-1b-it"),
        ("google/gemma-3-12b-it", "google/gemma-3-270m-it"),
        ("google/gemma-4-31B-it", "google/gemma-4-E2B-it"),
        ("CohereLabs/c4ai-command-a-03-2025", "CohereLabs/c4ai-command-r7b-12-2024"),
        ("allenai/OLMo-2-0325-32B-Instruct", "allenai/OLMo-2-0425-1B-Instruct"),
        ("ibm-granite/granite-3.3-8b-instruct", "ibm-granite/granite-3.3-2b-instruct"),
        ("zai-org/GLM-4-32B-0414", "zai-org/GLM-4-9B-0414"),
        ("google/gemma-2-27b-it", "google/gemma-2-2b-it"),
        ("openai/gpt-oss-120b", "openai/gpt-oss-20b"),
        ("Qwen/Qwen3.8-27B", "Qwen/Qwen3.5-2B"),
        ("Qwen/Qwen3.8-27B-FP8", "Qwen/Qwen3.5-0.8B"),
        ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-0.8B"),
        ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-2B"),
        ("Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.5-0.8B"),
        ("Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.5-2B"),
        ("btbtyler09/Qwen3.8-27B-GPTQ-4bit", "Qwen/Qwen3.5-2B"),
        (
            "mistralai/Ministral-3-14B-Instruct-2512-BF16",
            "mistralai/Ministral-3-3B-Instruct-2512-BF16",
        ),
    ],
)
def test_pairs_of_the_papers_and_of_today_ship(shipped: Registry, target: str, draft: str) -> None:
    pairs = {
        (shipped.models[pair.target].repo, entry.repo)
        for pair in shipped.pairs.values()
        if (entry := shipped.draft_of(pair)) is not None
    }
    assert (target, draft) in pairs


def test_shipped_pairs_make_sense(shipped: Registry) -> None:
    for pair in shipped.pairs.values():
        target, draft = shipped.models[pair.target], shipped.draft_of(pair)
        if draft is None:
            known = [shipped.models[name].params or 0 for name in shipped.drafts_for(pair.target)]
            assert all(8 * params > (target.params or 0) for params in known), pair.name
        else:
            assert target.tokenizer == draft.tokenizer, pair.name
            assert (draft.params or 0) < (target.params or 1), pair.name
        assert "arXiv" in pair.source or "estimate" in pair.source or "measured" in pair.source


def test_shipped_heads_say_where_their_facts_come_from(shipped: Registry) -> None:
    for head in shipped.heads.values():
        assert head.target in shipped.models, head.name
        assert head.source != "not stated", head.name
        # five layers of an 8B and what joins five of its rows; others are less than a tenth
        share = 7 if head.name in ("qwen3-8b-jetspec", "qwen3-8b-dflash") else 10
        assert (head.params or 0) < (shipped.models[head.target].params or 1) / share, head.name


def test_shipped_models_state_all_that_a_plan_needs(shipped: Registry) -> None:
    for model in shipped.models.values():
        assert model.model_type, model.name
        assert model.dtype, model.name
        assert model.quantization, model.name
        assert model.license, model.name
        assert model.chat is not None, model.name
        assert model.context, model.name
        assert model.params, model.name
        assert model.config_json()["model_type"] == model.model_type


def test_parameter_counts_are_those_of_transformers_own_models(shipped: Registry) -> None:
    """On the meta device; where all layers but the first are alike, two of them tell of all."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def count(model_type: str, shape: dict[str, object], layers: int) -> int:
        key = "n_layer" if "n_layer" in shape else "num_hidden_layers"
        ids = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
        config = AutoConfig.for_model(model_type, **{**shape, key: layers, **ids})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return sum(parameter.numel() for parameter in model.parameters())

    seen: dict[str, int] = {}
    for model in shipped.models.values():
        shape = {key: model.config_json()[key] for key in model.shape}
        key = f"{model.model_type} {sorted(shape.items())}"
        if key not in seen:
            layers = int(shape.get("n_layer", 0) or shape["num_hidden_layers"])
            differ = set(shape) & {
                "global_head_dim", "interleave_moe_layer_step", "layer_types", "layers_block_type",
                "linear_num_value_heads",
            }  # fmt: skip
            if differ or int(shape.get("first_k_dense_replace", 0)) > 1:
                seen[key] = count(str(model.model_type), shape, layers)
            else:
                one, two = (count(str(model.model_type), shape, n) for n in (1, 2))
                seen[key] = one + (two - one) * (layers - 1)
        assert model.params == seen[key], model.name


@pytest.mark.parametrize("name", ["demo-target", "demo-draft"])
def test_the_embedded_models_are_as_stated(shipped: Registry, name: str) -> None:
    model = shipped.models[name]
    assert model.folder is not None
    if not (model.folder / "config.json").is_file():
        pytest.skip("the demo pair is not trained yet")
    config = json.loads((model.folder / "config.json").read_text())
    assert model.context == config["max_position_embeddings"]
    assert model.dtype == (config.get("dtype") or config["torch_dtype"])
    assert {key: config[key] for key in model.shape} == model.shape


@pytest.mark.parametrize(
    ("name", "gigabytes"),  # the sizes of the files on the hub
    [
        ("llama2-7b", 13.48),
        ("llama2-70b-chat-gptq", 35.33),
        ("llama2-7b-chat-gptq", 3.90),
        ("sheared-llama-1.3b", 5.38),
        ("mistral-7b-instruct-gptq", 4.16),
        ("mixtral-8x7b-instruct-gptq", 23.81),
        ("tiny-starcoder", 0.657),
        ("vicuna-68m", 0.272),
        ("vicuna-13b", 26.03),
        ("qwen3-235b-a22b", 470.2),
        ("vicuna-33b", 65.07),
        ("qwen3-32b-awq", 19.33),
        ("gemma3-27b-it", 54.86),
        ("gpt-oss-20b", 13.76),
        ("deepseek-r1-0528", 688.6),
        ("llama4-scout-instruct", 217.3),
        ("qwen3.8-27b-fp8", 30.9),
        ("qwen3.8-27b-gptq", 21.0),
        ("qwen3-next-80b-a3b-instruct", 162.7),
        ("granite4-h-small", 64.41),
        ("granite4-h-tiny", 13.88),
    ],
)
def test_sizes_are_those_of_the_files_on_the_hub(
    shipped: Registry, name: str, gigabytes: float
) -> None:
    assert shipped.models[name].size_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)


def test_config_json_carries_the_quantization(shipped: Registry) -> None:
    config = shipped.models["llama2-70b-chat-gptq"].config_json()
    assert config["hidden_size"] == 8192
    assert config["quantization_config"] == {"quant_method": "gptq", "bits": 4, "group_size": -1}
    assert "quantization_config" not in shipped.models["llama2-70b-chat"].config_json()


@pytest.mark.parametrize(
    "name", ["gemma3-27b-it-gptq", "llama3.2-1b-instruct-awq", "gpt-oss-20b", "minimax-m2"]
)
def test_a_plan_counts_what_the_entry_says(shipped: Registry, name: str) -> None:
    """Two ways to count: from the entry's numbers, and from the config.json that it stands for."""
    model = shipped.models[name]
    unread = (model.vision_params or 0) * 2
    planned = architecture_bytes(model.config_json()).total
    assert planned + unread == pytest.approx(model.size_bytes, rel=0.01)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, specexec_cli.catalog.registry as r\n"
        "import specexec_cli.catalog.hub, specexec_cli.cli.models\n"
        "r.load_registry()\n"
        "heavy = {'torch', 'transformers', 'numba', 'triton', 'huggingface_hub', 'httpx'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (result.returncode, result.stderr) == (0, "")
