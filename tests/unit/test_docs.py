"""The documentation names what there is: links, pages, files, and lines that install."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from specexec_cli.cli.serve import _check_extra
from specexec_cli.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
# where a path in backquotes may begin
ROOMS = tuple(ROOT / folder for folder in ("", "specexec_cli", "kernels/specexec_kernels", "docs"))


def anchors(page: Path) -> set[str]:
    """What links to the headings of a page end with."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.is_file(), target
        assert not anchor or anchor in anchors(found), target


def test_pages_that_are_named_exist() -> None:
    """In code, comments, settings and documentation alike."""
    folders = ("specexec_cli", "kernels", "scripts", "tests", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    for file in [*files, *ROOT.glob("*.*")]:
        if file.is_file() and file.suffix in ("", ".py", ".md", ".toml"):
            for name in re.findall(r"(?<![\w/])docs/[\w-]+\.(?:md|svg)", file.read_text("utf-8")):
                assert (ROOT / name).is_file(), f"{file} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:[\w-]+/)+[\w-]+(?:\.(?:py|json|toml))?/?)`", page.read_text("utf-8"))
    in_this_house = {path.name for room in ROOMS for path in room.iterdir()}
    for name in named:
        if name.split("/")[0] in in_this_house and "NAME" not in name:
            assert any((room / name).exists() for room in ROOMS), name


@pytest.mark.parametrize(("page", "end", "lines"), [
    ("README.md", None, 150), ("docs/architecture.md", "## Rooms", 122),
    ("docs/measured.md", None, 300),
])  # fmt: skip
def test_a_page_stays_short(page: str, end: str | None, lines: int) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert len(text.partition(end)[0].splitlines() if end else text.splitlines()) <= lines


def test_install_lines_name_what_pyproject_has() -> None:
    """Of pages and messages: the clone or this project's name, its extras, or what they need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = {package(one) for one in [*project["dependencies"], *chain(*extras.values())]}
    line = re.compile(
        r"(?<!uv )pip (?:un)?install (?!\{)((?:-[\w-]+ |[\w/]+\.txt\s)*)'?([\w.-]*)(\[.*?\])?"
    )
    found = []
    for file in [*PAGES, *(ROOT / "specexec_cli").rglob("*.py")]:
        for options, name, wanted in line.findall(file.read_text("utf-8")):
            assert all((ROOT / path).is_file() for path in re.findall(r"\S+\.txt", options)), file
            if "-r " in options:  # what it names stands in the file
                continue
            assert name in {".", project["name"], *needed}, (file, name)
            assert {*wanted.strip("[]").split(",")} <= {"", *extras}, (file, wanted)
            found.append(name)
    assert {".", "triton", project["name"]} <= set(found)


def package(requirement: str) -> str:
    """The name in a requirement such as torch>=2.9."""
    return re.split(r"[^\w-]", requirement)[0]


def test_serve_names_the_packages_of_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = [package(one) for one in extras["optional-dependencies"]["serve"]]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"pip install {' '.join(names)}$"):
        _check_extra()


def test_no_install_line_asks_an_index_for_specexec() -> None:
    """Nothing is published under its name: a line that a user copies must work from a clone."""
    for file in (ROOT / "specexec_cli").rglob("*.py"):
        assert not re.search(r"pip install\W+specexec", file.read_text("utf-8")), file
