"""A Gemma 4's assistant drafts as transformers' own class does, from files as published."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from assistant_toys import CONVERTED, Read, reference, save_assistant, save_converted, save_gemma
from checkpoints import edit_json, random_tokens
from fake_cuda import CUDA, fake_cuda
from gguf_files import rewritten
from gguf_toys import TOYS, converted, save_toy
from head_rigs import CPU, begun, grown, open_head
from safetensors.torch import load_file, save_file
from toys import HEAD_PATHS, commit_a_path

from specexec_cli.core import DraftTree
from specexec_cli.drafting.head_rows import LentRows
from specexec_cli.errors import CheckpointError
from specexec_cli.models.kv_cache import SlotLayer
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.assistant import assistant_checkpoint, assistant_head
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.verify.verifier import LocalTarget

_TOKENS = [3 + each % 60 for each in random_tokens(24)]  # thrice the window


def _opened(
    target: Path, head: Path, device: torch.device = CPU, **spec: Any
) -> tuple[LocalTarget, StreamedModel]:
    return open_head(
        target, lambda its: assistant_checkpoint(read_checkpoint(head), its.config), device, **spec
    )


def _drafted(local: LocalTarget, drafts: StreamedModel, tokens: list[int]) -> torch.Tensor:
    """(5, vocab) the assistant's logits behind the root and the nodes of HEAD_STEPS."""
    return grown(begun(local, drafts, tokens))


def _expected(assistant: Any, read: Read, root: int) -> torch.Tensor:
    """The same by transformers' own class, each path by itself."""
    found = []
    for path in HEAD_PATHS:
        row = read.rows[-1]
        for token in (root, *path):
            logits, row = reference(assistant, read, token, row)
        found.append(logits)
    return torch.stack(found)


@pytest.mark.parametrize("shared", [0, 3])
def test_a_tree_is_drafted_as_by_transformers_own_class(tmp_path: Path, shared: int) -> None:
    target = save_gemma(tmp_path / "target", shared)
    assistant = save_assistant(tmp_path / "head", target)
    local, drafts = _opened(tmp_path / "target", tmp_path / "head")
    for tokens in (_TOKENS, _TOKENS[:6]):  # beyond the window, and within
        found = _drafted(local, drafts, tokens)
        expected = _expected(assistant, Read(target, tokens[:-1]), tokens[-1])
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_centroids_change_no_logit_that_they_leave(tmp_path: Path) -> None:
    """transformers' class reads a part of the head for each token, and fills in the others."""
    target = save_gemma(tmp_path / "target")
    assistant = save_assistant(tmp_path / "head", target, use_ordered_embeddings=True)
    found = _drafted(*_opened(tmp_path / "target", tmp_path / "head"), _TOKENS)
    expected = _expected(assistant, Read(target, _TOKENS[:-1]), _TOKENS[-1])
    read = expected > expected.amin(-1, keepdim=True)
    assert read.sum(-1).tolist() == [16] * len(expected)  # 2 of 8 centroids
    torch.testing.assert_close(found[read], expected[read], rtol=0, atol=2e-4)


def test_beside_a_gguf_file_an_assistant_drafts_as_beside_safetensors(tmp_path: Path) -> None:
    """The config of the target is then made of the file's metadata."""
    target = save_toy(TOYS["gemma4_text"], tmp_path / "plain")
    save_assistant(tmp_path / "head", target)
    path = converted("gemma4_text", tmp_path)
    found, expected = (
        _drafted(*_opened(each, tmp_path / "head"), _TOKENS) for each in (path, tmp_path / "plain")
    )
    assert torch.equal(found, expected)


def test_an_assistant_in_a_gguf_file_drafts_as_its_safetensors(tmp_path: Path) -> None:
    """llama.cpp's converter wrote the file, which says of all its layers that they draft."""
    save_converted(tmp_path / "head")
    path = converted(CONVERTED, tmp_path)
    found, expected = (
        _drafted(*_opened(tmp_path / "target", each), _TOKENS) for each in (path, tmp_path / "head")
    )
    assert torch.equal(found, expected)


def test_an_assistant_in_blocks_drafts_with_what_its_weights_mean(tmp_path: Path) -> None:
    save_converted(tmp_path / "head")
    path = converted(CONVERTED, tmp_path)
    heads = (rewritten(path, tmp_path / f"{packs}.gguf", packs) for packs in (True, False))
    found, expected = (_drafted(*_opened(tmp_path / "target", head), _TOKENS) for head in heads)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_on_a_gpu_an_assistant_drafts_as_on_a_cpu(tmp_path: Path) -> None:
    target = save_gemma(tmp_path / "target")
    save_assistant(tmp_path / "head", target)
    expected = _drafted(*_opened(tmp_path / "target", tmp_path / "head"), _TOKENS)
    with fake_cuda(triton=False):
        local, drafts = _opened(tmp_path / "target", tmp_path / "head", CUDA)
        found = _drafted(local, drafts, _TOKENS).cpu()
        local.close()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_more_nodes_than_a_layer_runs_at_once_see_all_keys(tmp_path: Path) -> None:
    target = save_gemma(tmp_path / "target")
    save_assistant(tmp_path / "head", target)
    with fake_cuda(triton=False):  # PyTorch's attention takes no mask of another width than keys
        local, drafts = _opened(tmp_path / "target", tmp_path / "head", CUDA)
        expected = _drafted(local, drafts, _TOKENS).cpu()
        drafts.context.chunk_rows = 1
        found = _drafted(local, drafts, _TOKENS).cpu()
        local.close()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_accepted_nodes_go_on_from_the_targets_rows_and_keys(tmp_path: Path) -> None:
    """And after a crop, and for a text whose rows are copied, there is nothing left of others."""
    target = save_gemma(tmp_path / "target", shared=3)
    assistant = save_assistant(tmp_path / "head", target)
    local, drafts = _opened(tmp_path / "target", tmp_path / "head")
    _drafted(local, drafts, _TOKENS)
    rows = LentRows(drafts, local)
    rows.begin(_TOKENS)
    grown(rows)
    text = commit_a_path(local, rows, _TOKENS)
    for context in (text, [*text[:-2], 20]):
        local.crop(len(context) - 1)
        copied = LentRows(drafts, local)
        copied.copy(rows, len(context) - 1)
        expected = _expected(assistant, Read(target, context[:-1]), context[-1])
        for each in (rows, copied):
            assert each.begin(context) > 0
            torch.testing.assert_close(grown(each), expected, rtol=0, atol=2e-4)
    read = {id(local.state.layers[index]) for index in drafts.others_layers.values()}
    for layer in local.state.layers[:-1]:  # behind them are the rows that the head is joined to
        assert isinstance(layer, SlotLayer)
        assert layer.shares == (id(layer) not in read), "each tree reads them in one piece"
    assert rows.begin([*text, 30, 31]) == 0, "the target has no rows of a new turn yet"
    assert LentRows(drafts, local).begin([3]) == 0, "nothing stands before the first token"


def test_behind_a_tree_none_of_the_targets_keys_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which on a GPU would keep buffers that the target's cache has outgrown."""
    target = save_gemma(tmp_path / "target")
    save_assistant(tmp_path / "head", target)
    local, drafts = _opened(tmp_path / "target", tmp_path / "head")
    lend, lent = drafts.keys_of_target, list[weakref.ref]()

    def watched(*given: Any) -> Any:
        found = lend(*given)
        lent.extend(weakref.ref(each) for keys in found.values() for each in keys)
        return found

    monkeypatch.setattr(drafts, "keys_of_target", watched)
    local.verify(_TOKENS[:-1], DraftTree.empty())
    local.commit([])
    rows = LentRows(drafts, local)
    rows.begin(_TOKENS)
    grown(rows)
    assert lent
    rows.commit([], _TOKENS[-1:])
    gc.collect()
    assert not any(each() is not None for each in lent)


@pytest.mark.parametrize(
    "absent", ["pre_projection.weight", "post_projection.weight", "model.embed_tokens.weight"]
)
def test_tensors_that_a_config_promises_and_files_lack(tmp_path: Path, absent: str) -> None:
    target = save_gemma(tmp_path / "target")
    save_assistant(tmp_path / "head", target, absent=(absent,))
    with pytest.raises(CheckpointError, match=f"an assistant, but its files hold no .*'{absent}'"):
        _opened(tmp_path / "target", tmp_path / "head")


@pytest.mark.parametrize(
    ("post", "pre"), [((), (16, 64)), ((40, 16), (16, 80)), ((32, 16), (16, 80)), ((32, 16), ())]
)
def test_projections_of_another_shape_than_promised_are_told_in_one_line(
    tmp_path: Path, post: tuple[int, ...], pre: tuple[int, ...]
) -> None:
    target = save_gemma(tmp_path / "target")
    save_assistant(tmp_path / "head", target)
    path = tmp_path / "head" / "model.safetensors"
    other = {"post_projection.weight": torch.ones(post), "pre_projection.weight": torch.ones(pre)}
    save_file(load_file(path) | other, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"_projection\.weight"):
        _opened(tmp_path / "target", tmp_path / "head")


def test_an_assistant_of_other_global_keys_is_refused_in_one_line(tmp_path: Path) -> None:
    """As published: transformers' own class writes them under another name."""
    target = save_gemma(tmp_path / "target")
    save_assistant(tmp_path / "head", target)
    edit_json(tmp_path / "target" / "config.json", num_global_key_value_heads=1)
    said = read_checkpoint(tmp_path / "head").config["text_config"]
    said = {**said, "num_global_key_value_heads": 2}
    edit_json(tmp_path / "head" / "config.json", text_config=said)
    with pytest.raises(CheckpointError, match="says 2 as 'num_global_key_value_heads'"):
        _opened(tmp_path / "target", tmp_path / "head")


def test_a_layer_that_files_lack_is_named(tmp_path: Path) -> None:
    target = save_gemma(tmp_path / "target")
    lacking = "model.layers.1.self_attn.q_proj.weight"
    save_assistant(tmp_path / "head", target, absent=(lacking,))
    with pytest.raises(CheckpointError, match=lacking):
        _opened(tmp_path / "target", tmp_path / "head")


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"backbone_hidden_size": 48}, "reads rows of 48 numbers, and its target's have 32"),
        ({"backbone_hidden_size": None}, "reads rows of None numbers"),
        ({"text_config": None}, "says nothing as 'text_config'"),
        ({"text_config": {"head_dim": 4}}, "says 4 as 'head_dim', and its target's 8"),
        (
            {"text_config": {"num_key_value_heads": 1}},
            "says 1 as 'num_key_value_heads', and its target's 2",
        ),
        ({"text_config": {"vocab_size": 65}}, "says 65 as 'vocab_size', and its target's 64"),
        ({"text_config": {"layer_types": "full"}}, "says 'full' as 'layer_types'"),
        ({"text_config": {"layer_types": ["chunked"]}}, "attends to keys of 'chunked'"),
    ],
)
def test_an_assistant_of_another_model_is_refused_in_one_line(
    tmp_path: Path, said: dict[str, Any], line: str
) -> None:
    target = save_gemma(tmp_path / "target")
    save_assistant(tmp_path / "head", target)
    whole = read_checkpoint(tmp_path / "head").config
    if isinstance(said.get("text_config"), dict):
        said = {"text_config": {**whole["text_config"], **said["text_config"]}}
    edit_json(tmp_path / "head" / "config.json", **said)
    with pytest.raises(CheckpointError, match=line):
        _opened(tmp_path / "target", tmp_path / "head")


def test_a_targets_config_is_read_as_everywhere(tmp_path: Path) -> None:
    target = save_gemma(tmp_path / "target")
    save_assistant(tmp_path / "head", target)
    whole = read_checkpoint(tmp_path / "target").config
    said = read_checkpoint(tmp_path / "head").config
    plain = assistant_head(said, whole, "here")
    assert assistant_head(said, {**whole, "text_config": None}, "here") == plain
    lacks = {name: value for name, value in whole.items() if name != "vocab_size"}
    with pytest.raises(CheckpointError, match="and its target's 65"):
        assistant_head(said, {"text_config": lacks, "vocab_size": 65}, "here")


def test_only_a_gemma_4_has_one(tmp_path: Path) -> None:
    target = save_gemma(tmp_path / "target")
    save_assistant(tmp_path / "head", target)
    edit_json(tmp_path / "target" / "config.json", model_type="gemma3_text")
    with pytest.raises(CheckpointError, match="and the target is of type 'gemma3_text'"):
        _opened(tmp_path / "target", tmp_path / "head")
