"""A file of texts is resumed only with the same texts: what they depend on, and what not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_llama, edit_json, save_byte_tokenizer, save_checkpoint
from cli_runner import run_cli
from fake_cuda import fake_cuda
from gguf import GGMLQuantizationType as Kind
from gguf_files import all_of, write_gguf
from other_cpu import other_cpu

from specexec_cli.loading import prepare
from specexec_cli.planning.request import Request
from specexec_cli.session.identity import rows_identity, text_identity


def identity(target: Path, **options: Any) -> str:
    options = {"method": "autoregressive", "device": "cpu", "context_tokens": 64, **options}
    return text_identity(prepare(Request(model=str(target), **options)))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "blobs"  # as caches of files that are named by their content call theirs
    save_checkpoint(folder, byte_llama(num_hidden_layers=1))
    save_byte_tokenizer(folder)
    return folder


def other_weights(folder: Path) -> None:
    save_checkpoint(folder, byte_llama(num_hidden_layers=1), seed=1)


def other_words(folder: Path) -> None:
    words = json.loads((folder / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (folder / "tokenizer.json").write_text(json.dumps(words))


def other_bytes_under_the_same_name_and_time(folder: Path) -> None:
    path = folder / "model.safetensors"
    before = path.stat()
    other_weights(folder)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize(
    "change",
    [
        other_bytes_under_the_same_name_and_time,
        lambda folder: (folder / "quantize_config.json").write_text('{"bits": 4}'),
        other_weights,
        other_words,
        lambda folder: edit_json(folder / "config.json", rms_norm_eps=1e-3),
        lambda folder: edit_json(folder / "generation_config.json", eos_token_id=7),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"),
    ],
)
def test_another_model_is_told_apart(target: Path, change: Callable[[Path], None]) -> None:
    before = identity(target)
    assert identity(target) == before
    change(target)
    assert identity(target) != before


def test_rows_in_8_bits_write_another_text(target: Path) -> None:
    assert identity(target, activations="8bit-draft") == identity(target)
    assert identity(target, activations="8bit") != identity(target)


def test_rows_in_8_bits_of_a_draft_model_are_told_apart(target: Path) -> None:
    def rows(*, of_draft: bool, **options: Any) -> str:
        asked = Request(model=str(target), draft=str(target), device="cpu", **options)
        return rows_identity(prepare(asked), of_draft=of_draft)

    rounds: dict[str, Any] = {"activations": "8bit-draft"}
    assert rows(of_draft=True, **rounds) != rows(of_draft=True)
    assert rows(of_draft=False, **rounds) == rows(of_draft=False)


def test_two_files_of_one_repository_are_two_models(target: Path, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "plain", byte_llama(num_hidden_layers=1))
    found = []
    for kind in (Kind.Q4_0, Kind.Q8_0):
        path = write_gguf(model, tmp_path / f"{kind.name}.gguf", all_of(kind), tokenizer=target)
        os.utime(path, ns=(0, 0))
        found.append(identity(path))
    assert found[0] != found[1]


def test_another_tokenizer_or_arithmetic_is_told_apart(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tmp_path / "words"
    shutil.copytree(target, words)
    found = [identity(target), identity(target, dtype="bfloat16")]
    assert identity(target, tokenizer=words) == found[0]
    other_words(words)
    found.append(identity(target, tokenizer=words))
    other_cpu(monkeypatch, lanes=4)
    found.append(identity(target))
    with fake_cuda():
        found.append(identity(target, device="cuda"))
    assert len(set(found)) == len(found)


def test_where_weights_wait_and_what_drafts_change_no_text(target: Path, tmp_path: Path) -> None:
    before = identity(target, offload="none")
    assert identity(target, offload="ssd", slots=3) == before
    assert identity(target, method="specexec", draft="suffix", offload="ram") == before
    moved = target.rename(tmp_path / "elsewhere")
    assert identity(moved) == before


def test_a_file_of_the_hub_is_known_by_its_content(target: Path, tmp_path: Path) -> None:
    """Its name among blobs is a hash: one that was downloaded again is the same."""
    blobs = tmp_path / "hub" / "blobs"
    blobs.mkdir(parents=True)
    weights, blob = target / "model.safetensors", blobs / ("a" * 64)
    shutil.move(weights, blob)
    weights.symlink_to(blob)
    before = identity(target)
    os.utime(blob, ns=(0, 0))
    assert identity(target) == before
    weights.unlink()
    weights.symlink_to(blob.rename(blobs / ("d" * 64)))
    assert identity(target) != before


def test_a_job_does_not_go_on_with_other_weights(target: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    job = ("generate", "-m", target, "--method", "autoregressive", "-f", prompts, "--jsonl",
           "--max-tokens", 2, "-o", out, "-q")  # fmt: skip
    assert run_cli(*job).code == 0
    before = out.read_text()
    assert run_cli(*job).code == 0
    other_weights(target)
    ran = run_cli(*job)
    assert ran.code == 2
    assert "with another prompt or other settings" in ran.error
    assert out.read_text() == before
