"""No function of the package or of the kernels is longer than a screen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 60
# The functions that are longer; none may join them.
KNOWN = {
    # a helper function changes the machine code that Triton compiles for GPUs
    "kernels/specexec_kernels/triton_tree_attention.py: _tree_attention_kernel",
    "kernels/specexec_kernels/cpu_attention.py: _attended",
    "specexec_cli/decoding/loop.py: specexec",
}


def long_functions(text: str) -> Iterator[str]:
    """The names of the functions that have too many lines, from `def` to the last one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno >= MOST_LINES:
                yield node.name


def test_functions_fit_on_a_screen() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("specexec_cli", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        for name in long_functions(path.read_text("utf-8"))
    }
    assert found <= KNOWN, "what has a name of its own is a function of its own"


def test_a_line_too_many_is_found() -> None:
    body = "    pass\n" * (MOST_LINES - 1)
    assert not list(long_functions(f"def fits():\n{body}"))
    assert list(long_functions(f"def fits_not():\n{body}    pass\n")) == ["fits_not"]
    inside = "class Both:\n    async def same(self):\n" + "        pass\n" * MOST_LINES
    assert list(long_functions(inside)) == ["same"]
