"""Settles how a command samples: the user's options, and where they say nothing, the makers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specexec_cli.cli.render import notice
from specexec_cli.config import SamplingChoice, SamplingConfig

if TYPE_CHECKING:
    from specexec_cli.models.makers_sampling import MakersSampling
    from specexec_cli.session import TextSession

_DRAWN = ("top_p", "top_k", "min_p", "seed")  # settings that need a temperature


def settled_sampling(session: TextSession, choice: SamplingChoice, quiet: bool) -> SamplingConfig:
    """The sampling of an open session's texts; notices tell what is left out.

    Raises:
        CheckpointError: the makers' file has an impossible value that no option replaces.
    """
    makers = session.makers_sampling
    sampling = makers.with_choice(choice)
    tell_left_out(makers, quiet)
    if sampling.temperature == 0.0 and not quiet:
        for name in _DRAWN:
            if name in choice.given:
                notice(f"`{name}` has no effect at `temperature=0`, which is greedy")
    return sampling


def tell_left_out(makers: MakersSampling, quiet: bool) -> None:
    """A notice of what the makers ask for and the program does not have."""
    if makers.not_applied and not quiet:
        notice(f"{makers.source}: not applied here: {', '.join(makers.not_applied)}")
