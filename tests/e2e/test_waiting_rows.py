"""Keys and values that do not fit a GPU wait in RAM: the text is the same, the plan has the bytes.

See tests/fake_cuda.py for what the stand-in checks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import architecture, byte_llama, random_tokens, save_checkpoint, save_pair
from fake_cuda import CUDA, Runtime, fake_cuda
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

TIERS: tuple[Tier, ...] = ("resident", "ram", "ssd")
# so many tokens that keys and values take most of the memory beside a layer's weights
CONTEXT, LAYERS = 1536, 6
PROMPT = [3 + token % 250 for token in random_tokens(700)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(folder: Path, layers: tuple[int, ...], dtype: torch.dtype) -> StreamedModel:
    spec = ModelSpec(device=CUDA, dtype=dtype, tiers=TIERS, chunk_rows=7, kv_layers=layers)
    return spec.open(read_checkpoint(folder))


@pytest.mark.parametrize(
    ("name", "dtype", "pins_bytes"),
    [("llama", torch.float32, 0), ("llama", torch.bfloat16, 1 << 40),
     ("gemma2", torch.float32, 1 << 40), ("mixtral", torch.float32, 1 << 40)],
)  # fmt: skip
def test_a_row_has_the_bits_that_it_has_on_the_gpu(
    name: str, dtype: torch.dtype, pins_bytes: int, tmp_path: Path
) -> None:
    """A prompt in chunks, a tree, a path that is committed: whichever layers wait."""
    save_checkpoint(tmp_path, architecture(name), dtype=dtype)
    found = []
    for layers in ((), (1,), (0, 1, 2)):
        with fake_cuda(pins_bytes=pins_bytes) as runtime:
            model = opened(tmp_path, layers, dtype)
            found.append(passes(model))
            model.close()
            assert not runtime.registered
    assert all(torch.equal(each, found[0]) for each in found[1:])


def test_texts_side_by_side_and_copies_of_their_rows(tmp_path: Path) -> None:
    """Each text has rows of its own; one that begins as another takes them over in RAM."""
    save_checkpoint(tmp_path, architecture("llama"))
    tokens = random_tokens(40)

    def logits(layers: tuple[int, ...]) -> torch.Tensor:
        with fake_cuda():
            model = opened(tmp_path, layers, torch.float32)
            one, two, three = (model.new_state() for _ in range(3))
            found = model.forward_together(
                [(PassRows.chain(tokens[:20], 0), one, [19]),
                 (PassRows.chain(tokens[20:33], 0), two, [12])]
            )  # fmt: skip
            one.commit(20, [])
            two.commit(13, [])
            two.crop(9)
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

    assert torch.equal(logits((0, 2)), logits(()))


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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    config = byte_llama(
        hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), target=config, noise=0.01)
    return {"model": str(target), "draft": str(draft)}


def session(pair: dict[str, str], **asked: Any) -> LocalSession:
    tree = TreeRequest(budget=24, depth=6, batch=6)
    usual = {"device": "cuda", "dtype": "float32", "offload": "ram", "context_tokens": CONTEXT}
    found = Session.open(**{**usual, **pair, "tree": tree, **asked})
    assert isinstance(found, LocalSession)
    return found


def written(session: LocalSession, prompt: list[int], **sampling: Any) -> list[int]:
    steps = session.generate(
        prompt, sampling=SamplingConfig(**sampling), generation=GenerationConfig(max_tokens=40)
    )
    return [token for step in steps for token in step.tokens]


@pytest.fixture(scope="module")
def expected(pair: dict[str, str]) -> Iterator[list[list[int]]]:
    """What a GPU with room for everything writes."""
    with fake_cuda(bare=True), session(pair) as roomy:
        assert not roomy.decision.plan.kv_layers
        yield [written(roomy, PROMPT), written(roomy, PROMPT, temperature=0.8, seed=3)]


def tight(runtime: Runtime, pair: dict[str, str], **asked: Any) -> LocalSession:
    """A session on a GPU that has no room for all keys and values beside the rest."""
    runtime.free_bytes = 400_000_000
    with session(pair, **asked) as roomy:
        parts = dict(roomy.decision.plan.vram)
    streamed = sum(parts.values()) - parts["resident layers"] + 2 * HUGE_PAGE_BYTES
    runtime.free_bytes = round((streamed - parts["target's KV cache"] / 2) / 0.95)
    runtime.memory.peak = 0
    found = session(pair, **asked)
    assert found.decision.plan.kv_layers, dict(found.decision.plan.vram)
    return found


@pytest.mark.parametrize("kv", ["full", "8bit"])
def test_a_session_writes_the_same_within_its_plan(
    kv: str, pair: dict[str, str], expected: list[list[int]]
) -> None:
    if kv == "8bit":
        with fake_cuda(bare=True) as runtime, session(pair, kv=kv) as roomy:
            assert not roomy.decision.plan.kv_layers
            expected = [
                written(roomy, PROMPT), written(roomy, PROMPT, temperature=0.8, seed=3)
            ]  # fmt: skip
            assert runtime.memory.peak <= roomy.decision.plan.peak_vram_bytes
    with fake_cuda(bare=True) as runtime, tight(runtime, pair, kv=kv) as one:
        plan = one.decision.plan
        assert written(one, PROMPT) == expected[0]
        assert written(one, PROMPT, temperature=0.8, seed=3) == expected[1]
        assert runtime.memory.peak <= plan.peak_vram_bytes, dict(plan.vram)
        waiting = [one.target.state.layers[index] for index in plan.kv_layers]
        assert 0 < sum(layer.nbytes for layer in waiting) <= dict(plan.ram)["keys and values"]
        each = 2 * 2 * 64  # keys and values of a token, two heads of 64, in float32 or 8 bits
        each = each * 4 if kv == "full" else each * 9 // 8
        assert plan.kv_link_bytes == len(waiting) * each * plan.work.slots // 2


def test_rows_that_wait_are_kept_on_disk(pair: dict[str, str], expected: list[list[int]]) -> None:
    for again in range(2):
        with fake_cuda(bare=True) as runtime, tight(runtime, pair, remember=True) as one:
            assert written(one, PROMPT) == expected[0]
            assert one.stats.prompt_rows < 64 if again else one.stats.prompt_rows == len(PROMPT)
