"""Measures how much target probability the draft model's k likeliest tokens have (SpecExec, 5.1).

This coverage bounds the success of any draft tree: a node's children can only be right if the
target's probability is on the tokens that the draft model ranks first. The coverage by the target's
own k likeliest tokens is the upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from specexec_cli.lab.bench.runner import BenchPrompt
    from specexec_cli.session import TextSession


@dataclass(frozen=True, slots=True)
class Coverage:
    """Target probability of the k likeliest tokens, averaged over positions; one entry per k."""

    top_k: tuple[int, ...]
    draft_mass: tuple[float, ...]  # target probability of the draft model's top k
    target_mass: tuple[float, ...]  # target probability of the target's own top k
    positions: int


def covered(target_logits: Tensor, draft_logits: Tensor, ranks: Sequence[int]) -> Tensor:
    """Target probability, row by row, of the draft model's k likeliest tokens.

    Args:
        target_logits, draft_logits: (rows, vocab); the draft model's vocabulary may be smaller.
        ranks: values of k.
    Returns:
        (rows, len(ranks)) float32
    """
    probs = target_logits.float().softmax(-1)
    order = draft_logits.float().topk(min(max(ranks), draft_logits.shape[-1]), dim=-1).indices
    mass = probs.gather(-1, order).cumsum(-1)
    columns = [min(rank, mass.shape[-1]) - 1 for rank in ranks]
    return mass[:, columns]


def check_settings(sampling: SamplingConfig, ranks: Sequence[int]) -> None:
    """Checks the settings of measure_coverage before models are opened, which takes time.

    Raises:
        ConfigError: the temperature is 0, so that the target has no distribution, or ranks are bad.
    """
    if sampling.temperature == 0.0:
        raise ConfigError("coverage needs `temperature` above 0: greedy text has no distribution")
    if not ranks or min(ranks) < 1:
        raise ConfigError("`top_k` takes numbers of 1 or more")


def measure_coverage(
    session: TextSession,
    prompts: Sequence[BenchPrompt],
    sampling: SamplingConfig,
    max_tokens: int,
    ranks: Sequence[int],
) -> Coverage:
    """Measures coverage at all positions of texts that the target writes."""
    draft_sum, target_sum, positions = [0.0] * len(ranks), [0.0] * len(ranks), 0
    for prompt in prompts:
        generation = GenerationConfig(max_tokens=max_tokens)
        list(session.generate(prompt.tokens, sampling=sampling, generation=generation))
        text = list(session.context)
        target_logits, draft_logits = session.score(text, len(prompt.tokens))
        target_logits = target_logits / sampling.temperature
        width = min(target_logits.shape[-1], draft_logits.shape[-1])
        by_draft = covered(target_logits, draft_logits[:, :width], ranks)
        by_target = covered(target_logits, target_logits, ranks)
        draft_sum = [a + float(b) for a, b in zip(draft_sum, by_draft.sum(0), strict=True)]
        target_sum = [a + float(b) for a, b in zip(target_sum, by_target.sum(0), strict=True)]
        positions += len(by_draft)
    return Coverage(
        tuple(ranks),
        tuple(total / positions for total in draft_sum),
        tuple(total / positions for total in target_sum),
        positions,
    )
