"""The draft sources that come with specexec."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from specexec_cli.drafting.sources.registry import DraftSetup, draft_source

if TYPE_CHECKING:
    from specexec_cli.drafting.protocols import SessionDrafter
    from specexec_cli.drafting.search import Search
    from specexec_cli.drafting.tree_scores import MakeScores


def _searched(
    setup: DraftSetup, search: Search, scores: MakeScores | None = None
) -> SessionDrafter:
    """A drafter that searches the draft model, with children scored by `scores`, or TreeScores."""
    from specexec_cli.drafting.drafter import ModelDrafter
    from specexec_cli.drafting.tree_scores import TreeScores

    assert setup.model is not None, "the session has seen to it"
    return ModelDrafter(
        setup.model, setup.sampler, setup.tree, setup.target_vocab_size, search, setup.learned,
        setup.shared, setup.slots, scores or TreeScores,
    )  # fmt: skip


def _sampled(setup: DraftSetup, search: Search, *, plain: bool = False) -> SessionDrafter:
    """A drafter that grows trees with `search` from children drawn from the draft model."""
    from specexec_cli.drafting.sampled import SampledDrafter, SampledScores

    assert setup.model is not None, "the session has seen to it"
    return SampledDrafter(
        setup.model, setup.sampler, setup.tree, setup.target_vocab_size, search, setup.learned,
        setup.shared, setup.slots, partial(SampledScores, plain=plain),
    )  # fmt: skip


@draft_source("specexec")
def _specexec(setup: DraftSetup) -> SessionDrafter:
    """The most probable continuations, by best-first search."""
    from specexec_cli.drafting.search import grow_tree

    return _searched(setup, grow_tree)


@draft_source("specexec-paper")
def _specexec_paper(setup: DraftSetup) -> SessionDrafter:
    """SpecExec as printed: draft probabilities alone, searched in rounds.

    Source: arXiv:2406.02532, algorithm 2 and appendix A.
    """
    from specexec_cli.drafting.as_printed import PrintedScores
    from specexec_cli.drafting.search import grow_in_rounds

    return _searched(setup, grow_in_rounds, PrintedScores)


@draft_source("chain", one_path=True, drawn=True)
def _chain(setup: DraftSetup) -> SessionDrafter:
    """One path, drawn from the draft model. Source: Leviathan et al., arXiv:2211.17192."""
    from specexec_cli.drafting.baselines import grow_chain

    return _sampled(setup, grow_chain)


@draft_source("chain-coupled", one_path=True)
def _chain_coupled(setup: DraftSetup) -> SessionDrafter:
    """One path, ranked with the noise of the target's own draws.

    Source: drafter-invariant speculation, Daliri et al., arXiv:2408.07978.
    """
    from specexec_cli.drafting.baselines import grow_chain

    return _searched(setup, grow_chain)


@draft_source("specinfer", drawn=True)
def _specinfer(setup: DraftSetup) -> SessionDrafter:
    """Several paths, drawn from the draft model's plain softmax at every temperature.

    Source: SpecInfer, arXiv:2305.09781, as in specdec/spec_SI.py of yandex-research/specexec.
    """
    from specexec_cli.drafting.baselines import grow_bundle

    return _sampled(setup, grow_bundle, plain=True)


@draft_source("beam")
def _beam(setup: DraftSetup) -> SessionDrafter:
    """SpecExec's ablation: the tree is found by beam search.

    Source: arXiv:2406.02532, appendix E.
    """
    from specexec_cli.drafting.baselines import grow_beam

    return _searched(setup, grow_beam)


@draft_source("beam-pruned")
def _beam_pruned(setup: DraftSetup) -> SessionDrafter:
    """Beam search that keeps only the final beams and their ancestors."""
    from specexec_cli.drafting.baselines import grow_beam_pruned

    return _searched(setup, grow_beam_pruned)


@draft_source("suffix", needs_model=False)
def _suffix(setup: DraftSetup) -> SessionDrafter:
    """What followed the last tokens earlier in the text, without a model.

    Source: SuffixDecoding, arXiv:2411.04975.
    """
    from specexec_cli.drafting.suffix import SuffixDrafter

    return SuffixDrafter(setup.sampler, setup.tree, setup.learned)
