"""The ways in which scripts/mutation breaks a module, one small change at a time.

Most operators come from mutmut: other numbers, operators, keywords and strings, and arguments left
out. mutmut's own runner is not used, since it skips decorated functions (such as the sampler's
noise), constants, and all code outside of functions.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m
from mutmut.mutation import mutators

Operator = Callable[[cst.CSTNode], Iterable[cst.CSTNode]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one change in it."""

    source: str  # the whole module's source
    function: str  # the function with the change, as SlotLayer.update; empty at module level
    line: int  # line of the change in the original, from 1
    was: str  # the original of the changed lines, without indentation, joined by line breaks
    now: str


def mutants(source: str) -> list[Mutant]:
    """Every different mutant of a module's source."""
    collector = _Collector(cst.parse_module(source))
    found: dict[tuple[str, str, str], Mutant] = {}
    for function, mutated in collector.changes():
        line, was, now = _changed_lines(source, mutated)
        # imports for type checking are skipped, since no test can see them
        if was not in (now, "if TYPE_CHECKING:"):
            found.setdefault((function, mutated, now), Mutant(mutated, function, line, was, now))
    return list(found.values())


def _changed_lines(before: str, after: str) -> tuple[int, str, str]:
    """The first line where two sources differ, and the differing lines of both."""
    old, new = before.splitlines(), after.splitlines()
    # autojunk would skip lines that occur often, such as blank ones
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changed = [block for block in blocks if block[0] != "equal"]
    was = [line.strip() for _, start, stop, _, _ in changed for line in old[start:stop]]
    now = [line.strip() for _, _, _, start, stop in changed for line in new[start:stop]]
    return (changed[0][1] + 1 if changed else 0), "\n".join(was), "\n".join(now)


class _Collector(cst.CSTVisitor):
    """Finds every node that an operator applies to, and the function that it is in."""

    def __init__(self, module: cst.Module) -> None:
        self._module = module
        self._scope: list[str] = []
        self._found: list[tuple[str, cst.CSTNode, cst.CSTNode]] = []
        module.visit(self)

    def changes(self) -> Iterator[tuple[str, str]]:
        """(function, mutated source) of every change."""
        for function, node, mutated in self._found:
            yield function, self._module.deep_replace(node, mutated).code  # type: ignore[union-attr]

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_alone(node, at_top=not self._scope):
            return False
        function = ".".join(self._scope)
        self._found += [
            (function, node, mutated)
            for operator in _OPERATORS
            for mutated in operator(node)
            if _is_strict(mutated) or not _is_strict(node)
        ]
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._scope.append(node.name.value)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef) and self._scope:
            self._scope.pop()


def _is_left_alone(node: cst.CSTNode, at_top: bool) -> bool:
    """Whether a node is not mutated: types and imports, which other checks hold, caching and
    messages."""
    if m.matches(node, m.Arg(keyword=m.Name("strict"))):
        return True
    if isinstance(node, cst.Annotation | cst.Import | cst.ImportFrom | cst.Raise | cst.Decorator):
        return True
    if isinstance(node, cst.ClassDef):
        return any(m.matches(base.value, m.Name("Protocol")) for base in node.bases)
    alias = m.Assign(value=m.Subscript()) | m.AnnAssign(value=m.Subscript())
    return at_top and m.matches(node, alias)


def _numbers(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Makes a number one less; mutmut's own operator makes it one more."""
    if isinstance(node, cst.Integer | cst.Float):
        less = node.evaluated_value - 1
        yield cst.parse_expression(f"({less!r})" if less < 0 else repr(less))


def _is_strict(node: cst.CSTNode) -> bool:
    """Whether a node is zip(..., strict=True), where `strict` only shows mistakes of our own."""
    strict = m.Arg(keyword=m.Name("strict"), value=m.Name("True"))
    return m.matches(node, m.Call(args=[m.ZeroOrMore(), strict]))


_SWAPPED_CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}


def _calls(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Turns min(a, b) into max(a, b), a and b, and max(a, b) into min(a, b), a and b."""
    if not isinstance(node, cst.Call):
        return
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    if isinstance(name, cst.Name) and name.value in _SWAPPED_CALLS:
        yield node.with_deep_changes(name, value=_SWAPPED_CALLS[name.value])
        if len(node.args) == 2 and not any(argument.keyword for argument in node.args):
            yield from (
                argument.value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
                for argument in node.args
            )


def _branches(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Makes a branch always taken, and never taken."""
    if isinstance(node, cst.If):
        yield node.with_changes(test=cst.Name("True"))
        yield node.with_changes(test=cst.Name("False"))


def _statements(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Leaves out a statement: a call for its effect, or the change of a variable."""
    docstring = m.Expr(m.SimpleString() | m.ConcatenatedString())
    if isinstance(node, cst.Expr | cst.AugAssign | cst.Del) and not m.matches(node, docstring):
        yield cst.Pass()


def _mutmut(kind: type[cst.CSTNode], operator: Callable[..., Iterable[cst.CSTNode]]) -> Operator:
    def applied(node: cst.CSTNode) -> Iterable[cst.CSTNode]:
        return operator(node) if isinstance(node, kind) else ()

    return applied


_OPERATORS: list[Operator] = [
    _numbers,
    _calls,
    _branches,
    _statements,
    *(_mutmut(kind, operator) for kind, operator in mutators.mutation_operators),
]
