"""Keys and values in 8 bits: texts are those of plain decoding with such rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import architecture, byte_llama, random_tokens, save_checkpoint, save_pair
from cli_runner import run_cli
from fake_cuda import CUDA, fake_cuda
from gguf_toys import TOYS, save_toy
from test_fake_cuda import passes

from specexec_cli.config import GenerationConfig, KvRows, Method, SamplingConfig, Tier, TreeConfig
from specexec_cli.engine.factory import open_engine
from specexec_cli.engine.text import TextRequest
from specexec_cli.errors import ConfigError
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession

PROMPT = [*b"A tree of draft nodes is checked by one pass over all layers of the target. " * 2]
TREE = TreeConfig(budget=12, max_depth=6, batch=4, policy="fixed")
TIERS: tuple[Tier, ...] = ("resident", "ram", "ssd")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    config = byte_llama(hidden_size=64, intermediate_size=128, max_position_embeddings=1024)
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), target=config)
    return {"model": str(target), "draft": str(draft)}


def session(pair: dict[str, str], kv: KvRows = "8bit", **asked: Any) -> LocalSession:
    found = Session.open(**{"dtype": "float32", "offload": "ssd", "kv": kv, **pair, **asked})
    assert isinstance(found, LocalSession)
    return found


def written(session: LocalSession, prompt: list[int], method: Method, heat: float) -> list[int]:
    steps = session.generate(
        prompt, method=method, tree=TREE, sampling=SamplingConfig(temperature=heat, seed=3),
        generation=GenerationConfig(max_tokens=24),
    )  # fmt: skip
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["draft", "self"])
def test_trees_write_the_autoregressive_text(pair: dict[str, str], dtype: str, draft: str) -> None:
    asked = {**pair, "dtype": dtype, "draft": pair["draft"] if draft == "draft" else draft}
    with session(asked) as one:
        assert one.settings["kv"] == "8bit"
        for heat in (0.0, 1.0):
            expected = written(one, PROMPT, "autoregressive", heat)
            assert written(one, PROMPT, "specexec", heat) == expected
            one.forget()
            assert written(one, PROMPT, "specexec", heat) == expected


def test_texts_together_write_what_each_writes_alone(pair: dict[str, str]) -> None:
    prompts = [[*PROMPT[: 40 + 9 * at], *range(40 + at, 60)] for at in range(3)]
    with session(pair) as one:
        alone = [written(one, prompt, "autoregressive", 0.0) for prompt in prompts]
    with session(pair, slots=3) as opened:
        engine = open_engine(opened, slots=3, most_waiting=9)
        running = [
            engine.submit(
                TextRequest(
                    prompt=tuple(prompt), sampling=SamplingConfig(),
                    generation=GenerationConfig(max_tokens=24),
                )
            )
            for prompt in prompts
        ]  # fmt: skip
        assert [[token for step in each for token in step.tokens] for each in running] == alone
        engine.close()


def test_kept_rows_are_those_of_the_same_form(pair: dict[str, str]) -> None:
    found = {}
    for kv in ("8bit", "full", "8bit"):
        with session(pair, kv, remember=True) as one:
            text = written(one, PROMPT, "specexec", 0.0)
            assert text == found.setdefault(kv, text)
            read = one.stats.prompt_rows
    assert read < 64
    with session(pair, "full", remember=True, cache=False) as one:
        assert written(one, PROMPT, "specexec", 0.0) == found["full"]


def test_rows_take_half_the_memory_and_no_more_than_is_planned(pair: dict[str, str]) -> None:
    taken, planned = {}, {}
    for kv in ("full", "8bit"):
        with session(pair, kv, dtype="bfloat16") as one:
            written(one, PROMPT, "autoregressive", 0.0)
            state = one.target.state
            taken[kv] = state.nbytes / state.layers[0].keys.shape[2]
            work, parts = one.decision.work, dict(one.decision.plan.ram)
            planned[kv] = parts["target's KV cache"] / work.slots
    assert taken["8bit"] < 0.6 * taken["full"]
    assert taken["8bit"] <= planned["8bit"] < 0.6 * planned["full"]


def opened(folder: Path, device: torch.device, **asked: Any) -> StreamedModel:
    spec = ModelSpec(
        device=device, tiers=TIERS if device == CUDA else "ssd",
        **{"dtype": torch.float32, "chunk_rows": 7, "eight_bit_kv": True, **asked},
    )  # fmt: skip
    return spec.open(read_checkpoint(folder))


@pytest.mark.parametrize(
    ("name", "dtype", "triton"),
    [("llama", torch.bfloat16, True), ("gemma2", torch.float32, False)],
)
def test_a_row_has_the_same_bits_where_it_waits_in_ram(
    name: str, dtype: torch.dtype, triton: bool, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, architecture(name), dtype=dtype)
    found = []
    for layers in ((), (1,), (0, 1, 2)):
        with fake_cuda(triton=triton):
            model = opened(tmp_path, CUDA, dtype=dtype, kv_layers=layers)
            found.append(passes(model))
            model.close()
    assert all(torch.equal(each, found[0]) for each in found[1:])


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_layers_that_attend_beside_recurrent_ones(name: str, tmp_path: Path) -> None:
    save_toy(TOYS[name], tmp_path)
    tokens = [3 + token % 40 for token in random_tokens(30)]

    def logits(parts: list[int], **asked: Any) -> torch.Tensor:
        model = opened(tmp_path, CPU, **asked)
        state, found = model.new_state(), []
        for start, stop in zip([0, *parts], [*parts, 30], strict=True):
            rows = PassRows.chain(tokens[start:stop], start)
            found.append(model.forward(rows, state, range(stop - start)))
            state.commit(stop, [])
        model.close()
        return torch.cat(found)

    together = logits([])
    assert torch.equal(logits([5, 6, 20]), together)
    whole = logits([], eight_bit_kv=False)
    assert 0 < float((together - whole).abs().max()) < 0.05 * float(whole.abs().max())


def test_layers_that_attend_to_the_keys_of_others_are_refused(tmp_path: Path) -> None:
    save_toy(TOYS["gemma4_text"], tmp_path)
    with pytest.raises(ConfigError, match=r"`kv='8bit'`: some layers of gemma4_text models"):
        opened(tmp_path, CPU)


def test_a_plan_has_half_of_the_cache() -> None:
    def cache(*more: str) -> int:
        said = run_cli("plan", "llama3.1-70b-instruct-gptq-8b", "--vram", "24GB", "--ram", "64GB",
                       "--context", "8192", "--offline", "--json", *more)  # fmt: skip
        return int(json.loads(said.out)["vram"]["target's KV cache"])

    assert 0.5 < cache("--kv", "8bit") / cache() < 0.57
