"""An EAGLE-3 head drafts as the paper says, from files as they are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_toys import block_toy
from checkpoints import edit_json, random_tokens
from eagle_toys import FEATURES, EagleToy, eagle_toy, save_target, target_features
from fake_cuda import CUDA, fake_cuda
from head_rigs import CPU, begun, grown, open_head
from safetensors.torch import load_file, save_file
from toys import HEAD_PATHS, HEAD_STEPS, commit_a_path

from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.drafting.head_rows import HeadRows
from specexec_cli.errors import CheckpointError
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.block_heads import block_checkpoint
from specexec_cli.offload.eagle import eagle_checkpoint, is_eagle
from specexec_cli.offload.mtp import has_mtp, mtp_config, mtp_layers
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.chosen_models import sized
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.verify.verifier import LocalTarget

# configs that have the half that reads text as a part of their own
WRAPPED = (
    {"whole": "qwen3_5", "text": "text_config"},
    {"whole": "NemotronH_Nano_Omni_Reasoning_V3", "text": "llm_config"},
)
_TOKENS = [3 + each % 60 for each in random_tokens(12)]


def _opened(
    target: Path, head: Path, device: torch.device = CPU
) -> tuple[LocalTarget, StreamedModel]:
    return open_head(
        target, lambda its: eagle_checkpoint(read_checkpoint(head), its.config), device
    )


def _drafted(local: LocalTarget, drafts: StreamedModel, tokens: list[int]) -> torch.Tensor:
    """(5, vocab) the head's logits behind the root and the nodes of HEAD_STEPS."""
    return grown(begun(local, drafts, tokens))


def _expected(toy: EagleToy, features: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The same by the paper, each path by itself."""
    fused, text, found = toy.fused(features), _TOKENS[1:], []
    for path in HEAD_PATHS:
        rows = fused
        logits, made = toy.run(text, rows, table)
        for depth in range(1, len(path) + 1):  # each node goes on from its parent's row
            rows = torch.cat([rows, made[-1:]])
            logits, made = toy.run([*text, *path[:depth]], rows, table)
        found.append(logits[-1])
    return torch.stack(found)


@pytest.mark.parametrize("layout", ["midlayer", "speculators"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_tree_is_drafted_as_the_paper_says(tmp_path: Path, layout: str, norm_first: bool) -> None:
    target, toy = save_target(tmp_path / "target"), eagle_toy(norm_first=norm_first)
    head = toy.save(tmp_path / "head", layout)
    found = _drafted(*_opened(tmp_path / "target", head), _TOKENS)
    table = toy.tensors["embed_tokens.weight"]
    expected = _expected(toy, target_features(target, _TOKENS[:-1]), table)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("place", "named"), [("eagle_config", [6, 0, 2]), ("at the top", [7, 1, 3])]
)
def test_a_config_names_the_layers_that_are_read(
    tmp_path: Path, place: str, named: list[int]
) -> None:
    """By what they give in `eagle_config`, as SpecForge counts; by what they read at the top."""
    target, toy = save_target(tmp_path / "target"), eagle_toy()
    settings: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": named}
    settings = {"eagle_config": settings} if place == "eagle_config" else settings
    head = toy.save(tmp_path / "head", **settings)
    found = _drafted(*_opened(tmp_path / "target", head), _TOKENS)
    features = target_features(target, _TOKENS[:-1], [7, 1, 3])
    expected = _expected(toy, features, toy.tensors["embed_tokens.weight"])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_specforges_own_numbers_are_the_layers_of_eagles_code(tmp_path: Path) -> None:
    """It writes 1, N / 2 - 1 and N - 4 where EAGLE's code reads in front of 2, N / 2 and N - 3."""
    target = save_target(tmp_path / "target").config.num_hidden_layers
    numbers = [1, target // 2 - 1, target - 4]
    said = {"eagle_aux_hidden_state_layer_ids": numbers}
    head = read_checkpoint(eagle_toy().save(tmp_path / "head", eagle_config=said))
    found = eagle_checkpoint(head, read_checkpoint(tmp_path / "target").config).head
    assert found is not None
    assert found.features == FEATURES


def test_without_tables_of_its_own_a_head_takes_the_targets(tmp_path: Path) -> None:
    target, toy = save_target(tmp_path / "target"), eagle_toy(vocab=64)
    absent = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    head = toy.save(tmp_path / "head", absent=absent)
    found = _drafted(*_opened(tmp_path / "target", head), _TOKENS)
    lent = target.state_dict()
    whole = {**toy.tensors, "lm_head.weight": lent["lm_head.weight"]}
    expected = _expected(
        EagleToy(whole, toy.hidden), target_features(target, _TOKENS[:-1]),
        lent["model.embed_tokens.weight"],
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_a_head_may_be_narrower_than_its_target(tmp_path: Path) -> None:
    target, toy = save_target(tmp_path / "target", hidden=64), eagle_toy(of_target=64)
    head = toy.save(tmp_path / "head", target_hidden_size=64)
    found = _drafted(*_opened(tmp_path / "target", head), _TOKENS)
    table = toy.tensors["embed_tokens.weight"]
    expected = _expected(toy, target_features(target, _TOKENS[:-1]), table)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_on_a_gpu_a_head_drafts_as_on_a_cpu(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    head = eagle_toy().save(tmp_path / "head", absent=("embed_tokens.weight",))
    expected = _drafted(*_opened(tmp_path / "target", head), _TOKENS)
    with fake_cuda(triton=False):
        local, drafts = _opened(tmp_path / "target", head, CUDA)
        found = _drafted(local, drafts, _TOKENS).cpu()
        local.close()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_accepted_nodes_go_on_from_the_targets_rows(tmp_path: Path) -> None:
    """And after a crop there is nothing left of others."""
    save_target(tmp_path / "target")
    local, drafts = _opened(tmp_path / "target", eagle_toy().save(tmp_path / "head"))
    _drafted(local, drafts, _TOKENS)
    rows = HeadRows(drafts, local)
    rows.begin(_TOKENS)
    for step in HEAD_STEPS:
        rows.run(step)
        rows.ran(step)
    text = commit_a_path(local, rows, _TOKENS)
    for context in (text, [*text[:-2], 20]):
        local.crop(len(context) - 1)
        fresh, found = HeadRows(drafts, local), []
        for each in (rows, fresh):
            assert each.begin(context) > 0
            found.append(each.run(HEAD_STEPS[0]))
            each.ran(HEAD_STEPS[0])
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("absent", "line"),
    [
        (("d2t",), "has 40 tokens of the target's 64, but its files hold no tensor 'd2t'"),
        (("fc.weight",), "hold no tensor 'fc.weight'"),
        (("norm.weight",), "hold no tensor 'norm.weight'"),
    ],
)
def test_tensors_that_a_config_promises_and_files_lack(
    tmp_path: Path, absent: tuple[str, ...], line: str
) -> None:
    save_target(tmp_path / "target")
    head = eagle_toy().save(tmp_path / "head", absent=absent)
    with pytest.raises(CheckpointError, match=line):
        _opened(tmp_path / "target", head)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, r"\[2, 16, 29\], and the target has 8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, r"\[2, 3\]"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, r"in front of the .* \[0, 3, 7\]"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}},
            r"behind the target's layers \[1, 3, 8\], and the target has 8",
        ),
        ({"num_hidden_layers": 2}, "of more than one layer"),
        ({"model_type": "mistral"}, "a layer of type 'mistral'"),
    ],
)
def test_a_head_that_is_not_read_is_refused_in_one_line(
    tmp_path: Path, settings: dict[str, Any], line: str
) -> None:
    save_target(tmp_path / "target")
    head = eagle_toy().save(tmp_path / "head", **settings)
    with pytest.raises(CheckpointError, match=line):
        _opened(tmp_path / "target", head)


@pytest.mark.parametrize("shape", [(), (32,), (1, 32, 96)])
def test_the_linear_has_two_dimensions(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_target(tmp_path / "target")
    head = eagle_toy().save(tmp_path / "head")
    stored = load_file(head / "model.safetensors")
    save_file(stored | {"fc.weight": torch.ones(shape)}, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"'fc.weight' has {len(shape)} dimensions, not 2"):
        _opened(tmp_path / "target", head)


def _size_on_the_hub(folder: Path, **settings: Any) -> ModelBytes:
    """Of a head whose config.json alone is here."""
    save_target(folder / "target")
    head = eagle_toy().save(folder / "head", **settings)
    (head / "model.safetensors").unlink()
    target = sized(ModelEntry(name="target", repo=str(folder / "target")), offline=True)
    return sized(ModelEntry(name="head", repo=str(head)), offline=True, target=target).sizes


def test_null_is_a_size_that_the_config_does_not_say(tmp_path: Path) -> None:
    nulls = {"num_key_value_heads": None, "draft_vocab_size": None, "head_dim": None}
    said = {"num_key_value_heads": 4, "draft_vocab_size": 64, "head_dim": 8}
    named = {"architectures": ["LlamaForCausalLMEagle3"]}
    found = _size_on_the_hub(tmp_path / "nulls", **nulls, **named)
    assert found == _size_on_the_hub(tmp_path / "said", **said, **named)


@pytest.mark.parametrize("value", [[40], "abc", float("inf"), -40, 0, True, 40.0])
def test_a_size_on_the_hub_is_a_whole_number(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"head: .* as 'draft_vocab_size', and not a whole"):
        _size_on_the_hub(tmp_path, draft_vocab_size=value)


def test_a_vocabulary_that_a_head_shares_is_a_whole_number(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    head = eagle_toy(vocab=64).save(
        tmp_path / "head", absent=("lm_head.weight", "d2t", "t2d"), vocab_size=[64]
    )
    with pytest.raises(CheckpointError, match=r"says \[64\] as 'vocab_size'"):
        _opened(tmp_path / "target", head)


def test_a_target_with_several_rows_for_a_token_has_no_head(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    head = read_checkpoint(eagle_toy().save(tmp_path / "head"))
    config = read_checkpoint(tmp_path / "target").config
    with pytest.raises(CheckpointError, match="several rows a token"):
        eagle_checkpoint(head, {**config, "altup_num_inputs": 4})


def test_a_head_drafts_beyond_the_texts_it_was_trained_on(tmp_path: Path) -> None:
    target, toy = save_target(tmp_path / "target"), eagle_toy()
    head = toy.save(tmp_path / "head", max_position_embeddings=8)
    found = _drafted(*_opened(tmp_path / "target", head), _TOKENS)
    table = toy.tensors["embed_tokens.weight"]
    expected = _expected(toy, target_features(target, _TOKENS[:-1]), table)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_a_head_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    save_target(tmp_path / "target", hidden=64)
    toy = eagle_toy()
    head = toy.save(tmp_path / "head", absent=("embed_tokens.weight",))
    with pytest.raises(CheckpointError, match="whose rows are of 64 numbers, not 32"):
        _opened(tmp_path / "target", head)
    whole = toy.save(tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"'fc.weight' reads 96 numbers, .* keeps 192"):
        _opened(tmp_path / "target", whole)


@pytest.mark.parametrize(
    ("change", "line"),
    [(70, "names tokens outside the target's 64"), (-1, "names a token twice")],
)
def test_a_map_of_tokens_is_not_believed(tmp_path: Path, change: int, line: str) -> None:
    save_target(tmp_path / "target")
    head = eagle_toy().save(tmp_path / "head")
    stored = load_file(head / "model.safetensors")
    # the second token's offset is raised beyond all, or so that it meets the first's
    offset = int(stored["d2t"][0]) - 1 if change < 0 else change
    stored["d2t"][1] = offset
    save_file(stored, head / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=line):
        _opened(tmp_path / "target", head)


@pytest.mark.parametrize("names", WRAPPED)
def test_a_targets_text_half_is_read_under_its_makers_names(
    tmp_path: Path, names: dict[str, str]
) -> None:
    save_target(tmp_path / "target")
    plain = read_checkpoint(tmp_path / "target").config
    whole = {"model_type": names["whole"], names["text"]: plain}
    head = read_checkpoint(eagle_toy().save(tmp_path / "head"))
    block = read_checkpoint(block_toy().save(tmp_path / "block"))
    for checkpoint, found in ((eagle_checkpoint, head), (block_checkpoint, block)):
        assert checkpoint(found, whole).head == checkpoint(found, plain).head
    of_glm = {"model_type": "glm4_moe", "num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    whole = {"model_type": names["whole"], names["text"]: of_glm}
    assert has_mtp(whole)
    assert mtp_layers(whole) == 1
    assert mtp_config(whole)["text_config"] == mtp_config(of_glm)


def test_a_head_is_told_by_its_config(tmp_path: Path) -> None:
    """Some publish it as a plain Llama with a vocabulary of its own beside the target's."""
    save_target(tmp_path / "target")
    assert not is_eagle(read_checkpoint(tmp_path / "target").config)
    for layout in ("midlayer", "speculators"):
        assert is_eagle(read_checkpoint(eagle_toy().save(tmp_path / layout, layout)).config)
    edit_json(tmp_path / "midlayer" / "config.json", architectures=["LlamaForCausalLM"])
    assert is_eagle(read_checkpoint(tmp_path / "midlayer").config)
