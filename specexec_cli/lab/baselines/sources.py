"""The methods that SpecExec is measured against, as draft sources; importing this adds them.

They are methods of `bench` alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from specexec_cli.drafting.sources import DraftSetup, draft_source
from specexec_cli.drafting.sources.built_in import searched

if TYPE_CHECKING:
    from specexec_cli.drafting.protocols import SessionDrafter
    from specexec_cli.drafting.search import Search


def _sampled(setup: DraftSetup, search: Search, *, plain: bool = False) -> SessionDrafter:
    """A drafter that grows trees with `search` from children drawn from the draft model."""
    from specexec_cli.lab.baselines.sampled import SampledDrafter, SampledScores

    assert setup.model is not None, "the session has seen to it"
    return SampledDrafter(
        setup.model, setup.sampler, setup.tree, setup.target_vocab_size, search, setup.learned,
        setup.shared, setup.slots, partial(SampledScores, plain=plain),
        setup.window,
    )  # fmt: skip


@draft_source("specexec-paper")
def _specexec_paper(setup: DraftSetup) -> SessionDrafter:
    """SpecExec as printed: draft probabilities alone, searched in rounds.

    Source: arXiv:2406.02532, algorithm 2 and appendix A.
    """
    from specexec_cli.lab.baselines.as_printed import PrintedScores
    from specexec_cli.lab.baselines.searches import grow_in_rounds

    return searched(setup, grow_in_rounds, PrintedScores)


@draft_source("chain", one_path=True, drawn=True)
def _chain(setup: DraftSetup) -> SessionDrafter:
    """One path, drawn from the draft model. Source: Leviathan et al., arXiv:2211.17192."""
    from specexec_cli.lab.baselines.searches import grow_chain

    return _sampled(setup, grow_chain)


@draft_source("chain-coupled", one_path=True)
def _chain_coupled(setup: DraftSetup) -> SessionDrafter:
    """One path, ranked with the noise of the target's own draws.

    Source: drafter-invariant speculation, Daliri et al., arXiv:2408.07978.
    """
    from specexec_cli.lab.baselines.searches import grow_chain

    return searched(setup, grow_chain)


@draft_source("specinfer", drawn=True)
def _specinfer(setup: DraftSetup) -> SessionDrafter:
    """Several paths, drawn from the draft model's plain softmax at every temperature.

    Source: SpecInfer, arXiv:2305.09781, as in specdec/spec_SI.py of yandex-research/specexec.
    """
    from specexec_cli.lab.baselines.searches import grow_bundle

    return _sampled(setup, grow_bundle, plain=True)


@draft_source("beam")
def _beam(setup: DraftSetup) -> SessionDrafter:
    """SpecExec's ablation: the tree is found by beam search.

    Source: arXiv:2406.02532, appendix E.
    """
    from specexec_cli.lab.baselines.searches import grow_beam

    return searched(setup, grow_beam)


@draft_source("beam-pruned")
def _beam_pruned(setup: DraftSetup) -> SessionDrafter:
    """Beam search that keeps only the final beams and their ancestors."""
    from specexec_cli.lab.baselines.searches import grow_beam_pruned

    return searched(setup, grow_beam_pruned)
