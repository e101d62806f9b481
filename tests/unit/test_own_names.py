"""`use`, `models add` and `models rm`: one word of the user's own for every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import byte_llama, save_byte_tokenizer, save_checkpoint
from cli_runner import run_cli
from computer import Computer

from specexec_cli.catalog.registry import load_registry, user_models_file
from specexec_cli.cli import complete, opening

WRITTEN = """# mine
use = "qwen3-8b"  # for now

[models.folder]  # a comment
repo = "/gone"
[pairs."a.b"]
target = "folder"
draft = "suffix"

[names] # short ones
q = "qwen3-4b"
"""


@pytest.fixture(autouse=True)
def user_file(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return user_models_file()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_checkpoint(folder, byte_llama(num_hidden_layers=1), std=0.1)
    save_byte_tokenizer(folder)
    return folder


def test_the_model_that_is_set_is_taken_by_every_command(
    tiny: Path, user_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("generate", "abc", "--max-tokens", 3, "--json")
    demo = run_cli(*short)
    line = demo.err.splitlines()[-1]
    small = opening.SMALL_MODEL
    assert "this is the demo" in line
    assert line.endswith(f"specexec pull {small} && specexec use {small}")
    entry = load_registry().models[small]
    assert (entry.size_bytes or 0) < 2e9
    assert not entry.gated
    assert "demo" not in run_cli(*short, "-m", "demo").err
    assert run_cli(*short, "-q").err == ""

    monkeypatch.chdir(tiny.parent)
    assert run_cli("use", tiny.name).code == 0  # a path of this folder alone
    monkeypatch.chdir("/")
    assert run_cli("use").out == f"{tiny}\n"
    used = run_cli(*short)
    assert "demo" not in used.err
    assert json.loads(used.out)["tokens"] == json.loads(run_cli(*short, "-m", tiny).out)["tokens"]
    assert str(tiny) in run_cli("plan").out
    assert str(tiny) in run_cli("chat", stdin=b"/info\n").err

    assert run_cli("use", "--none").code == 0
    assert run_cli("use").out == "demo\n"
    assert json.loads(run_cli(*short).out)["tokens"] == json.loads(demo.out)["tokens"]


def test_a_wrong_model_is_one_line_and_keeps_the_old_one(tmp_path: Path, user_file: Path) -> None:
    run_cli("use", "qwen3-4b")
    before = user_file.read_text()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    for word, code in {"qwen3-4c": 3, "org/none": 3, "./nowhere": 3, str(tmp_path): 5}.items():
        refused = run_cli("use", word)
        assert (refused.code, len(refused.error) > 20) == (code, True), word
    assert run_cli("use", "a", "--none").code == 2
    assert user_file.read_text() == before


def test_a_model_that_was_set_and_has_gone_names_the_command_that_sets_another(
    user_file: Path,
) -> None:
    user_file.parent.mkdir(parents=True)
    user_file.write_text("use = '/gone/away'\n")
    for command in (("plan",), ("generate", "x")):
        assert "`specexec use` has set that one" in run_cli(*command).error
    assert "specexec use" not in run_cli("plan", "/gone/away").error


def test_a_name_works_for_every_command(tiny: Path) -> None:
    assert run_cli("models", "add", "mine", tiny).code == 0
    short = ("--max-tokens", 3, "--json", "-q")
    named = json.loads(run_cli("generate", "abc", "-m", "mine", *short).out)
    plain = json.loads(run_cli("generate", "abc", "-m", tiny, *short).out)
    assert named["tokens"] == plain["tokens"]
    assert named["pair"] == "mine"
    assert run_cli("plan", "mine").code == 0
    assert run_cli("use", "mine").code == 0
    assert json.loads(run_cli("generate", "abc", *short).out)["pair"] == "mine"
    assert "already" in run_cli("pull", "mine").err
    assert "nothing was deleted" in run_cli("rm", "mine").error
    assert "mine" in complete.names("mi")
    assert complete.own_names("") == ["mine"]
    listed = run_cli("models", "list").out
    assert f"mine  {tiny}" in listed
    assert "as `specexec use` set it: mine" in listed
    told = json.loads(run_cli("models", "list", "--json").out)
    assert (told["names"], told["used"]) == ({"mine": str(tiny)}, "mine")
    assert "`specexec use --none` first" in run_cli("models", "rm", "mine").error
    run_cli("use", "--none")
    assert run_cli("models", "rm", "mine").code == 0
    assert "no model 'mine'" in run_cli("plan", "mine").error


def test_a_name_of_a_pair_is_the_pair_and_a_draft_makes_one(tiny: Path) -> None:
    run_cli("models", "add", "big", "llama2-70b-chat-gptq")
    machine = ("--vram", 24, "--ram", 64, "--ssd", "2GB/s", "--link", "20GB/s", "--json")
    whole = json.loads(run_cli("plan", "llama2-70b-chat-gptq", *machine).out)
    assert json.loads(run_cli("plan", "big", *machine).out) == whole
    assert "pair llama2-70b-chat-gptq" in run_cli("models", "show", "big").out
    before = load_registry()
    run_cli("models", "add", "again", "big")
    argv = ("models", "add", "own", "llama2-70b-chat-gptq", "--draft", "llama-160m")
    assert run_cli(*argv).code == 0
    after = load_registry()
    assert after.names["again"] == "llama2-70b-chat-gptq"
    pair, known = after.pairs["own"], before.pairs["llama2-70b-chat-gptq"]
    assert (pair.target, pair.draft) == (known.target, "llama-160m")
    assert pair.tree == known.tree
    assert "own" in complete.names("o")
    assert "no model 'nosuch'" in run_cli("models", "add", "x", tiny, "--draft", "nosuch").error


@pytest.mark.parametrize(
    ("name", "told"),
    {
        "qwen3-8b": "already",
        "q": "already",
        "a/b": "cannot be a name",
        "self": "cannot be a name",
        "-x": "No such option",
        "x" * 65: "cannot be a name",
        "": "cannot be a name",
        "ü": "cannot be a name",
        "a\nb": "cannot be a name",
    }.items(),
)
def test_a_name_is_checked_and_none_is_overwritten(name: str, told: str, user_file: Path) -> None:
    user_file.parent.mkdir(parents=True)
    user_file.write_text(WRITTEN)
    refused = run_cli("models", "add", name, "qwen3-4b")
    assert refused.code == 2
    assert told in refused.error
    assert user_file.read_text() == WRITTEN


def test_what_the_user_wrote_stays(user_file: Path, tmp_path: Path) -> None:
    """Only the lines that are meant change; a link to the file stays a link."""
    user_file.parent.mkdir(parents=True)
    user_file.symlink_to(tmp_path / "dotfiles.toml")
    user_file.write_text(WRITTEN)
    assert run_cli("models", "add", "w.x", "qwen3-8b").code == 0
    assert run_cli("use", "w.x").code == 0
    needed = run_cli("models", "rm", "folder").error
    assert "[pairs.a.b] target 'folder' is not a model" in needed
    for own in ("q", "a.b", "folder"):
        assert run_cli("models", "rm", own).code == 0
    assert user_file.is_symlink()
    assert user_file.read_text() == (
        'use = "w.x"\n# mine\n\n[names] # short ones\n"w.x" = "qwen3-8b"\n'
    )
    assert "came with specexec" in run_cli("models", "rm", "demo").error
    assert "no entry 'w.z'. Did you mean 'w.x'?" in run_cli("models", "rm", "w.z").error


def test_a_file_that_cannot_be_changed_line_by_line_is_left(user_file: Path) -> None:
    user_file.parent.mkdir(parents=True)
    inline = "names = { q = 'qwen3-4b' }\n"
    user_file.write_text(inline)
    for argv in (("rm", "q"), ("add", "w", "qwen3-4b")):
        assert "laid out so that" in run_cli("models", *argv).error
    assert user_file.read_text() == inline
    for text, told in {
        "use = 3": "use must be a model's name",
        "[names]\na = 'b'\nb = 'qwen3-4b'": "'b' is such a name itself",
        "[names]\na = ''": "[names] a must be a model's name",
        "names = 1": "'names' must hold entries",
    }.items():
        user_file.write_text(text)
        assert told in run_cli("use", "qwen3-4b").error
        assert user_file.read_text() == text


def test_a_folder_that_cannot_be_written_is_one_line(user_file: Path) -> None:
    user_file.parent.parent.mkdir()
    user_file.parent.write_text("no folder")
    assert "cannot write" in run_cli("use", "qwen3-4b").error
