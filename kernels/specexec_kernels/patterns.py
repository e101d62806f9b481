"""Matches regular expressions that a checkpoint brings to names of modules, in bounded time.

Python's matcher backtracks, which takes exponential time for expressions such as `(a+)+$`. Here all
ways of matching are followed at once: a set of places in the name is a whole number with a bit for
each place, and each part of an expression turns the set of places where it may begin into the set
where it may end. Python's own parser reads the expression. Back references and look-behind cannot
be written as sets of places and are refused.

Source: K. Thompson, Regular Expression Search Algorithm, 1968; the star of one character as an
addition: R. D. Cameron et al., Bitwise Data Parallelism in Regular Expression Matching, 2014.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_MOST_CHARACTERS = 10_000  # characters of an expression
_MOST_OF_NAME = 1_000  # characters of a name
_MOST_STEPS = 10_000  # sequences that one match may go through, some hundred times the usual

Accepts = Callable[[str], bool]


# whether an empty text matches "no boundary here": from Python 3.14 on
_EMPTY_HAS_NONE = re.match(r"\B", "") is not None


class _Name:
    """A name that expressions are matched to.

    A set of places is a number. Its bit i says that a match may have got to character i.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.steps_left = _MOST_STEPS
        self._literals: dict[str, int] = {}
        self._each: dict[str, int] = {}
        for place, character in enumerate(text):
            self._each[character] = self._each.get(character, 0) | 1 << place

    def characters(self, accepts: Accepts) -> int:
        """The places of all characters that are accepted."""
        found = 0
        for character, places in self._each.items():
            if accepts(character):
                found |= places
        return found

    def begins(self, literal: str) -> int:
        """The places at which a text begins."""
        found = self._literals.get(literal)
        if found is None:
            found, place = 0, self.text.find(literal)
            while place >= 0:
                found |= 1 << place
                place = self.text.find(literal, place + 1)
            self._literals[literal] = found
        return found


# A part of an expression: given the places where it may begin, those where it may end
Part = Callable[[_Name, int], int]


def matches(expression: str, name: str) -> bool:
    """Whether an expression matches the beginning of a name, as re.match does.

    Raises:
        ValueError: `check` refuses the expression, the name is too long, or the match takes too
            many steps.
    """
    if len(name) > _MOST_OF_NAME:
        raise ValueError(f"a name of {len(name)} characters is longer than any module's")
    return _compiled(expression)(_name(name), 1) != 0


def check(expression: str) -> None:
    """
    Raises:
        ValueError: it is no regular expression, or has a construct that is not supported.
    """
    _compiled(expression)


@lru_cache(maxsize=16)
def _name(text: str) -> _Name:
    return _Name(text)


@lru_cache(maxsize=10_000)
def _compiled(expression: str) -> Part:
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"it has more than {_MOST_CHARACTERS} characters")
    try:
        parsed = _parser.parse(expression)
        if parsed.state.flags != re.UNICODE.value:
            raise ValueError("flags are not supported")
        whole = _sequence(parsed)
    except RecursionError:
        raise ValueError("its groups are nested too deep") from None
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None

    def match(name: _Name, places: int) -> int:
        name.steps_left = _MOST_STEPS
        return whole(name, places)

    return match


def _sequence(items: Iterable[tuple[Any, Any]]) -> Part:
    parts: list[Part] = []
    literal = ""
    for op, value in items:
        if op is ops.LITERAL:
            literal += chr(value)
            continue
        if literal:
            parts.append(_literal(literal))
            literal = ""
        parts.append(_part(op, value))
    if literal:
        parts.append(_literal(literal))

    def sequence(name: _Name, places: int) -> int:
        name.steps_left -= 1
        if name.steps_left < 0:
            raise ValueError("matching it takes too long")
        for part in parts:
            places = part(name, places)
            if not places:
                return 0
        return places

    return sequence


def _part(op: Any, value: Any) -> Part:
    if (accepts := _accepts(op, value)) is not None:
        return _one_of(accepts)
    if op is ops.SUBPATTERN:
        _, added, removed, inside = value
        if added or removed:
            raise ValueError("flags are not supported")
        return _sequence(inside)
    if op is ops.BRANCH:
        return _any_of([_sequence(each) for each in value[1]])
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
        return _repeat(*value)
    if op is ops.AT:
        return _at(value)
    if op in (ops.ASSERT, ops.ASSERT_NOT) and value[0] > 0:
        return _ahead(_sequence(value[1]), wanted=op is ops.ASSERT)
    raise ValueError(f"{str(op).lower().replace('_', ' ')} is not supported")


def _literal(text: str) -> Part:
    return lambda name, places: (places & name.begins(text)) << len(text)


def _one_of(accepts: Accepts) -> Part:
    return lambda name, places: (places & name.characters(accepts)) << 1


def _any_of(branches: list[Part]) -> Part:
    def branch(name: _Name, places: int) -> int:
        found = 0
        for each in branches:
            found |= each(name, places)
        return found

    return branch


def _repeat(least: int, most: int, items: Any) -> Part:
    body = _sequence(items)
    op, value = items[0] if len(items) == 1 else (None, None)
    accepts = _accepts(op, value)
    if accepts is not None and least <= 1 and most is ops.MAXREPEAT:
        return _star(accepts, once=least == 1)

    def repeat(name: _Name, places: int) -> int:
        # a body may match the empty text, so a place may stay; each further round must reach a new
        # place or be the last
        rounds = len(name.text) + 1
        for _ in range(min(least, rounds)):
            places = body(name, places)
            if not places:
                return 0
        new = places
        for _ in range(min(most - least, rounds)):
            new = body(name, new) & ~places
            if not new:
                break
            places |= new
        return places

    return repeat


def _star(accepts: Accepts, once: bool) -> Part:
    """Any number of accepted characters, at least one if `once`: the carry of an addition runs
    through a stretch of them."""

    def star(name: _Name, places: int) -> int:
        found = name.characters(accepts)
        if once:
            places = (places & found) << 1
        return (((places & found) + found) ^ found) | places

    return star


def _ahead(body: Part, wanted: bool) -> Part:
    def ahead(name: _Name, places: int) -> int:
        found = 0
        while places:
            place = places & -places
            places ^= place
            if (body(name, place) != 0) is wanted:
                found |= place
        return found

    return ahead


def _at(where: Any) -> Part:
    if where in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
        return lambda name, places: places & 1
    if where is ops.AT_END_STRING:
        return lambda name, places: places & (1 << len(name.text))
    if where is ops.AT_END:
        return lambda name, places: places & _ends(name.text)
    if where in (ops.AT_BOUNDARY, ops.AT_NON_BOUNDARY):
        apart = where is ops.AT_BOUNDARY

        def boundary(name: _Name, places: int) -> int:
            if not name.text and not _EMPTY_HAS_NONE:
                return 0
            words = name.characters(_is_word)
            borders = words ^ (words << 1)
            return places & (borders if apart else ~borders)

        return boundary
    raise ValueError(f"{str(where).lower()} is not supported")


def _ends(text: str) -> int:
    """The places where `$` matches: the end, and the place before a final line break."""
    return (1 << len(text)) | (1 << len(text) - 1 if text.endswith("\n") else 0)


def _accepts(op: Any, value: Any) -> Accepts | None:
    """The test of a part that matches exactly one character; None for other parts."""
    if op is ops.LITERAL:
        return lambda each: ord(each) == value
    if op is ops.NOT_LITERAL:
        return lambda each: ord(each) != value
    if op is ops.ANY:
        return lambda each: each != "\n"
    if op is ops.RANGE:
        return lambda each: value[0] <= ord(each) <= value[1]
    if op is ops.CATEGORY:
        return _CATEGORIES[value]
    if op is ops.IN:
        negated = value[0][0] is ops.NEGATE
        inside = [_accepts(*each) for each in value[negated:]]
        # the same few characters are asked about for every name
        return lru_cache(maxsize=256)(
            lambda each: any(one is not None and one(each) for one in inside) is not negated
        )
    return None


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


_CATEGORIES: dict[Any, Accepts] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_NOT_DIGIT: lambda each: not each.isdecimal(),
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_SPACE: lambda each: not each.isspace(),
    ops.CATEGORY_WORD: _is_word,
    ops.CATEGORY_NOT_WORD: lambda each: not _is_word(each),
}
