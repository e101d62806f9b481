"""On the demo pair in float32, SpecExec's tokens are those of plain decoding, in every setting."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import specexec_cli
from specexec_cli.config import GenerationConfig, OffloadMode, SamplingConfig, TreeConfig
from specexec_cli.session import Session, TextSession

DEMO = Path(specexec_cli.__file__).parent / "demo" / "target"
MAX_TOKENS = 10
LONG = "".join(f"def value_{n}(x):\n    return x + {n * 7}\n\n" for n in range(400))
PROMPTS = (
    "def read_lines(path):\n",
    "import os\nimport sys\n\n",
    "class Stack:\n    def __init__(self):\n",
    "<|user|>What does os.path.join do?<|end|><|assistant|>",
    "x",
)
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.6, "top_p": 0.7, "top_k": 50},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2},
)
TREES = tuple(
    TreeConfig(budget=budget, max_depth=min(depth, budget), batch=batch, policy=policy)
    for budget, depth, batch, policy in (
        (1, 1, 1, "fixed"), (2, 2, 1, "fixed"), (5, 3, 8, "cost"), (9, 2, 2, "fixed"),
        (16, 16, 4, "heuristic"), (24, 6, 24, "fixed"), (32, 8, 16, "cost"), (48, 12, 3, "fixed"),
        (64, 5, 64, "fixed"), (100, 10, 32, "cost"), (256, 12, 64, "fixed"),
    )
)  # fmt: skip


@pytest.fixture(scope="module")
def sessions() -> Iterator[dict[OffloadMode, TextSession]]:
    tiers: tuple[OffloadMode, ...] = ("none", "ssd", "ram")
    opened = {tier: Session.open(model="demo", dtype="float32", offload=tier) for tier in tiers}
    yield opened
    for session in opened.values():
        session.close()


@pytest.fixture(scope="module")
def oracle(sessions):
    """(prompt tokens, sampling) -> the tokens of plain decoding; each computed once."""

    @cache
    def tokens(prompt: tuple[int, ...], sampling: SamplingConfig) -> list[int]:
        session = sessions["none"]
        steps = session.generate(
            prompt, sampling=sampling, method="autoregressive",
            generation=GenerationConfig(max_tokens=MAX_TOKENS),
        )  # fmt: skip
        return [token for step in steps for token in step.tokens]

    return tokens


def combinations() -> list[tuple[int, int, int, int, str]]:
    """(prompt, sampling, seed, tree, tier): every value of each with many of the others."""
    rng = np.random.default_rng(0)
    shares = np.array([1.0] * (len(TREES) - 2) + [0.25, 0.25])  # large trees are slow
    grid = itertools.product(range(7), range(len(PROMPTS)), range(len(SAMPLINGS)))
    return [
        (
            prompt,
            sampling,
            7 * (repeat % 2),
            int(rng.choice(len(TREES), p=shares / shares.sum())),
            ("ssd", "ram", "none")[(repeat + prompt + sampling) % 3],
        )
        for repeat, prompt, sampling in grid
    ]


@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
def test_the_tokens_of_plain_decoding(prompt, sessions, oracle):
    rows = [row for row in combinations() if row[0] == prompt]
    assert len(rows) * len(PROMPTS) >= 200
    assert {row[3] for row in combinations()} == set(range(len(TREES)))
    for _, sampling_index, seed, tree, tier in rows:
        sampling = SamplingConfig(**SAMPLINGS[sampling_index], seed=seed)
        session = sessions[tier]
        tokens = tuple(session.encode(PROMPTS[prompt]))
        steps = list(
            session.generate(
                tokens, sampling=sampling, tree=TREES[tree],
                generation=GenerationConfig(max_tokens=MAX_TOKENS),
            )
        )  # fmt: skip
        ours = [token for step in steps for token in step.tokens]
        assert ours == oracle(tokens, sampling), (sampling, TREES[tree], tier)
        assert len(ours) <= MAX_TOKENS
        assert all(step.tree_nodes <= TREES[tree].budget for step in steps)


def test_a_prompt_longer_than_2048_tokens(sessions, oracle):
    """In one pass with its tree, from an empty cache, on every tier."""
    tokens = tuple(sessions["none"].encode(LONG))[:2100]
    assert len(tokens) == 2100
    for sampling_index, tree, tier in (
        (0, 7, "ssd"),
        (2, 9, "ram"),
        (3, 4, "none"),
        (0, 10, "ssd"),
    ):
        sampling = SamplingConfig(**SAMPLINGS[sampling_index], seed=3)
        session = sessions[tier]
        session.forget()
        steps = list(
            session.generate(
                tokens, sampling=sampling, tree=TREES[tree],
                generation=GenerationConfig(max_tokens=MAX_TOKENS),
            )
        )  # fmt: skip
        assert steps[0].pending_rows == 2100
        assert [token for step in steps for token in step.tokens] == oracle(tokens, sampling)


@pytest.mark.parametrize(
    ("functions", "prompt", "sampling", "seed", "tree", "tier", "finish"),
    [
        (12, 1, 0, 0, 6, "ssd", "length"),
        (12, 2, 2, 1, 5, "none", "length"),
        (12, 4, 5, 3, 4, "ram", "length"),
        (0, 3, 0, 0, 8, "none", "eos"),
    ],
)
def test_long_texts(functions, prompt, sampling, seed, tree, tier, finish, sessions):
    """Hundreds of slots, so that caches grow; a text that ends in the middle of a tree."""
    session = sessions[tier]
    before = LONG[: LONG.index(f"def value_{functions}(")]
    tokens = session.encode(before + PROMPTS[prompt])

    def written(method: str, stop: tuple[str, ...] = ()) -> tuple[list[int], str, str | None]:
        steps = list(
            session.generate(
                tokens, sampling=SamplingConfig(**SAMPLINGS[sampling], seed=seed), method=method,
                tree=TREES[tree], generation=GenerationConfig(max_tokens=110, stop=stop),
            )
        )  # fmt: skip
        text = "".join(step.text for step in steps)
        return session.context[len(tokens) :], text, steps[-1].finish_reason

    plain = written("autoregressive")
    assert plain[2] == finish
    assert len(tokens) < 256 < len(tokens) + len(plain[0]) or finish == "eos"
    assert written("specexec") == plain
    stop = plain[1][len(plain[1]) // 2 :][:5]
    stopped = written("specexec", (stop,))
    assert stopped[0] == plain[0][: len(stopped[0])]
    assert stopped[1:] == (plain[1][: plain[1].index(stop)], "stop")


def test_trees_help(sessions):
    """Equal tokens would also come from trees that are never right."""
    session = sessions["none"]
    steps = list(
        session.generate(
            "def read_lines(path):\n",
            tree=TreeConfig(budget=64, max_depth=16, batch=16),
            generation=GenerationConfig(max_tokens=32),
        )
    )
    assert len(steps) < sum(len(step.tokens) for step in steps)


@torch.no_grad()
def test_the_oracle_is_transformers(sessions, oracle):
    """Greedy plain decoding gives what transformers' generate() gives."""
    session = sessions["none"]
    own = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        tokens = tuple(session.encode(prompt))
        expected = own.generate(
            torch.tensor([tokens]), max_new_tokens=MAX_TOKENS, do_sample=False,
            pad_token_id=0, eos_token_id=sorted(session.eos_ids),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),  # not guessed from pads
        )[0, len(tokens) :].tolist()  # fmt: skip
        assert oracle(tokens, SamplingConfig()) == expected
