"""Expressions of checkpoints match what Python's own do, in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from specexec_kernels.patterns import check, matches

NAME = "model.layers.31.mlp.experts.127.down_proj"

ATOMS = st.sampled_from(
    ["a", "b", "ab", ".", r"\.", r"\d", r"\w", r"\S", r"\b", r"\B", "^", "$", r"\Z", r"\A", "[ab]",
     "[^a]", "[0-9a]", r"[^\d.]", "(?=a)", "(?!b)", "1", "\n", "é", "_"]
)  # fmt: skip


def grown(inside: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "*?", "{2}", "{0,2}", "{1,}", "{3,70}"])
    groups = st.sampled_from(["(", "(?:", "(?P<x>", "(?=", "(?!"])
    return (
        st.lists(inside, max_size=3).map("".join)
        | st.lists(inside, min_size=2, max_size=3).map(lambda each: f"(?:{'|'.join(each)})")
        | st.tuples(inside, repeats).map(lambda both: f"(?:{both[0]}){both[1]}")
        | st.tuples(groups, inside).map(lambda both: f"{both[0]}{both[1]})")
    )


@given(expression=st.recursive(ATOMS, grown, max_leaves=8), name=st.text("ab1.\né_", max_size=9))
@example(expression="(?:^|a){3,70}", name="aaaa")
@example(expression="(?:a{2}|$){2,}b?", name="aaaa")
@example(expression=r"\B", name="")
def test_matches_what_python_matches(expression: str, name: str) -> None:
    try:
        expected = re.match(expression, name) is not None
    except re.error:  # a group of the same name twice
        return
    assert matches(expression, name) is expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [(r".*\.experts\..*", True), (r".*\.18\..*gate.*", False),
     (r"model\.layers\.(?:[4-9]|3\d)\.", True),
     (r"^(?!.*experts).*$", False), (r"^(?!.*attn).*_proj$", True), ("lm_head", False), ("", True)],
)  # fmt: skip
def test_rules_as_tools_write_them(expression: str, expected: bool) -> None:
    assert matches(expression, NAME) is expected
    assert (re.match(expression, NAME) is not None) is expected


@pytest.mark.parametrize(
    "expression",
    ["(a+)+$", "(?:.*)*b!", ".*" * 300 + "!", "(?:(?:.*)+)+!", "(?:a?){30}a{30}!",
     "(?:x?){999999999}b", "((a{0,100}){0,100}){0,100}b", "(?:.?" * 50 + ")" * 50 + "!",
     "(?=(?:.*)*!)*.*"],
)  # fmt: skip
def test_no_expression_takes_long(expression: str) -> None:
    start = time.process_time()
    for length in range(20):
        matches(expression, "a" * (980 + length))
    assert time.process_time() - start < 10.0  # where backtracking takes years, this takes 0.1 s


@pytest.mark.parametrize(
    ("expression", "reason"),
    [("(", "unterminated"), ("*", "nothing to repeat"), ("(" * 2000 + ")" * 2000, "too deep"),
     ("x{99999999999999999999}", "too large"), (r"(a)\1", "groupref"), ("(?<=a)b", "assert"),
     ("(?i)a", "flags"), ("(?i:a)", "flags"), ("a" * 10_001, "10000 characters"),
     ("a*+", "repeat")],
)  # fmt: skip
def test_expressions_that_are_refused(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check(expression)


def test_a_match_has_an_end() -> None:
    with pytest.raises(ValueError, match="takes too long"):
        matches("(?:(?=(?:ab|ba)*!)|.)*", "ab" * 490)
    with pytest.raises(ValueError, match="longer than any module"):
        matches("a", "a" * 1001)
