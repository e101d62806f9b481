"""How many passes it takes to a new text's first token, while other texts are under way.

Passes are counted, not timed. The text is submitted in the middle of a pass, which counts as the
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from checkpoints import byte_llama, save_pair
from slot_toys import prompt_rows

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.engine.batched import Batched
from specexec_cli.engine.text import Running, TextRequest
from specexec_cli.planning.request import TreeRequest
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession

CHUNK = 16  # rows of prompts in a pass


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSession]:
    config = byte_llama(max_position_embeddings=256)
    target, draft = map(str, save_pair(tmp_path_factory.mktemp("pair"), target=config))
    with Session.open(model=target, draft=draft, offload="ssd",
                      tree=TreeRequest(budget=24, depth=6, batch=6)) as opened:  # fmt: skip
        assert isinstance(opened, LocalSession)
        yield opened


def asked(tokens: int, seed: int, count: int = 60) -> TextRequest:
    """A text behind so many tokens, which begins like no other seed's."""
    prompt = tuple((7 * seed + 3 * at * at) % 200 for at in range(tokens))
    sampling = SamplingConfig(temperature=1.0, seed=seed)
    return TextRequest(
        prompt=prompt, sampling=sampling, generation=GenerationConfig(max_tokens=count)
    )


def passes_until_first_tokens(session: LocalSession, newcomers: Sequence[int]) -> list[int]:
    """Passes that end until each newcomer's first token, of prompts of so many tokens."""
    engine = Batched(session, slots=3 + len(newcomers), most_waiting=0)
    model = session.target.model
    layer = model.on_layer
    came: list[Running] = []
    first: dict[Running, int] = {}
    before = 0

    def heard(running: Running) -> None:  # in the engine's thread, so no pass ends meanwhile
        if running.take():
            first.setdefault(running, engine.figures().passes - before)

    def on_layer(index: int) -> None:
        nonlocal before
        figures = engine.figures()
        if index == 1 and figures.passes >= 3 and figures.running == 3 and not came:
            before = figures.passes
            for number, tokens in enumerate(newcomers):
                running = engine.submit(asked(tokens, 10 + number, 4))
                came.append(running)
                running.listen(lambda running=running: heard(running))
        layer(index)

    model.on_layer = on_layer
    try:
        others = [engine.submit(asked(5, seed)) for seed in range(3)]
        for running in others:
            list(running)
        for running in came:
            list(running)
    finally:
        engine.close()
    assert len(came) == len(newcomers), "the others ended before anybody came"
    return [first[running] for running in came]


@pytest.mark.parametrize(
    ("tokens", "passes"),
    [
        (1, 2),
        (CHUNK, 2),  # a prompt that fits goes with the next pass
        (CHUNK + 1, 3),
        (3 * CHUNK, 4),  # and a longer one takes a pass for each chunk
    ],
)
def test_a_newcomer_goes_with_the_next_pass(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch, tokens: int, passes: int
) -> None:
    prompt_rows(monkeypatch, CHUNK)
    assert passes_until_first_tokens(session, [tokens]) == [passes]


def test_newcomers_whose_prompts_fit_together_need_no_more(
    session: LocalSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_rows(monkeypatch, CHUNK)
    assert passes_until_first_tokens(session, [CHUNK // 2, CHUNK // 2]) == [2, 2]
    assert passes_until_first_tokens(session, [CHUNK, CHUNK]) == [2, 3], "the oldest goes first"


def test_as_it_is_a_prompt_of_64_tokens_fits(session: LocalSession) -> None:
    assert passes_until_first_tokens(session, [64]) == [2]
