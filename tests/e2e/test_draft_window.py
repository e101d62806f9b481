"""A draft model sees a window of a text that is longer than it can see, or than memory allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_llama, edit_json, open_float32, random_tokens, save_pair
from cli_runner import run_cli
from toys import HEAD_STEPS

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.drafting.draft_rows import DraftRows
from specexec_cli.engine.factory import open_engine
from specexec_cli.engine.text import TextRequest
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.planning.request import TreeRequest
from specexec_cli.prefixes.folder import kept_prefixes
from specexec_cli.session import Session
from specexec_cli.session.text_session import TextSession

WINDOW = 160
TEXT = [3 + each % 250 for each in random_tokens(400)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target that sees 512 tokens, and a noisy copy of it that sees 160."""
    config = byte_llama(max_position_embeddings=512)
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), target=config, noise=0.004)
    edit_json(draft / "config.json", max_position_embeddings=WINDOW)
    return {"model": str(target), "draft": str(draft)}


@pytest.fixture(scope="module")
def drafts(pair: dict[str, str]) -> Iterator[StreamedModel]:
    model = open_float32(Path(pair["draft"]), None)
    yield model
    model.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def behind(rows: DraftRows, context: list[int]) -> torch.Tensor:
    """(5, vocab) what the draft model predicts behind a context, and behind nodes below it."""
    assert rows.begin(context, 6) >= 6
    found = []
    for step in HEAD_STEPS:
        found.append(rows.run(step))
        rows.ran(step)
    rows.commit([], [])
    return torch.cat(found)


def alone(drafts: StreamedModel, rows: DraftRows, context: list[int]) -> torch.Tensor:
    """The same of rows that know nothing but what the others see."""
    return behind(DraftRows(drafts), context[rows.without_row :])


def test_what_is_drafted_follows_from_the_window_alone(drafts: StreamedModel) -> None:
    rows, moves = DraftRows(drafts), set()
    for length in range(1, 300, 7):
        found = behind(rows, TEXT[:length])
        seen = length - rows.without_row
        assert seen == length or WINDOW // 4 <= seen <= WINDOW - 6
        torch.testing.assert_close(found, alone(drafts, rows, TEXT[:length]), rtol=0, atol=0)
        moves.add(rows.without_row)
    assert 3 <= len(moves) <= 4, "it moves once in half a window"


@pytest.mark.parametrize("kept", [60, 5, -1, -100])
def test_a_text_that_is_cut_back_has_a_window_of_its_own(drafts: StreamedModel, kept: int) -> None:
    rows = DraftRows(drafts)
    behind(rows, TEXT[:240])
    assert rows.without_row > 100
    context = [*TEXT[: rows.without_row + kept], 17, 18]
    found = behind(rows, context)
    assert len(context) - rows.without_row >= min(len(context), WINDOW // 4)
    torch.testing.assert_close(found, alone(drafts, rows, context), rtol=0, atol=0)


def test_another_text_takes_over_the_rows_of_a_window(drafts: StreamedModel) -> None:
    rows, other = DraftRows(drafts), DraftRows(drafts)
    behind(rows, TEXT[:200])
    other.copy(rows, 190)
    assert other.tokens == TEXT[:190]
    context = [*TEXT[:190], 21]
    torch.testing.assert_close(
        behind(other, context), alone(drafts, other, context), rtol=0, atol=0
    )
    other.forget()
    assert not other.without_row
    other.copy(rows, rows.without_row - 1)
    assert other.tokens == []
    behind(other, TEXT[:30])
    assert not other.without_row


def session(pair: dict[str, str], **asked: Any) -> TextSession:
    tree = TreeRequest(budget=24, depth=6, batch=6, policy="fixed")
    usual = {"dtype": "float32", "context_tokens": 500, "tree": tree, "remember": True}
    return Session.open(**{**usual, **pair, **asked})


def written(of: TextSession, prompt: list[int], count: int = 60, **more: Any) -> list[int]:
    steps = of.generate(prompt, generation=GenerationConfig(max_tokens=count), **more)
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_beyond_the_draft_model_s_window_is_the_plain_one_in_fewer_passes(
    pair: dict[str, str], dtype: str, temperature: float
) -> None:
    sampling = SamplingConfig(temperature=temperature, seed=3)
    with session(pair, dtype=dtype) as opened:
        plain = written(opened, TEXT[:200], sampling=sampling, method="autoregressive")
        opened.forget()
        assert written(opened, TEXT[:200], sampling=sampling) == plain
        assert opened.stats.target_passes < 50
        turn = [*TEXT[:200], *plain, *TEXT[200:220]]
        second = written(opened, turn, sampling=sampling)
        opened.forget()
        assert written(opened, turn, sampling=sampling, method="autoregressive") == second


def test_texts_side_by_side_have_windows_of_their_own(pair: dict[str, str]) -> None:
    prompts = [TEXT[:20], TEXT[:150], [*TEXT[:150], *TEXT[300:]]]
    with session(pair) as opened:
        plain = [written(opened, each, method="autoregressive") for each in prompts]
    with session(pair, slots=2) as opened:
        engine = open_engine(opened, slots=2, most_waiting=9)
        generation = GenerationConfig(max_tokens=60)
        running = [
            engine.submit(
                TextRequest(
                    prompt=tuple(each), sampling=SamplingConfig(), generation=generation
                )
            )
            for each in prompts
        ]  # fmt: skip
        for each, expected in zip(running, plain, strict=True):
            assert [token for step in each for token in step.tokens] == expected
        engine.close()


def test_rows_of_a_window_that_has_moved_are_not_kept_on_disk(pair: dict[str, str]) -> None:
    for length, models in ((200, 1), (100, 2)):
        with session(pair) as opened:
            written(opened, TEXT[:length], 9)
        assert len(kept_prefixes()) == models
    with session(pair) as opened:
        found = written(opened, TEXT[:105])
        assert opened.stats.prompt_rows < 105 - 64 + 1
    with session(pair, cache=False) as opened:
        assert written(opened, TEXT[:105], method="autoregressive") == found


def test_where_nothing_fits_otherwise_the_draft_model_sees_less() -> None:
    asked = [
        "plan", "llama3.1-70b-instruct-gptq", "--draft", "llama3.1-8b-instruct-gptq", "--offline",
        "--all", "--ram", "64GB", "--link", "25GB/s", "--ssd", "3GB/s", "--context",
    ]  # fmt: skip
    told = "The draft model sees a text's last 4096 tokens at most."
    tight = run_cli(*asked, "16384", "--vram", "14GB")
    assert tight.code == 0, tight.err
    assert told in tight.out
    roomy = run_cli(*asked, "16384", "--vram", "16GB")
    assert roomy.code == 0, roomy.err
    assert "sees a text's last" not in roomy.out
    # whose drafters have no window
    servers = run_cli(*asked, "16384", "--vram", "14GB", "--method", "dsi")
    assert (servers.code, "of VRAM" in servers.error) == (6, True)


def test_a_mixture_whose_tree_is_made_smaller_still_fits_by_a_window() -> None:
    """Its tree has fewer nodes than recommended, once it is known that its experts wait."""
    ran = run_cli(
        "plan", "qwen3-235b-a22b", "--draft", "qwen3-8b-awq", "--offline", "--all", "--ram", "64GB",
        "--link", "25GB/s", "--ssd", "3GB/s", "--context", "65536", "--vram", "20GB",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "The draft model sees a text's last 4096 tokens at most." in ran.out
