"""Low-bit copies of targets in the cache: listed, removed, and mended when damaged."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import BYTE_VOCAB, architecture, byte_llama, save_byte_tokenizer, save_checkpoint
from cli_runner import run_cli
from gguf_files import write_gguf
from safetensors.torch import load_file
from torch import Tensor

from specexec_cli.catalog import own_copies as room
from specexec_cli.catalog.own_copies import lock_of, own_copies, remove_copy
from specexec_cli.errors import ConfigError, NotFetchedError
from specexec_cli.models.own_copy import own_copy
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning import chosen_models
from specexec_cli.planning.draft_sizes import own_folder
from specexec_cli.planning.machine import described_site
from specexec_cli.planning.speed import Pace, Speed
from specexec_cli.session import Session


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "target"
    save_checkpoint(folder, byte_llama(hidden_size=64, intermediate_size=128))
    save_byte_tokenizer(folder)
    return folder


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").unlink(),
    ],
    ids=["short", "no weights", "no header", "no JSON", "no config"],
)
def test_a_damaged_copy_is_made_anew(target: Path, damage: Callable[[Path], None]) -> None:
    checkpoint, told = read_checkpoint(target), []
    made = own_copy(checkpoint, 4)
    # copies: what is mapped would go with the damage
    mapped = load_file(made.folder / "model.safetensors")
    expected = {name: tensor.clone() for name, tensor in mapped.items()}
    del mapped
    damage(made.folder)
    again = own_copy(checkpoint, 4, told.append)
    assert told[0].startswith(f"the copy in {made.folder} is damaged, and made anew: ")
    assert "making a 4-bit copy" in told[1]
    found = load_file(again.folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())
    assert again.config == read_checkpoint(again.folder).config
    own_copy(checkpoint, 4, pytest.fail)


def test_a_copy_that_cannot_be_cleared_away_is_one_line_with_its_folder(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_copy(read_checkpoint(target), 4).folder
    _cut(folder)

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("specexec_cli.models.own_copy.shutil.rmtree", refused)
    with pytest.raises(NotFetchedError, match=rf"{folder} cannot be deleted \(Permission denied"):
        own_copy(read_checkpoint(target), 4)


def test_copies_are_listed_and_removed_by_the_beginning_of_their_names(target: Path) -> None:
    checkpoint = read_checkpoint(target)
    assert own_copies() == []
    folders = [own_copy(checkpoint, bits).folder for bits in (2, 4)]
    left = folders[1].with_name(f"{folders[1].name}.partial-1")
    left.mkdir()
    (left / "half").write_bytes(bytes(1000))
    names = sorted(f"self:{folder.name}" for folder in (*folders, left))
    assert all(name.startswith("self:target--") for name in names)
    shown = run_cli("models", "list", "--all").out
    assert all(name in shown for name in names)
    listed = json.loads(run_cli("models", "list", "--json").out)["own_copies"]
    assert [each["name"] for each in listed] == names
    assert listed[-1] == {"name": names[-1], "folder": str(left), "size_bytes": 1000}

    refused = run_cli("rm", "self:target", stdin=b"")
    assert (refused.code, refused.error.endswith("would be deleted: agree with --yes")) == (
        10,
        True,
    )
    assert len(own_copies()) == 3
    two = names[0]
    ran = run_cli("rm", two, "--yes")
    assert (ran.code, f"deleted {two}" in ran.err) == (0, True)
    assert [each.name for each in own_copies()] == names[1:]
    assert run_cli("rm", "self:", "--yes").code == 0
    assert own_copies() == []
    gone = run_cli("rm", two, "--yes")
    assert (gone.code, f"begins with '{two}'" in gone.error) == (3, True)
    assert own_copy(checkpoint, 2).folder == folders[0]


def test_a_copy_that_is_being_made_is_not_removed(target: Path) -> None:
    folder = own_copy(read_checkpoint(target), 4).folder
    half = folder.with_name(f"{folder.name}.partial-1")
    half.mkdir()
    with lock_of(folder):
        for found in own_copies():
            with pytest.raises(NotFetchedError, match="is being made by another process"):
                remove_copy(found)
    assert len(own_copies()) == 2


def test_what_cannot_be_removed_is_one_line(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_copy(read_checkpoint(target), 4)
    (found,) = own_copies()

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(room.shutil, "rmtree", refused)
    with pytest.raises(NotFetchedError, match=r"cannot delete .*: Permission denied"):
        remove_copy(found)


def test_in_the_hub_s_cache_a_copy_has_the_repository_s_name(target: Path) -> None:
    snapshot = target.parent / "models--org--name" / "snapshots" / "0123456789abcdef"
    snapshot.parent.mkdir(parents=True)
    target.rename(snapshot)
    assert own_folder(read_checkpoint(snapshot), 4).name.startswith("org--name--")


TEXT = [list(range(30, 60)), list(range(80, 110))]


def _weights(folder: Path) -> dict[str, Tensor]:
    # copies: what is mapped would go with the file
    return {
        name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()
    }


def _end_at_half(done: int, total: int) -> None:
    if done * 2 > total:
        raise KeyboardInterrupt


def _left(target: Path) -> Path:
    """What Ctrl-C leaves of a copy of four layers, three of which are whole."""
    with pytest.raises(KeyboardInterrupt):
        own_copy(read_checkpoint(target), 4, progress=_end_at_half, pieces=lambda: TEXT)
    (left,) = own_copies()
    return left.folder


def test_a_killed_process_leaves_whole_layers_behind_which_the_next_one_goes_on(
    target: Path,
) -> None:
    """SIGKILL in the midst of the writing, as the system does where memory runs out."""
    script = (
        "import sys, time; from pathlib import Path\n"
        "from specexec_cli.models.own_copy import own_copy\n"
        "from specexec_cli.offload.store import read_checkpoint\n"
        "def progress(done, total):\n"
        "    if done * 2 > total:\n"
        "        print('half', flush=True)\n"
        "        time.sleep(600)\n"
        "own_copy(read_checkpoint(Path(sys.argv[1])), 4, progress=progress)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "half\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    checkpoint = read_checkpoint(target)
    folder = own_folder(checkpoint, 4)
    (left,) = own_copies()
    assert left.folder.name == f"{folder.name}.partial-{process.pid}"
    assert left.size_bytes > 0
    told: list[str] = []
    made = own_copy(checkpoint, 4, told.append)
    assert len(told) == 1, "nobody holds the lock"
    assert re.search(r"going on with the 4-bit copy .*: [1-9] of [2-9] layers are there", told[0])
    assert [each.folder for each in own_copies()] == [made.folder]
    whole = _weights(made.folder)
    remove_copy(own_copies()[0])
    again = _weights(own_copy(checkpoint, 4).folder)
    assert whole.keys() == again.keys()
    assert all(tensor.equal(again[name]) for name, tensor in whole.items())


def test_layers_that_are_there_are_not_made_again_behind_ctrl_c(target: Path) -> None:
    left = _left(target)
    first = left / "model.safetensors"
    data = bytearray(first.read_bytes())
    place = 8 + int.from_bytes(data[:8], "little")  # the first weight's first byte
    data[place] ^= 1
    first.write_bytes(data)
    checkpoint = read_checkpoint(target)
    made = own_copy(checkpoint, 4, pieces=lambda: TEXT)
    assert not list(made.folder.glob("*done*"))
    found = _weights(made.folder)
    remove_copy(own_copies()[0])
    expected = _weights(own_copy(checkpoint, 4, pieces=lambda: TEXT).folder)
    assert found.keys() == expected.keys()
    (other,) = [name for name, tensor in found.items() if not tensor.equal(expected[name])]
    assert (found[other] != expected[other]).sum() == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda left: (left / "model.safetensors").write_bytes(b"x" * 99),
        lambda left: (left / "model.safetensors").unlink(),
        lambda left: (left / "layers-done.json").write_text("{"),
        lambda left: (left / "layers-done.json").write_text('{"layers": 1, "digest": "x"}'),
    ],
    ids=["short", "no weights", "no JSON", "another copy"],
)
def test_leftovers_that_are_none_of_this_copy_are_removed(
    target: Path, change: Callable[[Path], None]
) -> None:
    change(_left(target))
    told: list[str] = []
    checkpoint = read_checkpoint(target)
    made = own_copy(checkpoint, 4, told.append, pieces=lambda: TEXT)
    assert ["making a 4-bit copy" in line for line in told] == [True]
    assert [each.folder for each in own_copies()] == [made.folder]


def test_what_was_made_with_another_text_is_made_anew(target: Path) -> None:
    _left(target)
    told: list[str] = []
    own_copy(read_checkpoint(target), 4, told.append, pieces=lambda: TEXT[:1])
    assert ["making a 4-bit copy" in line for line in told] == [True]


def test_plan_refuses_what_a_session_refuses(target: Path, tmp_path: Path) -> None:
    """A GGUF file, and a mixture whose experts are one tensor: neither has a copy."""
    model = save_checkpoint(tmp_path / "plain", byte_llama(hidden_size=64, intermediate_size=128))
    packed = write_gguf(model, tmp_path / "m.gguf", tokenizer=target)
    config = architecture("qwen3-moe")
    config.hidden_size = config.moe_intermediate_size = config.intermediate_size = 64
    config.head_dim, config.vocab_size = 16, BYTE_VOCAB
    mixture = save_checkpoint(tmp_path / "apart", config)
    mixture.save_pretrained(tmp_path / "fused", save_original_format=False)
    save_byte_tokenizer(tmp_path / "fused")
    for path, reason in ((packed, "not GGUF files"), (tmp_path / "fused", "part of a tensor")):
        asked = (path, "--draft")
        planned = run_cli("plan", *asked, "self")
        assert (planned.code, reason in planned.error) == (2, True)
        assert planned.error.startswith("the target has no 4-bit copy to draft with: ")
        ran = run_cli("generate", "x", "-m", *asked, "self", "--max-tokens", 2)
        assert (ran.code, ran.error) == (2, planned.error)
        auto = run_cli("plan", *asked, "auto")
        assert auto.code == 0
        assert "self cannot be used" in auto.err
    assert own_copies() == []
    unread = run_cli("plan", "org/name:m.gguf", "--draft", "self")
    assert (unread.code, "is a GGUF file, of which no copy is made" in unread.error) == (2, True)


def test_what_cannot_pay_is_refused_before_the_target_is_fetched(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Speed(hard=Pace(1, 1, 9), usual=Pace(2, 1, 9), easy=Pace(3, 1, 9), alone=Pace(1, 1, 0),
                 nodes=1, tokens_per_pass=None)  # fmt: skip
    monkeypatch.setattr("specexec_cli.planning.alternatives.predicted", lambda *arguments: slow)
    monkeypatch.setattr(
        chosen_models, "fetch", lambda *arguments, **options: pytest.fail("it was fetched")
    )
    monkeypatch.setattr(
        "specexec_cli.cli.fetching.agree", lambda *arguments, **options: pytest.fail("it asked")
    )
    missing = SimpleNamespace(entry=SimpleNamespace(file=None))
    monkeypatch.setattr("specexec_cli.cli.fetching.to_fetch", lambda request: [missing])
    monkeypatch.setattr("specexec_cli.session.factory.to_fetch", lambda request: [])
    roomy = described_site(ram_bytes=64 * 10**9, vram_bytes=0)
    monkeypatch.setattr("specexec_cli.loading.this_site", lambda *arguments: roomy)
    with pytest.raises(ConfigError, match="expected to be slower here than no draft model"):
        Session.open(model="llama2-7b-chat", draft="self", device="cpu")
    monkeypatch.setattr("specexec_cli.cli.fetching.described_site", lambda **options: roomy)
    ran = run_cli("generate", "x", "-m", "llama2-7b-chat", "--draft", "self", "--yes")
    assert (ran.code, "expected to be slower here than no draft model" in ran.error) == (2, True)
