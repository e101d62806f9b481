"""The registry of draft sources: every way to come by draft trees, under its method's name.

A source is a function below the decorator `draft_source` that makes a drafter. The methods that
`bench` knows, their help and checks, and which policies suit them follow from there. The command
line reads the names before anything is loaded, so what a source needs is imported inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specexec_cli.config import TreeConfig
    from specexec_cli.drafting.learned import Learned
    from specexec_cli.drafting.protocols import Committed, SessionDrafter
    from specexec_cli.drafting.search import Search
    from specexec_cli.models.streamed import StreamedModel
    from specexec_cli.sampling import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetup:
    """What a drafter may be made of."""

    model: StreamedModel | None  # the draft model, where there is one
    sampler: Sampler  # settings of the first generation; configure() brings later ones
    tree: TreeConfig
    target_vocab_size: int
    learned: Learned  # about the pair, by all generations so far
    shared: Committed | None = None  # the target, where the draft model may read its cache rows
    slots: int = 0  # cache rows that memory is planned for


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """One way to come by draft trees."""

    name: str  # of the method
    make: Callable[[DraftSetup], SessionDrafter]
    one_path: bool  # a chain, sized by a speculation length in the place of budget and depth
    # Drawn from the draft model's distribution, and verified by rejection sampling: the text has
    # the target's distribution, but is not that of autoregressive decoding with the same seed.
    drawn: bool
    needs_model: bool  # a draft model


_table: dict[str, DraftSource] = {}
SOURCES: Mapping[str, DraftSource] = MappingProxyType(_table)

_Make = Callable[[DraftSetup], "SessionDrafter"]


def draft_source(
    name: str, *, one_path: bool = False, drawn: bool = False, needs_model: bool = True
) -> Callable[[_Make], _Make]:
    """Registers the function below as a source; see DraftSource for the arguments.

    Raises:
        ValueError: the name is taken.
    """

    def register(make: _Make) -> _Make:
        if name in _table:
            raise ValueError(f"draft source '{name}' is registered twice")
        _table[name] = DraftSource(
            name=name, make=make, one_path=one_path, drawn=drawn, needs_model=needs_model
        )
        return make

    return register


def _searched(setup: DraftSetup, search: Search) -> SessionDrafter:
    """Trees that a search finds in what the draft model says."""
    from specexec_cli.drafting.drafter import ModelDrafter

    assert setup.model is not None, "the session has seen to it"
    return ModelDrafter(
        setup.model, setup.sampler, setup.tree, setup.target_vocab_size, search, setup.learned,
        setup.shared, setup.slots,
    )  # fmt: skip


def _sampled(setup: DraftSetup, search: Search) -> SessionDrafter:
    """Trees of that shape whose tokens are drawn from the draft model's distribution."""
    from specexec_cli.drafting.sampled import SampledDrafter

    assert setup.model is not None, "the session has seen to it"
    return SampledDrafter(
        setup.model, setup.sampler, setup.tree, setup.target_vocab_size, search, setup.learned,
        setup.shared, setup.slots,
    )  # fmt: skip


@draft_source("specexec")
def _specexec(setup: DraftSetup) -> SessionDrafter:
    """The most probable continuations, by best-first search."""
    from specexec_cli.drafting.search import grow_tree

    return _searched(setup, grow_tree)


@draft_source("specexec-paper")
def _specexec_paper(setup: DraftSetup) -> SessionDrafter:
    """SpecExec as it is printed: draft probabilities alone, and rounds (arXiv:2406.02532)."""
    from specexec_cli.drafting.as_printed import AsPrintedDrafter
    from specexec_cli.drafting.search import grow_in_rounds

    assert setup.model is not None, "the session has seen to it"
    return AsPrintedDrafter(
        setup.model, setup.sampler, setup.tree, setup.target_vocab_size, grow_in_rounds,
        setup.learned, setup.shared, setup.slots,
    )  # fmt: skip


@draft_source("chain", one_path=True, drawn=True)
def _chain(setup: DraftSetup) -> SessionDrafter:
    """One path drawn from the draft model (Leviathan et al., arXiv:2211.17192)."""
    from specexec_cli.drafting.baselines import grow_chain

    return _sampled(setup, grow_chain)


@draft_source("chain-coupled", one_path=True)
def _chain_coupled(setup: DraftSetup) -> SessionDrafter:
    """One path, ranked by the noise of the target's own draws.

    Source: drafter-invariant speculation, Daliri et al., arXiv:2408.07978.
    """
    from specexec_cli.drafting.baselines import grow_chain

    return _searched(setup, grow_chain)


@draft_source("specinfer", drawn=True)
def _specinfer(setup: DraftSetup) -> SessionDrafter:
    """Several paths drawn from the draft model (SpecInfer, arXiv:2305.09781)."""
    from specexec_cli.drafting.baselines import grow_bundle

    return _sampled(setup, grow_bundle)


@draft_source("beam")
def _beam(setup: DraftSetup) -> SessionDrafter:
    """SpecExec's ablation: the same verification, the tree found by beam search."""
    from specexec_cli.drafting.baselines import grow_beam

    return _searched(setup, grow_beam)


@draft_source("beam-pruned")
def _beam_pruned(setup: DraftSetup) -> SessionDrafter:
    """Beam search of which the final beams alone are kept."""
    from specexec_cli.drafting.baselines import grow_beam_pruned

    return _searched(setup, grow_beam_pruned)


@draft_source("suffix", needs_model=False)
def _suffix(setup: DraftSetup) -> SessionDrafter:
    """What followed the last tokens where they stood before, without a model (arXiv:2411.04975)."""
    from specexec_cli.drafting.suffix import SuffixDrafter

    return SuffixDrafter(setup.sampler, setup.tree, setup.learned)
