"""A model is one word: each way to bring one opens without further options and writes its text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import byte_llama, save_byte_tokenizer, save_checkpoint
from cli_runner import run_cli
from computer import Computer
from gguf_files import split, write_gguf
from huggingface_hub import constants

import specexec_cli
from specexec_cli.catalog.registry import user_models_file

REPO = "someone/Tiny-GGUF"
GPTQ = Path(specexec_cli.__file__).parent / "demo" / "target-gptq"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as safetensors, as a GGUF file and in parts."""
    folder = tmp_path_factory.mktemp("made")
    model = save_checkpoint(folder / "plain", byte_llama(num_hidden_layers=2), std=0.12)
    save_byte_tokenizer(folder / "plain")
    (folder / "gguf").mkdir()
    whole = write_gguf(model, folder / "gguf" / "tiny-Q8_0.gguf", tokenizer=folder / "plain")
    (folder / "parts").mkdir()
    shutil.copy(whole, folder / "parts" / whole.name)
    split(folder / "parts" / whole.name, 2)
    (folder / "parts" / whole.name).unlink()
    return folder


@pytest.fixture(autouse=True)
def offline(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("OLLAMA_MODELS", str(computer.hub.parent / "ollama"))


def in_hub(hub: Path, repo: str, *files: Path) -> None:
    snapshot = hub / f"models--{repo.replace('/', '--')}" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    for file in files:
        shutil.copy(file, snapshot / file.name)


def folder_in_hub(made: Path, hub: Path) -> str:
    in_hub(hub, "someone/tiny", *(made / "plain").iterdir())
    return "someone/tiny"


def file_in_hub(made: Path, hub: Path) -> str:
    in_hub(hub, REPO, made / "gguf" / "tiny-Q8_0.gguf")
    return REPO


def of_ollama(made: Path, hub: Path) -> str:
    ollama = hub.parent / "ollama"
    manifest = ollama / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "1b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    (ollama / "blobs").mkdir()
    shutil.copy(made / "gguf" / "tiny-Q8_0.gguf", ollama / "blobs" / "sha256-ab")
    return "ollama:tiny:1b"


def a_pair(made: Path, hub: Path) -> str:
    user = user_models_file()
    user.parent.mkdir(parents=True)
    user.write_text(f"[pairs.mine]\ntarget = '{made / 'plain'}'\ndraft = '{made / 'plain'}'\n")
    return "mine"


WAYS: dict[str, Callable[[Path, Path], str]] = {
    "a GGUF file": lambda made, hub: str(made / "gguf" / "tiny-Q8_0.gguf"),
    "a part of a split GGUF file": (
        lambda made, hub: str(made / "parts" / "tiny-Q8_0-00001-of-00002.gguf")
    ),
    "a folder with a GGUF file": lambda made, hub: str(made / "parts"),
    "a folder of safetensors": lambda made, hub: str(made / "plain"),
    "a folder of GPTQ": lambda made, hub: str(GPTQ),
    "a hub id": folder_in_hub,
    "a file of a hub id": lambda made, hub: f"{file_in_hub(made, hub)}:tiny-Q8_0.gguf",
    "a quantization of a hub id": lambda made, hub: f"{file_in_hub(made, hub)}:q8_0",
    "a model of ollama's": of_ollama,
    "a pair's name": a_pair,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_one_word(way: str, made: Path, computer: Computer) -> None:
    word = WAYS[way](made, computer.hub)
    ran = run_cli("generate", "abc", "-m", word, "--json", "--max-tokens", 6)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    alone = run_cli("generate", "abc", "-m", word, "--json", "--max-tokens", 6, "--method",
                    "autoregressive", "-q")  # fmt: skip
    assert found["tokens"] == json.loads(alone.out)["tokens"]
    if "GPTQ" not in way:
        plain = run_cli("generate", "abc", "-m", made / "plain", "--json", "--max-tokens", 6, "-q")
        assert found["text"] == json.loads(plain.out)["text"]
    reasons = [line for line in ran.err.splitlines() if "draft" in line]
    assert len(reasons) == (0 if way == "a pair's name" else 1), ran.err
    planned = run_cli("plan", word, "--json")
    assert planned.code == 0, planned.err


def test_a_name_of_ones_own_is_predicted_where_it_is_asked_for(
    made: Path, computer: Computer
) -> None:
    """And where its file has gone, no empty table stands above it."""
    folder = shutil.copytree(made / "plain", computer.hub.parent / "moved")
    assert run_cli("models", "add", "little", folder).code == 0
    listed = run_cli("models", "list", "little").out.splitlines()
    (row,) = (line.split() for line in listed if line.startswith("little ") and " here " in line)
    assert float(row[1]) > 0
    assert float(row[2]) > 0
    shutil.rmtree(folder)
    alone = [f"little  {folder}  (a name of your own)"]
    assert run_cli("models", "list", "little").out.splitlines() == alone
    folder.mkdir()
    for name in ("one", "two"):  # which of them is meant cannot be told
        (folder / f"{name}.gguf").touch()
    assert run_cli("models", "list", "little").out.splitlines() == alone


def test_it_is_measured_by_one_word_although_no_draft_model_pays(
    made: Path, tmp_path: Path
) -> None:
    word = str(made / "gguf" / "tiny-Q8_0.gguf")
    few = ("--prompts", 1, "--max-tokens", 4, "--warmup", 0, "--results", tmp_path / "rows.jsonl")
    ran = run_cli("bench", word, *few)
    assert ran.code == 0, ran.err
    assert {"autoregressive", "suffix"} <= set(ran.out.split())
    refused = run_cli("bench", word, *few, "--method", "specexec")
    assert "opened without a draft model" in refused.err
