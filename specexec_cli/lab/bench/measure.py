"""Measures a pair for DSI's analysis: TTFT and TPOT of both models, and the acceptance rate.

Source: Timor et al., arXiv:2405.14105, section 4, "Experiments with LLMs": 50 prompts of a dataset
are drawn uniformly at random; 20 tokens of each are timed, and 256 are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.core import common_prefix
from specexec_cli.errors import ConfigError

if TYPE_CHECKING:
    from specexec_cli.lab.bench.runner import BenchPrompt
    from specexec_cli.session import TextSession

_WARMUP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """One model's mean seconds over all prompts, and its texts."""

    ttft_s: float  # seconds to the first token
    tpot_s: float  # seconds per later token
    texts: Mapping[str, tuple[int, ...]]  # prompt id -> tokens


def measure_model(
    session: TextSession,
    prompts: Sequence[BenchPrompt],
    sampling: SamplingConfig,
    timed_tokens: int,
    match_tokens: int,
    done: Callable[[], None],
) -> ModelTimes:
    """Times the session's target, which decodes without drafts.

    Args:
        prompts: the prompts; those that leave no room for a text are skipped.
        timed_tokens: number of a text's first tokens that are timed, 2 or more.
        match_tokens: length of the texts, at least timed_tokens.
        done: called after each prompt.
    Raises:
        ConfigError: no text has two tokens.
    """
    usable = [prompt for prompt in prompts if len(prompt.tokens) < session.context_length]
    if usable:
        _decode(session, usable[0], sampling, _WARMUP_TOKENS)
    first_s, later_s, texts = [], [], {}
    for prompt in usable:
        tokens, ends = _decode(session, prompt, sampling, match_tokens)
        texts[prompt.id] = tuple(tokens)
        first_s.append(ends[0])
        timed = ends[:timed_tokens]
        if len(timed) > 1:
            later_s.append((timed[-1] - timed[0]) / (len(timed) - 1))
        done()
    if not later_s:
        raise ConfigError(
            f"{session.pair.target.name} writes no text of two tokens on these prompts, so its "
            "time per token cannot be measured: give other prompts, `dataset`"
        )
    return ModelTimes(sum(first_s) / len(first_s), sum(later_s) / len(later_s), texts)


def _decode(
    session: TextSession, prompt: BenchPrompt, sampling: SamplingConfig, tokens: int
) -> tuple[list[int], list[float]]:
    """Decodes with an empty cache; returns the tokens and the seconds after which each came."""
    session.forget()
    text: list[int] = []
    ends: list[float] = []
    began = time.perf_counter()
    for step in session.generate(
        prompt.tokens,
        sampling=sampling,
        generation=GenerationConfig(max_tokens=tokens),
        method="autoregressive",
    ):
        text += step.tokens
        ends.append(time.perf_counter() - began)
    return text, ends


def mean_matches(target: ModelTimes, draft: ModelTimes) -> float:
    """Mean number n of equal first tokens, over the prompts that both models have continued.

    Raises:
        ConfigError: no prompt fits both models.
    """
    both = [name for name in target.texts if name in draft.texts]
    if not both:
        raise ConfigError("no prompt fits the context windows of both models: give shorter ones")
    matches = [common_prefix(target.texts[name], draft.texts[name]) for name in both]
    return sum(matches) / len(matches)


def acceptance_rate(matches: float) -> float:
    """1 - 1 / (1 + n): at this acceptance rate, n drafts are accepted in a row on average."""
    return 1 - 1 / (1 + matches)
