"""Large files go on where a download was stopped; only the right bytes become a blob."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, oid, running
from huggingface_hub import constants

from specexec_cli.catalog.large_files import LargeFile, fetch_large
from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.errors import CheckpointError

NAME = "model.safetensors"
DATA = bytes(range(256)) * 400
ENTRY = ModelEntry(name="big", repo="org/big")
FILE = LargeFile(name=NAME, size_bytes=len(DATA), sha256=oid(NAME, DATA))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(FakeHub(repos={"org/big": {NAME: DATA}})) as hub:
        url = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
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


def test_a_damaged_beginning_is_found_and_deleted(hub: FakeHub, tmp_path: Path) -> None:
    leave(tmp_path, bytes(1000))  # as after a power cut
    with pytest.raises(
        CheckpointError, match=rf"^{NAME} of org/big came damaged .* fetch it again"
    ):
        fetched(hub, tmp_path)
    assert FILE.bytes_here(tmp_path) == 0
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
