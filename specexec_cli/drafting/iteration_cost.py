"""What an iteration costs by the rows of its pass and its draft steps, learned from the last ones.

    seconds = base_s + row_s * max(0, rows - knee_rows) + step_s * steps

Below the knee a pass waits for weights whatever its rows. Where a GPU multiplies blocks of rows,
those are the rows of whole blocks. A draft step costs what it adds to the
whole iteration, less than it takes where the stream goes on meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specexec_cli.drafting.search import Floats

# One iteration: rows of its pass, draft steps, seconds of drafting, seconds of all.
Iteration = tuple[int, int, float, float]

_MEMORY = 128  # iterations
_KNEES = 24  # that are tried
_BETTER = 0.8  # a knee must fit this much better than none, or than a lower one
_NOISE = 0.01  # of an iteration's time: fits that are closer are equally good
_DOUBT = 0.5  # how many iterations the measured seconds of a draft step count as
# An iteration that took so many times what it should have is a stall: the process was stopped, or
# the disk was busy. Of fewer than so many none can be said to be usual.
_STALL = 3.0
_TELLING = 3
# So many iterations in a row, each off by this factor to the same side, are a machine that has
# changed.
_RUN, _CHANGED = 5, 1.5
# A prior counts as so many iterations at first, and as less and less until so many are known.
_PRIOR_WEIGHT, _PRIOR_UNTIL = 8.0, 24
_PRIOR_ROWS: Floats = np.exp2(np.arange(9, dtype=np.float64))  # where it says what a pass takes
# The prior may be off by one factor for its stream and by another for its arithmetic. These
# quotients of the second over the first are tried.
_RATIOS: Floats = np.geomspace(1 / 8, 8.0, 61)
# What speaks against each factor: the square of its logarithm, as much as so many passes whose
# seconds are off by it. The stream was probed just now, arithmetic long ago and alone.
_STREAM_WEIGHT, _ARITHMETIC_WEIGHT = 1e-3, 1e-4
_MEASURED_WEIGHT = 8.0  # of a stream that was measured while the passes ran


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of an iteration by rows and draft steps."""

    base_s: float
    row_s: float
    knee_rows: float
    step_s: float
    block_rows: int = 1  # that the target's device multiplies together, zeros behind the last

    def whole(self, rows: Floats) -> Floats:
        """The rows of as many whole blocks, (n,)."""
        return self.block_rows * np.ceil(rows / self.block_rows)

    def seconds(self, rows: Floats, steps: Floats | float) -> Floats:
        """Seconds of iterations over `rows` rows, (n,)."""
        beyond = np.maximum(0.0, self.whole(rows) - self.knee_rows)
        return self.base_s + self.row_s * beyond + self.step_s * steps


# Where nothing is known, a row costs nothing, and trees are limited by what was tried so far.
_UNKNOWN = CostModel(base_s=1.0, row_s=0.0, knee_rows=0.0, step_s=0.0)


class IterationCost:
    """A cost model that follows what iterations take.

    Args:
        prior: what was measured before the first iteration. Its shape is believed until iterations
            tell; how fast its stream and its arithmetic are, they say themselves.
    """

    def __init__(self, prior: CostModel | None = None) -> None:
        self.prior = prior
        self.model = prior or _UNKNOWN
        self.most_rows = 0
        self._models = deque([self.model], maxlen=_RUN + 1)  # the last ones
        self._seen: deque[Iteration] = deque(maxlen=_MEMORY)
        self._reads_s: deque[float] = deque(maxlen=_RUN)  # of the last iterations
        self._usual = np.zeros(0, dtype=np.bool_)  # of those seen, which are no stalls

    @property
    def typical(self) -> list[Iteration]:
        """The iterations remembered, but for stalls; none while there are too few to tell."""
        if len(self._seen) < _TELLING:
            return []
        return [one for one, usual in zip(self._seen, self._usual, strict=True) if usual]

    @property
    def iterations(self) -> int:
        """How many iterations are remembered."""
        return len(self._seen)

    def observe(
        self, rows: int, steps: int, draft_s: float, total_s: float, read_s: float = 0.0
    ) -> None:
        """Learns from one iteration.

        Args:
            read_s: in which the SSD was read; 0 where that is not known.
        """
        self.most_rows = max(self.most_rows, rows)
        if read_s > 0.0:
            self._reads_s.append(read_s)
        self._seen.append((rows, steps, draft_s, total_s))
        self._learn()

    def remember(self, iterations: Sequence[Iteration]) -> None:
        """Learns from iterations of an earlier session, given in their order."""
        self._seen.extend(iterations)
        self.most_rows = max([self.most_rows, *(rows for rows, *_ in iterations)])
        if iterations:
            self._learn()

    def _learn(self) -> None:
        seen = np.array(self._seen, dtype=np.float64)
        rows, steps, _, totals_s = seen.T
        ratios = totals_s / self.model.seconds(rows, steps)
        last = ratios[-_RUN:] / np.median(ratios[:-_RUN]) if len(ratios) >= 2 * _RUN else np.ones(1)
        if (last > _CHANGED).all() or (last < 1.0 / _CHANGED).all():
            # as it was before the run; the level is told by what is kept
            self.prior = self.model = self._models[0]
            self._seen = deque(list(self._seen)[-_RUN:], maxlen=_MEMORY)
            seen = seen[-_RUN:]
            rows, steps, _, totals_s = seen.T
            ratios = totals_s / self.model.seconds(rows, steps)
        # at the level that half of the iterations kept
        self._usual = ratios < _STALL * np.median(ratios)
        if self.prior is not None or self._usual.sum() >= 2:  # of one there is nothing to compare
            self.model = self._fitted(seen[self._usual])
        self._models.append(self.model)

    def _fitted(self, seen: Floats) -> CostModel:
        """Least squares over the knees that are tried.

        Args:
            seen: (n, 4), see Iteration.
        """
        rows, steps, drafts_s, totals_s = seen.T
        rows = self.model.whole(rows)
        per_step = float(drafts_s.sum() / max(steps.sum(), 1.0))
        prior, weight = self._prior_now(rows, np.maximum(totals_s - drafts_s, 1e-9))
        known_rows = prior.whole(_PRIOR_ROWS) if prior is not None else np.zeros(0)
        known_s = prior.seconds(known_rows, 0.0) if prior is not None else np.zeros(0)
        step_weight = np.sqrt(_DOUBT) * max(float(steps.mean()), 1.0)
        noise = float(np.square(_NOISE * totals_s).sum())
        knees = [
            0.0,
            *np.geomspace(rows.min(), max(rows.max(), known_rows.max(initial=0.0)), _KNEES),
        ]
        if self.prior is not None:
            knees.append(self.prior.knee_rows)
        if prior is not None:
            knees.append(prior.knee_rows)
        best, found_best = np.inf, self.model
        for knee in knees:
            beyond = np.maximum(0.0, rows - knee)
            known = np.maximum(0.0, known_rows - knee)
            features = np.vstack([
                np.column_stack([np.ones_like(beyond), beyond, steps]),
                weight * np.column_stack([np.ones_like(known), known, np.zeros_like(known)]),
                [[0.0, 0.0, step_weight]],  # a step costs what it takes
            ])  # fmt: skip
            wanted = np.concatenate([totals_s, weight * known_s, [step_weight * per_step]])
            solved, *_ = np.linalg.lstsq(features, wanted, rcond=None)
            model = CostModel(
                base_s=max(float(solved[0]), 1e-9),
                row_s=max(float(solved[1]), 0.0),
                knee_rows=float(knee),
                step_s=min(max(float(solved[2]), 0.0), per_step),
                block_rows=self.model.block_rows,
            )
            error = noise + float(np.square(model.seconds(rows, steps) - totals_s).sum())
            off = model.seconds(known_rows, 0.0) - known_s
            error += float(np.square(weight * off).sum())
            # no knee at all is the first of them, and is left for a clearly better one only
            if error < best * (_BETTER if found_best.knee_rows == 0.0 else 1.0):
                best, found_best = error, model
        return found_best

    def _prior_now(self, rows: Floats, passes_s: Floats) -> tuple[CostModel | None, float]:
        """What the prior says by now, and the weight of each of its points; None at the end.

        Args:
            rows, passes_s: (n,), of passes without the draft steps before them, in whole blocks.
        """
        doubt = 1.0 - len(rows) / _PRIOR_UNTIL
        if self.prior is None or doubt <= 0.0:
            return None, 0.0
        weight = float(np.sqrt(_PRIOR_WEIGHT * doubt / len(_PRIOR_ROWS)))
        stream_s = float(np.median(self._reads_s)) if self._reads_s else None
        return _levelled(self.prior, rows, passes_s, stream_s), weight

    def seconds(self, rows: Floats, steps: int) -> Floats:
        """Seconds of iterations over `rows` rows, (n,)."""
        return self.model.seconds(rows, steps)


def _levelled(
    prior: CostModel, rows: Floats, passes_s: Floats, stream_s: float | None = None
) -> CostModel:
    """The prior with its stream and its arithmetic each at the level that passes tell.

    A pass takes the longer of both. Slow passes at the knee may be due to either: where nobody
    knows what their stream took, arithmetic is taken to be the cause, until passes of fewer rows,
    which then look better, are just as slow.

    Args:
        rows, passes_s: (n,), see `_prior_now`.
        stream_s: seconds of a pass's stream, where they are known.
    """
    none_s = prior.base_s - prior.row_s * prior.knee_rows  # arithmetic of no rows
    arithmetic_s = none_s + prior.row_s * rows
    stream_weight, link_s = _STREAM_WEIGHT, prior.base_s
    if stream_s is not None:
        stream_weight, link_s = _MEASURED_WEIGHT, stream_s
    told_s = np.maximum(link_s, _RATIOS[:, None] * arithmetic_s)
    off = np.log(passes_s / told_s)
    levels = off.mean(axis=1)  # of the stream, for each of the ratios
    misfits = np.square(off - levels[:, None]).sum(axis=1)
    misfits += stream_weight * np.square(levels)
    misfits += _ARITHMETIC_WEIGHT * np.square(levels + np.log(_RATIOS))
    best = int(misfits.argmin())
    stream = float(np.exp(levels[best]))
    arithmetic = stream * float(_RATIOS[best])
    base_s, row_s, none_s = stream * link_s, arithmetic * prior.row_s, arithmetic * none_s
    if not row_s:
        return replace(prior, base_s=max(base_s, none_s))
    knee = (base_s - none_s) / row_s
    if knee < 0.0:  # arithmetic takes longer whatever the rows
        base_s, knee = none_s, 0.0
    return replace(prior, base_s=base_s, row_s=row_s, knee_rows=knee)
