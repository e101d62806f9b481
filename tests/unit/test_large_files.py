"""Large files go on where a download was stopped; only the right bytes become a blob."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_hub import FakeHub, asked_instead, oid, running
from filelock import FileLock
from huggingface_hub import constants

from specexec_cli.catalog.downloads import survey
from specexec_cli.catalog.large_files import LargeFile, fetch_large
from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.errors import CheckpointError

NAME = "model.safetensors"
DATA = bytes(range(256)) * 400
ENTRY = ModelEntry(name="big", repo="org/big")
FILE = LargeFile(name=NAME, size_bytes=len(DATA), sha256=oid(NAME, DATA))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(FakeHub(repos={"org/big": {NAME: DATA}})) as hub:
        asked_instead(hub, tmp_path, monkeypatch)
        yield hub


def fetched(hub: FakeHub, folder: Path, file: LargeFile = FILE) -> int:
    """Fetches the file; bytes that were told, less those told to be lost."""
    told: list[int] = []
    fetch_large(ENTRY, hub.sha("org/big"), [file], folder, told.append)
    assert file.blob(folder).read_bytes() == DATA
    assert not file.partial(folder).exists()
    return sum(told)


def leave(folder: Path, begin: bytes) -> None:
    """What a killed download left."""
    FILE.partial(folder).parent.mkdir(parents=True)
    FILE.partial(folder).write_bytes(begin)


@pytest.mark.parametrize("length", [0, 1, len(DATA) // 2, len(DATA)])
def test_only_what_is_missing_is_asked_for(hub: FakeHub, tmp_path: Path, length: int) -> None:
    leave(tmp_path, DATA[:length])
    assert FILE.bytes_here(tmp_path) == length
    assert fetched(hub, tmp_path) == len(DATA) - length
    assert hub.sent.get(NAME, 0) == len(DATA) - length
    assert FILE.bytes_here(tmp_path) == len(DATA)


def test_a_server_that_ignores_ranges_begins_anew(hub: FakeHub, tmp_path: Path) -> None:
    hub.ranges = False
    leave(tmp_path, DATA[:1000])
    assert fetched(hub, tmp_path) == len(DATA) - 1000, "the bar ends where it should"
    assert hub.sent[NAME] == len(DATA)


def test_one_that_breaks_off_and_ignores_ranges(hub: FakeHub, tmp_path: Path) -> None:
    hub.ranges, hub.breaks[NAME] = False, 1
    leave(tmp_path, DATA[:1000])
    assert fetched(hub, tmp_path) == len(DATA) - 1000


def test_more_than_the_file_begins_anew(hub: FakeHub, tmp_path: Path) -> None:
    leave(tmp_path, DATA + b"x")
    assert FILE.bytes_here(tmp_path) == 0
    assert fetched(hub, tmp_path) == len(DATA)


def test_another_revision_of_a_file_has_a_beginning_of_its_own(
    hub: FakeHub, tmp_path: Path
) -> None:
    older = LargeFile(name=NAME, size_bytes=len(DATA), sha256=oid(NAME, DATA[::-1]))
    leave(tmp_path, DATA[:1000])
    FILE.partial(tmp_path).rename(older.partial(tmp_path))
    assert fetched(hub, tmp_path) == len(DATA)
    assert older.bytes_here(tmp_path) == 1000


@pytest.mark.parametrize("length", [1000, len(DATA)])
def test_a_damaged_beginning_is_fetched_again(hub: FakeHub, tmp_path: Path, length: int) -> None:
    leave(tmp_path, bytes(length))  # as after a power cut
    assert fetched(hub, tmp_path) == len(DATA) - length, "the bar ends where it should"
    assert hub.sent[NAME] == len(DATA) - length + len(DATA)


@pytest.mark.parametrize(("length", "downloads"), [(0, 1), (1000, 2)])
def test_what_comes_damaged_is_deleted(
    hub: FakeHub, tmp_path: Path, length: int, downloads: int
) -> None:
    hub.repos = {"org/big": {NAME: DATA[::-1]}}
    leave(tmp_path, DATA[:length])
    with pytest.raises(
        CheckpointError, match=rf"^{NAME} of org/big came damaged .* fetch it again"
    ):
        fetched(hub, tmp_path)
    assert len(hub.downloads()) == downloads
    assert FILE.bytes_here(tmp_path) == 0
    hub.repos = {"org/big": {NAME: DATA}}
    assert fetched(hub, tmp_path) == len(DATA)


def test_what_a_full_disk_had_room_for_is_kept(hub: FakeHub, tmp_path: Path) -> None:
    room = len(DATA) // 2
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            fetched(hub, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 0 < FILE.bytes_here(tmp_path) <= room
    missing = len(DATA) - FILE.bytes_here(tmp_path)
    assert fetched(hub, tmp_path) == missing


def test_several_at_once_come_whole(hub: FakeHub, tmp_path: Path) -> None:
    contents = {f"model-{n}-of-9.safetensors": DATA + bytes([n]) for n in range(9)}
    hub.repos = {"org/big": contents}
    files = [
        LargeFile(name=name, size_bytes=len(data), sha256=oid(name, data))
        for name, data in contents.items()
    ]
    fetch_large(ENTRY, hub.sha("org/big"), [*files, files[0]], tmp_path, lambda n_bytes: None)
    assert [file.blob(tmp_path).read_bytes() for file in files] == list(contents.values())
    assert hub.downloads().count(files[0].name) == 1


def damaged(hub: FakeHub, others: dict[str, bytes]) -> LargeFile:
    """A file that comes with other bytes than its hash says, beside others."""
    hub.repos = {"org/big": {"bad.safetensors": DATA, **others}}
    return LargeFile(name="bad.safetensors", size_bytes=len(DATA), sha256="0" * 64)


def test_one_that_fails_ends_the_others(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)
    long = DATA * 50
    bad = damaged(hub, {"long.safetensors": long})
    slow = LargeFile(
        name="long.safetensors", size_bytes=len(long), sha256=oid("long.safetensors", long)
    )
    hub.bytes_per_s = 5e5
    with pytest.raises(CheckpointError, match=r"^bad\.safetensors of org/big came damaged"):
        fetch_large(ENTRY, hub.sha("org/big"), [slow, bad], tmp_path, lambda n_bytes: None)
    assert hub.sent["long.safetensors"] < len(long)
    assert slow.partial(tmp_path).exists(), "the next one goes on there"


def held(tmp_path: Path, file: LargeFile) -> FileLock:
    """The lock of another process that fetches the file."""
    lock = tmp_path.parent / ".locks" / tmp_path.name / f"{file.sha256}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(lock)


def test_nothing_waits_behind_another_download_once_one_failed(
    hub: FakeHub, tmp_path: Path
) -> None:
    bad = damaged(hub, {NAME: DATA})
    with held(tmp_path, FILE), pytest.raises(CheckpointError, match=r"^bad\.safetensors"):
        fetch_large(ENTRY, hub.sha("org/big"), [FILE, bad], tmp_path, lambda n_bytes: None)
    assert hub.downloads() == ["bad.safetensors"]


def test_what_another_program_brought_meanwhile_is_told(hub: FakeHub, tmp_path: Path) -> None:
    leave(tmp_path, DATA[:1000])
    with ThreadPoolExecutor(1) as pool:
        with held(tmp_path, FILE):
            told = pool.submit(fetched, hub, tmp_path)
            time.sleep(0.2)
            FILE.partial(tmp_path).unlink()
            FILE.blob(tmp_path).write_bytes(DATA)
        assert told.result() == len(DATA) - 1000
    assert hub.downloads() == []


def test_a_content_with_two_names_is_counted_once(hub: FakeHub) -> None:
    hub.repos = {"org/big": {"config.json": b"{}", NAME: DATA, "same.safetensors": DATA}}
    found = survey(ENTRY)
    assert (found.total_bytes, found.fetch_bytes) == (len(DATA) + 2, len(DATA) + 2)
    assert [file.sha256 for file in found.large] == [FILE.sha256]
