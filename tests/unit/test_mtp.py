"""A target's layer that predicts further tokens (MTP) drafts as transformers' own layer does."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, open_float32, random_tokens
from eagle_toys import save_target
from fake_cuda import CUDA, fake_cuda
from gguf_files import rewritten
from gguf_toys import Toy, converted, toy_config
from head_rigs import CPU, begun, grown, open_head
from mtp_toys import (
    BEFORE_NORM,
    BEHIND,
    CONVERTED,
    QWEN,
    hidden_rows,
    reference,
    reference_of_several,
    save_converted,
    save_mtp_toy,
    save_three_layers,
)
from safetensors.torch import load_file, save_file
from toys import HEAD_PATHS, HEAD_STEPS, commit_a_path

from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.decoding import batch
from specexec_cli.decoding.batch import Batch, BatchText, Seat
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.forest import Forest
from specexec_cli.drafting.head_rows import HeadRows
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.mtp_rows import head_rows
from specexec_cli.drafting.search import ROOT, Frontier
from specexec_cli.errors import ConfigError
from specexec_cli.gguf.container import GgufTensor
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.quantize import plan_quantization, write_quantized
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.gguf_checkpoint import GgufCheckpoint
from specexec_cli.offload.mtp import (
    behind_last,
    has_mtp,
    left_out,
    mtp_checkpoint,
    mtp_head,
    mtp_layers,
)
from specexec_cli.offload.resident import read_tensors
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.chosen_models import sized
from specexec_cli.planning.draft_sizes import mtp_sized
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget

_TOKENS = [3 + each % 45 for each in random_tokens(12)]


def _opened(
    folder: Path, device: torch.device = CPU, **more: Any
) -> tuple[LocalTarget, StreamedModel]:
    return open_head(folder, mtp_checkpoint, device, **more)


def _drafted(
    local: LocalTarget,
    drafts: StreamedModel,
    tokens: list[int],
    steps: Sequence[Frontier] = HEAD_STEPS,
    rows: HeadRows | None = None,
) -> torch.Tensor:
    """(nodes, vocab) the layer's logits behind the root and the nodes of some steps."""
    return grown(begun(local, drafts, tokens, rows), steps)


def _run(rows: HeadRows, tokens: list[int], steps: Sequence[Frontier]) -> torch.Tensor:
    assert rows.begin(tokens) > 0
    return grown(rows, steps)


@pytest.mark.parametrize("model_type", [*QWEN, *BEHIND])
def test_a_tree_is_drafted_as_by_transformers_own_layer(tmp_path: Path, model_type: str) -> None:
    target, layer = save_mtp_toy(model_type, tmp_path, std=0.3)
    found = _drafted(*_opened(tmp_path), _TOKENS)
    hidden, text = hidden_rows(target, _TOKENS[:-1]), _TOKENS[1:]
    of_root = reference(target, layer, text, hidden)[1]
    for path, logits in zip(HEAD_PATHS, found, strict=True):
        own, made = hidden, of_root
        for depth in range(1, len(path) + 1):  # each node goes on from its parent's row
            own = torch.cat([own, made[-1:]])
            made = reference(target, layer, [*text, *path[:depth]], own)[1]
        expected = reference(target, layer, [*text, *path], own)[0][-1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)


_DEEP_STEPS = (
    *HEAD_STEPS, *(replace(HEAD_STEPS[2], ids=ids, tokens=tokens, parents=parents, depths=depths)
    for ids, tokens, parents, depths in (
        (np.array([4, 5, 6]), np.array([8, 4, 7]), np.array([3, 2, ROOT]), np.array([3, 3, 1])),
        (np.array([7, 8]), np.array([3, 11]), np.array([4, 5]), np.array([4, 4])),
        (np.array([9]), np.array([5]), np.array([8]), np.array([5])),
    )),
)  # fmt: skip
_DEEP_PATHS = (
    *HEAD_PATHS, [7, 6, 8], [9, 5, 4], [7], [7, 6, 8, 3], [9, 5, 4, 11], [9, 5, 4, 11, 5],
)  # fmt: skip


@pytest.mark.parametrize("model_type", BEFORE_NORM)
def test_three_layers_draft_from_rows_in_front_of_norms(tmp_path: Path, model_type: str) -> None:
    """MiMo-V2's and Step's: they attend in a window, and Step's have output heads of their own."""
    target, layers = save_three_layers(model_type, tmp_path)
    found = _drafted(*_opened(tmp_path), _TOKENS, _DEEP_STEPS)
    for path, logits in zip(_DEEP_PATHS, found, strict=True):
        expected = reference_of_several(
            target, layers, _TOKENS, path, chained=model_type != "mimo_v2_flash"
        )
        torch.testing.assert_close(logits, expected, rtol=0, atol=5e-4)


def test_three_layers_draft_from_the_rows_that_are_left_of_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a new text do: behind an accepted path, another one, and a copy of a text."""
    save_three_layers("step3p7", tmp_path)
    local, drafts = _opened(tmp_path)
    forward, counts = drafts.later[1].forward, list[int]()

    def counted(rows: PassRows, *more: Any) -> torch.Tensor:
        counts.append(len(rows.tokens))
        return forward(rows, *more)

    monkeypatch.setattr(drafts.later[1], "forward", counted)
    rows = head_rows(drafts, local)
    _drafted(local, drafts, _TOKENS, _DEEP_STEPS, rows)
    text = commit_a_path(local, rows, _TOKENS)
    for context in (text, [*text[:-2], 20]):
        local.crop(len(context) - 1)
        fresh, copied = head_rows(drafts, local), head_rows(drafts, local)
        copied.copy(rows, min(len(context) - 1, len(rows.tokens)))
        counts.clear()
        made = [_run(each, context, _DEEP_STEPS) for each in (rows, fresh, copied)]
        of_root = counts[:: len(_DEEP_STEPS)]
        assert of_root[0] == of_root[2] < of_root[1], "rows that are there are not run again"
        assert torch.equal(made[0], made[1])
        assert torch.equal(made[2], made[1])
    assert head_rows(drafts, local).begin(text[:3]) == 0, "the third layer has no row yet"
    assert head_rows(drafts, local).begin(text[:4]) > 0


@pytest.mark.parametrize("model_type", BEFORE_NORM)
def test_no_row_of_a_forgotten_text_is_left_in_any_layer(tmp_path: Path, model_type: str) -> None:
    save_three_layers(model_type, tmp_path)
    local, drafts = _opened(tmp_path)
    rows, passes = head_rows(drafts, local), _passes_of(drafts)
    _drafted(local, drafts, _TOKENS, _DEEP_STEPS, rows)
    states = [noted[0][1] for noted in passes]
    counts = [len(_TOKENS) - layer for layer in (1, 2, 3)]
    assert states[1].length > counts[1], "it has rows of the tree"
    assert states[2].length > counts[2]
    rows.commit([], _TOKENS[-1:])
    assert [state.length for state in states] == counts, "rows of a tree are dropped"
    rows.crop(7)
    assert [state.length for state in states] == [6, 5, 4]
    _run(rows, _TOKENS, _DEEP_STEPS)
    rows.forget()
    assert [state.length for state in states] == [0, 0, 0]


@pytest.mark.parametrize("model_type", ["glm4_moe", *BEFORE_NORM])
def test_a_prompt_beside_other_texts_goes_through_every_layer_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """A part behind the target, whose rows they read, so at most two parts together."""
    monkeypatch.setattr(batch, "_ROWS", 64)
    (save_three_layers if model_type in BEFORE_NORM else save_mtp_toy)(model_type, tmp_path)
    prompts = [_TOKENS, [3 + each % 45 for each in random_tokens(400)]]
    found = []
    for drafting in (True, False):
        local, drafts = _opened(tmp_path)
        passes = _passes_of(drafts)
        tree = TreeConfig(budget=8, max_depth=4, policy="fixed", past=False)
        sampler, learned = Sampler(SamplingConfig()), Learned()
        forest = Forest(drafts, tree, 2, learned) if drafting else None
        seats = [
            Seat(own, ModelDrafter(drafts, sampler, tree, 64, learned=learned, shared=own))
            if drafting else Seat(own, None)
            for own in (local, LocalTarget(local.model))
        ]  # fmt: skip
        together = Batch(forest, seats)
        texts = [
            BatchText(seat, sampler, prompt, 60, ())
            for seat, prompt in zip(seats, prompts, strict=True)
        ]
        together.step(texts[:1])
        while len(texts[1].context) < len(prompts[1]) + 8:
            together.step(texts)
        found.append([text.context[: len(prompts[nth]) + 8] for nth, text in enumerate(texts)])
        for layer in passes if drafting else ():
            counts = [len(rows.tokens) for rows, _ in layer]
            assert max(counts) <= 2 * 64 + 8
            assert sum(count > 32 for count in counts) >= 5
    assert found[0] == found[1]


def _passes_of(drafts: StreamedModel) -> list[list[tuple[PassRows, ModelState]]]:
    """What each layer's passes run, text by text, as they come."""
    return [_noted(layer) for layer in (drafts, *drafts.later)]


def _noted(layer: StreamedModel) -> list[tuple[PassRows, ModelState]]:
    through, noted = layer._through_layers, list[tuple[PassRows, ModelState]]()

    def noting(
        parts: Sequence[PassRows], states: Sequence[ModelState], wanted: Sequence[int]
    ) -> torch.Tensor:
        noted.extend(zip(parts, states, strict=True))
        return through(parts, states, wanted)

    layer._through_layers = noting  # type: ignore[method-assign]
    return noted


def test_several_layers_of_other_types_are_chained(tmp_path: Path) -> None:
    """As in transformers' own model of such layers; rows go on behind their norms."""
    target, layer = save_mtp_toy("deepseek_v3", tmp_path)
    path = tmp_path / "model.safetensors"
    stored, last = load_file(path), target.config.num_hidden_layers
    second = copy.deepcopy(layer)
    with torch.no_grad():
        for weights in second.parameters():
            weights.mul_(1.5)
    more = {
        name.replace(f"layers.{last}.", f"layers.{last + 1}."): 1.5 * each
        for name, each in stored.items()
        if f"layers.{last}." in name
    }
    save_file(stored | more, path, metadata={"format": "pt"})
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=2)
    found = _drafted(*_opened(tmp_path), _TOKENS)
    hidden, text = hidden_rows(target, _TOKENS[:-1]), _TOKENS[1:]
    first, of_root = reference(target, layer, text, hidden)
    torch.testing.assert_close(found[0], first[-1], rtol=0, atol=2e-4)
    for path, logits in zip(HEAD_PATHS[1:], found[1:], strict=True):
        tokens, own = [*text[1:], path[0]], of_root
        expected, made = reference(target, second, tokens, own)
        if path[1:]:
            own = torch.cat([own, made[-1:]])
            expected, _ = reference(target, second, [*tokens, path[1]], own)
        torch.testing.assert_close(logits, expected[-1], rtol=0, atol=2e-4)


@pytest.mark.parametrize("model_type", CONVERTED)
def test_a_gguf_file_drafts_as_the_safetensors(tmp_path: Path, model_type: str) -> None:
    """llama.cpp's converter wrote the file: it shifts norms by one, and renames all tensors."""
    save_converted(model_type, tmp_path / "plain")
    path = converted(CONVERTED[model_type], tmp_path)
    opened = [_opened(each) for each in (path, tmp_path / "plain")]
    assert {len(drafts.later) for _, drafts in opened} == {2 if model_type in BEFORE_NORM else 0}
    found, expected = (_drafted(*each, _TOKENS, _DEEP_STEPS) for each in opened)
    assert torch.equal(found, expected)


def test_a_gguf_file_s_plan_has_all_its_layers(tmp_path: Path) -> None:
    """Of Step's, each has an output head of its own."""
    path = converted(CONVERTED["step3p7"], tmp_path)
    target = sized(ModelEntry(name="target", repo=str(path)), offline=True)
    found = mtp_sized(ModelEntry(name="mtp", repo="mtp"), target).sizes
    assert len(found.layers) == 3
    assert found.head == 3 * target.sizes.head


def test_layers_that_a_gguf_file_promises_and_lacks_are_told_in_a_line(tmp_path: Path) -> None:
    """As where those that draft were split off, or some of them; or they are called otherwise."""
    whole = read_checkpoint(converted(CONVERTED["mimo_v2_flash"], tmp_path))
    assert isinstance(whole, GgufCheckpoint)
    assert left_out(whole, mtp_checkpoint(whole)) is None

    def without(*layers: int, **more: GgufTensor) -> GgufCheckpoint:
        kept = {
            name: each for name, each in whole.file.tensors.items()
            if not name.startswith(tuple(f"blk.{layer}." for layer in layers))
        }  # fmt: skip
        return replace(whole, file=replace(whole.file, tensors=kept | more))

    some = without(6)
    assert "says 3 layers" in str(left_out(some, mtp_checkpoint(some)))
    with pytest.raises(ConfigError, match=r"says 3 as 'num_nextn_predict_layers', but the files"):
        mtp_checkpoint(without(4, 5, 6))
    other = {"blk.9.nextn.eh_proj.weight": whole.file.tensors["blk.4.nextn.eh_proj.weight"]}
    with pytest.raises(ConfigError, match=r"not read, as 'blk\.9\.nextn\.eh_proj\.weight'"):
        mtp_checkpoint(without(4, 5, 6, **other))


@pytest.mark.parametrize("model_type", BEFORE_NORM)
def test_a_plan_counts_the_layer_that_drafts_where_the_target_s_last_is_unlike(
    tmp_path: Path, model_type: str
) -> None:
    """It attends in a window and has no experts; the target's last sees all, and has."""
    _, layers = save_three_layers(model_type, tmp_path)
    target = sized(ModelEntry(name="target", repo=str(tmp_path)), offline=True)
    layer, head = layers[0]
    own = layer.mtp_block
    weights = sum(each.numel() for each in own.parameters()) + layer.eh_proj.weight.numel()
    for known in (target, replace(target, checkpoint=None)):  # its files may be elsewhere
        found = mtp_sized(ModelEntry(name="mtp", repo="mtp"), known).sizes
        assert found.layer_params == 3 * weights
        assert len(found.layers) == 3
        assert found.head == (3 * 4 * head.numel() if model_type == "step3p7" else 0)
        keys, values = own.self_attn.k_proj, own.self_attn.v_proj
        assert found.kv_elements == 3 * (keys.out_features + values.out_features)
        assert found.experts is None


def test_names_and_numbers_of_layers_are_not_believed(tmp_path: Path) -> None:
    save_mtp_toy("deepseek_v3", tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    for number in ("x", "9" * 5000, "-1", ""):
        stored[f"model.layers.{number}.eh_proj.weight"] = torch.zeros(1, 1)
    save_file(stored, path, metadata={"format": "pt"})
    target = read_checkpoint(tmp_path)
    assert not any(".x." in name or "99" in name for name in behind_last(target))
    head = mtp_checkpoint(target).head
    assert head is not None
    assert not head.later
    assert mtp_layers({"model_type": "step3p7", "num_nextn_predict_layers": 1 << 40}) == 8


@pytest.mark.parametrize("count", [None, True, "3", 2.0])
def test_without_a_number_of_layers_none_is_behind_the_last(tmp_path: Path, count: object) -> None:
    save_mtp_toy("deepseek_v3", tmp_path)
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    more = {
        f"model.layers.{each}.eh_proj.weight": torch.zeros(1, 1) for each in (0, 1, *_odd(count))
    }
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    said = json.loads(config.read_text())
    del said["num_hidden_layers"]
    config.write_text(json.dumps(said if count is None else said | {"num_hidden_layers": count}))
    target = read_checkpoint(tmp_path)
    assert not behind_last(target)
    with pytest.raises(ConfigError, match=r"stored in a way that is not read, as 'model\.layers"):
        mtp_checkpoint(target)


def _odd(count: object) -> list[str]:
    return [] if count is None else [str(count)]


def test_no_more_layers_are_read_than_a_config_is_believed_to_have(tmp_path: Path) -> None:
    target, _ = save_mtp_toy("deepseek_v3", tmp_path)
    path, last = tmp_path / "model.safetensors", target.config.num_hidden_layers
    more = {
        f"model.layers.{last + each}.eh_proj.weight": torch.zeros(1, 1) for each in range(1, 1500)
    }
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=1500)
    checkpoint = read_checkpoint(tmp_path)
    found = mtp_checkpoint(checkpoint)
    assert found.head is not None
    assert 1 + len(found.head.later) == 8
    line = left_out(checkpoint, found)
    assert line is not None
    assert line.endswith("says 1500 layers that predict further tokens (MTP), of which 8 draft: no "
                         "more are read")  # fmt: skip


@pytest.mark.parametrize("text", [{}, {"text_config": None}])
def test_a_config_in_one_part_says_how_many_layers_there_are(text: dict[str, Any]) -> None:
    head = mtp_head({"model_type": "step3p7", "num_hidden_layers": 3, **text})
    assert head.features == (3,)
    assert head.config["text_config"]["num_hidden_layers"] == 1
    with pytest.raises(ConfigError, match="no whole number as 'num_hidden_layers'"):
        mtp_head({"model_type": "step3p7", **text})


@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v3"])
def test_kimi_k2_has_the_type_of_a_model_with_such_layers_and_none(model_type: str) -> None:
    """Its config says 0; its makers tell programs that do not know it to take deepseek_v3."""
    said = {"model_type": model_type, "num_nextn_predict_layers": 0}
    assert not has_mtp(said)
    assert not has_mtp({"model_type": "kimi_k25", "text_config": said})
    assert has_mtp({"model_type": "deepseek_v3"})
    assert has_mtp({"model_type": model_type, "num_nextn_predict_layers": 1})


def test_a_gguf_file_in_blocks_drafts_with_what_its_weights_mean(tmp_path: Path) -> None:
    path = converted(CONVERTED["qwen3_5_text"], tmp_path)
    found, expected = (
        _drafted(*_opened(rewritten(path, tmp_path / f"{packs}.gguf", packs)), _TOKENS)
        for packs in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_model_that_sees_drafts_as_its_text_half(tmp_path: Path) -> None:
    """Published checkpoints of Qwen3.5 have the decoder one level deeper."""
    save_mtp_toy("qwen3_5_text", tmp_path / "text")
    config = toy_config(Toy("qwen3_5")).to_dict()
    config["text_config"] = json.loads((tmp_path / "text" / "config.json").read_text())
    deeper = {
        name.replace("model.", "model.language_model.", 1) if name[:6] == "model." else name: each
        for name, each in load_file(tmp_path / "text" / "model.safetensors").items()
    }
    (tmp_path / "seeing").mkdir()
    (tmp_path / "seeing" / "config.json").write_text(json.dumps(config, default=str))
    save_file(deeper, tmp_path / "seeing" / "model.safetensors", metadata={"format": "pt"})
    found, expected = (_drafted(*_opened(tmp_path / name), _TOKENS) for name in ("seeing", "text"))
    assert torch.equal(found, expected)


def test_on_a_gpu_a_layer_drafts_as_on_a_cpu(tmp_path: Path) -> None:
    """Its embeddings are the target's, which lie in RAM."""
    save_mtp_toy("glm4_moe", tmp_path)
    expected = _drafted(*_opened(tmp_path), _TOKENS)
    with fake_cuda(triton=False):
        local, drafts = _opened(tmp_path, CUDA)
        found = _drafted(local, drafts, _TOKENS).cpu()
        local.close()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_beside_keys_and_values_that_wait_in_ram_a_layer_drafts_the_same(tmp_path: Path) -> None:
    """The rows that the head reads stay on the GPU."""
    save_mtp_toy("glm4_moe", tmp_path)
    found = []
    for layers in ((), (0, 1), (0, 1, 2, 3)):
        with fake_cuda(triton=False):
            local, drafts = _opened(tmp_path, CUDA, kv_layers=layers)
            found.append(_drafted(local, drafts, _TOKENS).cpu())
            nodes = np.array([7, 9]), np.array([-1, 0]), np.array([1, 2]), np.zeros(2)
            local.verify(_TOKENS[-1:], DraftTree(*nodes))
            local.commit([0, 1])
            found[-1] = torch.cat([found[-1], _drafted(local, drafts, [*_TOKENS, 7, 9]).cpu()])
            local.close()
    assert all(torch.equal(each, found[0]) for each in found[1:])


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "glm4_moe"])
def test_tensors_that_a_config_promises_and_files_lack(tmp_path: Path, model_type: str) -> None:
    save_mtp_toy(model_type, tmp_path)
    path = tmp_path / "model.safetensors"
    left = {
        name: tensor
        for name, tensor in load_file(path).items()
        if not name.startswith(("mtp.", "model.layers.4."))
    }
    save_file(left, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"says 1 as '.*', but the files hold no tensors of such"):
        mtp_checkpoint(read_checkpoint(tmp_path))
    open_float32(tmp_path)  # the target itself needs none


@pytest.mark.parametrize("key", ["num_mtp_modules", "num_mtp_layers", "mtp_num_layers"])
def test_a_promise_by_another_key_is_told_too(tmp_path: Path, key: str) -> None:
    """As MiniMax's configs have it, whose published files hold no such layers."""
    save_target(tmp_path)
    edit_json(tmp_path / "config.json", **{key: 3})
    with pytest.raises(ConfigError, match=f"says 3 as '{key}', but the files hold no tensors"):
        mtp_checkpoint(read_checkpoint(tmp_path))


def test_layers_in_a_layout_that_is_not_read_are_told_as_such(tmp_path: Path) -> None:
    """As LongCat stores them: they are there, so nobody left them out."""
    save_mtp_toy("deepseek_v3", tmp_path)
    path = tmp_path / "model.safetensors"
    last = read_checkpoint(tmp_path).config["num_hidden_layers"]
    stored = {key: each for key, each in load_file(path).items() if f"layers.{last}." not in key}
    stored["model.mtp.layers.0.eh_proj.weight"] = torch.ones(4)
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"stored in a way that is not read, as 'model\."):
        mtp_checkpoint(read_checkpoint(tmp_path))


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "deepseek_v3"])
def test_accepted_nodes_go_on_from_the_targets_rows(tmp_path: Path, model_type: str) -> None:
    """And after a crop, and for a text whose rows are copied, there is nothing left of others."""
    save_mtp_toy(model_type, tmp_path)
    local, drafts = _opened(tmp_path)
    _drafted(local, drafts, _TOKENS)
    rows = HeadRows(drafts, local)
    rows.begin(_TOKENS)
    for step in HEAD_STEPS:
        rows.run(step)
        rows.ran(step)
    text = commit_a_path(local, rows, _TOKENS)
    for context in (text, [*text[:-2], 20]):
        local.crop(len(context) - 1)
        if pending := context[len(local.tokens) : -1]:  # of a state that cannot be cut back
            local.verify(pending, DraftTree.empty())
            local.commit([])
        fresh, copied = HeadRows(drafts, local), HeadRows(drafts, local)
        copied.copy(rows, min(len(context) - 1, len(rows.tokens)))
        found = []
        for each in (rows, fresh, copied):
            assert each.begin(context) > 0
            found.append(each.run(HEAD_STEPS[0]))
            each.ran(HEAD_STEPS[0])
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[2], found[1])
    assert rows.begin([*text, 30, 31]) == 0, "the target has no rows of a new turn yet"
    assert HeadRows(drafts, local).begin([3]) == 0, "nothing stands before the first token"


@pytest.mark.parametrize("bits", [3, 4])
def test_a_copy_in_few_bits_keeps_the_layer_as_it_is(tmp_path: Path, bits: int) -> None:
    """A head in 4 bits would be right 4 times in a hundred, and is a small part of the bytes."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    save_mtp_toy("glm4_moe", tmp_path / "plain", **sizes)
    source = read_checkpoint(tmp_path / "plain")
    write_quantized(plan_quantization(source, bits, 16), tmp_path / "copy")
    layers = [mtp_checkpoint(each) for each in (source, read_checkpoint(tmp_path / "copy"))]
    plain, kept = (
        {name: each for name, each in layer.items() if ".layers.0." in name or "head_input" in name}
        for layer in layers
    )
    assert plain.keys() == kept.keys()
    for one, other in ((read_tensors([plain[name]]), read_tensors([kept[name]])) for name in plain):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "deepseek_v3"])
def test_a_packed_layer_drafts_with_what_its_weights_mean(tmp_path: Path, model_type: str) -> None:
    """In FP8 files the linear before the layer stays plain, and so do the tables."""
    for folder in (tmp_path / "packed", tmp_path / "plain"):
        save_mtp_toy(model_type, folder)
        path = folder / "model.safetensors"
        stored = load_file(path)
        for name in [
            name for name in stored if name.endswith("_proj.weight") and "eh_" not in name
        ]:
            if ".linear_attn." in name:
                continue
            scale = stored[name].abs().max() / 448
            codes = (stored[name] / scale).to(torch.float8_e4m3fn)
            if folder.name == "packed":
                stored[name], stored[f"{name}_scale_inv"] = codes, scale.reshape(1, 1)
            else:
                stored[name] = codes.float() * scale
        save_file(stored, path, metadata={"format": "pt"})
    packing = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    edit_json(tmp_path / "packed" / "config.json", quantization_config=packing)
    found, expected = (_drafted(*_opened(tmp_path / name), _TOKENS) for name in ("packed", "plain"))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
