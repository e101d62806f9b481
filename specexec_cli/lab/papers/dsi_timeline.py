"""The timeline of DSI's later paper (arXiv:2405.14105v5, figure 1), in virtual time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specexec_cli.lab.papers.registry import Claim, Finding, Table, recipe

if TYPE_CHECKING:
    from specexec_cli.lab.papers.draw import Spans
    from specexec_cli.lab.papers.lab import Lab
    from specexec_cli.lab.simulate.clock import Latencies

_GPUS = 8  # one drafts, the others verify; with these latencies no task waits for one of the seven
_TARGET, _DRAFT = 7, 1  # time units of a pass
# of each position of the text, whether the drafter is right; all targets are equal
_RIGHT = tuple(token == "1" for token in "111011110111")
_METHODS = ("non-SI", "SI", "DSI")

Timeline = Mapping[str, "Spans"]  # worker, "target..." or "drafter" -> when its passes run


def most_at_once(timeline: Timeline) -> int:
    """The most target passes that run at one moment."""
    passes = [each for name, spans in timeline.items() if name.startswith("target")
              for each in spans]  # fmt: skip
    return max(sum(begun <= at < ended for begun, ended in passes) for at, _ in passes)


def timelines(right: Sequence[bool], servers: int) -> dict[str, Timeline]:
    """What each worker does with lookahead 1: without speculation, with SI and with DSI."""
    from specexec_cli.lab.simulate.clock import Latencies

    latencies = Latencies(target_s=_TARGET, draft_s=_DRAFT)
    plain = [(_TARGET * token, _TARGET * (token + 1)) for token in range(len(right))]
    return {
        "non-SI": {"target": plain},
        "SI": _si(right),
        "DSI": _dsi(latencies, right, servers),
    }


def _si(right: Sequence[bool]) -> Timeline:
    """Drafts a token unless it is the last one, verifies it, and repeats."""
    drafts, passes = list[tuple[float, float]](), list[tuple[float, float]]()
    now = done = 0
    while done < len(right):
        drafted = done < len(right) - 1
        if drafted:
            drafts.append((now, now + _DRAFT))
            now += _DRAFT
        passes.append((now, now + _TARGET))
        now += _TARGET
        done += 2 if drafted and right[done] else 1
    return {"drafter": drafts, "target": passes}


def _dsi(latencies: Latencies, right: Sequence[bool], servers: int) -> Timeline:
    """Runs the orchestrator of --method dsi."""
    from specexec_cli.dsi.messages import DRAFTER
    from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
    from specexec_cli.lab.simulate.clock import VirtualWorkers

    workers = VirtualWorkers(
        latencies, lambda sequence, position: position,
        lambda sequence, position: position if right[position - 1] else -1, servers,
    )  # fmt: skip
    commits = Orchestrator(workers, DsiConfig(lookahead=1, timeout_s=math.inf)).generate(
        [0], len(right)
    )
    text = [token for commit in commits for token in commit.tokens]
    assert text == list(range(1, len(right) + 1)), "DSI must commit the target's tokens"
    found: dict[str, list[tuple[float, float]]] = {"drafter": []}
    found |= {f"target {number + 1}": [] for number in range(servers)}
    for worker, begun, ended in workers.spans():
        name = "drafter" if worker == DRAFTER else f"target {worker + 1}"
        found[name].append((begun, ended))
    return found


def ends(timeline: Timeline) -> float:
    """When the last pass ends."""
    return max(ended for spans in timeline.values() for _, ended in spans)


def claims(found: dict[str, Timeline]) -> list[Claim]:
    """What the figure shows of a text that is drafted rightly in part."""
    last = {name: ends(timeline) for name, timeline in found.items()}
    most = {name: most_at_once(timeline) for name, timeline in found.items()}
    return [
        Claim(f"non-SI and SI run one target pass after another ({most['non-SI']} and "
              f"{most['SI']} at once)", most["non-SI"] == most["SI"] == 1),
        Claim(f"target passes of DSI begin before earlier ones end (up to {most['DSI']} at once)",
              most["DSI"] > 1),
        Claim(f"DSI ends first ({last['DSI']:g}, SI {last['SI']:g}, non-SI {last['non-SI']:g})",
              last["DSI"] < min(last["SI"], last["non-SI"])),
    ]  # fmt: skip


@recipe(
    "dsi-timeline",
    printed="figure 1 of the later paper: passes of SI and non-SI end before the next iteration "
    "starts, DSI's target passes need not (lookahead 1, eight GPUs)",
    models=False,
)
def timeline(lab: Lab) -> Finding:
    """One text, drawn pass by pass; and one whose drafts are all wrong."""
    from specexec_cli.lab.papers.draw import spans
    from specexec_cli.lab.simulate.clock import Latencies
    from specexec_cli.lab.simulate.methods import run_speculative

    found = timelines(_RIGHT, _GPUS - 1)
    wrong = {name: ends(each) for name, each in timelines([False] * 12, _GPUS - 1).items()}
    counted = run_speculative(Latencies(target_s=_TARGET, draft_s=_DRAFT), _RIGHT, 1).seconds
    rows = [[name, f"{ends(found[name]):g}", str(most_at_once(found[name])), f"{wrong[name]:g}"]
            for name in _METHODS]  # fmt: skip
    drawn = {
        f"{name}: {worker}": (int(worker != "drafter"), passes)
        for name in _METHODS
        for worker, passes in found[name].items()
    }
    return Finding(
        tables=[Table(f"{len(_RIGHT)} tokens; a draft takes {_DRAFT}, the target {_TARGET}",
                      ["", "ends", "most target passes at once", "all drafts wrong: ends"], rows)],
        claims=[
            *claims(found),
            Claim("SI's last pass ends when SI does in the other recipes",
                  ends(found["SI"]) == counted),
            Claim("where all drafts are wrong DSI takes as long as non-SI, and SI longer",
                  wrong["DSI"] == wrong["non-SI"] < wrong["SI"]),
        ],
        notes=["the paper prints neither latencies nor which drafts are right; those here are ours",
               "a token that the drafter gave up unfinished is not drawn"],
        figures={"": lambda: spans("Passes over time, lookahead 1", "time units", drawn)},
    )  # fmt: skip
