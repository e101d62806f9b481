"""Drafts from the text's own past: places are those of a full search, and the drafts help."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from cli_runner import run_cli
from hypothesis import given
from hypothesis import strategies as st
from toys import ToyTarget

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.suffix import MatchTrust, Past, SuffixDrafter
from specexec_cli.sampling import Sampler

TEXT = st.lists(st.integers(0, 3), max_size=60)
TREE = TreeConfig(budget=16, max_depth=16, batch=4)


def longest_match(context: Sequence[int], place: int, most: int = 32) -> int:
    """How many tokens in front of `place` are the last ones of the context, counted one by one."""
    length = 0
    while length < min(most, place) and context[place - 1 - length] == context[-1 - length]:
        length += 1
    return length


@given(TEXT, st.integers(0, 5))
def test_places_are_those_that_a_look_at_every_position_finds(text: list[int], step: int) -> None:
    past = Past()
    for end in range(0, len(text), step + 1):  # as a generation brings the text, piece by piece
        past.follow(text[:end])
    past.follow(text)
    expected = {
        place: length
        for place in range(1, len(text))
        if (length := longest_match(text, place)) >= 2
    }
    found = past.matches()
    assert dict(zip(found.at, found.lengths, strict=True)) == expected
    assert list(found.at) == sorted(found.at, reverse=True)
    children = past.continuations(found)
    assert {token: set(child.at) for token, child in children.items()} == {
        token: {place + 1 for place in expected if text[place] == token}
        for token in {text[place] for place in expected}
    }


@given(TEXT, TEXT, st.integers(0, 60))
def test_another_text_keeps_what_the_first_went_on_with(
    first: list[int], second: list[int], shared: int
) -> None:
    past = Past()
    past.follow(first)
    other = first[:shared] + second
    past.follow(other)
    places = past.matches()
    for place, length in zip(places.at, places.lengths, strict=True):
        assert past._tokens[place - length : place] == other[-length:]


def test_a_reply_that_is_asked_for_again_is_drafted_from_the_first() -> None:
    past, prompt, reply = Past(), [1, 2, 3, 4], [5, 6, 7, 8]
    past.follow(prompt + reply)
    past.follow(prompt)
    assert set(past.continuations(past.matches())) == {5}


def test_a_text_that_grows_too_long_is_forgotten_but_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from specexec_cli.drafting import suffix

    monkeypatch.setattr(suffix, "_MOST_TOKENS", 20)
    past = Past()
    past.follow([1, 2, 3] * 5)
    past.follow([4, 5, 4, 5])
    past.follow([4, 5, 4, 5, 6, 4, 5])
    assert len(past._tokens) <= 20
    assert set(past.continuations(past.matches())) == {4, 6}


def test_a_longer_match_counts_more_and_trust_follows_what_comes_true() -> None:
    past = Past()
    past.follow([9, 1, 2, 3, 7, 5, 1, 2, 3, 8, 9, 1, 2, 3])  # 7 behind four tokens, 8 behind three
    places = past.matches()
    children = past.continuations(places)
    trust = MatchTrust()
    chances = dict(zip(children, trust.chances(places, children), strict=True))
    assert chances[7] == pytest.approx(2 * chances[8])
    before = sum(chances.values())
    for _ in range(50):
        trust.learn(places, hit=False)
    assert sum(trust.chances(places, children)) < 0.5 * before
    for _ in range(200):
        trust.learn(places, hit=True)
    assert sum(trust.chances(places, children)) == pytest.approx(1.0, abs=0.1)


class Repeating:
    """A model of eight tokens that says the same forty over and over."""

    vocab_size = 8
    words = (3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7, 7, 2, 3, 0, 4, 6, 2, 6) * 2

    def logits(self, context: Sequence[int]) -> np.ndarray:
        logits = np.zeros(self.vocab_size, dtype=np.float32)
        logits[self.words[len(context) % len(self.words)]] = 5.0
        return logits


def test_a_text_that_repeats_itself_takes_few_passes() -> None:
    target = ToyTarget(Repeating())
    sampler = Sampler(SamplingConfig())
    drafter = SuffixDrafter(sampler, TREE)
    steps = list(specexec(target, drafter, sampler, Repeating.words, 160, ()))
    tokens = [token for step in steps for token in step.tokens]
    assert tokens == list(Repeating.words) * 4
    assert target.passes < 160 / 8


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.8, "--seed", 3)])
@pytest.mark.parametrize("policy", ["auto", "fixed", "heuristic"])
def test_the_text_is_that_of_plain_decoding(policy: str, sampling: tuple[object, ...]) -> None:
    prompt = "a b c a b c a b c a"
    argv = ("generate", prompt, "--max-tokens", 24, *sampling)
    plain = run_cli(*argv, "--method", "autoregressive")
    drafted = run_cli(*argv, "--draft", "suffix", "--policy", policy)
    assert drafted.code == 0, drafted.err
    assert drafted.out == plain.out


def test_dsi_needs_a_draft_model() -> None:
    ran = run_cli("generate", "x", "--draft", "suffix", "--method", "dsi")
    assert ran.code == 2
    assert "--draft suffix takes no device: use it without --method dsi" in ran.err
