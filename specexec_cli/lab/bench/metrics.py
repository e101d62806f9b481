"""Computes the field's metrics from the steps of one generation, and over many generations.

TIMING says what each time includes; every result contains it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specexec_cli.core import GenerationStats, StepResult

# stored beside the numbers, so that none is misread
TIMING: Mapping[str, str] = {
    "tokens_per_s": "generated tokens over wall time; prefill and first pass included",
    "ttft_s": "to the end of the first pass: prefill of the prompt and verification of one tree",
    "tpot_s": "wall time after the first pass, over tokens after the first pass",
    "draft_s": "all passes", "verify_s": "all passes; streaming the weights included",
    "generation_rate": "committed tokens per target pass, bonus tokens included; over several runs "
    "micro is all tokens over all passes, macro the mean of the runs' own rates",
    "excluded": "opening the models, warm-up generations, probing the link; caches are emptied "
    "before each run, so every run prefills its whole prompt",
    "ece": "sum |predicted - accepted| / sum predicted, over ten bins of the probability that a "
    "child is accepted once its parent is; ece_draft: of the draft's own probabilities",
    "peak_ram_bytes": "of the process during the run, models included",
}  # fmt: skip

# metrics of a run that are averaged over runs; a run may lack some (None)
AVERAGED = (
    "tokens_per_s", "ttft_s", "tpot_s", "generation_rate", "acceptance_rate",
    "token_acceptance_rate", "tree_nodes", "tree_depth", "draft_s", "verify_s",
    "bytes_per_pass",
    "stream_bytes_per_s", "link_share", "roofline_share", "peak_ram_bytes", "peak_vram_bytes",
    "bytes_per_token", "experts_per_token", "experts_held_share",
)  # fmt: skip

Metrics = dict[str, float | int | None]


def improvement_factor(acceptance: float, length: int, cost_ratio: float) -> float:
    """The theoretical speedup of a chain over plain decoding.

    Args:
        acceptance: probability that a tested draft token is accepted; `token_acceptance_rate`.
        length: draft tokens per iteration.
        cost_ratio: time of a draft pass divided by the time of a target pass.
    Source: Leviathan et al., arXiv:2211.17192, theorem 3.8.
    """
    committed: float = sum(acceptance**i for i in range(length + 1))
    return committed / (length * cost_ratio + 1)


def run_metrics(
    steps: Sequence[StepResult],
    stats: GenerationStats,
    *,
    link_bytes_per_s: float | None,
    is_chain: bool,
) -> Metrics:
    """The metrics of one generation.

    Args:
        link_bytes_per_s: the probed rate of the link; some metrics are shares of it.
        is_chain: whether the drafts were chains, for which acceptance rates are defined.
    """
    passes = stats.target_passes
    asked = stats.experts_asked  # 0 unless experts come one by one
    bytes_per_pass = stats.bytes_streamed / passes
    streams = link_bytes_per_s is not None and stats.bytes_streamed > 0
    link_share = roofline_share = None
    if streams and link_bytes_per_s:
        link_share = stats.stream_bytes_per_s / link_bytes_per_s
        roofline = stats.generation_rate * link_bytes_per_s / bytes_per_pass
        roofline_share = stats.tokens_per_s / roofline
    accepted, proposed, tested = _chain_counts(steps) if is_chain else (0, 0, 0)
    return {
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "target_passes": passes,
        "total_s": stats.total_s,
        "tokens_per_s": stats.tokens_per_s,
        "ttft_s": stats.ttft_s,
        "tpot_s": stats.tpot_s if passes > 1 else None,
        "generation_rate": stats.generation_rate,
        "acceptance_rate": accepted / proposed if proposed else None,
        "token_acceptance_rate": accepted / tested if tested else None,
        "tree_nodes": sum(step.tree_nodes for step in steps) / passes,
        "tree_depth": sum(step.tree_depth for step in steps) / passes,
        "draft_s": stats.draft_s,
        "verify_s": stats.verify_s,
        "bytes_per_pass": bytes_per_pass,
        "stream_bytes_per_s": stats.stream_bytes_per_s if stats.bytes_streamed else None,
        "link_share": link_share,
        "roofline_share": roofline_share,
        "peak_ram_bytes": stats.peak_ram_bytes,
        "peak_vram_bytes": stats.peak_vram_bytes,
        "bytes_per_token": stats.bytes_per_token,
        "experts_per_token": asked / stats.generated_tokens if asked else None,
        "experts_held_share": stats.experts_held / asked if asked else None,
    }


def _chain_counts(steps: Sequence[StepResult]) -> tuple[int, int, int]:
    """Counts accepted, proposed and tested draft tokens; those after a rejection are not tested."""
    accepted = proposed = tested = 0
    for step in steps:
        kept = sum(step.drafted)
        accepted += kept
        proposed += step.tree_nodes
        tested += kept + (kept < step.tree_nodes and not step.drafted[-1])
    return accepted, proposed, tested


def ratio_and_error(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, float]:
    """The sum of `parts` over that of `wholes`, and its standard error (infinite for one sample).

    The error comes from linearising a ratio of sums: with r the ratio and n samples,
    sqrt(n / (n - 1) * sum((part - r * whole)^2)) / sum(wholes) (Cochran, Sampling Techniques,
    section 2.11, without the correction for finite populations).
    """
    count, total = len(parts), sum(wholes)
    ratio = sum(parts) / total
    if count < 2:
        return ratio, math.inf
    squares = sum((part - ratio * whole) ** 2 for part, whole in zip(parts, wholes, strict=True))
    return ratio, math.sqrt(count / (count - 1) * squares) / total


def paired_difference(
    one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """The ratio of `one` minus that of `other`, and its standard error (infinite for one sample).

    The error excludes what both have in common, such as a prompt that is easy for both. It comes
    from linearising: with e the difference of both samples' (part - ratio * whole) / mean whole, it
    is sqrt(sum(e^2) / (n (n - 1))) (Cochran, Sampling Techniques, section 6.3).

    Args:
        one, other: (part, whole) of each sample, in the same order; the longer list is cut.
    """
    count = min(len(one), len(other))
    ratios, rests = [], []
    for side in (one[:count], other[:count]):
        total = sum(whole for _, whole in side)
        ratios.append(sum(part for part, _ in side) / total)
        rests.append([count * (part - ratios[-1] * whole) / total for part, whole in side])
    difference = ratios[0] - ratios[1]
    if count < 2:
        return difference, math.inf
    squares = sum((first - second) ** 2 for first, second in zip(*rests, strict=True))
    return difference, math.sqrt(squares / (count * (count - 1)))


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation, quantiles and the samples themselves; at least one sample."""
    mean = sum(samples) / len(samples)
    squares = sum((sample - mean) ** 2 for sample in samples)
    return {
        "mean": mean,
        "sd": math.sqrt(squares / (len(samples) - 1)) if len(samples) > 1 else 0.0,
        "p20": quantile(samples, 0.2),
        "p50": quantile(samples, 0.5),
        "p80": quantile(samples, 0.8),
        "samples": list(samples),
    }


def quantile(samples: Sequence[float], share: float) -> float:
    """A quantile, by linear interpolation between the sorted samples."""
    ordered = sorted(samples)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
