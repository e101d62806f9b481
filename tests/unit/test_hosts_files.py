"""Whether two machines have the same model: by all bytes of its files, each read once."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from checkpoints import architecture, save_checkpoint

from specexec_cli.errors import CheckpointError
from specexec_cli.hosts import files
from specexec_cli.hosts.files import digest_of, file_hashes, hashes_file
from specexec_cli.offload.store import read_checkpoint


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_checkpoint(folder, architecture("llama"))
    return folder


def weights(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


def test_a_bit_anywhere_in_the_weights_makes_another_model(model: Path) -> None:
    before, path = digest_of(read_checkpoint(model)), weights(model)
    whole = path.read_bytes()
    for at in (-1, -len(whole) // 3, -len(whole) // 7):
        changed = bytearray(whole)
        changed[at] ^= 1
        path.write_bytes(changed)
        assert digest_of(read_checkpoint(model)) != before
    path.write_bytes(whole)
    assert digest_of(read_checkpoint(model)) == before


def test_another_machines_copy_is_the_same_model(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert digest_of(read_checkpoint(model)) == digest_of(read_checkpoint(copy))


def test_a_file_is_read_once_until_it_changes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(files, "_TOLD_BYTES", 1)
    first = digest_of(read_checkpoint(model), said.append)
    assert digest_of(read_checkpoint(model), said.append) == first
    assert len(said) == 1
    assert "of the model's files, once, for their hashes" in said[0]
    os.utime(weights(model))
    assert digest_of(read_checkpoint(model), said.append) == first
    assert len(said) == 2


def test_where_no_hash_can_be_kept_files_are_read_again(model: Path) -> None:
    first = digest_of(read_checkpoint(model))
    hashes_file().write_text('{"x": [1, 2], "y": 3}')
    assert digest_of(read_checkpoint(model)) == first
    hashes_file().unlink()
    hashes_file().mkdir()
    assert digest_of(read_checkpoint(model)) == first


def test_a_file_that_is_gone_is_one_line(model: Path) -> None:
    checkpoint = read_checkpoint(model)
    path = weights(model)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"\.safetensors cannot be read: No such file"):
        digest_of(checkpoint)


def test_a_file_whose_bytes_cannot_be_read_is_named() -> None:
    memory = Path(f"/proc/{os.getpid()}/mem")
    if not memory.exists():
        pytest.skip("this system has no file that can be opened, but not read")
    with pytest.raises(CheckpointError, match=f"^{memory} cannot be read: Input/output error"):
        file_hashes([memory], lambda line: None)


def test_ctrl_c_does_not_wait_for_the_end_of_a_file(tmp_path: Path) -> None:
    path, blocks, written = tmp_path / "slow", 300, list[int]()
    os.mkfifo(path)

    def write() -> None:
        try:
            with path.open("wb", buffering=0) as file:
                for at in range(blocks):
                    file.write(bytes(1 << 20))
                    written.append(at)
                    if at == 3:
                        os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.02)
        except BrokenPipeError:
            pass

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(KeyboardInterrupt):
        file_hashes([path], lambda line: None)
    writer.join(30)
    assert 3 < len(written) < blocks
