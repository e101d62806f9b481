"""The engine that runs one text at a time, and a text as its caller sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from checkpoints import byte_llama, save_pair

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.core import StepResult
from specexec_cli.engine.one_at_a_time import OneAtATime
from specexec_cli.engine.text import QueueFullError, Running, TextRequest
from specexec_cli.errors import ConfigError, StreamError
from specexec_cli.session import Session, TextSession


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextSession]:
    target, draft = save_pair(
        tmp_path_factory.mktemp("pair"), target=byte_llama(max_position_embeddings=256)
    )
    with Session.open(model=str(target), draft=str(draft), dtype="float32") as opened:
        yield opened


@pytest.fixture
def engine(session: TextSession) -> Iterator[OneAtATime]:
    found = OneAtATime(session, most_waiting=2)
    yield found
    found.close()


def asked(session: TextSession, prompt: str, count: int = 12, seed: int = 0) -> TextRequest:
    return TextRequest(
        prompt=tuple(session.encode(prompt)),
        sampling=SamplingConfig(temperature=1.0, seed=seed),
        generation=GenerationConfig(max_tokens=count),
    )


def tokens(steps: list[StepResult]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def test_texts_take_turns_and_are_what_they_are_alone(
    session: TextSession, engine: OneAtATime
) -> None:
    requests = [
        asked(session, prompt, seed=seed) for seed, prompt in enumerate(("abc", "xy", "abd"))
    ]
    running = [engine.submit(request) for request in requests]
    found = [tokens(list(text)) for text in running]
    assert [text.finish for text in running] == ["length"] * 3
    assert [text.stats.generated_tokens for text in running] == [12] * 3
    assert running[0].began_s < running[1].began_s < running[2].began_s  # type: ignore[operator]
    figures = engine.figures()
    assert (figures.generated_tokens, figures.texts) == (36, {"length": 3})
    engine.close()
    for request, text in zip(requests, found, strict=True):
        steps = session.generate(
            request.prompt, sampling=request.sampling, generation=request.generation
        )
        assert tokens(list(steps)) == text


def test_cancelled_texts_end_and_give_their_place_back(
    session: TextSession, engine: OneAtATime
) -> None:
    first = engine.submit(asked(session, "abc", 240))
    next(iter(first))
    waiting = [engine.submit(asked(session, "abc")) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 texts are waiting already"):
        engine.submit(asked(session, "abc"))
    waiting[0].cancel()
    third = engine.submit(asked(session, "abc"))
    assert (waiting[0].finish, list(waiting[0])) == ("cancelled", [])
    first.cancel()
    list(first)
    assert first.finish == "cancelled"
    assert len(tokens(list(waiting[1]))) == len(tokens(list(third))) == 12


def test_a_failed_text_tells_why_and_the_next_one_works(
    session: TextSession, engine: OneAtATime
) -> None:
    model = session.target.model  # type: ignore[attr-defined]

    def unreadable(layer: int) -> None:
        raise StreamError("gone")

    usual, model.on_layer = model.on_layer, unreadable
    failed = engine.submit(asked(session, "abc"))
    with pytest.raises(StreamError, match="gone"):
        list(failed)
    assert failed.finish == "failed"
    model.on_layer = usual
    assert len(tokens(list(engine.submit(asked(session, "abc"))))) == 12


def test_wrong_requests_are_refused_before_they_wait(
    session: TextSession, engine: OneAtATime
) -> None:
    for prompt in ((), (0,) * 300, (10**6,)):
        request = TextRequest(
            prompt=prompt, sampling=SamplingConfig(), generation=GenerationConfig()
        )
        with pytest.raises(ConfigError):
            engine.submit(request)
    assert engine.figures().waiting == engine.figures().running == 0


def test_close_ends_everything(session: TextSession) -> None:
    engine = OneAtATime(session, most_waiting=4)
    running = [engine.submit(asked(session, "abc", 240)) for _ in range(3)]
    next(iter(running[0]))
    engine.close()
    engine.close()
    assert [text.finish for text in running] == ["cancelled"] * 3
    assert "specexec-engine" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(QueueFullError, match="shutting down"):
        engine.submit(asked(session, "abc"))


def test_a_listener_hears_what_came_before_it() -> None:
    text = Running(
        TextRequest(prompt=(1,), sampling=SamplingConfig(), generation=GenerationConfig())
    )
    heard: list[int] = []
    text.listen(lambda: heard.append(1))
    assert not heard
    text.end("cancelled")
    text.listen(lambda: heard.append(2))
    assert heard == [1, 2]
    assert text.take() == []
