"""A hostile hub or mirror: answers that would have files written outside of the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, asked_instead, oid, running

from specexec_cli.catalog.downloads import pull, survey
from specexec_cli.catalog.hub import fetch
from specexec_cli.catalog.hub_answers import is_inside
from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.errors import UnknownModelError

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}
ENTRY = ModelEntry(name="org/name", repo="org/name")
OUTSIDE = "../../../outside"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running(FakeHub(repos={"org/name": FILES})) as hub:
        asked_instead(hub, tmp_path / "deep" / "cache", monkeypatch)
        yield hub


def lies() -> dict[str, dict[str, str]]:
    names = {name: oid(name, data) for name, data in FILES.items()}
    sha = FakeHub({}).sha("org/name")
    return {
        "the commit": {sha: OUTSIDE},
        "the commit, absolute": {sha: "/tmp/outside"},
        "the commit, cut": {sha: sha[:39]},
        "the hash of a large file": {names["model.safetensors"]: OUTSIDE},
        "the hash of a small one": {names["config.json"]: OUTSIDE},
        "a name": {'"config.json"': f'"{OUTSIDE}/config.json"'},
        "an absolute name": {'"config.json"': '"/tmp/outside/config.json"'},
        "no text": {'"rfilename": "config.json"': '"rfilename": 5'},
        "deep JSON": {json.dumps("config.json"): "[" * 200 + "]" * 200},
    }


@pytest.mark.parametrize("fetched_by", ["fetch", "pull"])
@pytest.mark.parametrize("lie", lies())
def test_nothing_is_written_outside_of_the_cache(
    hub: FakeHub, tmp_path: Path, lie: str, fetched_by: str
) -> None:
    hub.lies |= lies()[lie]
    cache = tmp_path / "deep" / "cache"
    with pytest.raises(UnknownModelError, match="a file name or hash that is none") as caught:
        fetch(ENTRY) if fetched_by == "fetch" else pull(survey(ENTRY), lambda n_bytes: None)
    assert len(str(caught.value)) < 400
    assert all(path in cache.parents or path.is_relative_to(cache) for path in tmp_path.rglob("*"))
    assert not list(cache.rglob("outside*"))


def test_the_same_hub_without_lies(hub: FakeHub) -> None:
    folder = pull(survey(ENTRY), lambda n_bytes: None)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES


def test_names_that_lie_in_a_folder() -> None:
    assert all(map(is_inside, ("a", "a/b.gguf", "..a", "a..b/c", "a b", "ü")))
    outside = ("", ".", "..", "a/../../b", "/a", "//a", r"a\..\..\b", r"\a", "C:a", r"C:\a", "a\0b")
    assert not any(map(is_inside, outside))
