"""`draft='mtp'`: the target's own layer that predicts further tokens drafts; no text changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import save_byte_tokenizer
from mtp_toys import BEHIND, QWEN, recite, save_mtp_toy

from specexec_cli.config import DtypeName, GenerationConfig, SamplingConfig
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.session import open_session

_PROMPTS = ([5, 6, 7, 8, 9, 10], [5, 6, 7, 30, 31, 32], [40])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _saved(folder: Path, model_type: str, by: str | None = None) -> Path:
    save_mtp_toy(model_type, folder, std=0.4, hidden_size=64)
    if by is not None:
        recite(folder, by)
    save_byte_tokenizer(folder)
    return folder


def _texts(folder: Path, sampling: SamplingConfig, **request: object) -> list[list[list[int]]]:
    """What each pass committed behind each prompt, one text after another in one session."""
    asked = Request(model=str(folder), device="cpu", context_tokens=64, **request)
    with open_session(asked) as session:
        return [
            [
                list(step.tokens)
                for step in session.generate(
                    prompt, sampling=sampling, generation=GenerationConfig(max_tokens=16)
                )
            ]
            for prompt in _PROMPTS
        ]


def _joined(texts: list[list[list[int]]]) -> list[list[int]]:
    return [[token for step in text for token in step] for text in texts]


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [*((each, "float32") for each in (*QWEN, *BEHIND)), ("qwen3_5_text", "bfloat16")],
)
def test_the_text_is_that_of_plain_decoding(
    tmp_path: Path, model_type: str, dtype: DtypeName
) -> None:
    folder = _saved(tmp_path / "target", model_type)
    sampling = SamplingConfig(temperature=0.8, seed=3)
    plain = _texts(folder, sampling, method="autoregressive", dtype=dtype, offload="ssd")
    tree = TreeRequest(budget=24, depth=8, batch=4, policy="fixed")
    drafted = _texts(folder, sampling, draft="mtp", tree=tree, dtype=dtype, offload="ssd")
    assert _joined(drafted) == _joined(plain)
    assert any(len(step) > 1 for text in drafted for step in text)


@pytest.mark.parametrize("by", ["tokens", "hidden rows"])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "glm4_moe"])
def test_what_the_layer_knows_is_accepted_whole(tmp_path: Path, model_type: str, by: str) -> None:
    """From the right rows it is right as often as it adds to its own drafts."""
    folder = _saved(tmp_path / "target", model_type, by)
    plain = _texts(folder, SamplingConfig(), method="autoregressive")
    tree = TreeRequest(budget=4, depth=4, policy="fixed", past=False)
    drafted = _texts(folder, SamplingConfig(), draft="mtp", tree=tree)
    assert _joined(drafted) == _joined(plain)
    for steps in drafted:  # one token from the prompt's pass, then five from each of the others
        assert [len(step) for step in steps[:-1]] == [1, *[5] * (len(steps) - 2)]
        assert len(steps) > 2
