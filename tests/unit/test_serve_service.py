"""The way from a request to an engine: what is refused before any of it runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.engine.text import EngineFigures, Running, TextRequest
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.serve.api_errors import ApiError
from specexec_cli.serve.bodies import CompletionBody
from specexec_cli.serve.prompts import Prompt
from specexec_cli.serve.service import Defaults, Service

DEMO = Path(__file__).parents[2] / "specexec_cli" / "demo" / "target"
TEXT = TextRequest(prompt=(1,), sampling=SamplingConfig(), generation=GenerationConfig())


class Busy:
    """An engine of 2 slots and 3 places to wait, which notes what it is asked for."""

    def __init__(self) -> None:
        self.running = 0
        self.asked: list[TextRequest] = []

    def figures(self) -> EngineFigures:
        return EngineFigures(
            slots=2, running=self.running, waiting=0, most_waiting=3, passes=0,
            generated_tokens=0, bytes_streamed=0, texts={},
        )  # fmt: skip

    def submit(self, request: TextRequest) -> Running:
        self.asked.append(request)
        return Running(request)

    def close(self) -> None:
        pass


@pytest.fixture
def engine() -> Busy:
    return Busy()


@pytest.fixture
def service(engine: Busy) -> Iterator[Service]:
    tokenizer = load_tokenizer(DEMO)
    tokenizer.chat_template = "{{ messages[0].content }}<|assistant|><think>{{ '\\n' }}"
    session: Any = SimpleNamespace(
        context_length=64, settings={}, layers=2, vocab_size=4096, eos_ids=[tokenizer.eos_token_id],
        tokenizer=tokenizer,
        pair=SimpleNamespace(name="toy", target=SimpleNamespace(name="toy"), draft_name=None),
    )  # fmt: skip
    defaults = Defaults(sampling=SamplingConfig(), max_tokens=4)
    service = Service(session, engine, defaults)  # type: ignore[arg-type]
    yield service
    service.close()


def test_more_texts_than_ever_fit_are_refused_for_good(service: Service, engine: Busy) -> None:
    with pytest.raises(ApiError, match="asks for 6 texts") as refused:
        service.submit([TEXT] * 6)
    assert refused.value.status == 400
    assert engine.asked == []
    assert len(service.submit([TEXT] * 5)) == 5


def test_texts_that_do_not_fit_now_leave_the_queue_alone(service: Service, engine: Busy) -> None:
    engine.running = 2
    with pytest.raises(ApiError, match="try again") as refused:
        service.submit([TEXT] * 4)
    assert refused.value.status == 429
    assert engine.asked == []
    assert len(service.submit([TEXT] * 3)) == 3


def test_a_grammar_holds_nobody_else_up(service: Service) -> None:
    """Others are encoded while one waits for its schema."""
    hold = threading.Event()

    async def both() -> None:
        def slow(maker: Any) -> Any:
            assert hold.wait(30)
            return maker.json_schema({"type": "object"})

        waiting = asyncio.ensure_future(service.grammar(slow))
        found = await asyncio.wait_for(service.encoding(lambda maker: maker.raw("x")), 30)
        assert found.tokens
        assert not waiting.done()
        hold.set()
        assert await waiting

    asyncio.run(both())


def chat(service: Service, messages: list[dict[str, str]], **more: bool) -> Any:
    """What a chat of these messages gives the model to read."""
    return asyncio.run(service.encoding(lambda maker: maker.chat(messages, None, **more)))


def test_with_a_grammar_the_thinking_that_a_template_opens_is_ended(service: Service) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert chat(service, messages).text.endswith("<think>\n")
    at_once = chat(service, messages, answer_at_once=True)
    assert at_once.text == "hi<|assistant|><think>\n\n</think>\n\n"
    tokens = service.tokenizer.encode(at_once.text, add_special_tokens=False)
    assert at_once.tokens == tuple(tokens)


def test_a_template_without_end_is_an_answer_and_holds_nobody_up(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    good = service.tokenizer.chat_template
    chat(service, messages)
    monkeypatch.setattr("specexec_cli.models.templates._MOST_S", 0.2)
    service.tokenizer.chat_template = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(ApiError, match=r"the chat template of toy takes more than 0\.2 s") as told:
        chat(service, messages)
    assert told.value.status == 500
    service.tokenizer.chat_template = good
    monkeypatch.undo()
    assert chat(service, messages).tokens


@pytest.mark.parametrize("chat", [False, True])
def test_a_long_prompt_is_read_no_further_than_it_may_fit(
    service: Service, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    monkeypatch.setattr("specexec_cli.serve.prompts._SLICE", 50)
    maker, read = asyncio.run(service.encoding(lambda maker: maker, 1)), []
    whole = type(maker.tokenizer).__call__

    def counted(self: Any, text: str, **more: Any) -> Any:
        read.append(len(text))
        return whole(self, text, **more)

    monkeypatch.setattr(type(maker.tokenizer), "__call__", counted)
    messages = [{"role": "user", "content": "a b c d " * 1000}]
    with pytest.raises(ApiError, match="has more than 64 tokens, the context window holds 64 and"):
        maker.chat(messages, None) if chat else maker.raw(messages[0]["content"])
    assert sum(read) < 1000
    monkeypatch.undo()
    assert len(maker.raw("a b c d " * 7).tokens) < 64


def test_requests_of_some_length_hold_no_short_one_up(service: Service) -> None:
    hold = threading.Event()

    async def both() -> None:
        slow = asyncio.ensure_future(service.encoding(lambda _: hold.wait(30), 1 << 20))
        await asyncio.wait_for(service.encoding(lambda maker: maker.raw("x"), 1000), 30)
        assert not slow.done()
        hold.set()
        assert await slow

    asyncio.run(both())


def test_tokens_are_spelled_by_a_tokenizer_of_their_own(service: Service) -> None:
    body, prompt = CompletionBody(prompt="x"), Prompt(text="x", tokens=(1,))
    service.texts(body, [prompt], 1, None, None)
    assert service.spelling is None, "nobody asked for log-probabilities"
    service.texts(body, [prompt], 1, 2, None)
    made = service.spelling
    assert made is not None
    assert made._tokenizer is not service.tokenizer
    service.texts(body, [prompt], 1, 2, None)
    assert service.spelling is made
