"""What a decision is expected to reach, and what runs on this machine reached.

Tokens per pass are those of earlier runs here, or of models.toml. How unevenly a mixture's rows
choose experts is not known before it runs, so every figure of its cache is a pair: for experts that
are all chosen equally often, and for the skew that fine-grained mixtures were seen to have, where
27 % of the experts hold 80 % of the choices (docs/measured.md, "Expert caches").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from platformdirs import user_cache_path

from specexec_cli.catalog.registry import load_registry
from specexec_cli.config import ExpertPlace, OffloadMode
from specexec_cli.kept import file_name, is_number, read_json, write_json
from specexec_cli.offload.checkpoint import TrainedHead
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.placement import place
from specexec_cli.planning.resolve import Decision
from specexec_cli.planning.sizes import ExpertBytes, ModelBytes
from specexec_cli.planning.speed import (
    ASSISTANT_TOKENS_PER_PASS,
    DFLASH_TOKENS_PER_PASS,
    EAGLE_TOKENS_PER_PASS,
    JETSPEC_TOKENS_PER_PASS,
    MTP_TOKENS_PER_PASS,
    Speed,
    TokensPerPass,
    copy_tokens_per_pass,
    predict,
)
from specexec_cli.planning.tiers import Plan

_KEPT_RUNS = 20
# What a file may say of tokens, passes and seconds; beyond, it is damaged.
_LEAST, _MOST = 1e-9, 1e12
_FEWEST_TOKENS = 16  # behind the first pass; of fewer a run says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One session's generations together, without their first passes: those carry the prompts."""

    date: str  # as in 2026-11-22
    offload: str  # tiers in use
    device: str
    tokens: int
    passes: int
    seconds: float
    busy: bool = False  # other programs were, meanwhile
    activations: str = "full"
    hosts: str = ""  # other machines and their layers

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes


def runs_file(target_repo: str, draft_repo: str | None) -> Path:
    """Where a pair's runs are kept."""
    name = file_name(target_repo, draft_repo or "plain")
    return user_cache_path("specexec", appauthor=False) / "runs" / f"{name}.json"


def keep_run(path: Path, run: Run) -> None:
    """Adds a run, where it was long enough to say anything.

    Raises:
        OSError: the folder cannot be written.
    """
    if run.tokens < _FEWEST_TOKENS or not run.seconds or not run.passes:
        return
    runs = [*load_runs(path), run][-_KEPT_RUNS:]
    write_json(path, [asdict(each) for each in runs])


def load_runs(path: Path) -> Sequence[Run]:
    """The runs kept there, the oldest first; none where the file is missing or damaged."""
    try:
        runs = [Run(**each) for each in read_json(path)]
    except (ValueError, TypeError):  # a cache: it fills again
        return []
    return runs if all(_usable(run) for run in runs) else []


def _usable(run: Run) -> bool:
    words = (run.date, run.offload, run.device, run.activations, run.hosts)
    numbers = (run.tokens, run.passes, run.seconds)
    words_right = all(type(word) is str for word in words) and type(run.busy) is bool
    return words_right and all(is_number(number, _LEAST, _MOST) for number in numbers)


def predicted(decision: Decision, models_file: Path | None = None) -> Speed:
    """What a session of this decision is expected to reach.

    Raises:
        ConfigError: a models file cannot be used.
    """
    return predict(
        decision.plan,
        decision.draft.sizes if decision.draft is not None else None,
        decision.recommended,
        tokens_per_pass(decision, models_file),
    )


def tokens_per_pass(decision: Decision, models_file: Path | None) -> TokensPerPass | None:
    """Of the decision's pair: learned here, else as models.toml has it, else of pairs like it."""
    if decision.draft is None:
        return None
    if decision.pair.mtp and not _runs(decision):
        return MTP_TOKENS_PER_PASS
    if decision.pair.own_bits is not None and not _runs(decision):
        share = decision.plan.shared_layers / len(decision.plan.tiers)
        depth = decision.recommended.max_depth
        return copy_tokens_per_pass(decision.pair.own_bits, share, depth)
    target, draft = decision.target.entry, decision.draft.entry
    rates = sorted(run.tokens_per_pass for run in _runs(decision))
    if rates:
        count = f"{len(rates)} run{'s' if len(rates) > 1 else ''} here"
        return TokensPerPass(rates[0], rates[len(rates) // 2], rates[-1], count)
    pair = load_registry(models_file).pair_of(target, draft)
    head = decision.draft.head
    if pair is None and head is not None:
        return _of_heads(head)
    if pair is None:
        return TokensPerPass.of_pair(None, "")
    return TokensPerPass.of_pair(pair.tokens_per_pass, pair.source)


def _of_heads(head: TrainedHead) -> TokensPerPass:
    """What trained heads of a kind, with files of their own, are expected to bring."""
    if head.block is not None:
        return JETSPEC_TOKENS_PER_PASS if head.block.causal else DFLASH_TOKENS_PER_PASS
    return ASSISTANT_TOKENS_PER_PASS if head.keys else EAGLE_TOKENS_PER_PASS


def _runs(decision: Decision) -> Sequence[Run]:
    """What earlier sessions of these models reached on this machine."""
    assert decision.draft is not None
    return load_runs(runs_file(decision.target.entry.weights, decision.draft.entry.weights))


ROWS = (1, 4, 16)
_MORE = (1.5, 2.0)  # times the memory there is
# the most used share x of the experts holds x ** power of the choices
_EVEN, _SKEWED = 1.0, math.log(0.8) / math.log(0.27)

Range = tuple[float, float]  # with even choices, with skewed ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What passes of `rows` rows are expected to need."""

    rows: int
    experts: Range  # asked for, in all layers
    held_share: Range  # of them, in memory
    ssd_bytes: Range  # of experts, to be read
    tokens_per_s: Range  # if every row commits a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Richer:
    """The same with more memory."""

    ram_bytes: int
    cache_share: float  # of the experts' bytes; 1 where whole layers stay
    tokens_per_s: Range  # of passes of one row


def outlook(plan: Plan) -> tuple[Outlook, ...]:
    """By rows, for a plan with a cache of experts."""
    return tuple(_outlook(plan, rows) for rows in ROWS)


def cache_share(experts: ExpertBytes, plan: Plan) -> float:
    """Of the experts' bytes, what the cache holds; all of it where no expert comes from the SSD."""
    held = plan.expert_bytes + plan.device_expert_bytes
    return min(1.0, held / sum(experts.layers)) if held else 1.0


def with_more_ram(
    plan: Plan,
    draft: ModelBytes | None,
    mode: OffloadMode = "auto",
    where: ExpertPlace = "auto",
) -> tuple[Richer, ...]:
    """What more RAM would bring, up to where all experts stay.

    Args:
        mode, where: of the plan that it is more RAM than.
    """
    found = []
    target, machine = plan.target, plan.machine
    for times in _MORE:
        richer = replace(machine, ram_bytes=round(times * machine.ram_bytes))
        more = place(mode, target, draft, plan.work, richer, where)
        assert target.experts is not None, "only mixtures have experts"
        share = cache_share(target.experts, more)
        each = _outlook(more, 1)
        found.append(
            Richer(ram_bytes=richer.ram_bytes, cache_share=share, tokens_per_s=each.tokens_per_s)
        )
        if share == 1.0:
            break
    return tuple(found)


def _outlook(plan: Plan, rows: int) -> Outlook:
    target, experts = plan.target, plan.target.experts
    assert experts is not None, "only mixtures have experts"
    share, layers = cache_share(experts, plan), experts.in_all // experts.count
    # with the experts' part taken out, what is left of the plan's bytes are those of dense parts
    dense = sum(
        size
        for size, tier in zip(target.dense.layers, plan.tiers, strict=True)
        if plan.expert_bytes and tier == "ssd"
    )
    columns = []
    for power in (_EVEN, _SKEWED):
        used = [1.0 - (1.0 - each) ** rows for each in _chances(experts, power)]
        kept = round(share * experts.count)
        asked, missing = layers * sum(used), layers * sum(used[kept:])
        ssd_bytes = missing * sum(experts.layers) / experts.in_all
        seconds = pass_time(plan, rows, round(dense + ssd_bytes)).seconds
        columns.append((asked, 1.0 - missing / asked, ssd_bytes, rows / seconds))
    even, skewed = columns
    ranges = list(zip(even, skewed, strict=True))
    return Outlook(
        rows=rows, experts=ranges[0], held_share=ranges[1], ssd_bytes=ranges[2],
        tokens_per_s=ranges[3],
    )  # fmt: skip


def _chances(experts: ExpertBytes, power: float) -> list[float]:
    """How likely a row is to choose each expert of a layer, the most used first."""
    count, chosen = experts.count, experts.chosen
    shares = [((n + 1) / count) ** power - (n / count) ** power for n in range(count)]
    found, left = [], float(chosen)
    weight = sum(shares)
    for share in shares:  # none is chosen twice by a row: what is cut off goes to the others
        chance = min(1.0, left * share / weight) if weight > 0 else 0.0
        found.append(chance)
        left, weight = left - chance, weight - share
    return found
