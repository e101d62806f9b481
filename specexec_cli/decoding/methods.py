"""Every decoding method by name. A new one is one more entry."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specexec_cli.config import TreeConfig
from specexec_cli.core import StepResult
from specexec_cli.decoding.loop import specexec
from specexec_cli.decoding.rejection import rejection_sampling
from specexec_cli.drafting.baselines import (
    grow_beam,
    grow_beam_pruned,
    grow_bundle,
    grow_chain,
)
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.sampled import SampledDrafter
from specexec_cli.drafting.search import Search, grow_tree
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import TargetServer

# (target, drafter, sampler, prompt, max_tokens, eos_ids) -> one step per target pass
Decode = Callable[
    [TargetServer, Any, Sampler, Sequence[int], int, Collection[int]], Iterator[StepResult]
]


@dataclass(frozen=True, slots=True)
class SpeculativeMethod:
    """A method that drafts: how its trees grow, and how a pass over one is turned into text."""

    search: Search
    drafter: type[ModelDrafter] = ModelDrafter
    decode: Decode = specexec
    lossless: Literal["tokens", "distribution"] = "tokens"  # against autoregressive decoding

    def new_drafter(
        self,
        model: StreamedModel,
        sampler: Sampler,
        tree: TreeConfig,
        target_vocab_size: int,
        learned: Learned,
    ) -> ModelDrafter:
        """A drafter for this method; it may be used for many generations."""
        return self.drafter(model, sampler, tree, target_vocab_size, self.search, learned)


SPECULATIVE: Mapping[str, SpeculativeMethod] = {
    "specexec": SpeculativeMethod(grow_tree),
    # one path, ranked by the noise of the target's own draws: drafter-invariant speculation
    # (Daliri et al., arXiv:2408.07978)
    "chain-coupled": SpeculativeMethod(grow_chain),
    # one path drawn from the draft model (Leviathan et al., arXiv:2211.17192)
    "chain": SpeculativeMethod(grow_chain, SampledDrafter, rejection_sampling, "distribution"),
    # several paths drawn from the draft model (SpecInfer, arXiv:2305.09781)
    "specinfer": SpeculativeMethod(grow_bundle, SampledDrafter, rejection_sampling, "distribution"),
    # SpecExec's ablation: the same verification, the tree found by beam search
    "beam": SpeculativeMethod(grow_beam),
    "beam-pruned": SpeculativeMethod(grow_beam_pruned),
}
