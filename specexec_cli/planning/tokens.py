"""The speed of a Decision: its plan, and its pair's tokens per pass by runs here or models.toml."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specexec_cli.catalog.registry import load_registry
from specexec_cli.planning.low_bits import copy_tokens_per_pass
from specexec_cli.planning.reached import Run, load_runs, runs_file
from specexec_cli.planning.resolve import Decision
from specexec_cli.planning.speed import Speed, TokensPerPass, predict


def predicted(decision: Decision, models_file: Path | None = None) -> Speed:
    """What a session of this decision is expected to reach.

    Raises:
        ConfigError: a models file cannot be used.
    """
    return predict(
        decision.plan,
        decision.draft.sizes if decision.draft is not None else None,
        decision.recommended,
        tokens_per_pass(decision, models_file),
    )


def tokens_per_pass(decision: Decision, models_file: Path | None) -> TokensPerPass | None:
    """Of the decision's pair: learned here, else as models.toml has it, else of pairs like it."""
    if decision.draft is None:
        return None
    if decision.pair.own_bits is not None and not _runs(decision):
        share = decision.plan.shared_layers / len(decision.plan.tiers)
        depth = decision.recommended.max_depth
        return copy_tokens_per_pass(decision.pair.own_bits, share, depth)
    target, draft = decision.target.entry, decision.draft.entry
    rates = sorted(run.tokens_per_pass for run in _runs(decision))
    if rates:
        count = f"{len(rates)} run{'s' if len(rates) > 1 else ''} here"
        return TokensPerPass(rates[0], rates[len(rates) // 2], rates[-1], count)
    pair = load_registry(models_file).pair_of(target, draft)
    if pair is None:
        return TokensPerPass.of_pair(None, "")
    return TokensPerPass.of_pair(pair.tokens_per_pass, pair.source)


def _runs(decision: Decision) -> Sequence[Run]:
    """What earlier sessions of these models reached on this machine."""
    assert decision.draft is not None
    return load_runs(runs_file(decision.target.entry.weights, decision.draft.entry.weights))
