"""Whole sessions over a mixture whose experts come one by one."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoints import BYTE_VOCAB, architecture, save_pair
from disk import Disk

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.errors import StreamError
from specexec_cli.models import layer_sources
from specexec_cli.offload.experts import ExpertStore
from specexec_cli.session.factory import Session
from specexec_cli.session.local_session import LocalSession
from specexec_cli.session.text_session import TextSession


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    config = architecture("qwen3-moe")
    config.vocab_size = BYTE_VOCAB
    return save_pair(tmp_path_factory.mktemp("pair"), target=config)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specexec"


def opened(pair: tuple[Path, Path], **options: object) -> TextSession:
    target, draft = map(str, pair)
    return Session.open(model=target, draft=draft, offload="ssd", **options)


def text(session: TextSession, method: str, seed: int = 3) -> list[int]:
    steps = session.generate(
        "def f(x):", method=method,  # type: ignore[arg-type]
        sampling=SamplingConfig(temperature=1.0, seed=seed),
        generation=GenerationConfig(max_tokens=24),
    )  # fmt: skip
    return [token for step in steps for token in step.tokens]


def test_trees_give_the_text_of_plain_decoding(pair: tuple[Path, Path]) -> None:
    with opened(pair) as session:
        for seed in range(3):
            assert text(session, "specexec", seed) == text(session, "autoregressive", seed)
        assert session.stats.experts_asked > 0
        assert 0 < session.stats.experts_held <= session.stats.experts_asked
        assert session.settings["offload"] == "ssd"


def experts_of(session: TextSession) -> ExpertStore:
    assert isinstance(session, LocalSession)
    store = session.target.model.experts
    assert store is not None
    return store


def test_counts_are_kept_as_they_were(pair: tuple[Path, Path], cache: Path) -> None:
    with opened(pair, remember=True) as session:
        expected = text(session, "autoregressive")
        counts = experts_of(session).scores.counts.round(3)
    (kept,) = (cache / "experts").glob("*.json")
    assert counts.shape == (3, 4)
    assert counts.sum() > 0
    assert json.loads(kept.read_text()) == counts.tolist()
    with opened(pair, remember=True) as session:
        assert np.array_equal(experts_of(session).scores.counts, counts)
        assert text(session, "autoregressive") == expected


def test_what_was_used_most_is_read_before_the_first_prompt(
    pair: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(pair, remember=True) as session:
        each = experts_of(session).slot_bytes
    (kept,) = (cache / "experts").glob("*.json")
    # every expert was used, no two of them equally often
    counts = np.random.default_rng(0).permutation(np.arange(1.0, 13.0)).reshape(3, 4)
    kept.write_text(json.dumps(counts.tolist()))
    real = layer_sources.ExpertStore
    slots = 5
    monkeypatch.setattr(
        layer_sources,
        "ExpertStore",
        lambda layers, cap, *more, **how: real(layers, slots * each, *more, **how),
    )
    with opened(pair, remember=True) as session:
        store = experts_of(session)
        for _ in range(500):
            if store.table.ready.all():
                break
            threading.Event().wait(0.01)
        assert store.slots == slots
        assert sorted(store.table.held.tolist()) == sorted(
            np.argsort(-counts.ravel())[:slots].tolist()
        )
        assert store.touched == 0


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"no numbers", b"\x80\x02", b"PK\x03\x04", b"[" * 100_000, b"{}", b"[[1, 2], [3, 4]]",
        b"[[1e999, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]", b'[["a"]]', b"[[" + b"9" * 400 + b"]]",
    ],
)  # fmt: skip
def test_damaged_counts_are_counted_anew(
    pair: tuple[Path, Path], cache: Path, damage: bytes
) -> None:
    with opened(pair, remember=True) as session:
        expected = text(session, "autoregressive")
    (kept,) = (cache / "experts").glob("*.json")
    kept.write_bytes(damage)
    with opened(pair, remember=True) as session:
        assert text(session, "autoregressive") == expected
    assert np.array(json.loads(kept.read_text())).shape == (3, 4)


def test_an_expert_that_cannot_be_read_ends_the_pass_and_no_more(
    pair: tuple[Path, Path], disk: Disk
) -> None:
    with opened(pair) as session:
        expected = text(session, "autoregressive")
    with opened(pair) as session:

        def broken(*args: object) -> None:
            if threading.current_thread().name.startswith("specexec-experts"):
                disk.fail()

        disk.on_read = broken
        with pytest.raises(StreamError, match="failed at byte"):
            text(session, "autoregressive")
        disk.on_read = None
        assert text(session, "autoregressive") == expected
