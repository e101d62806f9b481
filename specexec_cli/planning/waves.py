"""Which waves a pass over several machines goes in, and what it takes then.

While a machine computes one wave, the next machine computes the wave before (models/waves.py). So a
machine's turn with a wave begins when the machine before it is done with that wave, and itself with
the wave before. Where all waves have as many rows,

    seconds = every machine's turn with the rows of one wave + (waves - 1) * the longest turn

Every machine reads all its weights for each wave. So few rows are fastest in one: a machine that
waits for memory takes as long for a part of them as for all, and the machines would be busy for
longer, not done sooner. Where arithmetic decides, or a prompt has hundreds of rows, all machines
computing at once pays. A tree is in one wave whatever its size, so only waves that can be made are
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from specexec_cli.core import Piece
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.tiers import Plan

# More waves than this for each machine shorten a pass little: with four, a machine computes in 4 of
# at most 5 turns.
FOR_EACH_MACHINE = 4

# A text's rows of a pass, and how many of them are pending: the rest are nodes of its tree.
TextRows = tuple[int, int]
# The waves of a pass, with the rows of each text in them.
InWaves = list[list[Piece]]


def in_waves(texts: Sequence[TextRows], size: int) -> InWaves:
    """Divides the rows of a pass into waves of about `size` rows, in order.

    A text is divided between its pending rows alone: a tree goes with the last of them.
    """
    waves, wave, room = InWaves(), list[Piece](), size
    for text, (total, pending) in enumerate(texts):
        start = 0
        while start < total:
            left = total - start
            stop = total if left <= room else min(start + room, pending - 1)
            if 2 * (stop - start) < min(left, room):  # that little is not worth a wave
                stop = total
                if wave and 2 * room < left:
                    waves.append(wave)
                    wave, room = [], size
            wave.append(Piece(text, start, stop))
            room -= stop - start
            start = stop
            if room <= 0 or start < total:
                waves.append(wave)
                wave, room = [], size
    return [*waves, wave] if wave else waves


class WaveTimes:
    """What passes in waves take by a plan.

    Args:
        plan: of the first machine, with the others'.
    """

    def __init__(self, plan: Plan) -> None:
        self._turns = cache(lambda rows: pass_time(plan, rows).turns_s)
        machines = (plan, *(each.plan for each in plan.others))
        # the weights that a machine streams would come again for each wave
        alone = len(machines) == 1 or any(each.streams for each in machines)
        self._most = 1 if alone else FOR_EACH_MACHINE * len(machines)

    def seconds(self, waves: InWaves) -> float:
        """A pass in these waves."""
        ends: Sequence[float] = ()  # of each machine's turn with the wave before
        for wave in waves:
            turns, end = self._turns(sum(piece.count for piece in wave)), 0.0
            before, ends = ends or (0.0,) * len(turns), list[float]()
            for turn_s, free in zip(turns, before, strict=True):
                end = max(end, free) + turn_s
                ends.append(end)
        return ends[-1]

    def fastest(self, texts: Sequence[TextRows]) -> InWaves:
        """The waves in which a pass of these rows takes least; of equal ones the fewest."""
        total = sum(rows for rows, _ in texts)
        ways = {
            tuple(map(tuple, waves)): waves
            for waves in (
                in_waves(texts, -(-total // count))
                for count in range(1, min(total, self._most) + 1)
            )
        }
        return min(ways.values(), key=self.seconds)
