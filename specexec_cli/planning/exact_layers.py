"""Whether a target's own copy drafts with layers of the target that stay on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specexec_cli.config import TreeConfig
from specexec_cli.planning.low_bits import copy_tokens_per_pass
from specexec_cli.planning.memory import DoesNotFitError, Work
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.speed import predict
from specexec_cli.planning.tiers import Plan


def faster_way(
    placed: Callable[[Work], Plan],
    bits: int,
    tree: TreeConfig,
    work: Work,
    draft: ModelBytes,
) -> tuple[Work, Plan]:
    """Whether a target's own copy drafts with the layers that stay on the GPU, or with copies.

    The target's own leave room for more of them and are accepted more often; copies are read
    faster, several times for each tree. Where all layers stay, only copies are worth having.

    Args:
        placed: the plan of a session.
        bits: of the copy.
        tree: the recommended one.
    Raises:
        DoesNotFitError: neither fits.
    """
    found: list[tuple[float, Work, Plan]] = []
    refused: DoesNotFitError | None = None
    for shares in (False, True):
        work = replace(work, shares_layers=shares)
        try:
            plan = placed(work)
        except DoesNotFitError as error:
            refused = error
            continue
        if plan.shared_layers == len(plan.tiers):
            continue  # nothing would be drafted with a copy
        rate = copy_tokens_per_pass(bits, plan.shared_layers / len(plan.tiers), tree.max_depth)
        speed = predict(plan, draft, tree, rate)
        found.append((speed.typical, work, plan))
    if not found:
        assert refused is not None, "copies of layers that all stay would have fitted"
        raise refused
    _, work, plan = max(found, key=lambda each: each[0])
    return work, plan
