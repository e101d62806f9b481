"""The fields of a row in the results file, and a check of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from specexec_cli.kept import is_number, numbers

SCHEMA = 1

_NUMBER = (int, float)
_MAYBE_NUMBER = (int, float, NoneType)
_MAYBE_TEXT = (str, NoneType)
_MOST = 1e18  # greatest number allowed in a row


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A nested list of numbers with a given shape; -1 stands for any length."""

    shape: tuple[int, ...] = (-1,)

    def holds(self, value: object) -> bool:
        """Whether a value is a list of this shape."""
        try:
            numbers(value, self.shape, -_MOST, _MOST)
        except ValueError:
            return False
        return True


_COMMON: Mapping[str, Any] = {
    "schema": int,
    "kind": str,  # run or coverage
    "key": str,
    "config": {
        "pair": str, "target": str, "draft": _MAYBE_TEXT, "offload": str, "device": str,
        "dtype": str, "dataset": str, "prompts_sha256": str,
    },
    "environment": {
        "commit": _MAYBE_TEXT, "versions": dict,
        "hardware": {"cpu": str, "cores": int, "ram_bytes": int, "gpus": list},
    },
}  # fmt: skip

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "run": {
        **_COMMON,
        "label": str,
        "case": {"method": str, "temperature": _NUMBER, "top_p": _NUMBER, "max_tokens": int},
        "seed": int,
        "repeat": int,
        "prompt": {"id": str, "sha256": str, "tokens": int, "form": str},
        "link": {"io": str, "link_bytes_per_s": _MAYBE_NUMBER},
        "started": str,
        "finish_reason": str,
        "tokens_sha256": str,  # digest of the generated tokens
        "tokens": _Numbers(),
        "metrics": {
            **dict.fromkeys(
                ("generated_tokens", "target_passes", "total_s", "tokens_per_s", "ttft_s",
                 "generation_rate", "tree_nodes", "tree_depth", "draft_s", "verify_s",
                 "bytes_per_pass", "peak_ram_bytes", "peak_vram_bytes"), _NUMBER),
            **dict.fromkeys(
                ("tpot_s", "acceptance_rate", "token_acceptance_rate", "stream_bytes_per_s",
                 "link_share", "roofline_share"), _MAYBE_NUMBER),
        },
        "passes": dict.fromkeys(("tokens", "tree_nodes", "draft_s", "verify_s"), _Numbers()),
        "calibration": _Numbers((2, 10, 3)),  # see drafting.calibration.Reliability.bins
        "timing": dict,
    },
    "coverage": {
        **_COMMON,
        "case": {"temperature": _NUMBER, "max_tokens": int},
        "top_k": _Numbers(),
        "draft_mass": _Numbers(),
        "target_mass": _Numbers(),
        "positions": int,
    },
}  # fmt: skip


def problems(row: object) -> list[str]:
    """The errors of a row; empty if the row is a valid result."""
    if not isinstance(row, Mapping) or row.get("kind") not in list(FIELDS):
        return [f"'kind' is not one of {', '.join(FIELDS)}"]
    found = _compare(row, FIELDS[row["kind"]], "")
    if not found and row["schema"] != SCHEMA:
        found.append(f"schema {row['schema']} is not {SCHEMA}: written by another version")
    if not found and row["kind"] == "run" and row["metrics"]["total_s"] <= 0:
        found.append("'metrics.total_s' is not above 0")
    if not found and row["kind"] == "run":  # fields that only some versions write
        found += _compare(row["metrics"], dict.fromkeys(row["metrics"], _MAYBE_NUMBER), "metrics")
    return found


def _compare(value: Any, expected: Any, where: str) -> list[str]:
    if isinstance(expected, Mapping):
        if not isinstance(value, Mapping):
            return [f"'{where}' is not an object"]
        found = []
        for name, inner in expected.items():
            path = f"{where}.{name}" if where else name
            found += (
                _compare(value[name], inner, path) if name in value else [f"'{path}' is missing"]
            )
        return found
    if isinstance(expected, _Numbers):
        return [] if expected.holds(value) else [f"'{where}' is no such list of numbers"]
    if type(value) in (int, float) and not is_number(value, -_MOST, _MOST):
        return [f"'{where}' is a number beyond all bounds"]
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        return [f"'{where}' is {type(value).__name__}"]
    return []
