"""Which experts of few rows are worth a copy into VRAM: copies and hits of rules, on random traces.

    python scripts/expert_admission.py

One row at a time visits all layers. Each expert that is not in VRAM has been computed by the CPU,
and is copied as well where its worth is above the least one's in VRAM by more than a margin.
Printed are the share of those experts that was copied, and of all experts asked for the share that
was in VRAM.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import log

import numpy as np

from specexec_cli.offload.expert_scores import ExpertScores

LAYERS, EXPERTS, CHOSEN = 2, 128, 8
ROWS, UNCOUNTED = 1500, 500  # of a trace, and of those the first, in which VRAM fills
SLOTS = LAYERS * EXPERTS // 4
# the most used share x of the experts holds x ** power of the choices
POWERS = {"even": 1.0, "skewed": log(0.8) / log(0.27)}


@dataclass(frozen=True, slots=True)
class Rule:
    """Worth, and the margin."""

    name: str
    recent: bool  # worth follows the last rows as well, as where every expert has to be copied
    margin: float  # in rows, of a count that remembers 200


RULES = (
    Rule("the last rows too, no margin", True, 0.0),
    *(Rule(f"counts, margin {margin}", False, margin) for margin in (0, 2, 4, 8, 16)),
)


def traced(power: float, again: float, seed: int) -> np.ndarray:
    """What each row chooses, (rows, layers, chosen).

    Args:
        again: how likely a row is to choose each expert of the row before.
    """
    rng = np.random.default_rng(seed)
    share = np.diff((np.arange(EXPERTS + 1) / EXPERTS) ** power)
    shares = [rng.permutation(share) for _ in range(LAYERS)]
    chosen = np.zeros((ROWS, LAYERS, CHOSEN), np.int64)
    for row in range(ROWS):
        for layer in range(LAYERS):
            kept = [e for e in chosen[row - 1, layer] if row and rng.random() < again]
            left = shares[layer].copy()
            left[kept] = 0.0
            more = rng.choice(EXPERTS, CHOSEN - len(kept), replace=False, p=left / left.sum())
            chosen[row, layer] = [*kept, *more]
    return chosen


def counted(trace: np.ndarray, rule: Rule) -> tuple[float, float]:
    """Shares of what was not in VRAM that was copied, and of all that was in VRAM."""
    scores, held = ExpertScores(LAYERS, EXPERTS, CHOSEN), np.zeros(LAYERS * EXPERTS, np.bool_)
    copied = missed = 0
    for row in range(ROWS):
        for layer in range(LAYERS):
            scores.used(layer, [(int(expert), 1) for expert in trace[row, layer]], 1)
            worth = (scores.worth if rule.recent else scores.counts).ravel()
            for key in (layer * EXPERTS + trace[row, layer]).tolist():
                if held[key]:
                    continue
                missed += row >= UNCOUNTED
                least = int(np.argmin(np.where(held, worth, np.inf)))
                if held.sum() == SLOTS:
                    if worth[key] <= worth[least] + rule.margin:
                        continue
                    held[least] = False
                    copied += row >= UNCOUNTED
                held[key] = True
    return copied / missed, 1.0 - missed / (ROWS - UNCOUNTED) / LAYERS / CHOSEN


def main() -> int:
    for name, power in POWERS.items():
        for again in (0.0, 0.3):
            trace = traced(power, again, seed=0)
            print(f"{name} choices, {again:.0%} of them those of the row before:")
            for rule in RULES:
                copied, hits = counted(trace, rule)
                print(f"  {rule.name:30}  copied {copied:4.0%}  in VRAM {hits:4.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
