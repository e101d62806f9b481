"""SpecExec decoding of one text, the whole of it.

Each iteration grows a draft tree, verifies it in one streaming pass, follows the target's own draws
through it, and commits the tokens that they settle. The prompt needs no pass of its own: tokens
that the target's cache lacks, be it a whole prompt or the last bonus token, are put in front of the
tree in the same pass.

Source: SpecExec, arXiv:2406.02532, algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from specexec_cli.core import DraftTree, FinishReason, StepResult
from specexec_cli.drafting.protocols import Drafter
from specexec_cli.errors import NonFiniteLogitsError
from specexec_cli.sampling import Sampler
from specexec_cli.verify.accept import Walk, accept
from specexec_cli.verify.verifier import TargetServer


def specexec(
    target: TargetServer,
    drafter: Drafter,
    sampler: Sampler,
    prompt: Sequence[int],
    max_tokens: int,
    eos_ids: Collection[int],
    walk: Walk = accept,
) -> Iterator[StepResult]:
    """Yields one StepResult per target pass until an EOS token or `max_tokens`.

    If a pass gives logits that are not finite, it is repeated without drafts; both count as one.

    Args:
        target: its cache must hold a proper prefix of `prompt`, or nothing.
        drafter: grows the trees.
        sampler: draws the target's tokens.
        prompt: at least one token.
        max_tokens: most tokens to decode.
        eos_ids: tokens that end the text.
        walk: turns a verified tree into committed tokens.
    Raises:
        NonFiniteLogitsError: the next token cannot be drawn, with drafts or without.
    """
    context = list(prompt)
    stop = len(prompt) + max_tokens
    while True:
        started, bytes_before = time.perf_counter(), target.bytes_streamed
        read_before_s = target.read_s
        pending = context[len(target.tokens) :]
        # the bonus token takes one position, so a deeper path could never be committed whole
        tree = drafter.grow(context, stop - len(context) - 1, len(pending))
        drafted = time.perf_counter()
        ends = sampler, context, stop - len(context), eos_ids
        try:
            accepted = walk(tree, target.verify(pending, tree), *ends)
        except NonFiniteLogitsError:
            if not len(tree):
                raise
            # A wrong draft may be the cause, which plain decoding would never run: rows that do not
            # attend to it give it the weight 0, but 0 times NaN is NaN. So try again without it.
            tree, pending = DraftTree.empty(), context[len(target.tokens) :]
            accepted = walk(tree, target.verify(pending, tree), *ends)
        target.commit(accepted.nodes)
        drafter.commit(accepted.nodes, accepted.tokens)
        context += accepted.tokens
        ended = accepted.tokens[-1] in eos_ids
        finish: FinishReason | None = "eos" if ended else "length" if len(context) == stop else None
        step = StepResult(
            tokens=accepted.tokens,
            drafted=accepted.drafted,
            tree_nodes=len(tree),
            tree_depth=int(tree.depths.max(initial=0)),
            draft_s=drafted - started,
            verify_s=time.perf_counter() - drafted,
            bytes_streamed=target.bytes_streamed - bytes_before,
            read_s=target.read_s - read_before_s,
            pending_rows=len(pending),
            finish_reason=finish,
        )
        drafter.observe(step)
        yield step
        if finish:
            return
