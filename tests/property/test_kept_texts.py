"""Rows of texts that were kept on disk: every logit behind them is that of a text read anew."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import architecture, random_tokens, random_tree, save_checkpoint
from fake_cuda import CUDA, fake_cuda
from gguf_toys import TOYS, save_toy
from mutants import mutated

from specexec_cli.core import DraftTree
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.prefixes import kept_texts, writer
from specexec_cli.prefixes.folder import Bound, kept_prefixes, prefixes_folder
from specexec_cli.prefixes.kept_pair import KeptPair
from specexec_cli.prefixes.kept_texts import KeptTexts
from specexec_cli.prefixes.segments import BLOCK_TOKENS
from specexec_cli.verify.verifier import LocalTarget

ATTENTION = ["llama", "gemma3", "gpt-bigcode", "qwen3-moe"]
RECURRENT = ["qwen3_5", "lfm2", "falcon_h1", "nemotron_h", "jamba"]
JAMBA = transformers.JambaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_experts=2,
    num_attention_heads=4, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1,
    expert_layer_period=9, expert_layer_offset=5, mamba_d_state=8, mamba_dt_rank=4,
    use_mamba_kernels=False,
)  # fmt: skip
TOKENS = [3 + token % 45 for token in random_tokens(700)]
TEXT = TOKENS[:300]


FORMS: dict[str, tuple[str, torch.dtype, dict[str, Any], int]] = {  # and how many are damaged
    "rows": ("llama", torch.float32, {}, 40),
    "8bit": ("llama", torch.bfloat16, {"eight_bit_kv": True}, 15),
    "waiting": ("llama", torch.bfloat16, {"device": CUDA, "kv_layers": (0, 2)}, 25),
    "recurrent": ("qwen3_5", torch.bfloat16, {}, 15),
}


def opened(folder: Path, dtype: torch.dtype = torch.float32, **asked: Any) -> StreamedModel:
    spec = ModelSpec(**{"device": torch.device("cpu"), "dtype": dtype, "tiers": "ssd", **asked})
    return spec.open(read_checkpoint(folder))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", params=[*ATTENTION, *RECURRENT])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(name)
    if name == "jamba":
        save_checkpoint(folder, JAMBA)
    elif name in RECURRENT:
        save_toy(TOYS[name], folder)
    else:
        save_checkpoint(folder, architecture(name))
    return folder


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[StreamedModel]:
    model = opened(folder, request.param)
    yield model
    model.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamedModel]:
    folder: Path = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, architecture("llama"))
    model = opened(folder)
    yield model
    model.close()


def keeper(bound: Bound | None = None, told: list[str] | None = None, name: str = "m") -> KeptTexts:
    told = [] if told is None else told
    return KeptTexts(name, f"weights of {name}", bound or Bound(10**9), told.append)


def read(target: LocalTarget, text: list[int]) -> torch.Tensor:
    """Crops a target to what it has of a text, and reads the rest; the logits behind the text."""
    same = next((n for n, (a, b) in enumerate(zip(target.tokens, text, strict=False)) if a != b),
                min(len(target.tokens), len(text)))  # fmt: skip
    target.crop(min(same, len(text) - 1))
    logits = target.verify(text[len(target.tokens) :], DraftTree.empty())
    target.commit([])
    return logits


def written(model: StreamedModel, text: list[int], kept: KeptTexts, seed: int = 0) -> list[int]:
    """Reads a text and goes on with trees of which random paths are accepted; the whole text."""
    rng, target = np.random.default_rng(seed), LocalTarget(model)
    read(target, text)
    kept.offer(target)
    for number in range(12):
        tree = random_tree(9, 100 * seed + number)
        target.verify([TOKENS[600 + number]], tree)
        path, node = [], -1
        while len(children := np.flatnonzero(tree.parents == node)) and rng.random() < 0.7:
            node = int(rng.choice(children))
            path.append(node)
        target.commit(path)
        kept.offer(target)
    kept.offer(target, ended=True)
    kept.close()
    return list(target.tokens)


def assert_as_if_read(model: StreamedModel, target: LocalTarget, text: list[int]) -> None:
    """The target's next logits, and those behind a tree that is committed, are a fresh text's."""
    fresh = LocalTarget(model)
    assert torch.equal(read(target, text), read(fresh, text))
    tree = random_tree(7, 5)
    both = [each.verify([7], tree) for each in (target, fresh)]
    assert torch.equal(*both)
    for each in (target, fresh):
        each.commit([0])
    assert torch.equal(*(each.verify([9], DraftTree.empty()) for each in (target, fresh)))


def test_a_text_that_goes_on_is_brought_back(model: StreamedModel) -> None:
    text = written(model, TEXT, keeper())
    longer, target = [*text, *TOKENS[400:430]], LocalTarget(model)
    keeper().bring_back(target, longer)
    assert 0 <= len(text) - len(target.tokens) < BLOCK_TOKENS
    assert target.tokens == longer[: len(target.tokens)]
    assert_as_if_read(model, target, longer)


def test_another_end_is_brought_back_up_to_where_it_parts(model: StreamedModel, name: str) -> None:
    text = written(model, TEXT, keeper())
    other = [*text[:290], *TOKENS[500:560]]
    target = LocalTarget(model)
    keeper().bring_back(target, other)
    # a recurrent layer's state was kept a little before the end of what was read at once
    assert len(target.tokens) == (len(TEXT) - 16 if name in RECURRENT else 256)
    assert_as_if_read(model, target, other)


def test_what_a_target_has_in_memory_is_gone_on_from(model: StreamedModel) -> None:
    text = written(model, TEXT, keeper())
    target = LocalTarget(model)
    read(target, text[:100])
    keeper().bring_back(target, text)
    assert len(target.tokens) >= 256
    assert_as_if_read(model, target, text)


def test_rows_that_are_dropped_while_they_are_written_are_not_kept(llama: StreamedModel) -> None:
    """The text is exchanged for another one at once, again and again."""
    kept, target = keeper(), LocalTarget(llama)
    texts = [[*TOKENS[:20], *TOKENS[100 + each : 300 + each]] for each in range(6)]
    for _ in range(4):
        for text in texts:
            read(target, text)
            kept.offer(target)
            target.crop(0)
    kept.close()
    back = keeper()
    for text in texts:
        found = LocalTarget(llama)
        back.bring_back(found, text)
        assert_as_if_read(llama, found, text)


def test_another_model_s_rows_are_not_taken(llama: StreamedModel) -> None:
    written(llama, TEXT, keeper())
    other = KeptTexts("m", "other weights in the folder of the same name", Bound(10**9), print)
    target = LocalTarget(llama)
    other.bring_back(target, TEXT)
    assert target.tokens == []
    files = sorted((prefixes_folder() / "m").iterdir())
    first, second = files[0].read_bytes(), files[1].read_bytes()
    files[0].write_bytes(second)  # a file of this model, of other tokens
    files[1].write_bytes(first)
    keeper().bring_back(target, TEXT)
    assert len(target.tokens) < 256
    assert_as_if_read(llama, target, TEXT)


@pytest.mark.parametrize("form", FORMS)
def test_no_damaged_file_is_believed(form: str, tmp_path: Path) -> None:
    """It is as one that is gone, whatever form its rows have, wherever they go."""
    name, dtype, asked, count = FORMS[form]
    if name in TOYS:
        save_toy(TOYS[name], tmp_path)
    else:
        save_checkpoint(tmp_path, architecture(name))
    with (
        fake_cuda() if "kv_layers" in asked else nullcontext(),
        closing(opened(tmp_path, dtype, **asked)) as model,
    ):
        text = [*written(model, TEXT, keeper()), 5]
        fresh = read(LocalTarget(model), text)
        right = {path: path.read_bytes() for path in (prefixes_folder() / "m").iterdir()}

        def brought() -> LocalTarget:
            target = LocalTarget(model)
            keeper().bring_back(target, text)
            return target

        most, without, found = len(brought().tokens), dict[Path, int](), set[int]()
        for path, data in right.items():
            path.unlink()
            without[path] = len(brought().tokens)
            path.write_bytes(data)
        assert len(text) - most <= BLOCK_TOKENS
        rng = random.Random(0)
        for _ in range(count):
            damaged = rng.choice(sorted(right))
            raw = right[damaged]
            filled = len(raw.rstrip(b"\0"))  # nothing is read of what fills the last block
            header = 4096 if rng.random() < 0.5 else filled
            damaged.write_bytes(mutated(raw, header, rng))
            same = damaged.read_bytes() == raw
            target = brought()
            assert len(target.tokens) == (most if same else without[damaged])
            assert torch.equal(read(target, text), fresh)
            if not same and without[damaged] < most:
                found.add(without[damaged])
                assert not damaged.exists(), "it is computed and written again"
            damaged.write_bytes(raw)
        # recurrent layers have one state here, without which nothing is brought back
        assert len(found) > 3 or (name in TOYS and found == {0})


@pytest.mark.parametrize("name", ["qwen3_5"], indirect=True)
def test_a_damaged_state_leads_to_an_earlier_one(folder: Path) -> None:
    model = opened(folder)
    text = written(model, TEXT, keeper())
    written(model, [*text, *TOKENS[300:420]], keeper())
    ends = list((prefixes_folder() / "m").glob("*.end"))
    assert len(ends) > 1
    while ends:
        longest = max(ends, key=lambda path: path.stat().st_mtime_ns)
        data = bytearray(longest.read_bytes())
        data[-5000] ^= 1
        longest.write_bytes(data)
        ends.remove(longest)
        target = LocalTarget(model)
        longer = [*text, *TOKENS[300:420], 5]
        keeper().bring_back(target, longer)
        assert (len(target.tokens) > 0) == bool(ends)
        assert_as_if_read(model, target, longer)
    model.close()


def test_what_was_used_longest_ago_leaves(llama: StreamedModel) -> None:
    texts = [[each, *TOKENS[each : each + 256]] for each in range(40, 45)]
    written(llama, texts[0], keeper())
    (found,) = kept_prefixes()
    bound = 3 * found.size_bytes
    for text in texts[1:]:
        written(llama, text, keeper(Bound(bound)))
        keeper().bring_back(LocalTarget(llama), texts[0])  # it is used between the others
        assert sum(each.size_bytes for each in kept_prefixes()) <= bound
    back = {}
    for number, text in enumerate(texts):
        target = LocalTarget(llama)
        keeper().bring_back(target, text)
        back[number] = len(target.tokens)
    assert back[0] == back[4] == 256
    assert back[1] < 256


def test_a_text_loses_its_end_before_its_beginning(llama: StreamedModel) -> None:
    """A beginning may be a system prompt that other texts share."""
    longest = TOKENS[:512]
    written(llama, longest, keeper())
    (found,) = kept_prefixes()
    written(llama, [7, *TOKENS[100:400]], keeper(Bound(found.size_bytes)))
    target = LocalTarget(llama)
    keeper().bring_back(target, longest)
    assert target.tokens == longest[: len(target.tokens)] != []
    assert len(target.tokens) < 448


def test_a_text_larger_than_the_bound_keeps_its_beginning(llama: StreamedModel) -> None:
    written(llama, TEXT, keeper())
    (found,) = kept_prefixes()
    (folder := found.folder).rename(folder.with_name("other"))
    written(llama, TEXT, keeper(Bound(found.size_bytes // 2)))
    target = LocalTarget(llama)
    keeper().bring_back(target, TEXT)
    assert target.tokens == TEXT[: len(target.tokens)] != []
    assert len(target.tokens) < 256
    assert_as_if_read(llama, target, TEXT)


def test_rows_that_nobody_else_has_are_let_go(llama: StreamedModel) -> None:
    """Those of a drafter that another one follows, in a session that goes on."""
    kept, target = keeper(), LocalTarget(llama)
    read(target, TEXT)
    kept.offer(target, ended=True)
    kept.flush()
    time.sleep(0.1)  # the thread that writes comes to wait for more
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    kept.close()


def test_the_end_of_a_session_waits_once_for_both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's rows are written while the target's are waited for."""
    waited: list[float] = []

    def close(self: KeptTexts, most_s: float = kept_texts.LAST_WRITES_S) -> None:
        waited.append(most_s)
        time.sleep(0.2)

    monkeypatch.setattr(KeptTexts, "close", close)
    KeptPair(keeper(name="target"), keeper(name="draft")).close()
    assert waited[0] == kept_texts.LAST_WRITES_S
    assert 0 < waited[1] <= waited[0] - 0.2


def test_a_disk_that_hangs_is_not_waited_for_where_the_process_ends(
    llama: StreamedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(writer, "write_file", lambda *_: go_on.wait(60.0))
    kept, target = keeper(), LocalTarget(llama)
    read(target, TEXT)
    kept.offer(target, ended=True)
    closing = threading.Thread(target=kept.close, args=(0.1, 0.1))
    closing.start()
    closing.join(20.0)
    ended = not closing.is_alive()
    go_on.set()
    assert ended
    kept.close()
