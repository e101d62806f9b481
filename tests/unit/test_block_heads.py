"""A DFlash or JetSpec head drafts as its authors' code does, from files as they are published."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from block_toys import FEATURES, ROWS, BlockToy, block_toy
from checkpoints import random_tokens
from eagle_toys import save_target, target_features
from fake_cuda import CUDA, fake_cuda
from head_rigs import CPU, begun, grown, open_head
from toys import HEAD_STEPS, commit_a_path

from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.core import DraftTree
from specexec_cli.drafting.head_rows import BlockRows
from specexec_cli.errors import CheckpointError
from specexec_cli.models.pass_context import CHUNK_ROWS
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.block_heads import block_checkpoint
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.chosen_models import sized
from specexec_cli.verify.verifier import LocalTarget

_TOKENS = [3 + each % 60 for each in random_tokens(12)]
_DEPTHS = [0, 1, 1, 2, 2]  # of the nodes of HEAD_STEPS


def _opened(
    target: Path, head: Path, device: torch.device = CPU
) -> tuple[LocalTarget, StreamedModel]:
    return open_head(
        target, lambda its: block_checkpoint(read_checkpoint(head), its.config), device
    )


def _drafted(local: LocalTarget, drafts: StreamedModel, tokens: list[int]) -> torch.Tensor:
    """(5, vocab) the head's logits behind the root and the nodes of HEAD_STEPS."""
    rows = begun(local, drafts, tokens)
    assert rows.begin(tokens) == ROWS - 1
    return grown(rows)


def _expected(toy: BlockToy, target: Any, tokens: list[int]) -> torch.Tensor:
    """The same by the authors' code; what follows a node is what its block says of that place."""
    lent = target.state_dict()
    features = target_features(target, tokens[:-1], FEATURES)
    made = toy.run(tokens[-1], features, lent["model.embed_tokens.weight"])
    return (made @ lent["lm_head.weight"].T)[_DEPTHS]


@pytest.mark.parametrize(
    ("layout", "causal"),
    [("dflash_config", False), ("dflash_config", True), ("speculators", False)],
)
def test_a_tree_is_drafted_as_by_the_authors_code(
    tmp_path: Path, layout: str, causal: bool
) -> None:
    target, toy = save_target(tmp_path / "target"), block_toy(causal)
    found = _drafted(*_opened(tmp_path / "target", toy.save(tmp_path / "head", layout)), _TOKENS)
    torch.testing.assert_close(found, _expected(toy, target, _TOKENS), rtol=0, atol=2e-4)


@pytest.mark.parametrize("count", [CHUNK_ROWS - ROWS + 1, CHUNK_ROWS - 1, CHUNK_ROWS + 1])
def test_behind_a_long_prompt_a_block_sees_all_of_itself(tmp_path: Path, count: int) -> None:
    """Rows of a pass see later ones within a chunk of rows alone."""
    target, toy = save_target(tmp_path / "target"), block_toy()
    tokens = [3 + each % 60 for each in random_tokens(count + 1)]
    found = _drafted(*_opened(tmp_path / "target", toy.save(tmp_path / "head")), tokens)
    torch.testing.assert_close(found, _expected(toy, target, tokens), rtol=0, atol=2e-4)


def test_blocks_of_several_texts_are_whole_wherever_a_chunk_of_rows_ends(tmp_path: Path) -> None:
    """The first text's rows and the second's together reach a chunk's end within a block."""
    save_target(tmp_path / "target")
    local, drafts = _opened(tmp_path / "target", block_toy().save(tmp_path / "head"))
    texts = [[3 + each % 60 for each in random_tokens(count)] for count in (481, 26)]
    assert 480 + ROWS + 25 < CHUNK_ROWS < 480 + ROWS + 25 + ROWS
    together, alone = [], []
    for text in texts:
        own = LocalTarget(local.model)
        own.verify(text[:-1], DraftTree.empty())
        own.commit([])
        for found in (together, alone):
            found.append(BlockRows(drafts, own))
            assert found[-1].begin(text) == ROWS - 1
    made = drafts.forward_together([rows.rows_of(HEAD_STEPS[0]) for rows in together])
    for rows, logits in zip(alone, made, strict=True):
        assert torch.equal(rows.run(HEAD_STEPS[0]), logits[:1])


def test_a_config_may_leave_the_layers_to_its_authors_code(tmp_path: Path) -> None:
    """They are then spread evenly, from the second to the fourth from the end."""
    save_target(tmp_path / "target")
    config = read_checkpoint(tmp_path / "target").config
    head = read_checkpoint(block_toy(layers=3).save(tmp_path / "head", target_layer_ids=None))
    found = block_checkpoint(head, config).head
    assert found is not None
    assert found.features == (2, 4, 6)  # behind 1, 3 and 5 of eight


def test_vllms_key_and_a_block_size_inside_are_read(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    config = read_checkpoint(tmp_path / "target").config
    inside = {"block_size": 7, "mask_token_id": 5, "target_layer_ids": [1, 3, 4], "causal": True}
    head = block_toy().save(tmp_path / "head", block_size=None, dflash_config=inside)
    found = block_checkpoint(read_checkpoint(head), config).head
    assert found is not None
    assert found.block is not None
    assert (found.block.rows, found.block.mask_token, found.block.causal) == (7, 5, True)


def test_on_a_gpu_a_head_drafts_as_on_a_cpu(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    head = block_toy().save(tmp_path / "head")
    expected = _drafted(*_opened(tmp_path / "target", head), _TOKENS)
    with fake_cuda(triton=False):
        local, drafts = _opened(tmp_path / "target", head, CUDA)
        found = _drafted(local, drafts, _TOKENS).cpu()
        local.close()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_accepted_nodes_are_the_targets_rows(tmp_path: Path, causal: bool) -> None:
    """And after a crop, and for a text whose rows are copied, there is nothing left of others."""
    save_target(tmp_path / "target")
    local, drafts = _opened(tmp_path / "target", block_toy(causal).save(tmp_path / "head"))
    _drafted(local, drafts, _TOKENS)
    rows = BlockRows(drafts, local)
    rows.begin(_TOKENS)
    grown(rows)
    assert rows.state.length == len(rows.tokens) == len(_TOKENS) - 1, "no row of the block stays"
    text = commit_a_path(local, rows, _TOKENS)
    for context in (text, [*text[:-2], 20]):
        local.crop(len(context) - 1)
        fresh, copied = BlockRows(drafts, local), BlockRows(drafts, local)
        copied.copy(rows, min(len(context) - 1, len(rows.tokens)))
        found = []
        for each in (rows, fresh, copied):
            assert each.begin(context) == ROWS - 1
            found.append(grown(each))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4)
        torch.testing.assert_close(found[2], found[1], rtol=0, atol=1e-4)
    assert rows.begin([*text, 30, 31]) == 0, "the target has no rows of a new turn yet"


@pytest.mark.parametrize(
    "absent", ["fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.mlp.up_proj.weight"]
)
def test_tensors_that_a_config_promises_and_files_lack(tmp_path: Path, absent: str) -> None:
    save_target(tmp_path / "target")
    head = block_toy().save(tmp_path / "head", absent=[absent])
    with pytest.raises(CheckpointError, match=re.escape(absent)):
        _opened(tmp_path / "target", head)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"target_layer_ids": [1, 3, 7]}, r"behind the target's layers \[1, 3, 7\], and .* has 8"),
        ({"target_layer_ids": [-1, 3, 4]}, r"\[-1, 3, 4\]"),
        ({"target_layer_ids": []}, r"\[\]"),
        ({"target_layer_ids": [1, 3]}, r"'fc.weight' reads 96 numbers, and the target keeps 64"),
        ({"mask_token_id": 64}, "64 as 'mask_token_id', and the target has 64 tokens"),
        ({"mask_token_id": None}, "None as 'mask_token_id'"),
        ({"block_size": 1}, "1 as 'block_size'"),
        ({"block_size": [5]}, r"\[5\] as 'block_size'"),
        ({"model_type": "llama"}, "layers of type 'llama', not 'qwen3'"),
        ({"architectures": ["DFlash2DraftModel"]}, "a head of type 'DFlash2DraftModel'"),
        ({"sample_from_anchor": True}, "from its block's first row"),
    ],
)
def test_a_head_that_is_not_read_is_refused_in_one_line(
    tmp_path: Path, settings: dict[str, Any], line: str
) -> None:
    save_target(tmp_path / "target")
    head = block_toy().save(tmp_path / "head", **settings)
    with pytest.raises(CheckpointError, match=line):
        _opened(tmp_path / "target", head)


def test_layers_that_are_causal_alone_are_refused_in_one_line(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    toy = block_toy(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    head = toy.save(tmp_path / "head", "speculators")
    with pytest.raises(CheckpointError, match="causal in layers with a sliding window alone"):
        _opened(tmp_path / "target", head)


def test_a_head_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    save_target(tmp_path / "target", hidden=64)
    with pytest.raises(CheckpointError, match="whose rows are of 64 numbers, not 32"):
        _opened(tmp_path / "target", block_toy().save(tmp_path / "head"))


def test_a_head_on_the_hub_is_as_large_as_its_files(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    head = block_toy().save(tmp_path / "head", dtype="float32")
    target = sized(ModelEntry(name="target", repo=str(tmp_path / "target")), offline=True)
    entry = ModelEntry(name="head", repo=str(head))
    here = sized(entry, offline=True, target=target)
    (head / "model.safetensors").unlink()
    absent = sized(entry, offline=True, target=target)
    assert absent.sizes.layers == here.sizes.layers
    assert absent.sizes.resident == here.sizes.resident
    assert absent.sizes.active_params == here.sizes.active_params
    assert absent.head == here.head
