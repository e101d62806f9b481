"""The passes that bench_batch.py's texts take, each told on stderr as it ends."""

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
    """A pass over the target, and what came before it."""

    texts: int
    pending_rows: int  # committed tokens, those of prompts among them
    nodes: int
    before_s: float  # since the pass before: drafting, and choosing tokens
    seconds: float
    waited_s: float  # of them, for weights
    ended_s: float  # by time.perf_counter


@dataclass(slots=True)
class Passes:
    """Every pass of this process, in order, as `recorded` sees them."""

    done: list[Pass] = field(default_factory=list)
    # when the last one ended, or `begin` was called
    ended_s: float = field(default_factory=time.perf_counter)
    late: Callable[[], None] | None = None  # called as pass number `late_at` has begun
    late_at: int = 0

    def begin(self) -> int:
        """Leaves out of the next pass's `before_s` what was before now; returns its number."""
        self.ended_s = time.perf_counter()
        return len(self.done)


@contextmanager
def recorded() -> Iterator[Passes]:
    """Watches every pass of this process, of one text and of several alike."""
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
    """Seconds so far; nothing is known where a mixture's experts come one by one."""
    return source.wait_s if isinstance(source, LayerStream) else 0.0


def sums(passes: Sequence[Pass]) -> dict[str, float]:
    """What so many passes carried and took."""
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
    """Sums, for people."""
    return (
        f"{found['passes']} passes of {found['pending_rows']} + {found['nodes']} rows; drafting "
        f"{found['before_s']:.1f} s, arithmetic {found['arithmetic_s']:.1f} s, waiting for weights "
        f"{found['waited_s']:.1f} s"
    )
