"""The seconds of an iteration by the rows of its pass and its draft steps, fitted to recent ones.

    seconds = base_s + row_s * max(0, rows - knee_rows) + step_s * steps

Up to the knee a pass waits for weights, however many rows it has. Where a GPU multiplies rows in
blocks, `rows` is rounded up to whole blocks. step_s is what a draft step adds to the iteration,
which is less than the step's own time if weights are streamed meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specexec_cli.drafting.search import Floats

# One iteration: rows of its pass, draft steps, seconds of drafting, seconds of the whole.
Iteration = tuple[int, int, float, float]

_MEMORY = 128  # iterations that are remembered
_KNEES = 24  # candidates for the knee
_BETTER = 0.8  # the squared error of a fit with a knee must be below this share of that without
_NOISE = 0.01  # share of an iteration's time; smaller differences between fits do not count
_DOUBT = 0.5  # the measured seconds of a draft step count as this many iterations
# An iteration that took this many times the expected seconds is a stall: the process was stopped,
# or the disk was busy. It takes _TELLING iterations to say what is usual.
_STALL = 3.0
_TELLING = 3
# After _RUN iterations in a row that are all off by the factor _CHANGED to the same side, the
# machine is taken to have changed.
_RUN, _CHANGED = 5, 1.5
# A prior counts as _PRIOR_WEIGHT iterations at first, and falls to nothing when _PRIOR_UNTIL
# iterations are known.
_PRIOR_WEIGHT, _PRIOR_UNTIL = 8.0, 24
_PRIOR_ROWS: Floats = np.exp2(np.arange(9, dtype=np.float64))  # where the prior is evaluated
# The prior may be off by one factor in the time of its stream, and by another in the time of its
# arithmetic. These quotients, arithmetic's factor over the stream's, are tried.
_RATIOS: Floats = np.geomspace(1 / 8, 8.0, 61)
# Penalties for factors other than 1: each counts like this many passes with seconds off by it. The
# stream's is larger, since it was probed just now; arithmetic was probed long ago, and alone.
_STREAM_WEIGHT, _ARITHMETIC_WEIGHT = 1e-3, 1e-4
_MEASURED_WEIGHT = 8.0  # the stream's penalty where it was measured while the passes ran


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The seconds of an iteration as a function of rows and draft steps."""

    base_s: float  # seconds of a pass up to the knee
    row_s: float  # seconds of each row beyond it
    knee_rows: float
    step_s: float  # seconds that a draft step adds
    block_rows: int = 1  # the target's device multiplies whole blocks of so many rows

    def whole(self, rows: Floats) -> Floats:
        """`rows` (n,) rounded up to whole blocks."""
        return self.block_rows * np.ceil(rows / self.block_rows)

    def seconds(self, rows: Floats, steps: Floats | float) -> Floats:
        """The seconds of iterations, (n,), for `rows` (n,) and draft steps."""
        beyond = np.maximum(0.0, self.whole(rows) - self.knee_rows)
        return self.base_s + self.row_s * beyond + self.step_s * steps


# Where nothing is known, rows cost nothing; trees are then limited by the rows tried so far.
_UNKNOWN = CostModel(base_s=1.0, row_s=0.0, knee_rows=0.0, step_s=0.0)


class IterationCost:
    """A cost model that is fitted to recent iterations.

    Args:
        prior: measured before the first iteration. Its shape is used until enough iterations are
            known; the speed of its stream and of its arithmetic is corrected from the first one on.

    Attributes:
        model: the present fit.
        most_rows: most rows of any pass so far.
    """

    def __init__(self, prior: CostModel | None = None) -> None:
        self.prior = prior
        self.model = prior or _UNKNOWN
        self.most_rows = 0
        self._models = deque([self.model], maxlen=_RUN + 1)  # the latest fits
        self._seen: deque[Iteration] = deque(maxlen=_MEMORY)
        self._reads_s: deque[float] = deque(maxlen=_RUN)  # seconds of reading, latest iterations
        self._usual = np.zeros(0, dtype=np.bool_)  # for each of _seen, whether it is no stall

    @property
    def typical(self) -> list[Iteration]:
        """The iterations remembered, without stalls; none while there are too few to tell."""
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
            rows: rows of its pass.
            steps: its draft steps.
            draft_s: seconds of drafting.
            total_s: seconds of the whole iteration.
            read_s: seconds in which the SSD was read; 0 where that is not known.
        """
        self.most_rows = max(self.most_rows, rows)
        if read_s > 0.0:
            self._reads_s.append(read_s)
        self._seen.append((rows, steps, draft_s, total_s))
        self._learn()

    def remember(self, iterations: Sequence[Iteration]) -> None:
        """Learns from iterations of an earlier session, the oldest first."""
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
            # take the fit from before these iterations, and forget all but them
            self.prior = self.model = self._models[0]
            self._seen = deque(list(self._seen)[-_RUN:], maxlen=_MEMORY)
            seen = seen[-_RUN:]
            rows, steps, _, totals_s = seen.T
            ratios = totals_s / self.model.seconds(rows, steps)
        # stalls are judged beside the median, so that a model that is off as a whole marks none
        self._usual = ratios < _STALL * np.median(ratios)
        if self.prior is not None or self._usual.sum() >= 2:  # one iteration alone fits anything
            self.model = self._fitted(seen[self._usual])
        self._models.append(self.model)

    def _fitted(self, seen: Floats) -> CostModel:
        """The model with the least squared error, of those with each candidate for the knee.

        Args:
            seen: (n, 4), one Iteration in each row.
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
                [[0.0, 0.0, step_weight]],  # a step adds what it takes, as a weak assumption
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
            # the first candidate is no knee; only a clearly better fit replaces it
            if error < best * (_BETTER if found_best.knee_rows == 0.0 else 1.0):
                best, found_best = error, model
        return found_best

    def _prior_now(self, rows: Floats, passes_s: Floats) -> tuple[CostModel | None, float]:
        """The prior corrected by the passes so far, and the weight of each of its points.

        Args:
            rows: (n,) rows of passes, rounded up to whole blocks.
            passes_s: (n,) seconds of the passes, without drafting.
        Returns:
            (None, 0.0) when enough iterations are known.
        """
        doubt = 1.0 - len(rows) / _PRIOR_UNTIL
        if self.prior is None or doubt <= 0.0:
            return None, 0.0
        weight = float(np.sqrt(_PRIOR_WEIGHT * doubt / len(_PRIOR_ROWS)))
        stream_s = float(np.median(self._reads_s)) if self._reads_s else None
        return _levelled(self.prior, rows, passes_s, stream_s), weight

    def seconds(self, rows: Floats, steps: int) -> Floats:
        """The seconds of iterations, (n,), by the present fit; see CostModel.seconds."""
        return self.model.seconds(rows, steps)


def _levelled(
    prior: CostModel, rows: Floats, passes_s: Floats, stream_s: float | None = None
) -> CostModel:
    """The prior with the speed of its stream and of its arithmetic fitted to passes.

    A pass takes the longer of its stream and its arithmetic. When passes at the knee are slow, it
    may be due to either. Where the stream's time was not measured, arithmetic is blamed first. The
    policy then tries smaller trees; if their passes are as slow, the fit turns to the stream.

    Args:
        prior: as it was measured.
        rows, passes_s: (n,), as for `_prior_now`.
        stream_s: seconds of a pass's stream, where they were measured.
    """
    none_s = prior.base_s - prior.row_s * prior.knee_rows  # seconds of arithmetic without rows
    arithmetic_s = none_s + prior.row_s * rows
    stream_weight, link_s = _STREAM_WEIGHT, prior.base_s
    if stream_s is not None:
        stream_weight, link_s = _MEASURED_WEIGHT, stream_s
    told_s = np.maximum(link_s, _RATIOS[:, None] * arithmetic_s)
    off = np.log(passes_s / told_s)
    levels = off.mean(axis=1)  # logarithm of the stream's factor, for each of the ratios
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
    if knee < 0.0:  # arithmetic takes longer than the stream for any number of rows
        base_s, knee = none_s, 0.0
    return replace(prior, base_s=base_s, row_s=row_s, knee_rows=knee)
