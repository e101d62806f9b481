"""Says in our own words which field of a request is wrong, and how to mend it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from specexec_cli.serve.api_errors import ApiError

_MOST_NAME = 100  # most letters of a field's name in an error
_MOST_VALUE = 40  # most letters of a value in an error
# What a field takes instead, by the beginning of pydantic's name for the mistake.
_KINDS = {
    "int": "a whole number", "float": "a number", "finite_number": "a finite number",
    "string": "a text", "bool": "true or false", "list": "a list", "dict": "an object",
    "model": "an object", "none": "nothing: leave it out",
}  # fmt: skip


def told(error: ValidationError) -> ApiError:
    """The ApiError for the first mistake; in a field of several types, for the type meant."""
    found = error.errors(include_url=False)
    first = found[0]
    if first["type"] == "extra_forbidden":
        where = ".".join(str(step) for step in first["loc"])[:_MOST_NAME]
        return ApiError(
            400,
            f"'{where}' is not known here: leave it out, as it would change nothing",
            param=where,
            code="unknown_parameter",
        )
    of_field = [each for each in found if each["loc"][:1] == first["loc"][:1]]
    first = next((each for each in of_field if not each["type"].endswith("_type")), first)
    # pydantic's path to a field also contains the names of the types that the field may have
    steps = [step for step in first["loc"] if isinstance(step, int) or step.isidentifier()]
    where = ".".join(map(str, steps))
    words = _words(first["type"], first["input"], first.get("ctx", {}))
    return ApiError(400, f"{where or 'the body'}: {words}", param=where or None)


def _words(kind: str, value: Any, limits: Mapping[str, Any]) -> str:
    """What is wrong with a value, and what to give instead.

    Args:
        kind: pydantic's name for the mistake.
        limits: what pydantic tells beside it.
    """
    for name in ("ge", "gt", "le", "lt"):
        if name in limits:
            wrong, mend = ("small", "more") if name[0] == "g" else ("large", "less")
            mend = (
                f"{limits[name]:g} or {mend}" if name[1] == "e" else f"{mend} than {limits[name]:g}"
            )
            return f"{_shown(value)} is too {wrong}, give {mend}"
    if kind == "missing":
        return "it is missing"
    if kind in ("too_short", "string_too_short"):
        return f"it is too short, give {limits['min_length']} or more{_letters(kind)}"
    if kind in ("too_long", "string_too_long"):
        return f"it is too long, give {limits['max_length']} or fewer{_letters(kind)}"
    if kind == "string_pattern_mismatch":
        return f"{_shown(value)} is not taken, give what fits {limits['pattern']}"
    if kind == "union_tag_invalid":
        known = limits["expected_tags"].replace(" item'", "'")
        return f"{_shown(limits['tag'].removesuffix(' item'))} is not known here, give {known}"
    if kind == "union_tag_not_found":
        return "it needs a field 'type'"
    if kind == "literal_error":
        return f"{_shown(value)} is not known here, give {limits['expected']}"
    wanted = next((_KINDS[name] for name in _KINDS if kind.startswith(name)), "something else")
    return f"{_shown(value)} is not taken, give {wanted}"


def _letters(kind: str) -> str:
    return " characters" if kind.startswith("string") else ""


def _shown(value: Any) -> str:
    """A value of a request as JSON, or what kind of value it is where that is long."""
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value, ensure_ascii=False, default=lambda other: type(other).__name__)
    return text if len(text) <= _MOST_VALUE else f"{text[:_MOST_VALUE]}..."
