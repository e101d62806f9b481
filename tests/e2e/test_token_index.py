"""Models whose layers pick the tokens they see by an index: exact as long as it picks them all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import BYTE_VOCAB, open_float32, random_tree, save_byte_tokenizer
from cli_runner import run_cli
from torch import Tensor
from transformers import PreTrainedModel

from specexec_cli.catalog.architectures import (
    is_unread_index,
    longest_text,
    text_config,
    why_no_longer,
)
from specexec_cli.config import GenerationConfig
from specexec_cli.errors import CheckpointError, ConfigError
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.planning.sizes import checkpoint_bytes
from specexec_cli.session import open_session
from specexec_cli.verify.verifier import LocalTarget

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import conformance_check
from conformance_logits import expected_logits

_PICKED = 32  # tokens
_TYPES = ("deepseek_v32", "glm_moe_dsa", "glm5_next")
_WORDS = [3 + 7 * at % 40 for at in range(48)]


def _saved(folder: Path, model_type: str) -> PreTrainedModel:
    options: dict[str, object] = {"index_topk": _PICKED, "vocab_size": BYTE_VOCAB}
    if model_type == "glm5_next":  # of a model that sees
        options = {"text_config": {**_text_options(), **options}}
    return conformance_check.save(model_type, folder, noise=0.0, options=options)


def _text_options() -> dict[str, object]:
    found: dict[str, object] = conformance_check.tiny_config("glm5_next").text_config.to_dict()
    return found


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("model_type", _TYPES)
def test_a_text_that_is_picked_whole_is_that_of_transformers(
    tmp_path: Path, model_type: str
) -> None:
    """Behind that length it is not: there transformers' own index leaves tokens out."""
    own = _saved(tmp_path, model_type)
    target = LocalTarget(open_float32(tmp_path))
    tree = random_tree(12, seed=1, depth=6)
    prompt = _WORDS[: _PICKED - 6]  # the deepest nodes are the last that the index picks whole
    assert _difference(target.verify(prompt, tree), expected_logits(own, prompt, tree)) < 1e-4
    target.crop(0)
    longer = target.verify(_WORDS, tree)
    assert _difference(longer, expected_logits(own, _WORDS, tree)) > 1e-2


@pytest.mark.parametrize("model_type", _TYPES)
def test_texts_end_where_the_index_would_leave_tokens_out(tmp_path: Path, model_type: str) -> None:
    _saved(tmp_path, model_type)
    save_byte_tokenizer(tmp_path)
    for method, offload in (("autoregressive", "ram"), ("specexec", "ssd")):
        asked = Request(
            model=str(tmp_path), device="cpu", dtype="float32", context_tokens=4096, method=method,
            draft=None if method == "autoregressive" else "suffix", offload=offload,
            tree=TreeRequest(budget=8, depth=4, batch=2, policy="fixed"),
        )  # fmt: skip
        with open_session(asked) as session:
            assert session.context_length == _PICKED
            steps = list(session.generate(_WORDS[:20], generation=GenerationConfig(max_tokens=100)))
            text = [token for step in steps for token in step.tokens]
            assert len(text) == _PICKED - 20
            message = f"beyond {_PICKED} tokens this model picks those it sees by an index"
            with pytest.raises(ConfigError, match=message):
                list(session.generate(_WORDS))


def test_a_plan_counts_no_index_and_says_how_long_texts_are(tmp_path: Path) -> None:
    own = _saved(tmp_path, "deepseek_v32")
    save_byte_tokenizer(tmp_path)
    index = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in own.state_dict().items()
        if ".indexer." in name
    )
    stored = read_checkpoint(tmp_path)
    assert index > 0
    assert checkpoint_bytes(stored).total == sum(each.n_bytes for each in stored.values()) - index
    unused = open_float32(tmp_path).skeleton.unused
    assert len(unused) == sum(".indexer." in name for name in own.state_dict())
    assert set(unused.values()) == {
        "of an index that picks the tokens a layer sees: it sees them all"
    }
    ran = run_cli("plan", tmp_path, "--vram", "0", "--context", "100000")
    assert ran.code == 0, ran.err
    told = " ".join(ran.out.split())
    assert f"Memory for {_PICKED} tokens of context" in told
    assert f"Longer texts are refused: beyond {_PICKED} tokens this model picks those" in told


def test_a_config_without_a_count_of_picks_means_its_class_default(tmp_path: Path) -> None:
    _saved(tmp_path, "deepseek_v32")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["index_topk"]
    path.write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    assert open_float32(tmp_path).context_length == 2048
    stored = text_config(read_checkpoint(tmp_path).config)
    assert longest_text(stored) == 2048
    assert why_no_longer(stored).startswith("beyond 2048 tokens")
    assert longest_text({**stored, "model_type": "deepseek_v3"}) == 8192


@pytest.mark.parametrize("count", ['"x"', "[32]", "1e999", "-5", "0", "true", "null"])
def test_a_count_of_picks_that_is_none_is_refused(tmp_path: Path, count: str) -> None:
    _saved(tmp_path, "deepseek_v32")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(f'"index_topk": {_PICKED}', f'"index_topk": {count}'))
    with pytest.raises(CheckpointError, match=r"config.json says .* as 'index_topk'"):
        open_float32(tmp_path)
    ran = run_cli("plan", tmp_path, "--vram", "0")
    assert ran.code > 1
    assert "as 'index_topk', where a whole number of 1 or more must be" in " ".join(ran.err.split())


def test_an_index_that_leaves_out_the_latest_tokens_is_refused(tmp_path: Path) -> None:
    options = {**_text_options(), "index_kpool_always_select_tail": False}
    conformance_check.save("glm5_next", tmp_path, noise=0.0, options={"text_config": options})
    with pytest.raises(CheckpointError, match="leaves out a text's latest tokens"):
        open_float32(tmp_path)


def test_tensors_of_an_index_count_where_the_model_is_not_known_to_pick() -> None:
    name = "model.layers.0.self_attn.indexer.wk.weight"
    assert is_unread_index("deepseek_v32", name)
    assert not is_unread_index("llama", name)
    assert not is_unread_index("deepseek_v32", "model.layers.0.self_attn.q_proj.weight")


def test_experts_are_chosen_by_corrections_that_are_not_rounded(tmp_path: Path) -> None:
    """In 16 bits too, since a correction differs from the next by less than its rounding."""
    own = _saved(tmp_path, "deepseek_v32")
    spec = ModelSpec(device=torch.device("cpu"), dtype=torch.bfloat16, tiers=None)
    layer = spec.open(read_checkpoint(tmp_path)).layers[-1].layer
    theirs = own.get_submodule("model.layers.3.mlp.gate").e_score_correction_bias
    assert torch.equal(layer.mlp.gate.e_score_correction_bias, theirs)
    assert not torch.equal(theirs, theirs.bfloat16().float())
