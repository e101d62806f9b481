"""The engine of several texts: each is what its session writes alone, whoever comes and goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    BYTE_VOCAB,
    architecture,
    byte_llama,
    random_tokens,
    save_byte_tokenizer,
    save_pair,
)
from gguf_toys import TOYS, save_toy
from slot_toys import prompt_rows

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.core import StepResult
from specexec_cli.decoding import batch
from specexec_cli.engine.batched import Batched
from specexec_cli.engine.factory import open_engine
from specexec_cli.engine.one_at_a_time import OneAtATime
from specexec_cli.engine.text import EngineFailedError, QueueFullError, Running, TextRequest
from specexec_cli.errors import ConfigError, StreamError
from specexec_cli.planning.request import TreeRequest
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession
from specexec_cli.session.text_session import GenerationRequest

TREE = TreeRequest(budget=24, depth=6, batch=6)
SYSTEM = "You answer in few words, and you never guess what you do not know. "


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    config = byte_llama(max_position_embeddings=256)
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), target=config)
    return {"model": str(target), "draft": str(draft)}


@pytest.fixture(params=["float32", "bfloat16"])
def session(pair: dict[str, str], request: pytest.FixtureRequest) -> Iterator[LocalSession]:
    with Session.open(**pair, dtype=request.param, offload="ssd", tree=TREE) as opened:
        assert isinstance(opened, LocalSession)
        yield opened


@pytest.fixture
def plain(pair: dict[str, str]) -> Iterator[LocalSession]:
    with Session.open(**pair, dtype="float32", offload="ssd", tree=TREE) as opened:
        assert isinstance(opened, LocalSession)
        yield opened


def text(
    session: LocalSession, prompt: str, count: int = 24, stop: tuple[str, ...] = (), **sampling
) -> TextRequest:
    return TextRequest(
        prompt=tuple(session.encode(prompt)),
        sampling=SamplingConfig(**sampling),
        generation=GenerationConfig(max_tokens=count, stop=stop),
    )


Outcome = tuple[list[int], str, str | None]  # tokens, text, why it ended


def outcome(steps: list[StepResult]) -> Outcome:
    tokens = [token for step in steps for token in step.tokens]
    return tokens, "".join(step.text for step in steps), steps[-1].finish_reason


def alone(session: LocalSession, request: TextRequest) -> Outcome:
    session.forget()
    steps = session.generate(
        request.prompt, sampling=request.sampling, generation=request.generation
    )
    return outcome(list(steps))


def requests_of(session: LocalSession) -> list[tuple[TextRequest, Outcome]]:
    """Texts and what the session alone makes of them.

    Different beginnings and lengths; greedy and drawn; with stop strings, and without."""
    requests = [text(session, "abc", 9), text(session, "abd", 20, temperature=0.8, seed=1)]
    for at in range(3):
        prompt = SYSTEM + f"question {at}" * (1 + at)
        requests.append(text(session, prompt, 8 + 5 * at, temperature=0.8 * (at % 2), seed=at))
    found = [(request, alone(session, request)) for request in requests]
    for request, (_, written, _) in found[1:3]:
        stop = GenerationConfig(max_tokens=30, stop=(written[6:8],))
        request = replace(request, generation=stop)
        found.append((request, alone(session, request)))
    assert {finish for _, (*_, finish) in found} >= {"stop", "length"}
    return found


@pytest.mark.parametrize("slots", [2, 4])
def test_each_text_is_what_the_session_writes_alone(session: LocalSession, slots: int) -> None:
    requests, expected = zip(*requests_of(session), strict=True)
    engine = Batched(session, slots=slots, most_waiting=99)
    try:
        running = [engine.submit(request) for request in requests]
        assert [outcome(list(each)) for each in running] == list(expected)
        figures = engine.figures()
    finally:
        engine.close()
    assert sum(figures.texts.values()) == len(requests)
    assert figures.generated_tokens == sum(len(tokens) for tokens, *_ in expected)
    assert figures.passes < sum(each.stats.target_passes for each in running)
    assert figures.running == figures.waiting == 0


def test_joins_leaves_and_cancels_at_random(plain: LocalSession) -> None:
    requests, expected = zip(*requests_of(plain), strict=True)
    rng = np.random.default_rng(0)
    engine = Batched(plain, slots=3, most_waiting=99)
    try:
        asked: list[tuple[int, Running, bool]] = []
        for _ in range(14):
            at = int(rng.integers(len(requests)))
            asked.append((at, engine.submit(requests[at]), bool(rng.random() < 0.4)))
            if rng.random() < 0.5:
                next(iter(asked[int(rng.integers(len(asked)))][1]), None)
            for _, running, cancelled in asked:
                if cancelled and rng.random() < 0.3:
                    running.cancel()
        for at, running, _ in asked:
            list(running)
            assert running.done
            if running.finish != "cancelled":
                tokens = running.stats.generated_tokens
                assert (tokens, running.finish) == (len(expected[at][0]), expected[at][2])
        last = [outcome(list(engine.submit(request))) for request in requests]
        assert last == list(expected)
    finally:
        engine.close()


def test_logprobs_and_statistics_are_those_of_the_text(plain: LocalSession) -> None:
    request = TextRequest(
        prompt=tuple(plain.encode("abc")),
        sampling=SamplingConfig(temperature=0.7, seed=3),
        generation=GenerationConfig(max_tokens=12),
        top_logprobs=2,
    )
    generated = plain.generate(
        request.prompt, sampling=request.sampling, generation=request.generation, top_logprobs=2
    )
    expected = [each for step in generated for each in step.logprobs]
    engine = Batched(plain, slots=2, most_waiting=4)
    try:
        other = engine.submit(text(plain, "zzz", 20))
        running = engine.submit(request)
        assert [each for step in running for each in step.logprobs] == expected
        assert running.stats.generated_tokens == 12
        assert running.stats.prompt_tokens == len(request.prompt)
        assert running.stats.bytes_streamed > 0
        list(other)
    finally:
        engine.close()


def test_the_queue_has_a_limit(plain: LocalSession) -> None:
    engine = Batched(plain, slots=2, most_waiting=1)
    held = threading.Event()
    layer = plain.target.model.on_layer
    plain.target.model.on_layer = lambda index: (held.wait(60), layer(index))[1]
    try:
        running = [engine.submit(text(plain, "abc", 40)) for _ in range(3)]
        with pytest.raises(QueueFullError, match="waiting already"):
            engine.submit(text(plain, "abc"))
        running[2].cancel()
        running.append(engine.submit(text(plain, "abd", 5)))  # its place in the queue is free
        held.set()
        assert [each.finish for each in running if list(each)] == ["length"] * 3
        assert running[2].finish == "cancelled"
    finally:
        held.set()
        engine.close()
    with pytest.raises(QueueFullError, match="shutting down"):
        engine.submit(text(plain, "abc"))


def test_what_cannot_be_generated_is_refused_at_once(plain: LocalSession) -> None:
    engine = Batched(plain, slots=2, most_waiting=1)
    try:
        for prompt in ("", "x" * 300):
            with pytest.raises(ConfigError):
                engine.submit(text(plain, prompt))
    finally:
        engine.close()


def test_a_failed_pass_ends_its_texts_and_the_next_ones_go_on(plain: LocalSession) -> None:
    expected = alone(plain, text(plain, "abc"))
    engine = Batched(plain, slots=2, most_waiting=9)
    model, layer = plain.target.model, plain.target.model.on_layer

    def failing(index: int) -> None:
        raise StreamError("the disk is gone")

    try:
        model.on_layer = failing
        running = [engine.submit(text(plain, each)) for each in ("abc", "abd")]
        for each in running:
            with pytest.raises(StreamError):
                list(each)
            assert each.finish == "failed"
        model.on_layer = layer
        assert outcome(list(engine.submit(text(plain, "abc")))) == expected
        assert engine.figures().texts == {"failed": 2, "length": 1}
    finally:
        engine.close()


def test_a_text_that_cannot_begin_costs_the_others_nothing(
    plain: LocalSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = alone(plain, text(plain, "abc"))
    engine = Batched(plain, slots=2, most_waiting=9)
    begun = Batched._begun

    def failing(self: Batched, running: Running, request: GenerationRequest) -> object:
        if request.max_tokens == 5:
            raise KeyError("a bug")
        return begun(self, running, request)

    monkeypatch.setattr(Batched, "_begun", failing)
    try:
        running = [engine.submit(text(plain, "abc", count)) for count in (5, 24)]
        with pytest.raises(KeyError):
            list(running[0])
        assert outcome(list(running[1])) == expected
        assert engine.figures().texts == {"failed": 1, "length": 1}
    finally:
        engine.close()
    assert "KeyError" in capsys.readouterr().err


def test_nobody_waits_for_an_engine_that_has_died(
    plain: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(self: Batched) -> None:
        raise KeyError("a bug")

    engine = Batched(plain, slots=2, most_waiting=9)
    monkeypatch.setattr(Batched, "_admit", dying)
    running = engine.submit(text(plain, "abc"))
    with pytest.raises(KeyError):
        list(running)
    assert engine.figures().failed
    for _ in range(2):
        with pytest.raises(EngineFailedError, match=r"has ended the engine, .* start the server"):
            engine.submit(text(plain, "abc"))
        engine.close()


def test_rows_of_a_prompt_that_came_in_pieces_are_all_counted(
    plain: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_rows(monkeypatch, 4)
    engine = Batched(plain, slots=2, most_waiting=9)
    try:
        first = engine.submit(text(plain, "abc", 24))
        next(iter(first))
        request = text(plain, "zyxwvutsrqponmlkjihgfedcba", 3)
        second = engine.submit(request)
        list(second)
        list(first)
        assert second.stats.prompt_rows == len(request.prompt)
    finally:
        engine.close()


def test_close_ends_everything_in_the_middle_of_a_pass(plain: LocalSession) -> None:
    engine = Batched(plain, slots=2, most_waiting=9)
    running = [engine.submit(text(plain, "abc", 200)) for _ in range(4)]
    next(iter(running[0]))
    engine.close()
    engine.close()
    assert [each.finish for each in running] == ["cancelled"] * 4
    assert "specexec-engine" not in {thread.name for thread in threading.enumerate()}
    assert outcome(list(plain.generate("abc", generation=GenerationConfig(max_tokens=3))))[2]


def test_the_factory_takes_turns_where_one_text_is_planned_for(plain: LocalSession) -> None:
    for slots, kind in ((1, OneAtATime), (2, Batched)):
        engine = open_engine(plain, slots=slots, most_waiting=1)
        assert type(engine) is kind
        engine.close()


@pytest.mark.parametrize("drafts", [{"method": "autoregressive"}, {"draft": "suffix"}])
def test_without_a_draft_model(pair: dict[str, str], drafts: dict[str, str]) -> None:
    options = {"model": pair["model"], **drafts}
    with Session.open(**options, dtype="float32", offload="ssd") as session:
        assert isinstance(session, LocalSession)
        repeating = "to and fro and to and fro and to and "
        requests = [text(session, repeating, 9), text(session, "abd", 12, temperature=0.8)]
        expected = [alone(session, request) for request in requests]
        engine = Batched(session, slots=2, most_waiting=1)
        try:
            running = [engine.submit(request) for request in requests]
            steps = [list(each) for each in running]
            assert [outcome(each) for each in steps] == expected
            assert engine.figures().passes <= 13
        finally:
            engine.close()
        assert any(step.tree_nodes for step in steps[0]) == (drafts != {"method": "autoregressive"})


def test_texts_share_the_experts_of_their_passes(tmp_path: Path) -> None:
    config = architecture("qwen3-moe")
    config.vocab_size = BYTE_VOCAB
    target, draft = map(str, save_pair(tmp_path, target=config))
    with Session.open(model=target, draft=draft, offload="ssd", tree=TREE, slots=2) as opened:
        assert isinstance(opened, LocalSession)
        engine = Batched(opened, slots=2, most_waiting=0)
        try:
            texts = [engine.submit(text(opened, prompt, 8)) for prompt in ("one", "two")]
            for running in texts:
                list(running)
        finally:
            engine.close()
        asked, held = opened.experts_counted()
    assert 0 < held <= asked
    # each pass leaves a remainder of less than one expert per text
    passes = sum(running.stats.target_passes for running in texts)
    assert asked - 2 * passes < sum(running.stats.experts_asked for running in texts) <= asked
    assert held - 2 * passes < sum(running.stats.experts_held for running in texts) <= held
    assert all(running.stats.link_bytes_per_s == opened.link_bytes_per_s for running in texts)


def test_a_text_that_waits_for_the_next_pass_pays_for_no_experts(tmp_path: Path) -> None:
    """One that begins alike waits for the rows of the other; neither bytes nor experts are its."""
    config = architecture("qwen3-moe")
    config.vocab_size = BYTE_VOCAB
    target, draft = map(str, save_pair(tmp_path, target=config))
    with Session.open(model=target, draft=draft, offload="ssd", tree=TREE, slots=2) as opened:
        assert isinstance(opened, LocalSession)
        engine = Batched(opened, slots=2, most_waiting=0)
        passes: list[tuple[list[Running], int]] = []  # who was carried, and the experts asked for
        step = engine._batch.step

        def counted(texts: Sequence[batch.BatchText]) -> list[batch.Outcome]:
            before = opened.experts_counted()[0]
            outcomes = step(texts)
            carried = [each.running for each in engine._texts if each.batched.carried]
            passes.append((carried, opened.experts_counted()[0] - before))
            return outcomes

        engine._batch.step = counted  # type: ignore[method-assign]
        try:
            with engine._changed:  # both are there when the first pass begins
                texts = [engine.submit(text(opened, SYSTEM + name, 6)) for name in "ab"]
            for running in texts:
                list(running)
        finally:
            engine.close()
    assert [texts[0]] in [carried for carried, _ in passes], "the second one waited"
    for running in texts:
        expected = sum(asked // len(carried) for carried, asked in passes if running in carried)
        assert running.stats.experts_asked == expected > 0


@pytest.mark.parametrize("together", [True, False])
def test_texts_with_one_system_prompt_read_it_once(tmp_path: Path, together: bool) -> None:
    """Sixteen texts at once, and sixteen of which the others come when the first is under way."""
    config = byte_llama(max_position_embeddings=4096)
    target, draft = save_pair(tmp_path, target=config)
    system = [3 + each % 200 for each in random_tokens(2000)]
    asked = [(*system, *f"question {at}".encode()) for at in range(16)]
    generation = GenerationConfig(max_tokens=6)
    with Session.open(model=str(target), draft=str(draft), dtype="float32", offload="ssd",
                      tree=TREE, slots=16, context_tokens=2048) as opened:  # fmt: skip
        expected = []
        for prompt in asked[:3]:
            opened.forget()
            steps = opened.generate(prompt, generation=generation)
            expected.append([token for step in steps for token in step.tokens])
        engine = open_engine(opened, slots=16, most_waiting=16)

        def begun(prompt: tuple[int, ...]) -> Running:
            return engine.submit(
                TextRequest(prompt=prompt, sampling=SamplingConfig(), generation=generation)
            )

        running = [begun(asked[0])]
        steps = []
        if not together:
            steps = [next(iter(running[0]))]
        running += [begun(prompt) for prompt in asked[1:]]
        written = [[*steps, *running[0]], *map(list, running[1:])]
        engine.close()
    found = [[token for step in each for token in step.tokens] for each in written]
    assert found[:3] == expected
    generated = sum(map(len, found))
    rows = sum(each.stats.prompt_rows for each in running)
    assert rows <= len(system) + sum(len(prompt) - len(system) for prompt in asked) + generated


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_recurrent_layers_share_a_system_prompt_too(name: str, tmp_path: Path) -> None:
    """A state is kept where texts part: at once where it is known, else from the second text on."""
    save_toy(TOYS[name], tmp_path)
    save_byte_tokenizer(tmp_path)
    system = [3 + each % 40 for each in random_tokens(300)]
    asked = [(*system, *(5 + at, 6, 7 + at % 3) * 14) for at in range(8)]
    generation = GenerationConfig(max_tokens=4)
    with Session.open(model=str(tmp_path), method="autoregressive", dtype="float32", offload="ssd",
                      slots=4, context_tokens=400) as opened:  # fmt: skip
        expected = []
        for prompt in asked:
            opened.forget()
            steps = opened.generate(prompt, generation=generation)
            expected.append([token for step in steps for token in step.tokens])
        engine = open_engine(opened, slots=4, most_waiting=9)
        running = [
            engine.submit(
                TextRequest(prompt=prompt, sampling=SamplingConfig(), generation=generation)
            )
            for prompt in asked
        ]
        found = [[token for step in each for token in step.tokens] for each in running]
        engine.close()
    assert found == expected
    rows = sum(each.stats.prompt_rows for each in running)
    own = sum(len(prompt) - len(system) for prompt in asked)
    assert rows <= 2 * len(system) + own + sum(map(len, found))
