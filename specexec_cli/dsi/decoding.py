"""One generation through a DSI pool, as the steps that every decoding method yields."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from specexec_cli.config import SamplingConfig
from specexec_cli.core import FinishReason, StepResult
from specexec_cli.dsi.messages import Workers
from specexec_cli.dsi.orchestrator import Orchestrator


class ConfigurableWorkers(Workers, Protocol):
    """A pool of real workers, which must know how tokens are drawn."""

    def configure(self, sampling: SamplingConfig) -> None:
        """Tell every worker how the next generation draws its tokens."""
        ...


def dsi(
    workers: ConfigurableWorkers,
    orchestrator: Orchestrator,
    sampling: SamplingConfig,
    prompt: Sequence[int],
    max_tokens: int,
    eos_ids: Collection[int],
) -> Iterator[StepResult]:
    """Yields one StepResult per commit until an EOS token or `max_tokens`.

    Drafting and verification overlap, so a step's verify_s is the time since the step before it
    and its draft_s is 0. Bytes are counted by the orchestrator.
    """
    workers.configure(sampling)
    left, since = max_tokens, time.perf_counter()
    commits = orchestrator.generate(prompt, max_tokens)
    try:
        for commit in commits:
            ends = [i + 1 for i, token in enumerate(commit.tokens) if token in eos_ids]
            tokens = commit.tokens[: ends[0]] if ends else commit.tokens
            left -= len(tokens)
            finish: FinishReason | None = "eos" if ends else "length" if left == 0 else None
            now = time.perf_counter()
            drafted = commit.drafted[: len(tokens)]
            yield StepResult(
                tokens=tokens,
                drafted=drafted,
                tree_nodes=sum(drafted),
                tree_depth=sum(drafted),
                draft_s=0.0,
                verify_s=now - since,
                bytes_streamed=0,
                pending_rows=len(prompt) if left + len(tokens) == max_tokens else 1,
                finish_reason=finish,
            )
            since = now
            if finish:
                return
    finally:
        commits.close()
