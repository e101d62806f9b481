"""How many tokens per second a plan comes to, drafting included; and llama.cpp's beside it.

    tokens/s = tokens per pass / (seconds of the pass + seconds of drafting that do not hide)

Tokens per pass are a property of the pair: of a paper, of models.toml, or of earlier runs here.
With the same weights llama.cpp takes

    seconds = the sum of bytes in VRAM, in RAM and on the SSD, each over the share of its rate
              that products reach
            >= the products of one row, where a CPU computes alone; then also
            + what is left of each layer + what each word of the vocabulary takes

The bytes are those of the weights that one token is multiplied by. RAM and products on a CPU are
taken to be as fast as those here, of rows in 8 bits. What is left of a layer and of a word was set
so that the formula gives what `scripts/bench_peers.py --in-ram` measured of llama.cpp on a Zen 3
(docs/measured.md, "Beside other programs"); by itself neither was measured. The split is the best
that llama.cpp's options allow: the GPU holds what every token needs, then experts or layers as far
as they fit, and the CPU computes the rest. tests/unit/test_llama_cpp.py compares the formula with
published figures, and with measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from specexec_cli.config import TreeConfig
from specexec_cli.planning.machine import Machine
from specexec_cli.planning.machine_rates import BANDWIDTH_SHARE, one_row_flops, product_seconds
from specexec_cli.planning.memory import DoesNotFitError, Work
from specexec_cli.planning.pass_time import (
    Launches,
    asked_of_each,
    layers_seconds,
    pass_launches,
    pass_time,
    products,
    unpack_seconds,
)
from specexec_cli.planning.sizes import ModelBytes
from specexec_cli.planning.tiers import Plan, shared_layers

# Of a pair of which nothing is known: between what SpecExec's smallest draft model reaches on text
# that is hard to guess and its 7B on chat (arXiv:2406.02532, tables 2 and 3), with a small tree.
UNKNOWN_TOKENS_PER_PASS = (4.0, 6.0, 9.0)
# A pair's figure holds for the texts it was measured on: SpecExec's pairs commit 0.5 to 0.6 as many
# tokens on WikiText-2 as on chat (tables 1 and 2).
_HARD_TEXT, _EASY_TEXT = 0.55, 1.15
# Tokens per pass of copies by their bits, measured on SmolLM2-135M-Instruct with 64 nodes, greedy
# and at T = 0.7 (docs/measured.md): chat, texts of five kinds, and code. Larger models have better
# copies: SubSpec's in 4 bits bring 28 of Qwen2.5-7B (arXiv:2509.18344).
_TOKENS_PER_PASS = {4: (7.3, 9.4, 12.0), 3: (4.2, 5.7, 9.5), 2: (1.7, 1.9, 2.4)}
# By which share they would rise if all layers were the target's own, from what up to three quarters
# of them brought (docs/measured.md). In 4 bits there is next to nothing to gain.
_GAIN_OF_EXACT_LAYERS = {4: 0.05, 3: 0.24, 2: 0.57}
_STREAM_SHARE = 0.85  # of a link's rate that passes reached where they reached the least

# Of llama.cpp on a CPU alone, by SmolLM2-135M, Gemma-3-270M and 8 layers of a 7B on a Zen 3.
_LAYER_S, _WORD_S = 2e-4, 20e-9
_SHARE = 0.8  # of a memory's rate that plain decoding reaches: 35 to 45 of 51 tok/s on an RTX 4090
_GPU_SHARE = _SHARE / BANDWIDTH_SHARE  # of a GPU's rate in a plan, which is what products reach
_BUFFER_BYTES = 400_000_000  # of a GPU, for the activations of a batch of 512 rows
_CACHE_ITEM_BYTES = 2  # keys and values are float16


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


# Of a target's own MTP layer: what chains of such layers reach in other programs. It was trained to
# predict one token, so what it adds to its own drafts of further ones is less likely to be right.
MTP_TOKENS_PER_PASS = TokensPerPass(2.3, 2.5, 2.8, "as MTP layers reach in chains elsewhere")
# Of three such layers: Step 3.7's 2.8 (https://github.com/ikawrakow/ik_llama.cpp/pull/2250),
# MiMo-V2-Flash's 2.95 (https://github.com/sgl-project/sglang-jax/pull/1256), its makers' up to 3.6.
MTP_LAYERS_TOKENS_PER_PASS = TokensPerPass(2.8, 2.9, 3.6, "as three MTP layers reach elsewhere")
# Of an EAGLE-3 head: what such heads reach in other programs. It was trained on its own drafts.
EAGLE_TOKENS_PER_PASS = TokensPerPass(2.2, 3.0, 4.1, "as EAGLE-3 heads reach elsewhere")
# Of a Gemma 4's assistant: the 31B's wrote 192 tokens in 43 to 54 passes of 4 drafts
# (https://github.com/ggml-org/llama.cpp/pull/23398); stories, and smaller targets, do worse.
ASSISTANT_TOKENS_PER_PASS = TokensPerPass(2.5, 3.6, 4.5, "as assistants reach in chains elsewhere")
# Of heads that draft a block in one pass: of 8B models with 256 nodes DFlash's is said to reach 6.9
# and JetSpec's 10.8 (arXiv:2606.18394); a chat's speedup is half of that of mathematics there.
DFLASH_TOKENS_PER_PASS = TokensPerPass(3.0, 4.5, 6.9, "as DFlash heads reach elsewhere")
JETSPEC_TOKENS_PER_PASS = TokensPerPass(4.5, 6.5, 10.8, "as JetSpec heads reach elsewhere")


@dataclass(frozen=True, slots=True)
class Pace:
    """One iteration after another: drafting, then a pass that commits so many tokens."""

    tokens_per_pass: float
    pass_s: float
    draft_s: float  # of growing a tree, as far as it does not hide behind the stream

    @property
    def tokens_per_s(self) -> float:
        """What the three numbers come to."""
        return self.tokens_per_pass / (self.pass_s + self.draft_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What sessions of a plan are expected to reach, by the kind of text."""

    hard: Pace  # text that is hard to guess, over links at their slowest
    usual: Pace
    easy: Pace  # text that is easy to guess, drafted behind the stream as far as that goes
    alone: Pace  # without a draft model
    nodes: int  # of each tree
    tokens_per_pass: TokensPerPass | None  # None: without a draft model

    @property
    def low(self) -> float:
        """Tokens per second at least."""
        return self.hard.tokens_per_s

    @property
    def typical(self) -> float:
        """Tokens per second as expected."""
        return self.usual.tokens_per_s

    @property
    def high(self) -> float:
        """Tokens per second at best."""
        return self.easy.tokens_per_s

    @property
    def plain(self) -> float:
        """Tokens per second without a draft model."""
        return self.alone.tokens_per_s

    @property
    def drafting_pays(self) -> bool:
        """Whether it is faster than plain decoding."""
        return self.typical > self.plain

    def as_json(self) -> dict[str, Any]:
        """The numbers by the names that JSON output has for them."""
        paces = {"low": self.hard, "typical": self.usual, "high": self.easy, "plain": self.alone}
        return {
            **{name: pace.tokens_per_s for name, pace in paces.items()},
            "pass_s": self.usual.pass_s,
            "draft_s": self.usual.draft_s,
            "nodes": self.nodes,
            "tokens_per_pass": asdict(self.tokens_per_pass) if self.tokens_per_pass else None,
            "paces": {name: asdict(pace) for name, pace in paces.items()},
        }


def predict(
    plan: Plan, draft: ModelBytes | None, tree: TreeConfig, rate: TokensPerPass | None
) -> Speed:
    """The speed of a plan.

    Args:
        tree: the recommended one; the budget that memory is planned for may be another.
        rate: None without a draft model.
    """
    plain_s = pass_time(plan, 1).seconds
    alone = Pace(1.0, plain_s, 0.0)
    if draft is None or rate is None:
        hard = Pace(1.0, plain_s / _STREAM_SHARE, 0.0)
        return Speed(hard=hard, usual=alone, easy=alone, alone=alone, nodes=0, tokens_per_pass=None)

    speeds = [
        with_trees(plan, draft, tree, nodes, rate.of_nodes(nodes, tree.budget))
        for nodes in _sizes(tree, plan.target)
    ]
    return max(speeds, key=lambda speed: speed.typical)


def with_trees(
    plan: Plan, draft: ModelBytes, tree: TreeConfig, nodes: int, rate: TokensPerPass
) -> Speed:
    """The speed of a plan with trees of so many nodes.

    Args:
        tree: its depth and batch.
        rate: with trees of so many nodes.
    """
    if block := plan.work.block_rows:
        draft_s = _step_seconds(plan, draft, block)
    else:
        draft_s = _step_seconds(plan, draft, min(tree.batch, nodes))
        draft_s *= _steps(tree, nodes, rate.typical)
    verify = pass_time(plan, nodes + 1)
    # the next pass's first layers may come while the tree grows; weights that stay save nothing
    hidden_s = min(draft_s, max(verify.ssd_s, verify.link_s))
    return Speed(
        hard=Pace(rate.low, verify.seconds / _STREAM_SHARE, draft_s),
        usual=Pace(rate.typical, verify.seconds, draft_s),
        easy=Pace(rate.high, verify.seconds, draft_s - hidden_s),
        alone=Pace(1.0, pass_time(plan, 1).seconds, 0.0),
        nodes=nodes,
        tokens_per_pass=rate,
    )


def _step_seconds(plan: Plan, draft: ModelBytes, rows: int) -> float:
    """Seconds of a draft step over so many rows."""
    work, machine = plan.work, plan.machine
    own, shared = _step_bytes(plan, draft)
    # layers come one after another: those of the target wait for memory, packed copies for products
    share = plan.shared_layers / len(plan.tiers)
    read_bytes, compute_s = products(draft, rows, own, 0, machine)
    products_s = max(read_bytes / machine.memory_bytes_per_s, (1.0 - share) * compute_s)
    products_s += max(shared / machine.memory_bytes_per_s, share * compute_s)
    others_s = layers_seconds(draft, rows, work, machine, drafts=True)
    # on a GPU a step starts as one graph, in which the host takes no part; none is captured of
    # recurrent layers and of heads
    graph, started = not (draft.state_elements or work.reads_target), Launches()
    if machine.vram_bytes and not graph:
        asked = asked_of_each(draft.experts, rows, one_by_one=False)
        started = pass_launches(draft, asked, drafts=True)
    device_s = products_s + unpack_seconds(draft, own + shared, machine, graph=graph) + others_s
    return max(device_s, started.host_s(machine.gpu)) + started.waits * machine.gpu.wait_s


def _step_bytes(plan: Plan, draft: ModelBytes) -> tuple[int, int]:
    """Weights that a draft step reads: the draft model's own, and layers of the target's."""
    target, work = plan.target, plan.work
    own = draft.loaded(work.item_bytes) - draft.table
    layers = zip(shared_layers(target, draft, work), target.layers, plan.tiers, strict=True)
    shared = [(copy, exact) for copy, exact, tier in layers if copy and tier == "resident"]
    return own - sum(copy for copy, _ in shared), sum(exact for _, exact in shared)


def _sizes(tree: TreeConfig, target: ModelBytes) -> list[int]:
    """Nodes of the trees to choose from.

    A node of a mixture's tree may bring experts of its own, so that few nodes may write faster than
    the recommended ones.
    """
    if target.experts is None:
        return [tree.budget]
    return [*(1 << n for n in range(tree.budget.bit_length() - 1)), tree.budget]


def _steps(tree: TreeConfig, nodes: int, tokens_per_pass: float) -> float:
    """Draft steps of a tree: enough for its nodes and for paths longer than what is accepted."""
    return min(tree.max_depth, nodes, max(nodes / tree.batch, 1.5 * tokens_per_pass))


def copy_tokens_per_pass(bits: int, share: float, max_depth: int) -> TokensPerPass:
    """What a target's own copy is expected to bring.

    Args:
        share: of the layers, those that are the target's own.
        max_depth: of the trees.
    """
    gain = 1.0 + share * _GAIN_OF_EXACT_LAYERS[bits]
    low, typical, high = (min(gain * each, max_depth + 1.0) for each in _TOKENS_PER_PASS[bits])
    return TokensPerPass(low, typical, high, "as the copies of SmolLM2-135M reach")


def figure(value: float) -> str:
    """A speed or a rate with as many digits as a prediction deserves."""
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


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


def llama_cpp_tokens_per_s(target: ModelBytes, machine: Machine, context_tokens: int) -> float:
    """Tokens per second of llama.cpp without a draft model, at its best split of the weights.

    Args:
        context_tokens: prompt and text; their keys and values lie where most weights are computed.
    """
    host_rate = machine.host_bytes_per_s if machine.vram_bytes else machine.memory_bytes_per_s
    cache = target.kv_elements * context_tokens * _CACHE_ITEM_BYTES
    vram, ram = 0, machine.usable(machine.ram_bytes) - machine.base_bytes
    if machine.vram_bytes:
        taken = machine.context_bytes + _BUFFER_BYTES + cache
        vram = max(0, machine.usable(machine.vram_bytes) - taken)
    else:
        ram -= cache
    ram, seconds = max(0, ram), 0.0
    for stored, read in _parts(target):
        in_vram = min(stored, vram)
        in_ram = min(stored - in_vram, ram)
        on_ssd = stored - in_vram - in_ram
        vram, ram = vram - in_vram, ram - in_ram
        seconds += read * (
            in_vram / (_GPU_SHARE * machine.memory_bytes_per_s)
            + in_ram / host_rate
            + on_ssd / (_SHARE * machine.ssd_bytes_per_s)
        )
    if not machine.vram_bytes:
        weights = target.active_params + target.vocab * target.hidden
        seconds = max(seconds, product_seconds(weights, 1, machine.flops or one_row_flops()))
        seconds += len(target.layers) * _LAYER_S + target.vocab * _WORD_S
    return 1.0 / seconds


def _parts(target: ModelBytes) -> list[tuple[int, float]]:
    """Stored bytes and the share of them that a token reads, the most read first."""
    experts = target.experts
    if experts is None:
        # experts that move with their layer are read one by one all the same
        read = target.active_params / target.layer_params
        return [(target.read_bytes - sum(target.layers), 1.0), (sum(target.layers), read)]
    return [
        (target.dense.read_bytes, 1.0),
        (sum(experts.layers), experts.chosen / experts.count),
    ]
