"""From a Request to a Decision: names, files, tree, dtype, and where each layer will live.

`specexec plan` shows a Decision and sessions carry it out. Both get it from `resolve`, so that
what was planned is what runs. Torch-free; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specexec_cli.config import DTYPE_BYTES, Activations, DtypeName, Tier, TreeConfig
from specexec_cli.errors import ConfigError
from specexec_cli.offload.checkpoint import Checkpoint
from specexec_cli.offload.mtp import left_out
from specexec_cli.planning.chosen_models import ChosenPair, choose_pair, models_of, registry_of
from specexec_cli.planning.dtype_choice import (
    SMALL_MODEL_BYTES,
    ChosenDtype,
    choose_dtype,
    has_arithmetic,
    has_integer_codes,
    multiplies_bytes,
)
from specexec_cli.planning.hosts import spread
from specexec_cli.planning.machine import ASSUMED_FLOPS, Host, Machine, Setting, Site
from specexec_cli.planning.machine_rates import arithmetic_name
from specexec_cli.planning.memory import (
    BLOCK_ROWS,
    DRAFT_WINDOW_TOKENS,
    DoesNotFitError,
    Work,
    prompt_rows,
)
from specexec_cli.planning.placement import Placed, place, placement_table
from specexec_cli.planning.request import DEFAULT_CONTEXT_TOKENS, Request, in_whole_blocks
from specexec_cli.planning.sizes import ModelBytes, SizedModel
from specexec_cli.planning.speed import UNKNOWN_TOKENS_PER_PASS, TokensPerPass, faster_way, predict
from specexec_cli.planning.tiers import Plan, make_plan

# Trees of a mixture get memory for so many times the nodes that are expected to write fastest, of
# a draft model that is often right: what a session finds worthwhile it learns as it runs.
_ROOM, _LEAST_NODES = 8, 32
_OFTEN_RIGHT = TokensPerPass.of_pair(UNKNOWN_TOKENS_PER_PASS[-1], "assumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Everything that is settled before weights are loaded."""

    pair: ChosenPair  # its tree is the one that memory is planned for
    recommended: TreeConfig  # the pair's, as far as nothing else was asked for
    target: SizedModel
    draft: SizedModel | None
    device: str
    dtype: DtypeName
    dtype_reason: str  # why, where speed alone decided it; else empty
    activations: Activations
    settings: Mapping[str, Setting]  # the machine's, as they were when the plan was made
    plan: Plan

    @property
    def placement(self) -> tuple[Placed, ...]:
        """Every part of both models: where it waits, and in which form."""
        draft = self.draft.sizes if self.draft is not None else None
        return placement_table(self.target.sizes, draft, self.plan, self.work)

    @property
    def left_out(self) -> str | None:
        """That fewer MTP layers draft than the target's config says, as one line."""
        target, draft = self.target.checkpoint, self.draft.checkpoint if self.draft else None
        if not self.pair.mtp or target is None or draft is None:
            return None
        return left_out(target, draft)

    @property
    def work(self) -> Work:
        """How large the session will be."""
        return self.plan.work

    @property
    def machine(self) -> Machine:
        """What the plan rests on."""
        return self.plan.machine

    @property
    def tree(self) -> TreeConfig:
        """The largest draft tree that memory is planned for."""
        return self.pair.tree

    @property
    def tiers(self) -> tuple[Tier, ...] | None:
        """Per layer, where it is streamed from; None where the whole target is loaded to stay."""
        if self.plan.stays:
            return None
        return tuple(
            row.tier for row in self.placement if (row.model, row.part) == ("target", "layer")
        )

    @property
    def prompt_rows(self) -> int:
        """Rows of a prompt that go through a layer together.

        More than otherwise only where a GPU converts stored weights, once for as many rows.
        """
        sizes, work, plan = self.target.sizes, self.work, self.plan
        if not plan.on_gpu or plan.expert_bytes or not sizes.layers_differ_from(work.item_bytes):
            return work.chunk_rows
        spare = self.machine.usable(self.machine.vram_bytes) - plan.peak_vram_bytes
        return prompt_rows(sizes, work, max(0, spare))

    @property
    def link_bytes_per_s(self) -> float | None:
        """At which streamed bytes can come; None where nothing is streamed over a link."""
        plan, machine = self.plan, self.machine
        if plan.link_bytes:
            # both links are busy at once, and the SSD with its share only
            rate = machine.link_bytes_per_s
            share = plan.ssd_bytes / plan.link_bytes
            return min(rate, machine.ssd_bytes_per_s / share) if share else rate
        return machine.ssd_bytes_per_s if plan.ssd_bytes else None

    @property
    def ssd_share(self) -> float:
        """Of the bytes that a pass streams, what comes from the SSD."""
        return self.plan.ssd_bytes / self.plan.link_bytes if self.plan.link_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What did not fit: whoever tells of it can look for what would."""

    request: Request
    site: Site
    context_tokens: int  # that the request came to


class RequestDoesNotFitError(DoesNotFitError):
    """A request that does not fit, with which changes can be tried."""

    def __init__(self, error: DoesNotFitError, asked: Asked) -> None:
        super().__init__(error.what, error.needed_bytes, error.usable_bytes, error.parts)
        self.asked = asked


def resolve(
    request: Request,
    site: Site,
    *,
    fetch_weights: bool = False,
    check: Callable[[Checkpoint], object] = lambda checkpoint: None,
    count_tokens: Callable[[Path, str], int] | None = None,
) -> Decision:
    """Decides everything that a session needs to know.

    Args:
        site: the machine; what it measures is measured for this target's own files.
        fetch_weights: download what is not here. Otherwise sizes come from models.toml or the
            hub's config.json where the files are not here.
        check: called with every checkpoint that was fetched, to refuse what cannot be opened.
        count_tokens: (tokenizer's folder, text) -> tokens; needed where the request has a prompt.
    Raises:
        SpecexecError: whatever is wrong, in one line.
    """
    _check_activations(request.activations, site)
    pair = choose_pair(registry_of(request), request)
    block_rows = BLOCK_ROWS if site.device != "cpu" else 1
    wanted = request.tree.resolve(pair.tree, request.method, request.slots, block_rows)
    recommended = replace(request.tree, policy="fixed").resolve(
        pair.tree, request.method, block_rows=block_rows
    )
    target, draft = models_of(pair, request.offline, check if fetch_weights else None)
    if draft is not None:
        _check_reach(request, site, draft)
    planner = _Planner(
        request=request,
        site=site,
        pair=pair,
        recommended=recommended,
        target=target,
        draft=draft,
        chosen_dtype=choose_dtype(request.dtype, site, target),
        context_tokens=_context_tokens(request, target, count_tokens),
        block_rows=block_rows,
    )
    tree, _, plan = planner.fitted(wanted)
    if site.measure is not None and target.checkpoint is not None:
        planner = replace(planner, site=planner.measured_site(plan))
        tree, _, plan = planner.fitted(wanted)
    return Decision(
        pair=replace(pair, tree=tree),
        recommended=recommended,
        target=target,
        draft=draft,
        device=site.device,
        dtype=planner.dtype,
        dtype_reason=planner.chosen_dtype.reason,
        activations=request.activations,
        settings=planner.site.settings,
        plan=plan,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planner:
    """Plans memory for a request whose models are known: all that is still open is the tree."""

    request: Request
    site: Site
    pair: ChosenPair
    recommended: TreeConfig  # as in a Decision
    target: SizedModel
    draft: SizedModel | None
    chosen_dtype: ChosenDtype
    context_tokens: int
    block_rows: int  # rows that the device computes together

    @property
    def dtype(self) -> DtypeName:
        """To compute in."""
        return self.chosen_dtype.name

    @property
    def rounds(self) -> bool:
        """Whether most products of the target are of rows in 8 bits."""
        return _rounds(self.request.activations, self.target)

    def plan(self, tree: TreeConfig) -> tuple[Work, Plan]:
        """The session's size with this tree, and where every layer is placed.

        The draft model sees a window of a long text where nothing fits otherwise, nor would with a
        smaller tree. The drafters of DSI have no such window.

        Raises:
            DoesNotFitError: memory ends before that.
        """
        work = self._work(tree)
        try:
            return self._placed(work)
        except DoesNotFitError:
            own_rows = self.draft is not None and not (work.shares_cache or work.reads_target)
            long = work.draft_tokens > DRAFT_WINDOW_TOKENS and self.request.method != "dsi"
            if not (own_rows and long) or self._may_shrink(tree):
                raise
        return self._placed(replace(work, draft_window=DRAFT_WINDOW_TOKENS))

    def _placed(self, work: Work) -> tuple[Work, Plan]:
        """As `plan`, of a session of this size; the size tells which layers are shared, too."""
        sizes = self.target.sizes
        machine = self.site.machine(self.dtype, sizes.packed_bits, eight_bit_rows=self.rounds)
        draft_sizes = self.draft.sizes if self.draft is not None else None

        def placed(work: Work) -> Plan:
            request = self.request
            return place(request.offload, sizes, draft_sizes, work, machine, request.experts)

        if self.site.hosts:
            bits, rounds = sizes.packed_bits, self.rounds
            hosts = [
                host.computing(self.dtype, bits, eight_bit_rows=rounds) for host in self.site.hosts
            ]
            return work, spread(sizes, work, machine.with_products(), hosts, self._own_part)
        if not (work.shares_tables and machine.vram_bytes):
            return work, placed(work)
        assert draft_sizes is not None
        assert self.pair.own_bits is not None
        return faster_way(placed, self.pair.own_bits, self.recommended, work, draft_sizes)

    def _own_part(self, sizes: ModelBytes, work: Work, machine: Machine) -> Plan:
        """Where this machine's layers go, if others have the rest."""
        draft = self.draft.sizes if self.draft is not None else None
        if self.request.offload == "auto":
            return make_plan(sizes, draft, work, machine)
        return place(self.request.offload, replace(sizes, experts=None), draft, work, machine)

    def fitted(self, wanted: TreeConfig) -> tuple[TreeConfig, Work, Plan]:
        """The wanted tree, or one of fewer nodes that fits or leaves more room, and its plan.

        Raises:
            RequestDoesNotFitError: no tree that the request allows fits.
        """
        request, draft = self.request, self.draft
        try:
            tree, work, plan = self._plan_or_smaller(wanted)
            if draft is not None and plan.expert_bytes and request.tree.budget is None:
                best = predict(plan, draft.sizes, tree, _OFTEN_RIGHT)
                tree = self._with_fewer_nodes(tree, best.nodes)
                work, plan = self.plan(tree)
        except DoesNotFitError as error:
            asked = Asked(request, self.site, self.context_tokens)
            raise RequestDoesNotFitError(error, asked) from None
        return tree, work, plan

    def measured_site(self, plan: Plan) -> Site:
        """The site with the rates that it measures for the target's own files."""
        site, checkpoint = self.site, self.target.checkpoint
        assert site.measure is not None
        assert checkpoint is not None
        measured = site.measure(checkpoint, plan.ssd_bytes, plan.link_bytes)
        # small models spend their time between the products, and plain decoding sizes no trees
        if self.draft is not None and self.target.sizes.total >= SMALL_MODEL_BYTES:
            bits = self.target.sizes.packed_bits
            site = site.calibrated(self.dtype, bits, eight_bit_rows=self.rounds)
        return replace(site, settings={**site.settings, **measured})

    def _work(self, tree: TreeConfig) -> Work:
        """The size of a session with this tree."""
        request, pair, target = self.request, self.pair, self.target
        on_cpu, one_text = self.site.device == "cpu", request.slots == 1
        head = self.draft.head if self.draft is not None else None
        return Work(
            context_tokens=self.context_tokens,
            budget=tree.budget if pair.draft_name is not None else 0,
            batch=tree.batch,
            texts=request.slots,
            item_bytes=DTYPE_BYTES[self.dtype],
            eight_bit_kv=request.kv == "8bit",
            widened=on_cpu and self.dtype != "float32" and not has_arithmetic(self.dtype),
            shares_cache=pair.own_bits is not None and one_text and not self.site.hosts,
            # a GPU has its draft model's weights in the compute dtype
            shares_tables=pair.own_bits is not None
            and target.sizes.experts is None
            and (on_cpu or target.table_dtype == self.dtype),
            draft_window=self.draft.window_tokens if self.draft and head is None else None,
            features=head.features if head is not None else None,
            reads_keys=head is not None and bool(head.keys),
            block_rows=head.block.rows if head is not None and head.block is not None else 0,
            mtp_layers=len(self.draft.sizes.layers) if self.pair.mtp and self.draft else 1,
        )

    def _plan_or_smaller(self, wanted: TreeConfig) -> tuple[TreeConfig, Work, Plan]:
        """The wanted tree and its plan; a tree of the recommended budget if that does not fit.

        Nodes beyond the recommended ones are welcome, not needed.
        """
        request, budget = self.request, self.recommended.budget
        try:
            return wanted, *self.plan(wanted)
        except DoesNotFitError:
            if not self._may_shrink(wanted):
                raise
        smaller = replace(request.tree, budget=budget).resolve(self.pair.tree, request.method)
        return smaller, *self.plan(smaller)

    def _may_shrink(self, tree: TreeConfig) -> bool:
        """Whether nobody asked for so many nodes, and the recommended tree has fewer."""
        drafts, asked = self.pair.draft_name is not None, self.request.tree.budget is not None
        return drafts and not asked and tree.budget > self.recommended.budget

    def _with_fewer_nodes(self, tree: TreeConfig, nodes: int) -> TreeConfig:
        """A tree with room for several times `nodes`, unless it has no more already.

        Each node of a mixture's tree may bring experts of its own. The memory of nodes that never
        pay is better spent on experts.
        """
        request = self.request
        room = request.slots * max(_LEAST_NODES, _ROOM * nodes)
        room = in_whole_blocks(room, request.slots, self.block_rows)
        budget = max(room, request.tree.depth or 0, request.tree.batch or 0)
        if budget >= tree.budget:
            return tree
        return replace(request.tree, budget=budget).resolve(self.pair.tree, request.method)


def _check_reach(request: Request, site: Site, draft: SizedModel) -> None:
    """Refuses a trained head where what it reads of its target is out of its reach.

    Of several machines each sends back the rows that a head reads of its layers. Keys and values
    stay there: an assistant would need those of a whole text.

    Raises:
        ConfigError: the target runs in other processes, or the keys are of layers elsewhere.
    """
    if draft.head is None:
        return
    reads = f"`draft='{draft.entry.name}'` reads"
    if request.method == "dsi":
        raise ConfigError(
            f"{reads} rows of its target, which is not for `method='dsi'`: give a draft model"
        )
    if site.hosts and draft.head.keys:
        raise ConfigError(
            f"{reads} keys of its target's layers, which `hosts` has elsewhere: give a draft model"
        )


def _rounds(activations: Activations, target: SizedModel) -> bool:
    """Whether most products of a target are of rows in 8 bits."""
    return activations == "8bit" and has_integer_codes(target)


def told_of_assumed(decision: Decision, hosts: Sequence[Host]) -> str:
    """A sentence on those of several machines that were taken as usual ones; empty if none was.

    Args:
        hosts: the other machines, whether they have layers or not.
    """
    dtype, bits = decision.dtype, decision.target.sizes.packed_bits
    rounds = _rounds(decision.activations, decision.target)
    machines = {"this machine": decision.machine}
    for host in hosts:
        machines[host.name] = host.computing(dtype, bits, eight_bit_rows=rounds).machine
    names = [name for name, machine in machines.items() if machine.products_assumed]
    if not names:
        return ""
    return (
        f"how fast products in {arithmetic_name(dtype, bits, eight_bit_rows=rounds)} are is not "
        f"known of {', '.join(names)}: taken as a usual CPU's, {ASSUMED_FLOPS / 1e12:g} TFLOP/s. "
        "`specexec doctor` measures it there, or give 'tflops' in the file of hosts"
    )


def _check_activations(activations: Activations, site: Site) -> None:
    """Refuses rows in 8 bits where nothing multiplies them.

    Raises:
        ConfigError: a GPU computes, or this CPU has no products of integers.
    """
    asked = f"`activations='{activations}'`"
    if activations == "full":
        return
    if site.device != "cpu":
        raise ConfigError(
            f"{asked} rounds rows on a CPU alone, and {site.device} computes here: leave it out, "
            "or choose `device='cpu'`"
        )
    if not multiplies_bytes():
        raise ConfigError(f"{asked} needs AVX2 or Arm's dot products, and this CPU has neither")


def _context_tokens(
    request: Request,
    target: SizedModel,
    count_tokens: Callable[[Path, str], int] | None,
) -> int:
    """Tokens of prompt and text to plan for, at most the model's window."""
    wanted = request.context_tokens
    if request.prompt is not None:
        assert count_tokens is not None, "a prompt is counted by whoever has a tokenizer"
        assert target.checkpoint is not None
        folder = request.tokenizer or target.checkpoint.folder
        wanted = (wanted or 0) + count_tokens(folder, request.prompt)
    wanted = DEFAULT_CONTEXT_TOKENS if wanted is None else wanted
    return min(wanted, target.window_tokens or wanted)
