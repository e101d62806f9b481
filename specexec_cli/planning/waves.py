"""How many waves a pass over several machines goes in, and what it takes then.

While a machine computes one wave, the next machine computes the wave before (models/waves.py):

    seconds = every machine's turn with the rows of one wave + (waves - 1) * the longest turn

Every machine reads all its weights for each wave. So few rows are fastest in one: a machine that
waits for memory takes as long for a part of them as for all, and the machines would be busy for
longer, not done sooner. Where arithmetic decides, or a prompt has hundreds of rows, all machines
computing at once pays.
"""

from __future__ import annotations

from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.tiers import Plan

# More waves than this for each machine shorten a pass little: with four, a machine computes in 4 of
# at most 5 turns.
FOR_EACH_MACHINE = 4


def seconds_in_waves(plan: Plan, rows: int, waves: int) -> float:
    """A pass of so many rows that are divided evenly among waves."""
    turns = pass_time(plan, -(-rows // waves)).turns_s
    return sum(turns) + (waves - 1) * max(turns)


def wave_count(plan: Plan, rows: int) -> int:
    """With how many waves a pass of so many rows takes least: one where a machine streams weights,
    which would come again for each."""
    if not plan.others or plan.streams or any(each.plan.streams for each in plan.others):
        return 1
    most = min(rows, FOR_EACH_MACHINE * (1 + len(plan.others)))
    return min(range(1, most + 1), key=lambda waves: seconds_in_waves(plan, rows, waves))
