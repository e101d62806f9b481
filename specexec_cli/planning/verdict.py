"""What a user wants to know of a model first: how fast it would write here, and what is to be done.

Everything is predicted from sizes and rates; nothing is loaded or fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specexec_cli.catalog.downloads import missing
from specexec_cli.catalog.models_file import PACKAGE_PREFIX, ModelEntry
from specexec_cli.device import format_bytes
from specexec_cli.planning.expected_speed import predicted
from specexec_cli.planning.llama_cpp import llama_cpp_tokens_per_s
from specexec_cli.planning.machine import Site
from specexec_cli.planning.resolve import Decision
from specexec_cli.planning.speed import Speed, figure
from specexec_cli.planning.tiers import Plan

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
        other = llama_cpp_tokens_per_s(plan.target, plan.machine, plan.work.context_tokens)
    speed = predicted(decision, models_file)
    return Verdict(place_of(plan, site), speed, other, *to_fetch(models))


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
