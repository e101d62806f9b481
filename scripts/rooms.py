"""Writes the list of rooms in docs/architecture.md, or prints the files of one room.

    python scripts/rooms.py              writes the list from the packages' own docstrings
    python scripts/rooms.py --check      fails where the list is out of date
    python scripts/rooms.py planning     the files of specexec_cli/planning, a line each

A room is a package or module right below specexec_cli. Rooms stand in the order of the import
linter's layers in pyproject.toml: imports point down the list. The kernels, which know no room,
follow.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE, KERNELS = ROOT / "specexec_cli", ROOT / "kernels" / "specexec_kernels"
BEGIN, END = "<!-- rooms -->\n", "<!-- end of rooms -->\n"


def first_paragraph(file: Path) -> str:
    """The first paragraph of a module's docstring, in one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def rooms() -> list[Path]:
    """The packages and modules of specexec_cli, a package as its __init__.py, then the kernels'."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    found = []
    for layer in contract["layers"] + contract["exhaustive_ignores"]:
        for name in re.split(r" *[|:] *", layer):
            module = PACKAGE / f"{name}.py"
            found.append(module if module.is_file() else PACKAGE / name / "__init__.py")
    return [*found, KERNELS / "__init__.py"]


def rows() -> Iterator[str]:
    """The lines of the list: a room each, and the packages inside of it below."""
    for room in rooms():
        yield row(room)
        if room.name == "__init__.py":
            yield from map(row, sorted(room.parent.glob("*/__init__.py")))


def row(file: Path) -> str:
    """One line of the list."""
    module = file.parent if file.name == "__init__.py" else file
    name = module.relative_to(KERNELS.parent if KERNELS in file.parents else PACKAGE).as_posix()
    return f"| `{name}{'' if module is file else '/'}` | {first_paragraph(file)} |"


def page() -> str:
    """docs/architecture.md with the list as it should be."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    table = "\n".join(["| room | what it is |", "|---|---|", *rows()])
    return f"{before}{BEGIN}{table}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("room", nargs="?", help="print the files of this room")
    parser.add_argument("--check", action="store_true", help="fail if the list is out of date")
    arguments = parser.parse_args()
    if arguments.room:
        folder = KERNELS if arguments.room == KERNELS.name else PACKAGE / arguments.room
        files = sorted(folder.glob("*.py"))
        if not files:
            sys.exit(f"error: there is no package {arguments.room} in specexec_cli")
        for file in files:
            print(f"{file.name}: {first_paragraph(file)}")
    elif not arguments.check:
        PAGE.write_text(page(), "utf-8")
    elif PAGE.read_text("utf-8") != page():
        sys.exit(f"docs/{PAGE.name} is out of date: run python scripts/rooms.py")


if __name__ == "__main__":
    main()
