"""Keys and values that do not fit a GPU wait in RAM: the text is the same, the plan has the bytes.

See tests/fake_cuda.py for what the stand-in checks.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    BYTE_VOCAB,
    architecture,
    byte_llama,
    random_tokens,
    save_byte_tokenizer,
    save_checkpoint,
    save_pair,
)
from fake_cuda import CUDA, Runtime, fake_cuda
from gguf_toys import TOYS, save_toy
from test_fake_cuda import passes

from specexec_cli.config import GenerationConfig, SamplingConfig, Tier
from specexec_cli.device import HUGE_PAGE_BYTES
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.request import TreeRequest
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession

TIERS: tuple[Tier, ...] = ("resident", "ram", "ssd", "ram")
# so many tokens that keys and values take most of the memory beside a layer's weights
CONTEXT, LAYERS = 1536, 6
ROOMY_BYTES = 400_000_000  # of a GPU that has room for all of them
PROMPT = [3 + token % 250 for token in random_tokens(700)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save(name: str, folder: Path, dtype: torch.dtype) -> None:
    if name in ("qwen3_5", "falcon_h1"):
        save_toy(TOYS[name], folder)
    else:
        save_checkpoint(folder, architecture(name), dtype=dtype)


def opened(folder: Path, layers: tuple[int, ...], dtype: torch.dtype) -> StreamedModel:
    checkpoint = read_checkpoint(folder)
    tiers = TIERS[: checkpoint.config["num_hidden_layers"]]
    spec = ModelSpec(device=CUDA, dtype=dtype, tiers=tiers, chunk_rows=7, kv_layers=layers)
    return spec.open(checkpoint)


@pytest.mark.parametrize(
    ("name", "dtype", "pins_bytes", "waiting"),
    [("llama", torch.float32, 0, (0, 1, 2)), ("llama", torch.bfloat16, 1 << 40, (0, 1, 2)),
     ("gemma2", torch.float32, 1 << 40, (0, 1, 2)), ("mixtral", torch.float32, 1 << 40, (0, 1, 2)),
     ("qwen3_5", torch.float32, 0, (3,)), ("qwen3_5", torch.bfloat16, 1 << 40, (3,)),
     ("falcon_h1", torch.bfloat16, 1 << 40, (0, 1, 2))],
)  # fmt: skip
def test_a_row_has_the_bits_that_it_has_on_the_gpu(
    name: str, dtype: torch.dtype, pins_bytes: int, waiting: tuple[int, ...], tmp_path: Path
) -> None:
    """A prompt in chunks, a tree, a path that is committed: whichever layers wait."""
    save(name, tmp_path, dtype)
    found = []
    for layers in ((), waiting[-1:], waiting):
        with fake_cuda(pins_bytes=pins_bytes) as runtime:
            model = opened(tmp_path, layers, dtype)
            found.append(passes(model))
            model.close()
            assert not runtime.registered
    assert all(torch.equal(each, found[0]) for each in found[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "waiting"), [("llama", (0, 2)), ("qwen3_5", (3,))])
def test_texts_side_by_side_and_copies_of_their_rows(
    name: str, waiting: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Each text has rows of its own; one that begins as another takes them over in RAM."""
    save(name, tmp_path, dtype)
    tokens = random_tokens(40)

    def logits(layers: tuple[int, ...]) -> torch.Tensor:
        with fake_cuda():
            model = opened(tmp_path, layers, dtype)
            one, two, three = (model.new_state() for _ in range(3))
            for state in (one, two):
                state.keep_at(9 if state is two else 17)
            found = model.forward_together(
                [(PassRows.chain(tokens[:20], 0), one, [19]),
                 (PassRows.chain(tokens[20:33], 0), two, [12])]
            )  # fmt: skip
            one.commit(20, [])
            two.commit(13, [])
            assert two.crop(9) == 9
            assert three.copy(one, 17) == 17
            for _ in range(2):
                found += model.forward_together(
                    [(PassRows.chain(tokens[5:8], state.length), state, [2])
                     for state in (one, two, three)]
                )  # fmt: skip
            two.release()
            found.append(model.forward(PassRows.chain(tokens[:9], 0), two, [8]))
            model.close()
            return torch.cat(found).cpu()

    assert torch.equal(logits(waiting), logits(()))


def test_memory_of_a_text_that_ends_is_unpinned(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    with fake_cuda() as runtime:
        model = opened(tmp_path, (0, 1), torch.float32)
        before = len(runtime.registered)
        state = model.new_state()
        model.forward(PassRows.chain(random_tokens(9), 0), state, [8])
        assert len(runtime.registered) == before + 2
        del state
        gc.collect()
        assert len(runtime.registered) == before
        model.close()


def save_long_pair(folder: Path) -> dict[str, str]:
    """Whose keys and values take most of the memory beside a layer's weights."""
    config = byte_llama(
        hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    target, draft = save_pair(folder, target=config, noise=0.01)
    return {"model": str(target), "draft": str(draft)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_long_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Whose first layer is recurrent."""
    folder, toy = tmp_path_factory.mktemp("hybrid"), TOYS["qwen3_5"]
    sizes = {
        "vocab_size": BYTE_VOCAB, "num_hidden_layers": 4, "num_key_value_heads": 4,
        "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
        "layer_types": ["linear_attention", *["full_attention"] * 3],
    }  # fmt: skip
    save_toy(replace(toy, options={**toy.options, **sizes}), folder)
    save_byte_tokenizer(folder)
    return {"model": str(folder), "draft": "suffix"}


USUAL: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "offload": "ram", "context_tokens": CONTEXT,
    "tree": TreeRequest(budget=24, depth=6, batch=6),
}  # fmt: skip


def session(pair: dict[str, str], **asked: Any) -> LocalSession:
    found = Session.open(**{**USUAL, **pair, **asked})
    assert isinstance(found, LocalSession)
    return found


def written(session: LocalSession, prompt: list[int], **sampling: Any) -> list[int]:
    count = 40 if session.draft is not None else 8  # each of them is a pass
    steps = session.generate(
        prompt, sampling=SamplingConfig(**sampling), generation=GenerationConfig(max_tokens=count)
    )
    return [token for step in steps for token in step.tokens]


def both_texts(session: LocalSession) -> list[list[int]]:
    return [written(session, PROMPT), written(session, PROMPT, temperature=0.8, seed=3)]


def tight_bytes(runtime: Runtime, pair: dict[str, str], **asked: Any) -> int:
    """What is free on a GPU that has no room for all keys and values beside the rest."""
    runtime.free_bytes = ROOMY_BYTES
    with session(pair, **asked) as roomy:
        parts = dict(roomy.decision.plan.vram)
    streamed = sum(parts.values()) - parts["resident layers"] + 2 * HUGE_PAGE_BYTES
    return round((streamed - parts["target's KV cache"] / 2) / 0.95)


def tight(runtime: Runtime, pair: dict[str, str], **asked: Any) -> LocalSession:
    """A session on such a GPU."""
    runtime.free_bytes = tight_bytes(runtime, pair, **asked)
    runtime.memory.peak = 0
    found = session(pair, **asked)
    assert found.decision.plan.kv_layers, dict(found.decision.plan.vram)
    return found


@pytest.mark.parametrize(
    ("models", "kv", "dtype"),
    [("pair", "full", "float32"), ("pair", "8bit", "float32"),
     ("hybrid", "full", "bfloat16")],
)  # fmt: skip
def test_a_session_writes_the_same_within_its_plan(
    models: str, kv: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    pair, asked = request.getfixturevalue(models), {"kv": kv, "dtype": dtype}
    with fake_cuda(bare=True) as runtime, session(pair, **asked) as roomy:
        assert not roomy.decision.plan.kv_layers
        expected = both_texts(roomy)
        if kv == "8bit":
            assert runtime.memory.peak <= roomy.decision.plan.peak_vram_bytes
    with fake_cuda(bare=True) as runtime, tight(runtime, pair, **asked) as one:
        plan = one.decision.plan
        assert both_texts(one) == expected
        if models == "pair":  # rows of a toy's recurrence take more than its weights
            assert runtime.memory.peak <= plan.peak_vram_bytes, dict(plan.vram)
        waiting = [one.target.state.layers[index] for index in plan.kv_layers]
        assert 0 < sum(layer.nbytes for layer in waiting) <= dict(plan.ram)["keys and values"]
        each = 2 * (2 if models == "pair" else 4) * 64  # numbers of a token, in heads of 64
        each = each * (4 if dtype == "float32" else 2) if kv == "full" else each * 9 // 8
        assert plan.kv_link_bytes == len(waiting) * each * plan.work.slots // 2


@pytest.mark.parametrize(("models", "dtype"), [("pair", "bfloat16"), ("hybrid", "float32")])
def test_rows_that_wait_are_kept_on_disk(
    models: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    pair = request.getfixturevalue(models)
    with fake_cuda(bare=True), session(pair, dtype=dtype) as roomy:
        expected = written(roomy, PROMPT)
    for again in range(2):
        asked = {"remember": True, "dtype": dtype}
        with fake_cuda(bare=True) as runtime, tight(runtime, pair, **asked) as one:
            assert written(one, PROMPT) == expected
            assert one.stats.prompt_rows < 64 if again else one.stats.prompt_rows == len(PROMPT)
