"""Summarizes rows of results case by case, and compares each case with the baseline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specexec_cli.lab.bench.cases import BASELINE, is_chain, same_distribution
from specexec_cli.lab.bench.metrics import AVERAGED, improvement_factor, spread
from specexec_cli.lab.bench.results import Row

Summary = dict[str, Any]


def summarize(rows: Iterable[Row]) -> list[Summary]:
    """One summary for each case, in the order of the cases' first rows."""
    groups: dict[str, list[Row]] = {}
    baselines: dict[str, Row] = {}
    for row in rows:
        if row["kind"] == "run":
            groups.setdefault(_case_key(row), []).append(row)
            if row["case"]["method"] == BASELINE:
                baselines[_prompt_key(row)] = row
    return [_summary(group, baselines) for group in groups.values()]


def _case_key(row: Row) -> str:
    environment = row["environment"]
    return json.dumps(
        [row["config"], row["case"], environment["commit"], environment["hardware"]],
        sort_keys=True,
    )


def _prompt_key(row: Row) -> str:
    """A key that is equal for a run and the baseline run to compare it with."""
    case = {name: row["case"][name] for name in _SAMPLING if name in row["case"]}
    environment = row["environment"]
    return json.dumps(
        [row["config"], case, row["seed"], row["prompt"]["sha256"], environment["commit"],
         environment["hardware"]],
        sort_keys=True,
    )  # fmt: skip


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _summary(rows: Sequence[Row], baselines: Mapping[str, Row]) -> Summary:
    first = rows[0]
    metrics: dict[str, Any] = {}
    for name in AVERAGED:
        # results of earlier versions may lack a number
        found = [row["metrics"].get(name) for row in rows]
        samples = [value for value in found if value is not None]
        metrics[name] = spread(samples) if samples else None
    pairs = [(row, baselines[key]) for row in rows if (key := _prompt_key(row)) in baselines]
    return {
        "label": first["label"],
        "config": first["config"],
        "case": first["case"],
        "link": first["link"],
        "environment": first["environment"],
        "runs": len(rows),
        "metrics": metrics,
        "tokens_per_s": _per(rows, "total_s"),
        "generation_rate": {
            "micro": _per(rows, "target_passes"),
            "macro": metrics["generation_rate"]["mean"],
        },
        "speedup": _speedup(pairs),
        "predicted_speedup": _predicted(rows, pairs),
        "same_text": _same_text(pairs),
        "calibration_errors": calibration_errors(np.sum([r["calibration"] for r in rows], axis=0)),
        "passes": {
            name: sum(row["metrics"][name] for row in rows)
            for name in ("draft_s", "verify_s", "total_s", "target_passes")
        },
    }


def _speedup(pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any] | None:
    """Ratios of tokens_per_s to the baseline's, for equal prompt, temperature and seed."""
    if not pairs:
        return None
    ratios = [
        ours["metrics"]["tokens_per_s"] / plain["metrics"]["tokens_per_s"] for ours, plain in pairs
    ]
    return {
        **spread(ratios),
        "overall": _per([o for o, _ in pairs], "total_s") / _per([b for _, b in pairs], "total_s"),
    }


def _per(rows: Sequence[Row], name: str) -> float:
    """The tokens of all runs divided by the sum of a metric over all runs."""
    whole: float = sum(row["metrics"][name] for row in rows)
    return float(sum(row["metrics"]["generated_tokens"] for row in rows)) / whole


def _predicted(rows: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> float | None:
    """The speedup of a chain by Leviathan et al.'s improvement factor, from the measured costs."""
    case = rows[0]["case"]
    rates = [row["metrics"]["token_acceptance_rate"] for row in rows]
    rates = [rate for rate in rates if rate is not None]
    drafted = sum(sum(row["passes"]["tree_nodes"]) for row in rows)
    if not is_chain(case["method"]) or not rates or not pairs or not drafted:
        return None
    draft_pass_s = sum(row["metrics"]["draft_s"] for row in rows) / drafted
    baseline = [plain["metrics"] for _, plain in pairs]
    target_pass_s = sum(m["verify_s"] for m in baseline) / sum(m["target_passes"] for m in baseline)
    return improvement_factor(sum(rates) / len(rates), case["budget"], draft_pass_s / target_pass_s)


def _same_text(pairs: Sequence[tuple[Row, Row]]) -> dict[str, int] | None:
    """How many runs have the baseline's exact tokens; None if the method does not promise that."""
    if not pairs or (same_distribution(pairs[0][0]["case"]["method"]) and _sampled(pairs[0][0])):
        return None
    same = 0
    for ours, plain in pairs:
        common = min(len(ours["tokens"]), len(plain["tokens"]))  # one may have a lower limit
        same += ours["tokens"][:common] == plain["tokens"][:common]
    return {"same": same, "of": len(pairs)}


def _sampled(row: Row) -> bool:
    return bool(row["case"]["temperature"] > 0.0)


def calibration_errors(bins: ArrayLike) -> tuple[float, float] | None:
    """Expected calibration error of the draft's own predictions and of those used.

    It is sum |predicted - true| / sum predicted, so per child that was predicted to be accepted.
    Per prediction it would say little, since most children are rightly predicted near 0.

    Args:
        bins: (2, 10, 3), Reliability.bins or a sum of several. Few predictions look badly
            calibrated by chance, so add bins before calling this.
    Returns:
        two errors; None where nothing was predicted.
    """
    _, predicted, true = np.moveaxis(np.asarray(bins, dtype=np.float64), -1, 0)
    totals = predicted.sum(axis=1)
    if not totals.all():
        return None
    own, used = (np.abs(predicted - true).sum(axis=1) / totals).tolist()
    return own, used
