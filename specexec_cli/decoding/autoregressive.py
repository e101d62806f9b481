"""Plain decoding, one token per target pass: the oracle of losslessness and the baseline of speed.

It shares only the streaming target and the sampler with SpecExec.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from specexec_cli.core import DraftTree, FinishReason, StepResult
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import TargetServer


def autoregressive(
    target: TargetServer,
    sampler: Sampler,
    prompt: Sequence[int],
    max_tokens: int,
    eos_ids: Collection[int],
) -> Iterator[StepResult]:
    """Yields one StepResult, with one token, per target pass until an EOS token or `max_tokens`.

    Args:
        target: its cache must hold a proper prefix of `prompt`, or nothing.
        sampler: draws the tokens.
        prompt: at least one token.
        max_tokens: most tokens to decode.
        eos_ids: tokens that end the text.
    Raises:
        NonFiniteLogitsError: the next token cannot be drawn.
    """
    context = list(prompt)
    for count in range(1, max_tokens + 1):
        started, bytes_before = time.perf_counter(), target.bytes_streamed
        pending = context[len(target.tokens) :]
        logits = target.verify(pending, DraftTree.empty())
        token = sampler.token(logits[0], context)
        target.commit([])
        context.append(token)
        finish: FinishReason | None = (
            "eos" if token in eos_ids else "length" if count == max_tokens else None
        )
        yield StepResult(
            tokens=(token,),
            drafted=(False,),
            tree_nodes=0,
            tree_depth=0,
            draft_s=0.0,
            verify_s=time.perf_counter() - started,
            bytes_streamed=target.bytes_streamed - bytes_before,
            pending_rows=len(pending),
            finish_reason=finish,
        )
        if finish:
            return
