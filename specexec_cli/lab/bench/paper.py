"""Rows of the papers' tables, shown beside our rows of the same pair.

Copied from SpecExec, arXiv:2406.02532v3, tables 1 to 4, and DISCO, arXiv:2405.04304, tables 1 to 4
(its table 5 follows from table 1). The only table of DSI, arXiv:2405.14105v1, is in
simulate/table.py, which simulates it. The papers print names of models, not repositories. Here are
the repositories of models.toml, or the usual ones of models that it does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_LLAMA_70B = "meta-llama/Llama-2-70b-hf"
_LLAMA_70B_GPTQ = "TheBloke/Llama-2-70B-GPTQ"
_LLAMA_70B_CHAT = "meta-llama/Llama-2-70b-chat-hf"
_LLAMA_70B_CHAT_GPTQ = "TheBloke/Llama-2-70B-Chat-GPTQ"
_LLAMA_7B = "meta-llama/Llama-2-7b-hf"
_LLAMA_7B_GPTQ = "TheBloke/Llama-2-7B-GPTQ"
_LLAMA_7B_CHAT = "meta-llama/Llama-2-7b-chat-hf"
_LLAMA_7B_CHAT_GPTQ = "TheBloke/Llama-2-7B-Chat-GPTQ"
_SHEARED = "princeton-nlp/Sheared-LLaMA-1.3B"
_LLAMA3_70B = "meta-llama/Meta-Llama-3-70B-Instruct"
_LLAMA3_8B = "meta-llama/Meta-Llama-3-8B-Instruct"
_MIXTRAL = "TheBloke/Mixtral-8x7B-v0.1-GPTQ"
_MIXTRAL_INSTRUCT = "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ"
_MISTRAL = ("mistralai/Mistral-7B-v0.1", "TheBloke/Mistral-7B-v0.1-GPTQ")
_MISTRAL_INSTRUCT = (
    "mistralai/Mistral-7B-Instruct-v0.2",
    "TheBloke/Mistral-7B-Instruct-v0.2-GPTQ",
)
_VICUNA_33B = "lmsys/vicuna-33b-v1.3"


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One row of SpecExec's tables; the first three have RAM offloading, the fourth has none."""

    table: int
    hardware: str
    target: str  # hub id
    # The tables write 'Llama2-7b / 70b GPTQ', and appendix C says that the 7B draft model is
    # quantized too. It is unclear which is meant, so a row lists both draft models.
    drafts: tuple[str, ...]
    dataset: str  # name of its adapter
    temperature: float
    method: str  # specexec or specinfer, as bench knows them
    budget: int
    generation_rate: float  # tokens per target pass
    tokens_per_s: float
    speedup: float  # over autoregressive decoding with the same offloading

    @property
    def source(self) -> str:
        """The table in which the row is printed."""
        return f"SpecExec, table {self.table}"


def _rows(
    table: int,
    hardware: str,
    target: str,
    drafts: tuple[str, ...],
    dataset: str,
    *printed: tuple[float, Literal["SX", "SI"], int, float, float, float],
) -> list[PaperRow]:
    """Rows of one pair and dataset, from (t, method, budget, generation rate, tok/s, speedup)."""
    methods = {"SX": "specexec", "SI": "specinfer"}
    return [
        PaperRow(table, hardware, target, drafts, dataset, t, methods[name], k, rate, speed, gain)
        for t, name, k, rate, speed, gain in printed
    ]


_GPTQ_CHAT = (_LLAMA_7B_CHAT, _LLAMA_7B_CHAT_GPTQ)
_GPTQ_BASE = (_LLAMA_7B, _LLAMA_7B_GPTQ)

ROWS: tuple[PaperRow, ...] = (
    *_rows(1, "A100", _LLAMA_70B_CHAT, (_LLAMA_7B_CHAT,), "oasst",
           (0.6, "SX", 2048, 20.60, 3.12, 18.7), (0.6, "SI", 1024, 8.41, 1.34, 8.0),
           (0.0, "SX", 1024, 18.8, 2.74, 16.4), (0.0, "SI", 1024, 7.86, 1.18, 7.1)),
    *_rows(1, "A100", _LLAMA_70B_CHAT_GPTQ, _GPTQ_CHAT, "oasst",
           (0.6, "SX", 128, 12.10, 6.02, 8.9), (0.0, "SX", 256, 13.43, 6.17, 9.1)),
    *_rows(1, "A100", _MIXTRAL_INSTRUCT, _MISTRAL_INSTRUCT, "oasst",
           (0.6, "SX", 256, 12.38, 3.58, 3.5)),
    *_rows(1, "A100", _LLAMA3_70B, (_LLAMA3_8B,), "oasst",
           (0.6, "SX", 1024, 18.88, 2.62, 15.6)),
    *_rows(1, "A100", _LLAMA3_70B, (_LLAMA3_8B,), "mt-bench",
           (0.6, "SX", 1024, 18.16, 2.79, 16.6), (0.0, "SX", 2048, 21.58, 2.94, 17.5)),
    *_rows(2, "A100", _LLAMA_70B, (_LLAMA_7B,), "c4",
           (0.6, "SX", 2048, 12.9, 1.97, 11.8), (0.6, "SI", 1024, 6.48, 1.03, 6.2),
           (0.0, "SX", 2048, 16.1, 2.38, 14.3), (0.0, "SI", 1024, 4.78, 0.75, 4.5)),
    *_rows(2, "A100", _LLAMA_70B, (_LLAMA_7B,), "wikitext2",
           (0.6, "SX", 2048, 9.57, 1.54, 9.2), (0.6, "SI", 1024, 4.69, 0.77, 4.6),
           (0.0, "SX", 2048, 11.74, 1.88, 11.3), (0.0, "SI", 1024, 3.71, 0.62, 3.6)),
    *_rows(2, "A100", _LLAMA_70B_GPTQ, _GPTQ_BASE, "wikitext2",
           (0.6, "SX", 256, 6.99, 3.72, 5.5), (0.0, "SX", 256, 8.81, 4.54, 6.7)),
    *_rows(2, "A100", _MIXTRAL, _MISTRAL, "wikitext2", (0.6, "SX", 128, 6.56, 3.23, 3.2)),
    *_rows(3, "RTX 4090", _LLAMA_70B_CHAT_GPTQ, (_LLAMA_7B_CHAT_GPTQ,), "oasst",
           (0.6, "SX", 256, 13.46, 5.66, 8.3)),
    *_rows(3, "RTX 4060", _LLAMA_70B_CHAT_GPTQ, (_LLAMA_7B_CHAT_GPTQ,), "oasst",
           (0.6, "SX", 128, 9.70, 3.28, 4.6)),
    *_rows(3, "RTX 3090", _LLAMA_70B_CHAT_GPTQ, (_LLAMA_7B_CHAT_GPTQ,), "oasst",
           (0.6, "SX", 256, 14.3, 3.68, 10.6)),
    *_rows(3, "RTX 2080 Ti", _LLAMA_70B_CHAT_GPTQ, (_SHEARED,), "oasst",
           (0.6, "SX", 128, 7.34, 1.86, 6.1)),
    *_rows(4, "A100", _VICUNA_33B, (_SHEARED,), "oasst",
           (0.6, "SX", 128, 5.33, 31.6, 2.15), (0.0, "SX", 128, 5.4, 32.94, 2.24)),
    *_rows(4, "A100", _VICUNA_33B, (_SHEARED,), "c4",
           (0.6, "SX", 128, 5.1, 33.3, 2.26), (0.0, "SX", 128, 5.36, 35.62, 2.42)),
    *_rows(4, "A100", _VICUNA_33B, (_SHEARED,), "wikitext2",
           (0.6, "SX", 128, 4.87, 30.19, 1.90), (0.0, "SX", 128, 5.24, 33.15, 2.08)),
)  # fmt: skip


def rows_for(target: str, draft: str | None, device: str = "") -> list[PaperRow]:
    """The published rows of a pair, given by hub ids; rows of the same hardware come first.

    Args:
        device: the name that the machine gives its GPU, such as 'NVIDIA GeForce RTX 4090'.
    """
    found = [row for row in ROWS if row.target == target and draft in row.drafts]
    return sorted(found, key=lambda row: row.hardware not in device)


@dataclass(frozen=True, slots=True)
class DiscoRow:
    """The numbers that DISCO's paper prints for one dataset; temperature 0, one A100 with 80 GB."""

    dataset: str  # name of its adapter
    target: str  # hub id
    draft: str
    samples: tuple[int | None, int | None, int]  # table 3: for training, validation and tests
    # Table 1, milliseconds per token. static_5 always drafts five tokens; static_best drafts the
    # length that is best on the validation set.
    target_ms: float
    heuristic_ms: float
    static_5_ms: float
    static_best_ms: float
    disco_ms: float
    oracle_ms: float
    oracle_length: float  # table 2: the oracle's mean draft tokens, and below their deviation
    oracle_deviation: float
    f1_static: float | None = None  # table 4; None for HumanEval, which has no validation set
    f1_disco: float | None = None

    @property
    def gain(self) -> float:
        """The latency saved, as a share of the latency of the best static length (table 5)."""
        return 1.0 - self.disco_ms / self.static_best_ms

    @property
    def gain_over_heuristic(self) -> float:
        """The latency saved, as a share of the dynamic heuristic's latency (table 5)."""
        return 1.0 - self.disco_ms / self.heuristic_ms


_STARCODER = ("bigcode/starcoder", "bigcode/tiny_starcoder_py")
_VICUNA = ("lmsys/vicuna-13b-v1.3", "double7/vicuna-68m")

DISCO_ROWS = (
    DiscoRow("mbpp", *_STARCODER, (374, 80, 80),
             23.21, 20.07, 15.88, 14.16, 12.58, 10.18, 18.0, 46.2, 0.85, 0.95),
    DiscoRow("humaneval", *_STARCODER, (None, None, 80),
             23.46, 22.57, 14.43, 14.42, 12.78, 10.59, 14.7, 42.6),
    DiscoRow("cnn-dailymail", *_VICUNA, (500, 80, 80),
             38.29, 21.18, 19.74, 20.66, 17.85, 15.41, 3.2, 4.0, 0.76, 0.88),
    DiscoRow("alpaca", *_VICUNA, (500, 80, 80),
             47.67, 31.83, 23.79, 23.65, 22.49, 20.04, 2.4, 2.1, 0.68, 0.77),
)  # fmt: skip
