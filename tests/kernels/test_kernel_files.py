"""Kernels in files: compiled once for a CPU, and again if a file is damaged or not safe."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from specexec_kernels import cpu_jit, kernel_files

ADDS = """
define void @{name}(ptr %args) {{
  %number = load i64, ptr %args
  %more = add i64 %number, {more}
  store i64 %more, ptr %args
  ret void
}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    kernel_files.code_digest()  # which each process keeps once, so not in this folder
    monkeypatch.setenv("SPECEXEC_KERNEL_CACHE", str(tmp_path))
    return tmp_path


def result(compiler: cpu_jit.Compiler, more: int) -> int:
    """1 and so much more, by a kernel."""
    number = ctypes.c_int64(1)
    kernel = compiler.kernel("adds", more, lambda name: ADDS.format(name=name, more=more))
    kernel(ctypes.addressof(number))
    return number.value


def test_the_next_process_compiles_nothing(folder: Path) -> None:
    first = cpu_jit.Compiler()
    assert [result(first, 4), result(first, 5), result(first, 4)] == [5, 6, 5]
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(kept) == 2
    second = cpu_jit.Compiler()
    assert [result(second, 5), result(second, 4)] == [6, 5]
    assert second.compilations == 0
    assert {path: path.read_bytes() for path in folder.iterdir()} == kept


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_compiled_anew(folder: Path, damage: str) -> None:
    assert result(cpu_jit.Compiler(), 4) == 5
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    changed = bytes([*whole[:-1], whole[-1] ^ 1])
    path.write_bytes({"cut": whole[:-9], "changed": changed, "empty": b""}[damage])
    assert result(cpu_jit.Compiler(), 4) == 5
    assert path.read_bytes() == whole


def run_again(folder: Path, compiles: bool) -> None:
    """A second process has the same result, whether it compiles or not."""
    second = cpu_jit.Compiler()
    assert result(second, 4) == 5
    assert second.compilations == compiles


@pytest.mark.parametrize(("which", "mode"), [("file", 0o620), ("file", 0o602), ("folder", 0o722)])
def test_machine_code_that_others_may_write_is_not_run(folder: Path, which: str, mode: int) -> None:
    assert result(cpu_jit.Compiler(), 4) == 5
    (path,) = folder.iterdir()
    run_again(folder, compiles=False)
    (path if which == "file" else folder).chmod(mode)
    run_again(folder, compiles=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("which", ["file", "folder"])
def test_machine_code_of_another_user_is_not_run(folder: Path, which: str) -> None:
    assert result(cpu_jit.Compiler(), 4) == 5
    (path,) = folder.iterdir()
    os.chown(path if which == "file" else folder, 12345, 12345)
    run_again(folder, compiles=True)


def test_a_link_to_machine_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    assert result(cpu_jit.Compiler(), 4) == 5
    (path,) = folder.iterdir()
    path.symlink_to(path.rename(tmp_path.with_suffix(".elsewhere")))
    run_again(folder, compiles=True)


def test_a_link_to_a_folder_of_another_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the link leads to is looked at, not the link."""
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "other")
    monkeypatch.setenv("SPECEXEC_KERNEL_CACHE", str(tmp_path / "link"))
    kernel_files.keep("symbol", b"code")
    assert kernel_files.read("symbol") == b"code"
    (tmp_path / "other").chmod(0o770)
    assert kernel_files.read("symbol") is None
    kernel_files.keep("more", b"code")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["symbol.o"]


def test_a_file_that_cannot_be_kept_leaves_nothing(folder: Path) -> None:
    (folder / "symbol.o").mkdir()  # no file can take its place
    kernel_files.keep("symbol", b"code")
    assert [path.name for path in folder.iterdir()] == ["symbol.o"]


def test_files_whose_names_were_swapped_are_compiled_anew(folder: Path) -> None:
    first = cpu_jit.Compiler()
    assert [result(first, 4), result(first, 5)] == [5, 6]
    one, other = folder.iterdir()
    whole = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(whole)
    second = cpu_jit.Compiler()
    assert [result(second, 4), result(second, 5)] == [5, 6]
    assert second.compilations == 2


def test_only_the_user_may_enter_a_folder_that_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECEXEC_KERNEL_CACHE", str(tmp_path / "new" / "kernels"))
    assert result(cpu_jit.Compiler(), 4) == 5
    assert (tmp_path / "new" / "kernels").stat().st_mode & 0o777 == 0o700
    run_again(tmp_path, compiles=False)


def test_the_users_own_folder_is_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECEXEC_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_files.folder().mkdir(parents=True)
    kernel_files.folder().chmod(0o775)
    run_again(tmp_path, compiles=True)
    run_again(tmp_path, compiles=False)


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECEXEC_KERNEL_CACHE", str(tmp_path / "file"))
    assert result(cpu_jit.Compiler(), 4) == 5


def test_another_cpu_has_files_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result(cpu_jit.Compiler(), 4) == 5
    fewer = {**cpu_jit.features(), "avx512f": False, "avx2": False}
    monkeypatch.setattr(cpu_jit, "features", lambda: fewer)
    assert result(cpu_jit.Compiler(), 4) == 5
    assert len(list(folder.iterdir())) == 2


def test_other_code_has_files_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result(cpu_jit.Compiler(), 4) == 5
    monkeypatch.setattr(kernel_files, "code_digest", lambda: "another")
    assert result(cpu_jit.Compiler(), 4) == 5
    assert len(list(folder.iterdir())) == 2


def digest(folder: Path, text: str) -> str:
    """The digest of a package whose one file has this text."""
    (folder / "kernel.py").write_text(text)
    return kernel_files.digest_of(folder)


CODE = '''"""A module."""
import sys

NAMES = {"a", "b"}

class Kernel:
    """A class."""

    def emit(self, name: str) -> str:
        """A function."""
        # a comment
        return "add" if name in {"a", "b", "c"} else name + "%s"
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [('"A module."', '"Another\nmodule."'), ("A class.", "Two\n\nlines."),
     ("A function.", "New."), ("# a comment", "# two\n        # comments"),
     ("import sys", "\n\nimport sys  # used")],
)  # fmt: skip
def test_words_leave_kernels_as_they_are(tmp_path: Path, old: str, new: str) -> None:
    assert old in CODE
    assert digest(tmp_path, CODE.replace(old, new)) == digest(tmp_path, CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"add"', '"mul"'), ("name + ", "name * "), ("emit", "emits"), ('"b", "c"', '"b", "d"'),
     ("import sys", "import os"), ("name: str", "name: str = ''")],
)  # fmt: skip
def test_code_makes_other_kernels(tmp_path: Path, old: str, new: str) -> None:
    assert old in CODE
    assert digest(tmp_path, CODE.replace(old, new)) != digest(tmp_path, CODE)


def test_a_kept_digest_is_that_of_the_code(folder: Path) -> None:
    """It is made anew where the kept one is damaged."""
    package = folder / "package"
    package.mkdir()
    found = digest(package, CODE)
    (kept,) = folder.glob("code-*")
    written = kept.stat().st_mtime_ns
    assert digest(package, CODE) == found
    assert kept.stat().st_mtime_ns == written
    kept.write_bytes(kept.read_bytes()[:-1])
    assert digest(package, CODE) == found


def test_another_process_finds_the_same_digest() -> None:
    command = "from specexec_kernels import kernel_files; print(kernel_files.code_digest())"
    found = [
        subprocess.run(
            [sys.executable, "-c", command], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert found[0] == found[1]


def test_the_users_own_folder_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECEXEC_KERNEL_CACHE")
    assert kernel_files.folder().parts[-2:] == ("specexec", "kernels")
