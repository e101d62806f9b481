"""Groups of tests that are slow and rarely break, and which of them have passed as they are now.

tests/nightly.toml names the groups: their tests, and the paths whose changes can break them.
scripts/nightly runs every test and writes, for each group that passed, a digest of those paths and
tests to tests/nightly_passed.json, which is committed. scripts/test leaves out the groups whose
digest is still the same. So a clean checkout tells what has to run, whatever was tested before.

    python tests/nightly_groups.py changed    prints what scripts/test leaves out
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# changes of these can break any test
EVERYWHERE = ("pyproject.toml", "locks/test.txt", "tests/conftest.py", "tests/nightly.toml")
# arguments of pytest that choose no tests and end no run early: those that scripts/test gives
_OF_WHOLE_RUNS = (
    "--groups=", "--numprocesses=", "--max-worker-restart=", "--dist=", "--durations",
)  # fmt: skip
_IMPORT = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Group:
    """Tests that scripts/test leaves out while nothing has changed that could break them.

    Attributes:
        tests: test files, folders of them, or node ids without parameters.
        always: node ids among these tests that run all the same.
        guards: files, folders and patterns, relative to `root`, whose changes can break the tests.
        whole: whether `guards` have all of the package that the tests import.
    """

    root: Path
    tests: tuple[str, ...]
    guards: tuple[str, ...]
    always: tuple[str, ...] = ()
    whole: bool = False

    def has(self, node_id: str) -> bool:
        """Whether a test belongs to the group."""
        return node_id not in self.always and any(names(each, node_id) for each in self.tests)

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex of all that can break the group: names of files and their bytes."""
        found = hashlib.sha256()
        for path in sorted(self._files()):
            found.update(f"{path.relative_to(self.root).as_posix()}\0".encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
        return found.hexdigest()

    def _files(self) -> set[Path]:
        """Guarded files, files of the tests, and the helpers that these import, also those of
        guarded scripts, which tests start.

        Raises:
            ValueError: a path does not exist.
        """
        guarded = self._within((*self.guards, *EVERYWHERE))
        folders = "scripts", "tests"
        own = {each for each in guarded if each.relative_to(self.root).parts[0] in folders}
        return guarded | self._with_helpers(own) | self.test_files()

    def test_files(self) -> set[Path]:
        """Files of the tests, and the helpers that these import."""
        return self._with_helpers(self._within(each.partition("::")[0] for each in self.tests))

    def _with_helpers(self, found: set[Path]) -> set[Path]:
        """Some files, and the helpers that these import."""
        files = set[Path]()
        while found:
            files |= found
            found = {helper for path in found for helper in self._helpers(path)} - files
        return files

    def guarded_files(self) -> set[Path]:
        """All files that the group guards."""
        return self._within(self.guards)

    def _within(self, places: Iterable[str]) -> set[Path]:
        """Files, files in folders, and those that a pattern such as `core/*.py` finds."""
        files = set[Path]()
        for place in places:
            paths = [*self.root.glob(place)] if "*" in place else [self.root / place]
            if not all(path.exists() for path in paths or [self.root / place]):
                raise ValueError(f"tests/nightly.toml: there is no {place}")
            for path in paths:
                found = [path] if path.is_file() else path.rglob("*")
                files |= {
                    each for each in found if each.is_file() and "__pycache__" not in each.parts
                }
        return files

    def _helpers(self, path: Path) -> Iterator[Path]:
        """Modules of tests/ and scripts/ that a file of these imports by name."""
        for name in _IMPORT.findall(path.read_text() if path.suffix == ".py" else ""):
            for folder in (self.root / "tests", self.root / "scripts", path.parent):
                if (folder / f"{name}.py").is_file():
                    yield folder / f"{name}.py"


def names(entry: str, node_id: str) -> bool:
    """Whether an entry of the table is the test, less its parameters, its file, or its folder."""
    return node_id.startswith(entry) and node_id[len(entry) :][:1] in ("", ":", "[", "/")


def groups(root: Path = ROOT) -> dict[str, Group]:
    """The groups of tests/nightly.toml by name."""
    table = tomllib.loads((root / "tests" / "nightly.toml").read_text())
    return {
        name: Group(
            root, tuple(group["tests"]), tuple(group["guards"]), tuple(group.get("always", ())),
            group.get("whole", False),
        )
        for name, group in table.items()
    }  # fmt: skip


def passed_file(root: Path = ROOT) -> Path:
    """Where scripts/nightly writes the digest of each group that passed."""
    return root / "tests" / "nightly_passed.json"


def passed(root: Path = ROOT) -> list[str]:
    """The groups that have passed and whose paths and tests have not changed since."""
    file = passed_file(root)
    digests = json.loads(file.read_text()) if file.exists() else {}
    return [name for name, group in groups(root).items() if digests.get(name) == group.digest]


def record(ran: Iterable[str], failed: set[str], root: Path = ROOT) -> None:
    """Writes which of the groups that ran have passed: those without a test that failed."""
    file, known = passed_file(root), groups(root)
    digests = json.loads(file.read_text()) if file.exists() else {}
    for name in ran:
        digests[name] = known[name].digest
        if any(known[name].has(node_id) for node_id in failed):
            del digests[name]
    digests = {name: digest for name, digest in digests.items() if name in known}
    file.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


def left_out(choice: str, root: Path = ROOT) -> list[str]:
    """The groups that do not run.

    Args:
        choice: "changed" for all but those that have passed as they are, "all", or the names of
            groups that run alone, as in "gpu,papers".
    Raises:
        ValueError: there is no group of that name.
    """
    if choice == "all":
        return []
    if choice == "changed":
        return passed(root)
    if unknown := set(choice.split(",")) - groups(root).keys():
        raise ValueError(f"tests/nightly.toml has no group {', '.join(unknown)}")
    return [name for name in groups(root) if name not in choice.split(",")]


class Selection:
    """A plugin of pytest for its option --groups, which conftest.py adds."""

    def __init__(self, choice: str, root: Path = ROOT) -> None:
        """Decides which groups run.

        Args:
            choice: see `left_out`. Whether groups passed is written down unless it is "changed",
                or pytest has arguments that may leave a part of a group out, such as -k or -x.
        """
        self._root, self._groups = root, groups(root)
        self._left_out = left_out(choice, root)
        self._alone = choice not in ("changed", "all")  # nothing else runs than the named groups
        self._records = choice != "changed"
        self._passed, self._failed = set[str](), set[str]()

    def _runs(self, node_id: str) -> bool:
        of = [name for name, group in self._groups.items() if group.has(node_id)]
        return not set(of) & set(self._left_out) if of else not self._alone

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselects the tests that do not run."""
        config.hook.pytest_deselected(items=[each for each in items if not self._runs(each.nodeid)])
        items[:] = [each for each in items if self._runs(each.nodeid)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remembers which tests passed and which failed."""
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Writes which groups passed, once, and not after a run that was cut short."""
        whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if hasattr(session.config, "workerinput") or os.environ.get("PYTEST_ADDOPTS"):
            return
        arguments = session.config.invocation_params.args
        whole = whole and all(str(each).startswith(_OF_WHOLE_RUNS) for each in arguments)
        if self._records and whole:
            tests = self._passed | self._failed
            ran = [name for name in self._groups if any(map(self._groups[name].has, tests))]
            if ran:
                record(ran, self._failed, self._root)


def main(choice: str) -> str:
    """What does not run, in words; empty where every test does."""
    always = [] if choice in ("changed", "all") else ["what always runs"]
    return ", ".join(left_out(choice) + always)


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1]))
