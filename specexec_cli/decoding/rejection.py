"""Speculative sampling as published: chains (Leviathan et al.) and token trees (SpecInfer).

The loop is SpecExec's, with two differences: the tree is drawn from the draft model, and a verified
tree is walked by rejection sampling. The text has the target's distribution, but unlike SpecExec's
it is not the text of autoregressive decoding with the same seed.

Source: Leviathan et al., arXiv:2211.17192; SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from specexec_cli.core import StepResult
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.sampled import SampledDrafter
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import TargetServer


def rejection_sampling(
    target: TargetServer,
    drafter: SampledDrafter,
    sampler: Sampler,
    prompt: Sequence[int],
    max_tokens: int,
    eos_ids: Collection[int],
) -> Iterator[StepResult]:
    """Yields one StepResult per target pass; arguments as for specexec()."""
    return specexec(target, drafter, sampler, prompt, max_tokens, eos_ids, drafter.walk)
