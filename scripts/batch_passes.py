"""Records the passes of bench_batch.py's texts, and reports each on stderr as it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from offload_setup import tell
from torch import Tensor

from specexec_cli.core import DraftTree
from specexec_cli.decoding import batch
from specexec_cli.offload.stream import LayerStream
from specexec_cli.verify import verifier
from specexec_cli.verify.verifier import LocalTarget


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over the target, and the seconds before it."""

    texts: int
    pending_rows: int  # committed tokens among its rows, those of prompts included
    nodes: int
    before_s: float  # since the pass before: drafting, and choosing tokens
    seconds: float
    waited_s: float  # of them, for weights
    ended_s: float  # by time.perf_counter


@dataclass(slots=True)
class Passes:
    """Every pass of this process, in order, while `recorded` watches."""

    done: list[Pass] = field(default_factory=list)
    # when the last one ended, or `begin` was called
    ended_s: float = field(default_factory=time.perf_counter)
    late: Callable[[], None] | None = None  # called as pass number `late_at` has begun
    late_at: int = 0

    def begin(self) -> int:
        """Has the next pass's `before_s` begin now; returns the number of that pass."""
        self.ended_s = time.perf_counter()
        return len(self.done)


@contextmanager
def recorded() -> Iterator[Passes]:
    """Watches every pass of this process, whether of one text or of several."""
    passes, verified = Passes(), verifier.verify_together

    def watched(texts: Sequence[tuple[LocalTarget, Sequence[int], DraftTree]]) -> list[Tensor]:
        source = texts[0][0].model.source
        started, waited_s = time.perf_counter(), _waited_s(source)
        if passes.late is not None and len(passes.done) == passes.late_at:
            passes.late()
        found = verified(texts)
        ended = time.perf_counter()
        one = Pass(
            texts=len(texts),
            pending_rows=sum(len(pending) for _, pending, _ in texts),
            nodes=sum(len(tree) for *_, tree in texts),
            before_s=started - passes.ended_s,
            seconds=ended - started,
            waited_s=_waited_s(source) - waited_s,
            ended_s=ended,
        )
        passes.done.append(one)
        passes.ended_s = ended
        tell(
            f"  pass of {one.texts} texts, {one.pending_rows} + {one.nodes} rows: "
            f"{one.before_s:.2f} s before it, {one.seconds:.2f} s, {one.waited_s:.2f} s of it "
            "waiting for weights"
        )
        return found

    verifier.verify_together = batch.verify_together = watched
    try:
        yield passes
    finally:
        verifier.verify_together = batch.verify_together = verified


def _waited_s(source: object) -> float:
    """Seconds that passes have waited for weights so far; 0 for a mixture's single experts."""
    return source.wait_s if isinstance(source, LayerStream) else 0.0


def sums(passes: Sequence[Pass]) -> dict[str, float]:
    """Sums over passes: rows and seconds."""
    waited_s = sum(one.waited_s for one in passes)
    return {
        "passes": len(passes),
        "pending_rows": sum(one.pending_rows for one in passes),
        "nodes": sum(one.nodes for one in passes),
        "before_s": sum(one.before_s for one in passes),
        "waited_s": waited_s,
        "arithmetic_s": sum(one.seconds for one in passes) - waited_s,
    }


def told(found: dict[str, float]) -> str:
    """The sums as one line for people."""
    return (
        f"{found['passes']} passes of {found['pending_rows']} + {found['nodes']} rows; drafting "
        f"{found['before_s']:.1f} s, arithmetic {found['arithmetic_s']:.1f} s, waiting for weights "
        f"{found['waited_s']:.1f} s"
    )
