"""Rows of the papers, shown beside ours where the target is the same.

Only numbers that could be checked against a source are here; a field that could not is None.
SpecExec: arXiv:2406.02532, tables 1 and 3 (chat models, OpenAssistant, temperature 0.6).
"""

from __future__ import annotations

from dataclasses import dataclass

_LLAMA_70B = "meta-llama/Llama-2-70b-chat-hf"
_LLAMA_70B_GPTQ = "TheBloke/Llama-2-70B-Chat-GPTQ"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """One published measurement of SpecExec with RAM offloading."""

    source: str
    target: str  # hub id
    hardware: str
    tokens_per_s: float
    budget: int | None = None
    generation_rate: float | None = None  # tokens per target pass
    speedup: float | None = None  # over autoregressive decoding with the same offloading
    dataset: str = "oasst"
    temperature: float = 0.6


ROWS: tuple[PaperRow, ...] = (
    PaperRow(source="SpecExec, table 1", target=_LLAMA_70B, hardware="A100", budget=2048,
             generation_rate=20.6, tokens_per_s=3.12, speedup=18.7),
    PaperRow(source="SpecExec, table 1", target=_LLAMA_70B_GPTQ, hardware="A100", budget=128,
             generation_rate=12.1, tokens_per_s=6.02),
    PaperRow(source="SpecExec, table 3", target=_LLAMA_70B_GPTQ, hardware="RTX 4090",
             tokens_per_s=5.66),
    PaperRow(source="SpecExec, table 3", target=_LLAMA_70B_GPTQ, hardware="RTX 3090",
             tokens_per_s=3.68),
    PaperRow(source="SpecExec, table 3", target=_LLAMA_70B_GPTQ, hardware="RTX 2080 Ti",
             tokens_per_s=1.86),
)  # fmt: skip


def rows_for(target: str) -> list[PaperRow]:
    """Published rows of a target, by its hub id."""
    return [row for row in ROWS if row.target == target]
