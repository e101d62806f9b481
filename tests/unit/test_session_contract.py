"""What every session promises, on each kind of it: models in this process, models in workers.

The pair has every edge at once: a draft model with a shorter window and a smaller vocabulary than
the target's, a token that spoils the target's logits, and one that spoils the draft model's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import (
    BYTE_VOCAB,
    byte_llama,
    chain_logits,
    open_float32,
    save_byte_tokenizer,
    save_checkpoint,
    spoil_logits,
)

from specexec_cli.config import DsiOptions, GenerationConfig, SamplingConfig, TreeConfig
from specexec_cli.core import StepResult
from specexec_cli.drafting.learned import Learned
from specexec_cli.errors import CheckpointError, ConfigError, NonFiniteLogitsError
from specexec_cli.session import Session, TextSession
from specexec_cli.session.dsi_session import DsiSession
from specexec_cli.session.local_session import LocalSession

VOCAB, WINDOW, DRAFT_WINDOW, LAYERS = 320, 96, 40, 2
UNKNOWN_TO_DRAFT = 265
SPOILS_DRAFT = 7
TREE = TreeConfig(budget=8, max_depth=4, batch=4)
COUNT = 16  # tokens of a text, unless a test says otherwise
TEMPLATE = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=0.9, seed=4)
SPOILT = SamplingConfig(temperature=3.0, seed=2)  # comes to the token that spoils the target
UNSPOILT_TOKENS = 10  # of that text, at least


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path
    spoilt_text: list[int]  # behind "abc" under SPOILT; its last token spoils the target's logits


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    config = byte_llama(num_hidden_layers=LAYERS, vocab_size=VOCAB, max_position_embeddings=WINDOW)
    target = save_checkpoint(folder / "target", config, std=0.12)
    config = byte_llama(num_hidden_layers=LAYERS, max_position_embeddings=DRAFT_WINDOW)
    save_checkpoint(folder / "draft", config, noise_of=target, noise=0.01)
    for name in ("target", "draft"):
        save_byte_tokenizer(folder / name, chat_template=TEMPLATE)
    spoil_logits(folder / "draft", SPOILS_DRAFT)
    spoil_logits(folder / "target", None)
    with plain_session(folder / "target") as session:
        text = tokens_of(run(session, count=40, sampling=SPOILT))
    # the first new one that the draft model may draft as well
    length = next(
        at
        for at in range(UNSPOILT_TOKENS, 40)
        if text[at] < BYTE_VOCAB and text[at] not in text[:at]
    )
    spoil_logits(folder / "target", text[length])
    return Pair(folder / "target", folder / "draft", text[: length + 1])


def plain_session(target: Path) -> TextSession:
    return Session.open(model=str(target), method="autoregressive", device="cpu", dtype="float32")


@pytest.fixture(scope="module", params=["local", "dsi"])
def session(pair: Pair, request: pytest.FixtureRequest) -> Iterator[TextSession]:
    notices: list[str] = []
    with Session.open(
        model=str(pair.target), draft=str(pair.draft), device="cpu", dtype="float32",
        offload="ssd",
        method="dsi" if request.param == "dsi" else "specexec", notice=notices.append,
        dsi=DsiOptions(sp=2, lookahead=2),
    ) as opened:  # fmt: skip
        assert isinstance(opened, DsiSession if request.param == "dsi" else LocalSession)
        yield opened
        assert not [line for line in notices if "lost" in line or "without it" in line]


@pytest.fixture(scope="module")
def oracle(pair: Pair) -> Iterator[TextSession]:
    with plain_session(pair.target) as session:
        yield session


def run(
    session: TextSession, prompt: str | Sequence[int] = "abc", count: int = COUNT, **options
) -> list[StepResult]:
    generation = GenerationConfig(max_tokens=count, stop=options.pop("stop", ()))
    return list(session.generate(prompt, generation=generation, tree=TREE, **options))


def tokens_of(steps: Sequence[StepResult]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@functools.cache
def plain(
    oracle: TextSession, prompt: str | tuple[int, ...] = "abc", count: int = COUNT, **options
):
    """The tokens that every method of every session must write."""
    return tokens_of(run(oracle, prompt, count, **options))


def assert_drafts(session: TextSession) -> None:
    """Some committed tokens had been drafted; where drafting runs beside the target, at last."""
    for _ in range(20):
        if any(any(step.drafted) for step in run(session, "hello")):
            return
    raise AssertionError("no draft was accepted in 20 texts")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", [None, "autoregressive"])
def test_the_text_is_the_plain_text(session, oracle, sampling, method) -> None:
    steps = run(session, "hello", 24, sampling=sampling, method=method)
    assert tokens_of(steps) == plain(oracle, "hello", 24, sampling=sampling)
    text = "".join(step.text for step in steps)
    whole = [*session.encode("hello"), *tokens_of(steps)]
    assert "hello" + text == session.tokenizer.decode(whole, skip_special_tokens=True)
    assert session.context == whole
    assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + ["length"]


def test_its_own_method_drafts(session) -> None:
    """Or the equality above would prove little."""
    assert_drafts(session)


def test_plain_decoding_is_one_token_a_pass(session) -> None:
    steps = run(session, method="autoregressive")
    assert all(len(step.tokens) == 1 and step.drafted == (False,) for step in steps)
    assert all(step.tree_nodes == 0 for step in steps)
    assert session.stats.target_passes == session.stats.generated_tokens == COUNT


def test_a_method_of_another_kind_of_session_is_refused(session) -> None:
    foreign = "dsi" if session.method == "specexec" else "specexec"
    with pytest.raises(ConfigError, match=f"this session runs on .* `method='{foreign}'` does not"):
        session.generate("abc", method=foreign)
    refused = "is not among those known here" if foreign == "dsi" else "does not: use dsi"
    with pytest.raises(ConfigError, match=f"`method='beams'` {refused}"):
        session.generate("abc", method="beams")


def test_facts_about_the_target(session) -> None:
    assert session.vocab_size == VOCAB
    assert session.layers == LAYERS
    assert session.context_length == WINDOW
    session.context_limit = 50
    assert session.context_length == 50
    session.context_limit = None
    assert session.settings["device"].startswith("cpu")
    assert session.ssd_share == 1.0
    assert session.pair.tree.budget >= 1


def test_prompts_that_cannot_be_are_refused_at_the_call(session) -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        session.generate([])
    for token in (VOCAB, -1):
        with pytest.raises(ConfigError, match=f"the prompt has token {token} but the target knows"):
            session.generate([200, token, 5])
    with pytest.raises(ConfigError, match="96 tokens, the context window holds 96"):
        session.generate([5] * WINDOW)


def test_a_text_goes_on_behind_the_draft_model_s_window(session, oracle) -> None:
    prompt = tuple(range(20, 50))
    for begin, count in ((prompt, 40), (prompt * 2, 10), (prompt * 3, 20)):
        expected = plain(oracle, begin, count)
        assert tokens_of(run(session, begin, count)) == expected
        assert len(begin) + len(expected) == min(len(begin) + count, WINDOW)
        assert session.stats.paused_passes == 0, "no policy has left a tree out"
    # within the draft model's window drafts come, and come again after a text beyond it
    assert_drafts(session)


def test_tokens_that_the_draft_model_does_not_know(session, oracle) -> None:
    prompt = (*range(20, 26), UNKNOWN_TO_DRAFT, 30, VOCAB - 1)
    for sampling in (GREEDY, SAMPLED):
        steps = run(session, prompt, 20, sampling=sampling)
        assert tokens_of(steps) == plain(oracle, prompt, 20, sampling=sampling)
    # its own tokens, too: at a high temperature about one in five is of the padding
    hot = SamplingConfig(temperature=30.0, seed=1)
    expected = plain(oracle, "abc", 30, sampling=hot)
    assert max(expected[:20]) >= BYTE_VOCAB
    assert tokens_of(run(session, "abc", 30, sampling=hot)) == expected
    assert_drafts(session)


@pytest.mark.parametrize("method", [None, "autoregressive"])
def test_logits_that_are_not_finite_end_the_text_and_not_the_session(
    session, oracle, pair, method
) -> None:
    for _ in range(2):
        with pytest.raises(NonFiniteLogitsError, match="position 2 are not finite") as raised:
            run(session, [20, pair.spoilt_text[-1]], method=method)
        assert raised.value.exit_code == 8
    assert tokens_of(run(session, method=method)) == plain(oracle)
    if isinstance(session, DsiSession):
        assert len(session._workers.servers) == 2


@pytest.mark.parametrize("method", [None, "autoregressive"])
def test_a_text_comes_to_the_token_that_spoils_it(session, pair, method) -> None:
    tokens: list[int] = []
    limit = GenerationConfig(max_tokens=60)
    steps = session.generate("abc", generation=limit, tree=TREE, sampling=SPOILT, method=method)
    with pytest.raises(NonFiniteLogitsError):
        tokens.extend(token for step in steps for token in step.tokens)
    assert len(tokens) >= len(pair.spoilt_text)
    assert tokens == pair.spoilt_text[: len(tokens)]


def test_a_text_that_ends_before_it_is_spoilt_is_whole(session, pair) -> None:
    """Drafts lead the passes beyond the end, where logits are not finite."""
    ends, session.eos_ids = session.eos_ids, frozenset({pair.spoilt_text[-1]})
    try:
        steps = run(session, "abc", 60, sampling=SPOILT)
    finally:
        session.eos_ids = ends
    assert tokens_of(steps) == pair.spoilt_text
    assert steps[-1].finish_reason == "eos"


def test_a_draft_model_whose_logits_are_not_finite_drafts_nothing(session, oracle) -> None:
    prompt = (20, 21, SPOILS_DRAFT)
    steps = run(session, prompt, 20)
    assert tokens_of(steps) == plain(oracle, prompt, 20)
    assert steps[0].drafted == (False,)
    assert_drafts(session)


def test_forgetting_runs_the_prompt_again(session, oracle) -> None:
    prompt = tuple(session.encode("a prompt of some length"))
    expected = plain(oracle, prompt, 8)
    session.forget()
    for rows in (len(prompt), 1, 1):
        assert tokens_of(run(session, prompt, 8)) == expected
        assert session.stats.prompt_rows == rows
    session.forget()
    assert tokens_of(run(session, prompt, 8, method="autoregressive")) == expected
    assert session.stats.prompt_rows == len(prompt)


def test_forgetting_in_the_middle_of_a_text_changes_no_token(session, oracle) -> None:
    steps = session.generate("abc", tree=TREE, generation=GenerationConfig(max_tokens=COUNT))
    tokens = [*next(steps).tokens]
    session.forget()
    tokens += [token for step in steps for token in step.tokens]
    assert tokens == plain(oracle)


def test_scores_are_the_models_logits(session, pair, oracle) -> None:
    text = [20, 21, 22, UNKNOWN_TO_DRAFT, 24, 25, 26]
    known = [20, 21, 22, 0, 24, 25, 26]
    target, draft = open_float32(pair.target, None), open_float32(pair.draft, None)
    expected = chain_logits(target, text)[2:-1], chain_logits(draft, known)[2:-1]
    for found in (session.score(text, 3), (expected[0], session.draft_logits(text, 3))):
        assert [tuple(logits.shape) for logits in found] == [(4, VOCAB), (4, BYTE_VOCAB)]
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert tokens_of(run(session)) == plain(oracle)


def test_scoring_ends_a_text_that_is_under_way(session, oracle) -> None:
    steps = session.generate("abc", tree=TREE)
    next(steps)
    session.score([20, 21, 22, 23], 1)
    with pytest.raises(ConfigError, match="this generation has ended"):
        next(steps)
    assert tokens_of(run(session)) == plain(oracle)


def test_what_is_learned_can_be_looked_at_and_replaced(session) -> None:
    assert isinstance(session.learned, Learned)
    session.learned = Learned(session.classifier)
    assert len(tokens_of(run(session))) == COUNT
    assert isinstance(session.reliability.bins, dict | list | tuple)
    with pytest.raises(CheckpointError, match="train"):
        session.classifier()


def test_prompts_and_conversations_become_tokens(session, oracle) -> None:
    tokens = session.encode("hi")
    assert tokens == session.encode_rendered("hi")
    messages = [{"role": "user", "content": "hi"}]
    assert session.render_chat(messages) == "hi</s>"
    assert session.encode_chat(messages) == [*tokens, session.special_tokens["</s>"]]
    template, session.tokenizer.chat_template = session.tokenizer.chat_template, None
    try:
        with pytest.raises(ConfigError, match="has no chat template: it is a base model"):
            session.encode_chat(messages)
    finally:
        session.tokenizer.chat_template = template
    prompt = tuple(session.encode_chat(messages))
    assert tokens_of(run(session, prompt, 8)) == plain(oracle, prompt, 8)


def test_stop_strings_and_eos_end_the_text(session, oracle) -> None:
    expected = plain(oracle)
    text = "".join(step.text for step in run(session))
    steps = run(session, stop=(text[5:7], "never in there"))
    assert "".join(step.text for step in steps) == text[: text.index(text[5:7])]
    assert steps[-1].finish_reason == "stop"
    assert tokens_of(steps) == expected[: len(tokens_of(steps))]
    ends, session.eos_ids = session.eos_ids, frozenset({expected[6]})
    try:
        steps = run(session)
    finally:
        session.eos_ids = ends
    assert tokens_of(steps) == expected[: expected.index(expected[6]) + 1]
    assert steps[-1].finish_reason == "eos"
    assert tokens_of(run(session)) == expected, "and the next one is right"


def test_statistics_add_up(session) -> None:
    session.forget()
    steps = run(session, "hello there", 20)
    stats = session.stats
    assert stats.prompt_tokens == stats.prompt_rows == len(session.encode("hello there"))
    assert stats.generated_tokens == len(tokens_of(steps)) == 20
    assert stats.target_passes >= len(steps) > 1
    assert stats.bytes_streamed > 0
    assert 0 < stats.ttft_s <= stats.total_s
    assert stats.first_tokens == len(steps[0].tokens)
    assert stats.peak_ram_bytes > 0


def test_a_callback_for_layers_changes_nothing(session, oracle) -> None:
    seen: list[int] = []
    session.on_layer(lambda progress: seen.append(progress.layers))
    try:
        assert tokens_of(run(session)) == plain(oracle)
    finally:
        session.on_layer(lambda progress: None)
    assert set(seen) <= {LAYERS}
    assert bool(seen) == isinstance(session, LocalSession), "other processes do not call back"


def test_leaving_early_leaves_the_session_right(session, oracle) -> None:
    for passes in (0, 1, 2):
        steps = session.generate("abc", tree=TREE)
        for _ in range(passes):
            next(steps)
        steps.close()
        assert tokens_of(run(session)) == plain(oracle)


def test_a_text_that_has_not_begun_disturbs_none(session, oracle) -> None:
    running = session.generate("abc", tree=TREE, generation=GenerationConfig(max_tokens=COUNT))
    tokens = [*next(running).tokens]
    context, stats = session.context, session.stats
    session.generate("quite another text", tree=TREE).close()
    waiting = session.generate("abd", tree=TREE, generation=GenerationConfig(max_tokens=COUNT))
    assert session.context is context
    assert session.stats is stats
    tokens += [token for step in running for token in step.tokens]
    assert tokens == plain(oracle)
    assert tokens_of(list(waiting)) == plain(oracle, "abd")


@pytest.mark.parametrize("closed", [False, True], ids=["asked again", "closed"])
def test_a_text_ends_the_one_before(session, oracle, closed: bool) -> None:
    """The older one says so, and neither that nor its end disturbs the younger one."""
    limit = GenerationConfig(max_tokens=COUNT)
    old = session.generate("abcdefgh", tree=TREE, generation=limit)
    next(old)
    new = session.generate("abcx", tree=TREE, generation=limit)
    tokens = [*next(new).tokens]
    if closed:
        old.close()
    else:
        with pytest.raises(ConfigError, match="this generation has ended: its session went on"):
            next(old)
    assert session.stats.prompt_tokens == len(session.encode("abcx"))
    tokens += [token for step in new for token in step.tokens]
    assert tokens == plain(oracle, "abcx")
    assert session.context == [*session.encode("abcx"), *tokens]
    old.close()
    of_both = session.history[-2:]
    assert [stats.prompt_tokens for stats in of_both] == [
        len(session.encode(prompt)) for prompt in ("abcdefgh", "abcx")
    ]
    assert tokens_of(run(session)) == plain(oracle)


def test_taking_turns_is_refused(session, oracle) -> None:
    """Two texts by turns would each draw from the other's cache."""
    first, second = (session.generate(prompt, tree=TREE) for prompt in ("abcdefgh", "abcx"))
    next(first)
    next(second)
    with pytest.raises(ConfigError, match="this generation has ended"):
        next(first)
    assert next(second).tokens
    second.close()
    assert tokens_of(run(session)) == plain(oracle)
