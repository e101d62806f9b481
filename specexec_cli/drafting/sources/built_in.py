"""The draft sources that come with specexec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specexec_cli.drafting.sources.registry import DraftSetup, draft_source

if TYPE_CHECKING:
    from specexec_cli.drafting.protocols import SessionDrafter
    from specexec_cli.drafting.search import Search
    from specexec_cli.drafting.tree_scores import MakeScores


def searched(setup: DraftSetup, search: Search, scores: MakeScores | None = None) -> SessionDrafter:
    """A drafter that searches the draft model, with children scored by `scores`, or TreeScores."""
    from specexec_cli.drafting.drafter import ModelDrafter
    from specexec_cli.drafting.tree_scores import TreeScores

    assert setup.model is not None, "the session has seen to it"
    return ModelDrafter(
        setup.model, setup.sampler, setup.tree, setup.target_vocab_size, search, setup.learned,
        setup.shared, setup.slots, scores or TreeScores, setup.window,
    )  # fmt: skip


@draft_source("specexec")
def _specexec(setup: DraftSetup) -> SessionDrafter:
    """The most probable continuations, by best-first search."""
    from specexec_cli.drafting.search import grow_tree

    return searched(setup, grow_tree)


@draft_source("suffix", needs_model=False)
def _suffix(setup: DraftSetup) -> SessionDrafter:
    """What followed the last tokens earlier in the text, without a model.

    Source: SuffixDecoding, arXiv:2411.04975.
    """
    from specexec_cli.drafting.suffix import SuffixDrafter

    return SuffixDrafter(setup.sampler, setup.tree, setup.learned)
