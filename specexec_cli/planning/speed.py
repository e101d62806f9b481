"""How many tokens per second a plan comes to, drafting included: a range, and where it comes from.

    tokens/s = tokens per pass / (seconds of the pass + seconds of drafting that do not hide)

Tokens per pass are a property of the pair: of a paper, of models.toml, or of earlier runs here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specexec_cli.config import TreeConfig
from specexec_cli.planning.arithmetic import compute_seconds
from specexec_cli.planning.memory import Work
from specexec_cli.planning.mixtures import stream_seconds
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.tiers import Machine, Plan, shared_layers

# Of a pair of which nothing is known: between what SpecExec's smallest draft model reaches on text
# that is hard to guess and its 7B on chat (arXiv:2406.02532, tables 2 and 3), with a small tree.
UNKNOWN_TOKENS_PER_PASS = (4.0, 6.0, 9.0)
# A pair's figure holds for the texts it was measured on: SpecExec's pairs commit 0.5 to 0.6 as many
# tokens on WikiText-2 as on chat (tables 1 and 2).
_HARD_TEXT, _EASY_TEXT = 0.55, 1.15
# Starting the operations of one layer, whatever its size. On a CPU the demo target's 8 layers took
# 12 to 16 ms when nothing else ran; a GPU's is a guess.
_CPU_LAYER_S, _GPU_LAYER_S = 1.5e-3, 0.3e-3
# Of a draft step on a GPU, which starts as one graph: between two of its kernels, of which a layer
# has about twenty, a GPU takes one or two microseconds. Reasoned, not measured.
_GRAPH_LAYER_S = 0.04e-3
_STREAM_SHARE = 0.85  # of a link's rate that passes reached where they reached the least


@dataclass(frozen=True, slots=True)
class TokensPerPass:
    """How many tokens a pass commits."""

    low: float
    typical: float
    high: float
    source: str  # a sentence's end, as in "SpecExec, arXiv:2406.02532, table 1"

    @staticmethod
    def of_pair(typical: float | None, source: str) -> TokensPerPass:
        """By the one figure that models.toml has, or what pairs of its kind reach."""
        if typical is None:
            return TokensPerPass(*UNKNOWN_TOKENS_PER_PASS, "assumed: nothing is known of this pair")
        low = max(1.0, typical * _HARD_TEXT)
        return TokensPerPass(low, typical, typical * _EASY_TEXT, source)

    def of_nodes(self, nodes: int, budget: int) -> TokensPerPass:
        """With trees of fewer nodes than the budget that the figures are of.

        Each doubling is taken to bring as much as the one before: docs/measured.md, "The papers",
        has 2.2 tokens with 16 nodes and 0.2 to 0.4 more with each doubling, up to 2048.
        """
        share = math.log2(1 + nodes) / math.log2(1 + budget)
        low, typical, high = (
            1.0 + share * (each - 1.0) for each in (self.low, self.typical, self.high)
        )
        return replace(self, low=low, typical=typical, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens per second of a plan."""

    low: float
    typical: float
    high: float
    plain: float  # without a draft model
    pass_s: float  # of a verification pass
    draft_s: float  # of growing one tree
    nodes: int  # of that tree
    tokens_per_pass: TokensPerPass | None  # None: without a draft model

    @property
    def drafting_pays(self) -> bool:
        """Whether it is faster than plain decoding."""
        return self.typical > self.plain


def predict(
    target: ModelBytes,
    draft: ModelBytes | None,
    tree: TreeConfig,
    work: Work,
    machine: Machine,
    plan: Plan,
    rate: TokensPerPass | None,
) -> Speed:
    """The speed of a plan.

    Args:
        tree: the recommended one; the budget that memory is planned for may be another.
        rate: None without a draft model.
    """

    def pass_s(rows: int) -> float:
        return pass_seconds(target, work, machine, plan, rows)

    plain = 1.0 / pass_s(1)
    if draft is None or rate is None:
        low = plain * _STREAM_SHARE
        return Speed(low=low, typical=plain, high=plain, plain=plain, pass_s=pass_s(1),
                     draft_s=0.0, nodes=0, tokens_per_pass=None)  # fmt: skip

    def with_trees(nodes: int, rate: TokensPerPass) -> Speed:
        step_s = _step_layer_seconds(machine) * len(draft.layers) + max(
            _step_bytes(target, draft, work, plan) / machine.memory_bytes_per_s,
            compute_seconds(draft.active_params, min(tree.batch, nodes), machine.flops),
        )
        draft_s = step_s * _steps(tree, nodes, rate.typical)
        verify_s = pass_s(nodes + 1)
        # the next pass's first layers may come while the tree grows; weights that stay save nothing
        hidden_s = min(draft_s, max(plan.ssd_s, plan.link_s))
        return Speed(
            low=rate.low / (verify_s / _STREAM_SHARE + draft_s),
            typical=rate.typical / (verify_s + draft_s),
            high=rate.high / (verify_s + draft_s - hidden_s),
            plain=plain,
            pass_s=verify_s,
            draft_s=draft_s,
            nodes=nodes,
            tokens_per_pass=rate,
        )

    speeds = [
        with_trees(nodes, rate.of_nodes(nodes, tree.budget)) for nodes in _sizes(tree, target)
    ]
    return max(speeds, key=lambda speed: speed.typical)


def _step_bytes(target: ModelBytes, draft: ModelBytes, work: Work, plan: Plan) -> int:
    """Weights that a draft step reads: of layers that a copy of the target shares, the target's."""
    own = draft.loaded(work.item_bytes) - draft.table
    layers = zip(shared_layers(target, draft, work), target.layers, plan.tiers, strict=True)
    return own + sum(exact - copy for copy, exact, tier in layers if copy and tier == "resident")


def _sizes(tree: TreeConfig, target: ModelBytes) -> list[int]:
    """Nodes of the trees to choose from.

    A node of a mixture's tree may bring experts of its own, so that few nodes may write faster than
    the recommended ones.
    """
    if target.experts is None:
        return [tree.budget]
    return [*(1 << n for n in range(tree.budget.bit_length() - 1)), tree.budget]


def pass_seconds(
    target: ModelBytes,
    work: Work,
    machine: Machine,
    plan: Plan,
    rows: int,
    ssd_bytes: int | None = None,
) -> float:
    """Seconds of a pass of so many rows.

    Args:
        ssd_bytes: that it reads; as planned unless told.
    """
    compute_s = compute_seconds(target.active_params, rows, machine.flops)
    stream_s = stream_seconds(plan, target, work, machine, rows, ssd_bytes)
    return max(stream_s, compute_s) + _layer_seconds(machine) * len(target.layers)


def _layer_seconds(machine: Machine) -> float:
    return _GPU_LAYER_S if machine.vram_bytes else _CPU_LAYER_S


def _step_layer_seconds(machine: Machine) -> float:
    return _GRAPH_LAYER_S if machine.vram_bytes else _CPU_LAYER_S


def _steps(tree: TreeConfig, nodes: int, tokens_per_pass: float) -> float:
    """Draft steps of a tree: enough for its nodes and for paths longer than what is accepted."""
    return min(tree.max_depth, nodes, max(nodes / tree.batch, 1.5 * tokens_per_pass))


def figure(value: float) -> str:
    """A speed or a rate with as many digits as a prediction deserves."""
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
