"""The speed of a Decision: its plan, and its pair's tokens per pass by runs here or models.toml."""

from __future__ import annotations

from pathlib import Path

from specexec_cli.catalog.registry import load_registry
from specexec_cli.planning.reached import load_runs, runs_file
from specexec_cli.planning.resolve import Decision
from specexec_cli.planning.speed import Speed, TokensPerPass, predict


def predicted(decision: Decision, models_file: Path | None = None) -> Speed:
    """What a session of this decision is expected to reach.

    Raises:
        ConfigError: a models file cannot be used.
    """
    return predict(
        decision.target.sizes,
        decision.draft.sizes if decision.draft is not None else None,
        decision.recommended,
        decision.work,
        decision.machine,
        decision.plan,
        tokens_per_pass(decision, models_file),
    )


def tokens_per_pass(decision: Decision, models_file: Path | None) -> TokensPerPass | None:
    """Of the decision's pair: learned here, else as models.toml has it, else of pairs like it."""
    if decision.draft is None:
        return None
    target, draft = decision.target.entry, decision.draft.entry
    runs = load_runs(runs_file(target.weights, draft.weights))
    rates = sorted(run.tokens_per_pass for run in runs)
    if rates:
        count = f"{len(rates)} run{'s' if len(rates) > 1 else ''} here"
        return TokensPerPass(rates[0], rates[len(rates) // 2], rates[-1], count)
    pair = load_registry(models_file).pair_of(target, draft)
    if pair is None:
        return TokensPerPass.of_pair(None, "")
    return TokensPerPass.of_pair(pair.tokens_per_pass, pair.source)
