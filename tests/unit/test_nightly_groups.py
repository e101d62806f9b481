"""tests/nightly.toml: what is left out has passed as it is, and comes back when a path changes."""

from __future__ import annotations

import ast
import itertools
import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from nightly_groups import Selection, groups, left_out, main, names, passed, passed_file, record

ROOT = Path(__file__).parents[2]
KNOWN = groups()
ENDS = (".py", "/__init__.py")
TABLE = """
[slow]
tests = ["tests/e2e/test_slow.py"]
always = ["tests/e2e/test_slow.py::test_one[a]"]
guards = ["co*/*", "core"]

[other]
tests = ["tests/test_other.py::test_grid"]
guards = ["core/part.py", "scripts/started.py"]
"""
FILES = {
    "core/part.py": "", "core/deep/data.bin": "", "tests/test_other.py": "",
    "tests/conftest.py": "def disk():\n    from place import Disk\n", "tests/place.py": "",
    "scripts/started.py": "import tool\n", "scripts/tool.py": "",
    "tests/e2e/test_slow.py": "import torch\n    from toys import toy\n",
    "tests/toys.py": "import helper\nimport rig\n", "scripts/rig.py": "",
    "tests/helper.py": "", "tests/unused.py": "",
    "tests/nightly.toml": TABLE, "pyproject.toml": "", "locks/test.txt": "",
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "still"),
    [
        ("core/part.py", []),
        ("core/deep/data.bin", ["other"]),
        ("tests/e2e/test_slow.py", ["other"]),
        ("tests/helper.py", ["other"]),  # imported by a helper of the test
        ("scripts/rig.py", ["other"]),
        ("tests/test_other.py", ["slow"]),
        ("scripts/tool.py", ["slow"]),  # imported by a script that the tests start
        ("tests/place.py", []),
        ("locks/test.txt", []),
        ("tests/unused.py", ["other", "slow"]),
    ],
)
def test_a_group_runs_again_once_a_file_that_it_guards_has_changed(
    project: Path, changed: str, still: list[str]
) -> None:
    assert passed(project) == []
    record(["slow", "other"], set(), project)
    assert sorted(passed(project)) == ["other", "slow"]
    (project / changed).write_text("changed")
    assert sorted(passed(project)) == still


@pytest.mark.parametrize("name", ["core/new.py", "core/part.py"])
def test_files_that_come_and_go_are_changes(project: Path, name: str) -> None:
    record(["slow"], set(), project)
    path = project / name
    path.unlink() if path.exists() else path.touch()
    if name == "core/part.py":  # `other` guards it by name
        with pytest.raises(ValueError, match=r"there is no core/part\.py"):
            passed(project)
        path.with_name("moved.py").touch()
        (project / "tests/nightly.toml").write_text(TABLE.replace("part.py", "moved.py"))
    assert passed(project) == []


def test_a_group_with_a_failure_has_not_passed(project: Path) -> None:
    record(["slow", "other"], set(), project)
    record(["slow"], {"tests/e2e/test_slow.py::test_two[b]"}, project)
    assert passed(project) == ["other"]
    record(["slow"], {"tests/e2e/test_slow.py::test_one[a]"}, project)  # which always runs
    assert passed(project) == ["slow", "other"]
    passed_file(project).unlink()
    assert passed(project) == []


@pytest.mark.parametrize(
    ("choice", "cut_short", "more", "expected"),
    [
        ("all", False, [], ["slow"]),
        ("slow", False, ["--numprocesses=auto", "--durations-min=1"], ["slow"]),
        ("changed", False, [], []),
        ("all", True, [], []),
        ("all", False, ["-k", "two"], []),  # a part of the group
        ("all", False, ["tests/e2e/test_slow.py::test_two"], []),
        ("all", False, ["-x"], []),
    ],
)
def test_what_ran_and_passed_is_written(
    project: Path, choice: str, cut_short: bool, more: list[str], expected: list[str]
) -> None:
    arguments = SimpleNamespace(args=[f"--groups={choice}", *more])
    session: Any = SimpleNamespace(config=SimpleNamespace(invocation_params=arguments))
    selection = Selection(choice, project)
    for node, outcome in (
        ("e2e/test_slow.py::test_two", "passed"),
        ("test_other.py::test_grid", ""),
    ):
        report: Any = Mock(nodeid=f"tests/{node}", when="call", passed=bool(outcome), failed=False)
        selection.pytest_runtest_logreport(report)
    code = pytest.ExitCode.INTERRUPTED if cut_short else pytest.ExitCode.OK
    selection.pytest_sessionfinish(session, code)
    assert passed(project) == expected
    selection.pytest_runtest_logreport(Mock(nodeid="tests/e2e/test_slow.py::test_one", failed=True))
    selection.pytest_sessionfinish(session, code)
    assert passed(project) == []


def test_entries_name_files_tests_and_tests_of_some_parameters() -> None:
    assert names("tests/test_a.py", "tests/test_a.py::test_b[c]")
    assert names("tests/test_a.py::test_b", "tests/test_a.py::test_b[c]")
    assert names("tests/test_a.py::test_b[c]", "tests/test_a.py::test_b[c]")
    assert not names("tests/test_a.py::test_b", "tests/test_a.py::test_bc")
    assert not names("tests/test_a.py::test_b[c]", "tests/test_a.py::test_b[cd]")


def test_what_is_asked_for_runs() -> None:
    assert left_out("all") == []
    first, *others = KNOWN
    assert left_out(first) == others
    assert main(",".join(KNOWN)) == "what always runs"
    assert main("all") == ""
    with pytest.raises(ValueError, match="no group nothing"):
        left_out(f"{first},nothing")


def test_pytest_is_left_with_the_tests_that_run() -> None:
    name, group = next(iter(KNOWN.items()))
    elsewhere = "tests/unit/test_nightly_groups.py::test_pytest_is_left_with_the_tests_that_run"
    nodes = [f"{group.tests[0]}[x]", *group.always, elsewhere]
    for choice, expected in ((name, nodes[:1]), ("all", nodes)):
        items: Any = [SimpleNamespace(nodeid=node) for node in nodes]
        config = Mock()
        Selection(choice).pytest_collection_modifyitems(config, items)
        assert [item.nodeid for item in items] == expected
        deselected = config.hook.pytest_deselected.call_args.kwargs["items"]
        assert len(items) + len(deselected) == len(nodes)


@pytest.mark.parametrize("name", KNOWN)
def test_tests_and_guarded_paths_exist(name: str) -> None:
    """And no test is in two groups, so that one of them cannot leave out what the other runs."""
    group = KNOWN[name]
    assert re.fullmatch("[0-9a-f]{64}", group.digest)
    for entry in (*group.tests, *group.always):
        file, *test = entry.partition("[")[0].split("::")
        text = (ROOT / file).read_text() if test else ""
        assert (ROOT / file).exists()
        assert all(f"def {each}(" in text or f"class {each}(" in text for each in test), entry
        owners = [other for other in KNOWN if any(names(e, entry) for e in KNOWN[other].tests)]
        assert owners == [name], entry


@pytest.mark.parametrize("name", [name for name, group in KNOWN.items() if group.whole])
def test_a_whole_group_guards_all_that_its_tests_import(name: str) -> None:
    found, files = set[Path](), KNOWN[name].test_files()
    while files:
        found |= files
        files = {each for path in files if path.suffix == ".py" for each in imported(path)} - found
    assert found <= KNOWN[name].guarded_files() | KNOWN[name].test_files()


@pytest.mark.parametrize("name", KNOWN)
def test_a_group_guards_what_its_tests_import_themselves(name: str) -> None:
    tests = [path for path in KNOWN[name].test_files() if path.is_relative_to(ROOT / "tests")]
    own = {each for path in tests if path.suffix == ".py" for each in imported(path)}
    package = {path for path in own if path.name != "__init__.py"}
    assert package <= KNOWN[name].guarded_files() | KNOWN[name].test_files()


@cache
def imported(path: Path) -> set[Path]:
    """The modules of the package that a file imports, and the packages around them."""
    found = set[Path]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            for stem in ("/".join(parts[: n + 1]) for n in range(len(parts))):
                for folder, end in itertools.product((ROOT, ROOT / "kernels"), ENDS):
                    if (folder / f"{stem}{end}").is_file():
                        found.add(folder / f"{stem}{end}")
    return found


def test_what_has_passed_is_a_group() -> None:
    if passed_file().exists():
        assert set(json.loads(passed_file().read_text())) <= KNOWN.keys()
