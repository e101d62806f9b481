"""What a decision is expected to reach, and the verdict on it in words.

Everything is predicted from sizes and rates; nothing is loaded or fetched. Tokens per pass are
those of earlier runs here, or of models.toml. How unevenly a mixture's rows choose experts is not
known before it runs, so every figure of its cache is a pair: for experts that are all chosen
equally often, and for the skew that fine-grained mixtures were seen to have, where 27 % of the
experts hold 80 % of the choices (docs/measured.md, "Expert caches").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from platformdirs import user_cache_path

from specexec_cli.catalog.downloads import missing
from specexec_cli.catalog.models_file import PACKAGE_PREFIX, ModelEntry
from specexec_cli.catalog.registry import load_registry
from specexec_cli.config import ExpertPlace, OffloadMode
from specexec_cli.device import format_bytes
from specexec_cli.kept import file_name, is_number, read_json, write_json
from specexec_cli.offload.checkpoint import TrainedHead
from specexec_cli.planning.machine import Machine, Site
from specexec_cli.planning.machine_rates import arithmetic_name, one_row_flops, product_seconds
from specexec_cli.planning.pass_time import pass_time
from specexec_cli.planning.placement import place
from specexec_cli.planning.resolve import Decision
from specexec_cli.planning.sizes import ExpertBytes, ModelBytes
from specexec_cli.planning.speed import (
    ASSISTANT_TOKENS_PER_PASS,
    DFLASH_TOKENS_PER_PASS,
    EAGLE_TOKENS_PER_PASS,
    JETSPEC_TOKENS_PER_PASS,
    MTP_LAYERS_TOKENS_PER_PASS,
    MTP_TOKENS_PER_PASS,
    Speed,
    TokensPerPass,
    copy_tokens_per_pass,
    figure,
    llama_cpp_tokens_per_s,
    predict,
)
from specexec_cli.planning.tiers import Plan

_KEPT_RUNS = 20
# What a file may say of tokens, passes and seconds; beyond, it is damaged.
_LEAST, _MOST = 1e-9, 1e12
_FEWEST_TOKENS = 16  # behind the first pass; of fewer a run says nothing

# Where a target would be computed from; no: it does not fit.
Place = Literal["VRAM", "RAM", "SSD", "no"]
READING_TOKENS_PER_S = 4.0  # about as fast as text is read
PATIENT_TOKENS_PER_S = 0.3  # a paragraph in five minutes; nobody waits longer
_FITS = {
    "VRAM": "fits, all in GPU memory",
    "RAM": "fits, from RAM",
    "SSD": "fits, from SSD",
    "no": "does not fit",
}


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
    runs = _runs(decision)
    if decision.pair.mtp and not runs:
        return MTP_LAYERS_TOKENS_PER_PASS if decision.work.mtp_layers > 1 else MTP_TOKENS_PER_PASS
    if decision.pair.own_bits is not None and not runs:
        share = decision.plan.shared_layers / len(decision.plan.tiers)
        depth = decision.recommended.max_depth
        return copy_tokens_per_pass(decision.pair.own_bits, share, depth)
    target, draft = decision.target.entry, decision.draft.entry
    rates = sorted(run.tokens_per_pass for run in runs)
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """How models would run on a machine."""

    place: Place
    speed: Speed | None  # None where the models do not fit
    llama_cpp_tokens_per_s: float | None  # with the same weights; None: not known
    fetch_bytes: int | None  # of all models, as far as they are not here; None is not known
    gated: bool  # of what is to be fetched, something wants an accepted licence

    @property
    def words(self) -> str:
        """The verdict in a few words."""
        if self.speed is None:
            return "does not fit"
        if self.speed.typical >= READING_TOKENS_PER_S:
            return "reads like chat"
        slow = self.speed.typical < PATIENT_TOKENS_PER_S
        return "for overnight jobs" if slow else "slower than reading"

    @property
    def sentence(self) -> str:
        """The verdict with its numbers: speed, download, place, and llama.cpp's speed."""
        if self.speed is None:
            return self.words
        speed = self.speed
        fetch = "not known how much to fetch"
        if self.fetch_bytes is not None:
            fetch = f"{format_bytes(self.fetch_bytes)} to fetch" if self.fetch_bytes else "is here"
        gated = " (gated: a licence is to be accepted)" if self.gated else ""
        other = ""
        if self.llama_cpp_tokens_per_s is not None:
            other = f"; llama.cpp about {figure(self.llama_cpp_tokens_per_s)} tok/s"
        return (
            f"{self.words}: about {figure(speed.typical)} tok/s ({figure(speed.low)} to "
            f"{figure(speed.high)}); {fetch}{gated}; {_FITS[self.place]}{other}"
        )

    def as_json(self) -> dict[str, Any]:
        """The keys that JSON output has for the verdict, the speed's own numbers aside."""
        return {
            "verdict": self.words,
            "place": self.place,
            "llama_cpp_tokens_per_s": self.llama_cpp_tokens_per_s,
            "fetch_bytes": self.fetch_bytes,
            "gated": self.gated,
        }


def verdict_of(decision: Decision, site: Site, models_file: Path | None = None) -> Verdict:
    """The verdict on a decision.

    Raises:
        ConfigError: a models file cannot be used.
    """
    plan, models = decision.plan, [decision.target.entry]
    if decision.draft is not None and not decision.pair.of_target:
        models.append(decision.draft.entry)
    other = None
    if not (plan.others or decision.target.entry.repo.startswith(PACKAGE_PREFIX)):  # ours alone
        other = llama_cpp_tokens_per_s(plan.target, _rounding(plan, site), plan.work.context_tokens)
    speed = predicted(decision, models_file)
    return Verdict(place_of(plan, site), speed, other, *to_fetch(models))


def _rounding(plan: Plan, site: Site) -> Machine:
    """The plan's machine with its products of rows in 8 bits, as llama.cpp makes them of packed
    weights; where they were not measured, no slower ones than are assumed of its cores."""
    if not plan.target.packed:
        return plan.machine
    name = arithmetic_name("float32", plan.target.packed_bits, eight_bit_rows=True)
    usual = (plan.machine.flops, one_row_flops())
    fastest = min(filter(None, usual), key=lambda flops: product_seconds(1, 1, flops))
    return replace(plan.machine, flops=site.flops.get(name) or fastest)


def to_fetch(models: Sequence[ModelEntry]) -> tuple[int | None, bool]:
    """Bytes of the models that are not here, and whether one of those is gated.

    Returns:
        None in the place of the bytes where they are not known.
    """
    absent = missing(models)
    sizes = [entry.size_bytes for entry in absent]
    known = [size for size in sizes if size is not None]
    fetch_bytes = sum(known) if len(known) == len(sizes) else None
    return fetch_bytes, any(entry.gated for entry in absent)


def place_of(plan: Plan, site: Site) -> Place:
    """The slowest place that weights of the target come from."""
    if plan.ssd_bytes or any(each.plan.ssd_bytes for each in plan.others):
        return "SSD"
    on_gpu = site.settings["vram"].value > 0
    in_vram = on_gpu and set(plan.tiers) == {"resident"} and not plan.expert_bytes
    return "VRAM" if in_vram else "RAM"
