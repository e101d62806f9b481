"""Fetching: the real huggingface_hub against a small hub on this machine, its errors in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from computer import Computer
from fake_hub import FakeHub, running
from huggingface_hub import constants, errors

from specexec_cli.catalog.hub import cached_snapshot, fetch
from specexec_cli.catalog.models_file import ModelEntry
from specexec_cli.errors import ConfigError, NotFetchedError, SpecexecError, UnknownModelError

ENTRY = ModelEntry(name="org/name", repo="org/name")
SHA = "a" * 40


def test_folders_are_returned_as_they_are(tmp_path: Path) -> None:
    entry = ModelEntry(name="mine", repo=str(tmp_path))
    with pytest.raises(UnknownModelError, match=r"'mine': folder .* has no config\.json"):
        fetch(entry)
    (tmp_path / "config.json").write_text("{}")
    assert fetch(entry, offline=True) == tmp_path
    with pytest.raises(ConfigError, match="`revision` is for hub ids, but 'mine' is a local"):
        entry.at("v1")


def test_a_package_folder_is_inside_the_package() -> None:
    import specexec_cli

    folder = ModelEntry(name="demo", repo="package:demo/target").folder
    assert folder == Path(str(specexec_cli.__file__)).parent / "demo" / "target"


# --- What huggingface_hub is asked for ---


@dataclass
class Client:
    """Stands in for huggingface_hub's download of a repository."""

    folder: Path
    calls: list[dict[str, Any]] = field(default_factory=list)
    failure: Callable[[], BaseException] | None = None

    def download(self, repo: str, **kwargs: Any) -> str:
        self.calls.append({"repo": repo, **kwargs})
        if self.failure is not None:
            raise self.failure()
        return str(self.folder)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Client:
    """What snapshot_download is asked, which finds one safetensors file until a test says else."""
    (tmp_path / "model.safetensors").touch()
    found = Client(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.download)
    return found


@pytest.fixture
def calls(client: Client) -> list[dict[str, Any]]:
    """Arguments of every snapshot_download."""
    return client.calls


def test_revision_and_offline_are_passed_on(
    calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = replace(ENTRY, revision="v1")
    assert fetch(pinned) == tmp_path
    fetch(pinned.at("v2"), offline=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetch(ENTRY)
    asked = [(call["repo"], call["revision"], call["local_files_only"]) for call in calls]
    assert asked == [
        ("org/name", "v1", False),
        ("org/name", "v2", True),
        ("org/name", None, True),
    ]


def test_few_files_come_at_once_where_a_broken_one_begins_anew(calls: list[dict[str, Any]]) -> None:
    fetch(ENTRY)
    assert calls[0]["max_workers"] == 2


def test_progress_bars_are_silent_and_what_is_stored_is_told(
    calls: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    stored: list[int] = []
    fetch(ENTRY, stored=stored.append)
    for name in ("huggingface_hub.snapshot_download", "huggingface_hub.http_get"):
        with calls[0]["tqdm_class"](total=10, desc="loud", name=name) as bar:
            bar.update(5)
    assert capfd.readouterr().err == ""
    assert stored == [5], "bytes on the wire are not those on the disk"


# --- Every failure is one line that says what to do ---


def _response(status: int) -> Any:
    """An answer of the HTTP library that this version of huggingface_hub uses."""
    http = sys.modules[errors.HTTPError.__module__.partition(".")[0]]
    return http.Response(status, request=http.Request("GET", "https://hub.test/org/name"))


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


FAILURES: list[tuple[Callable[[], Exception], bool, list[str]]] = [
    (
        lambda: errors.GatedRepoError("no", response=_response(403)),
        False,
        ["org/name is gated", "accept its licence at https://", "/org/name", "`hf auth login`"],
    ),
    (
        lambda: _caused(
            errors.LocalEntryNotFoundError("hidden"),
            errors.GatedRepoError("no", response=_response(403)),
        ),
        False,
        ["org/name is gated", "`hf auth login`"],
    ),
    (
        lambda: errors.HfHubHTTPError("no", response=_response(403)),
        False,
        ["answered 403 for org/name"],
    ),
    (
        lambda: errors.RepositoryNotFoundError("no", response=_response(404)),
        False,
        ["no repository 'org/name'", "no such folder", "private", "check the name"],
    ),
    (
        lambda: errors.RevisionNotFoundError("no", response=_response(404)),
        False,
        ["org/name has no revision 'main'"],
    ),
    (lambda: errors.HFValidationError("no"), False, ["'org/name' is not a hub id", "org/name"]),
    (
        lambda: errors.LocalEntryNotFoundError("no"),
        True,
        ["not (completely) in the cache at", "offline", "without `offline`"],
    ),
    (
        lambda: errors.IncompleteSnapshotError("no", snapshot_path="x"),
        True,
        ["not (completely) in the cache at", "without `offline`"],
    ),
    (
        lambda: _caused(errors.LocalEntryNotFoundError("hidden"), ConnectionError("refused")),
        False,
        ["cannot fetch org/name", "ConnectionError: refused", "check the network"],
    ),
    (
        lambda: errors.HfHubHTTPError("no", response=_response(503)),
        False,
        ["answered 503", "try again later"],
    ),
    (
        lambda: OSError(28, "No space left on device"),
        False,
        ["cannot store org/name in", "No space left on device"],
    ),
    (lambda: RuntimeError("first\nsecond"), False, ["RuntimeError: first)", "check the network"]),
]


@pytest.mark.parametrize(("failure", "offline", "parts"), FAILURES)
def test_failures_become_one_line(
    client: Client, failure: Callable[[], Exception], offline: bool, parts: list[str]
) -> None:
    client.failure = failure
    with pytest.raises(SpecexecError) as caught:
        fetch(ENTRY, offline=offline)
    message = str(caught.value)
    full = message.startswith("cannot store")
    assert type(caught.value) is (NotFetchedError if full else UnknownModelError)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_refusal_of_what_is_known_to_be_gated_names_the_licence(
    client: Client,
) -> None:
    client.failure = lambda: errors.HfHubHTTPError("no", response=_response(403))
    with pytest.raises(UnknownModelError, match="org/name is gated: accept its licence"):
        fetch(replace(ENTRY, gated=True))


def test_an_interrupt_is_not_an_error_of_the_hub(client: Client) -> None:
    client.failure = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        fetch(ENTRY)


# --- The real client against a small hub ---

FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer.model": b"sp",
    "chat_template.jinja": b"{{ messages }}",
    "quantize_config.json": b"{}",
    "model-00001-of-00001.safetensors": b"weights",
    "model.safetensors.index.json": b'{"weight_map": {"w": "model-00001-of-00001.safetensors"}}',
    # none of these is wanted
    "README.md": b"#",
    "modeling_custom.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"a second copy",
    "adapter_model.safetensors": b"lora",
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"other",
}
WANTED = set(list(FILES)[:8])
HUB = FakeHub(
    repos={
        "org/name": FILES,
        "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle", "x.py": b"no"},
        "org/old": {"config.json": b"{}", "model.bin": b"pickle"},
        "org/gated": FILES,
    },
    gated=frozenset({"org/gated"}),
)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with running(HUB) as hub:
        yield hub.url


def _fetch_elsewhere(
    endpoint: str, cache: Path, repo: str, revision: str | None = None, **kwargs: object
) -> Path | str:
    """fetch() in a fresh process, which reads endpoint and cache anew; a path or the error."""
    code = (
        "import sys, json\n"
        "from specexec_cli.errors import SpecexecError\n"
        "from specexec_cli.catalog.hub import fetch\n"
        "from specexec_cli.catalog.models_file import ModelEntry\n"
        "repo, revision, kwargs = json.loads(sys.argv[1])\n"
        "try:\n"
        "    print(fetch(ModelEntry(name=repo, repo=repo, revision=revision), **kwargs))\n"
        "except SpecexecError as error:\n"
        "    print(type(error).__name__ + ': ' + str(error))\n"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    local = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps([repo, revision, kwargs])],
        capture_output=True,
        text=True,
        env={**clean, **local, "NO_PROXY": "127.0.0.1"},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    answer = result.stdout.strip()
    return Path(answer) if answer.startswith(str(cache)) else answer


def test_a_download_brings_the_wanted_files_and_no_other(endpoint: str, tmp_path: Path) -> None:
    folder = _fetch_elsewhere(endpoint, tmp_path, "org/name")
    assert isinstance(folder, Path), folder
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == WANTED
    assert (folder / "model-00001-of-00001.safetensors").read_bytes() == b"weights"
    # and from now on without any network
    assert _fetch_elsewhere("http://127.0.0.1:9", tmp_path, "org/name", offline=True) == folder
    assert _fetch_elsewhere("http://127.0.0.1:9", tmp_path, "org/name") == folder


def test_a_file_of_torch_save_comes_where_there_is_nothing_else(
    endpoint: str, tmp_path: Path
) -> None:
    folder = _fetch_elsewhere(endpoint, tmp_path, "org/pickled")
    assert isinstance(folder, Path), folder
    assert {path.name for path in folder.iterdir()} == {"config.json", "pytorch_model.bin"}
    assert _fetch_elsewhere("http://127.0.0.1:9", tmp_path, "org/pickled", offline=True) == folder


def test_real_answers_become_one_line(endpoint: str, tmp_path: Path) -> None:
    def failure(repo: str, at: str = endpoint, **kwargs: object) -> str:
        answer = _fetch_elsewhere(at, tmp_path, repo, **kwargs)
        assert isinstance(answer, str)
        assert "\n" not in answer
        return answer

    assert "CheckpointError: org/old holds no safetensors weights" in failure("org/old")
    assert "UnknownModelError: org/gated is gated" in failure("org/gated")
    assert "UnknownModelError: no repository 'org/gone'" in failure("org/gone")
    assert "org/name has no revision 'v9'" in failure("org/name", revision="v9")
    assert "is not (completely) in the cache" in failure("org/gone", offline=True)
    assert "check the network" in failure("org/gone", at="http://127.0.0.1:9")


# --- What is in the cache already ---


def test_cached_snapshot_wants_every_shard(computer: Computer) -> None:
    assert cached_snapshot(ENTRY) is None
    repo = computer.hub / "models--org--name"
    snapshot = repo / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (repo / "refs" / "refs" / "pr").mkdir(parents=True)
    (repo / "refs" / "main").write_text(SHA)
    (repo / "refs" / "refs" / "pr" / "5").write_text(SHA)
    assert cached_snapshot(ENTRY) is None
    (snapshot / "a.safetensors").touch()
    assert cached_snapshot(ENTRY) == snapshot
    index = snapshot / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    assert cached_snapshot(ENTRY) is None
    (snapshot / "b.safetensors").touch()
    assert cached_snapshot(ENTRY) == snapshot
    assert cached_snapshot(replace(ENTRY, revision="refs/pr/5")) == snapshot
    assert cached_snapshot(replace(ENTRY, revision=SHA)) == snapshot
    assert cached_snapshot(replace(ENTRY, revision="refs/pr/6")) is None
    long = '{"weight_map": {"x": "' + "x" * 300 + '"}}'
    for damage in ("{", "[]", '{"weight_map": []}', '{"weight_map": null}', "[" * 100_000, long,
                   '{"weight_map": {"x": 5}}', '{"weight_map": {"x": [5]}}'):  # fmt: skip
        index.write_text(damage)
        assert cached_snapshot(ENTRY) is None
    for damage in (b"\xff", b"x" * 300, b""):
        (repo / "refs" / "main").write_bytes(damage)
        assert cached_snapshot(ENTRY) is None
