"""Kernels that are kept in files: compiled once for a CPU, and again where a file is no good."""

from __future__ import annotations

import ctypes
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
    monkeypatch.setenv("SPECEXEC_KERNEL_CACHE", str(tmp_path))
    return tmp_path


def result(compiler: cpu_jit._Compiler, more: int) -> int:
    """1 and so much more, by a kernel."""
    number = ctypes.c_int64(1)
    kernel = compiler.kernel("adds", more, lambda name: ADDS.format(name=name, more=more))
    kernel(ctypes.addressof(number))
    return number.value


def test_the_next_process_compiles_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cpu_jit._Compiler()
    assert [result(first, 4), result(first, 5), result(first, 4)] == [5, 6, 5]
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(kept) == 2

    def refused(symbol: str, machine_code: bytes) -> None:
        raise AssertionError("LLVM has compiled it")

    monkeypatch.setattr(kernel_files, "keep", refused)
    monkeypatch.setattr(cpu_jit.llvm, "create_pass_builder", refused)
    second = cpu_jit._Compiler()
    assert [result(second, 5), result(second, 4)] == [6, 5]
    assert {path: path.read_bytes() for path in folder.iterdir()} == kept


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_compiled_anew(folder: Path, damage: str) -> None:
    assert result(cpu_jit._Compiler(), 4) == 5
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    changed = bytes([*whole[:-1], whole[-1] ^ 1])
    path.write_bytes({"cut": whole[:-9], "changed": changed, "empty": b""}[damage])
    assert result(cpu_jit._Compiler(), 4) == 5
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECEXEC_KERNEL_CACHE", str(tmp_path / "file"))
    assert result(cpu_jit._Compiler(), 4) == 5


def test_another_cpu_has_files_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result(cpu_jit._Compiler(), 4) == 5
    fewer = {**cpu_jit.features(), "avx512f": False, "avx2": False}
    monkeypatch.setattr(cpu_jit, "features", lambda: fewer)
    assert result(cpu_jit._Compiler(), 4) == 5
    assert len(list(folder.iterdir())) == 2


def test_other_code_has_files_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result(cpu_jit._Compiler(), 4) == 5
    monkeypatch.setattr(kernel_files, "code_digest", lambda: "another")
    assert result(cpu_jit._Compiler(), 4) == 5
    assert len(list(folder.iterdir())) == 2


def test_the_users_own_folder_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECEXEC_KERNEL_CACHE")
    assert kernel_files.folder().parts[-2:] == ("specexec", "kernels")
