"""scripts/check_install.py against a package index of empty wheels, in a folder."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
check_install = pytest.importorskip("check_install")

PLATFORMS = ("Linux x86-64", "Windows x86-64")
TORCH_TAGS = ("manylinux_2_28_x86_64", "win_amd64")


class Index:
    """A simple repository (PEP 503) that is read from a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, version: str, *needs: str, tag: str = "any") -> None:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        wheel = f"{name}-{version}-py3-none-{tag}.whl"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
        with ZipFile(folder / wheel, "w") as archive:
            archive.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
            archive.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
            archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
        with (folder / "index.html").open("a") as page:
            page.write(f'<a href="{wheel}">{wheel}</a>\n')


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """torch as it is published: on Linux it requires one version of Triton, elsewhere none."""
    index = Index(tmp_path / "index")
    index.add("typer", "0.28.0")
    for tag in TORCH_TAGS:
        index.add("torch", "2.13.0", "triton==3.7.1; sys_platform == 'linux'", tag=tag)
    for version in ("3.7.1", "3.9.0"):
        index.add("triton", version)
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.folder.as_uri())
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    return index


@pytest.fixture
def project(tmp_path: Path, index: Index) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "toy"\nversion = "1"\ndependencies = ["torch>=2.9"]\n'
        "[project.optional-dependencies]\ntest = [\"triton; platform_system == 'Linux'\"]\n"
    )
    (folder / "constraints.txt").write_text("torch==2.13.0\ntriton==3.7.1\n")
    return folder


@pytest.fixture(autouse=True)
def few_combinations(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = {name: check_install.PLATFORMS[name] for name in PLATFORMS}
    monkeypatch.setattr(check_install, "PLATFORMS", platforms)
    monkeypatch.setattr(check_install, "PYTHONS", ("3.13",))


def test_what_resolves_everywhere(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_install.main([str(project)]) == 0
    assert "6 of 6 installations resolve" in capsys.readouterr().out


def test_another_triton_than_torch_requires(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "constraints.txt").write_text("torch==2.13.0\ntriton==3.9.0\n")
    assert check_install.main([str(project)]) == 1
    out = capsys.readouterr().out
    assert "Linux x86-64, Python 3.13, the versions of constraints.txt:" in out
    assert "triton" in out
    assert "5 of 6 installations resolve" in out


def test_a_dependency_without_wheels(
    project: Path, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    (index.folder / "torch" / "index.html").write_text("")
    index.add("torch", "2.13.0", tag="win_amd64")
    assert check_install.main([str(project)]) == 1
    assert "3 of 6 installations resolve" in capsys.readouterr().out


def test_no_index_answers(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    assert check_install.main([str(project)]) == 0
    assert "skipped, because no package index answers" in capsys.readouterr().out


def pins(name: str) -> dict[str, set[str]]:
    """The versions that a file pins, by package: several where Python's version decides."""
    found: dict[str, set[str]] = {}
    for package, version in re.findall(
        r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(), re.MULTILINE
    ):
        found.setdefault(package, set()).add(version)
    return found


def test_every_requirement_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    pinned = pins("constraints.txt")
    for line in (*project["dependencies"], *(line for extra in extras for line in extra)):
        wanted = Requirement(line)
        versions = pinned[canonicalize_name(wanted.name)]
        assert all(wanted.specifier.contains(version) for version in versions), line


@pytest.mark.parametrize("extra", ["test", "serve"])
def test_a_lock_has_hashes_for_all_but_torch(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked, pinned = pins(f"locks/{extra}.txt"), pins("constraints.txt")
    lines = (*project["dependencies"], *project["optional-dependencies"][extra])
    wanted = {canonicalize_name(Requirement(line).name) for line in lines}
    assert wanted - locked.keys() == {"torch"}
    assert all(versions == pinned[package] for package, versions in locked.items())
    text = (ROOT / f"locks/{extra}.txt").read_text()
    for entry in re.split(r"\n(?=\w)", text.split("\n", 2)[2]):
        assert "--hash=sha256:" in entry, entry


def test_an_installation_in_this_environment_has_only_pinned_packages() -> None:
    """What resolving left out would be missing here, or come unpinned."""
    pinned = pins("constraints.txt")
    seen, todo = set(), ["specexec-cli"]
    while todo:
        name = todo.pop()
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker and not needed.marker.evaluate({"extra": ""}):
                continue
            package = canonicalize_name(needed.name)
            if package not in seen:
                seen.add(package)
                todo.append(package)
    assert not seen - pinned.keys()
