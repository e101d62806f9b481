"""Damaged checkpoints: one line that names the file, the tensor, and what to do; never a guess."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import byte_llama, edit_json, save_byte_tokenizer, save_checkpoint, save_pair
from cli_runner import run_cli
from disk import Disk
from safetensors.torch import load_file, save_file

from specexec_cli.config import GenerationConfig, TreeConfig
from specexec_cli.errors import StreamError
from specexec_cli.session import Session, TextSession

QPROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def target(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(pair[0], tmp_path / "target")
    return tmp_path / "target"


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip


def edit_header(folder: Path, edit: Callable[[dict[str, dict]], None]) -> None:
    """Changes the header in place; the data stay as they are."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])


def drop(name: str) -> Callable[[dict], None]:
    return lambda weights: weights.pop(name)


def move(name: str, start: int, stop: int) -> Callable[[dict], None]:
    return lambda header: header[name].__setitem__("data_offsets", [start, stop])


def overlap(header: dict[str, dict]) -> None:
    first, second = sorted(name for name in header if "mlp.up_proj" in name)[:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]


def truncate(path: Path, n_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - n_bytes)


WEIGHTS = "model.safetensors"
CONFIG = "config.json"
# damage -> what the line must say
DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no weights": (lambda f: (f / WEIGHTS).unlink(), ["no *.safetensors", "download"]),
    "pickled weights alone": (
        lambda f: (f / WEIGHTS).rename(f / "model.bin"),
        ["model.bin", "Only safetensors"],
    ),
    "pickled weights of an old form": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        ["pytorch_model.bin", "save it as safetensors"],
    ),
    "empty file": (lambda f: (f / WEIGHTS).write_bytes(b""), [WEIGHTS, "truncated"]),
    "cut by a byte": (lambda f: truncate(f / WEIGHTS, 1), [WEIGHTS, "truncated"]),
    "cut in the header": (lambda f: os.truncate(f / WEIGHTS, 100), [WEIGHTS, "header"]),
    "absurd header length": (
        lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 8 + (f / WEIGHTS).read_bytes()[8:]),
        [WEIGHTS, "header of 18446744073709551615 bytes"],
    ),
    "no JSON": (
        lambda f: (f / WEIGHTS).write_bytes(struct.pack("<Q", 4) + b"\xff{}x" + bytes(64)),
        [WEIGHTS, "JSON"],
    ),
    "offsets behind the end": (
        lambda f: edit_header(f, move(QPROJ, 10**15, 10**15 + 4096)),
        [QPROJ, "the file has only"],
    ),
    "negative offsets": (lambda f: edit_header(f, move(QPROJ, -8, 4088)), [QPROJ, "data_offsets"]),
    "overlapping offsets": (lambda f: edit_header(f, overlap), ["overlap", "mlp.up_proj"]),
    "size of another shape": (
        lambda f: edit_header(f, lambda h: h[QPROJ].__setitem__("shape", [32, 33])),
        [QPROJ, "[32, 33]"],
    ),
    "unknown dtype": (
        lambda f: edit_header(f, lambda h: h[QPROJ].__setitem__("dtype", "F3")),
        [QPROJ, "'F3'"],
    ),
    "missing tensor": (lambda f: edit_weights(f, drop(QPROJ)), [QPROJ, "missing"]),
    "missing layer": (
        lambda f: edit_json(f / CONFIG, num_hidden_layers=5),
        ["model.layers.4.", "missing"],
    ),
    "missing head": (lambda f: edit_weights(f, drop("lm_head.weight")), ["lm_head", "missing"]),
    "missing embedding": (
        lambda f: edit_weights(f, drop("model.embed_tokens.weight")),
        ["embed_tokens", "missing"],
    ),
    "wrong shape": (
        lambda f: edit_weights(f, lambda w: w.__setitem__(QPROJ, w[QPROJ][:-4])),
        [QPROJ, "[28, 32]", "[32, 32]"],
    ),
    "another width": (
        lambda f: edit_json(f / CONFIG, intermediate_size=64),
        ["mlp", "config.json says"],
    ),
    "integer weights": (
        lambda f: edit_weights(f, lambda w: w.__setitem__(QPROJ, w[QPROJ].to(torch.int32))),
        [QPROJ, "I32"],
    ),
    "no config": (lambda f: (f / CONFIG).unlink(), ["no config.json"]),
    "broken config": (lambda f: (f / CONFIG).write_text('{"model_type"'), [CONFIG, "JSON"]),
    "a list as config": (lambda f: (f / CONFIG).write_text("[]"), [CONFIG]),
    "text for a number": (lambda f: edit_json(f / CONFIG, hidden_size="many"), [CONFIG]),
    "heads that do not divide": (lambda f: edit_json(f / CONFIG, num_attention_heads=5), []),
    "no layers": (lambda f: edit_json(f / CONFIG, num_hidden_layers=0), [CONFIG, "0 layers"]),
    "negative layers": (lambda f: edit_json(f / CONFIG, num_hidden_layers=-2), [CONFIG]),
    "unknown activation": (lambda f: edit_json(f / CONFIG, hidden_act="selu9"), ["selu9"]),
    "unknown rope": (
        lambda f: edit_json(f / CONFIG, rope_parameters={"rope_type": "spiral"}),
        ["spiral"],
    ),
    "another architecture": (
        lambda f: edit_json(f / CONFIG, model_type="minimax"),
        ["'minimax' is not supported: recurrent", "Nearest of those that run"],
    ),
    "broken generation config": (
        lambda f: (f / "generation_config.json").write_text("{"),
        ["generation_config.json"],
    ),
    "text as eos": (
        lambda f: edit_json(f / "generation_config.json", eos_token_id="</s>"),
        ["generation_config.json", "eos_token_id"],
    ),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), ["tokenizer"]),
    "a shard that is not there": (
        lambda f: (
            (f / WEIGHTS).unlink(),
            (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {QPROJ: "model-00001-of-00002.safetensors"}})
            ),
        ),
        ["model-00001-of-00002.safetensors"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line(name: str, target: Path) -> None:
    damage, words = DAMAGE[name]
    damage(target)
    ran = run_cli("generate", "x", "-m", target, "--method", "autoregressive",
                  "--max-tokens", 2)  # fmt: skip
    assert ran.out == ""
    assert ran.code in (3, 5), ran.err  # 3: a folder without config.json is no model at all
    for word in words:
        assert word in ran.error


def test_the_undamaged_copy_runs(target: Path) -> None:
    """Or every case above would be empty."""
    ran = run_cli("generate", "x", "-m", target, "--method", "autoregressive",
                  "--max-tokens", 2)  # fmt: skip
    assert (ran.code, ran.err) == (0, "notice: cut at 2 tokens: --max-tokens 4 allows more\n")


def test_a_damaged_draft_is_named(pair: tuple[Path, Path], target: Path) -> None:
    edit_weights(target, drop(QPROJ))
    ran = run_cli("generate", "x", "-m", pair[0], "--draft", target)
    assert ran.code == 5
    assert str(target) in ran.error


def test_a_tokenizer_with_more_tokens_than_the_embedding(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, byte_llama(vocab_size=100))
    save_byte_tokenizer(tmp_path)
    ran = run_cli("generate", "zzz é", "-m", tmp_path, "--method", "autoregressive")
    assert ran.code == 2
    assert "the target knows only 100" in ran.error


def test_a_draft_whose_logits_are_not_finite_changes_nothing(
    pair: tuple[Path, Path], target: Path, tmp_path: Path
) -> None:
    """Only the target's logits decide; a draft that says nothing costs speed alone."""
    plain = run_cli("generate", "abc", "-m", pair[0], "--draft", pair[1], "--max-tokens", 8)
    edit_weights(target, lambda w: w["model.norm.weight"].fill_(float("nan")))
    ran = run_cli("generate", "abc", "-m", pair[0], "--draft", target, "--max-tokens", 8)
    assert (ran.code, ran.out, ran.err) == (0, plain.out, plain.err)


def test_a_target_with_more_rows_than_its_draft(tmp_path: Path) -> None:
    """Padded embeddings differ (Qwen2.5); a token that only the target has must not stop it."""
    own = save_checkpoint(tmp_path / "target", byte_llama(vocab_size=320), std=0.12)
    with torch.no_grad():
        own.lm_head.weight[262:] *= 3.0  # so that padding wins now and then
    own.save_pretrained(tmp_path / "target")
    save_checkpoint(tmp_path / "draft", byte_llama(), seed=1, std=0.12)
    for name in ("target", "draft"):
        save_byte_tokenizer(tmp_path / name)
    folders = {"model": str(tmp_path / "target"), "draft": str(tmp_path / "draft")}
    with Session.open(**folders, dtype="float32") as session:
        texts = [
            [token for step in session.generate(
                session.encode("abc"), method=method,
                generation=GenerationConfig(max_tokens=24),
                tree=TreeConfig(budget=8, max_depth=4),
            ) for token in step.tokens]
            for method in ("specexec", "autoregressive")
        ]  # fmt: skip
    assert texts[0] == texts[1]
    assert max(texts[0]) >= 260, "the test wants a token the draft does not have"


# A read error in the middle of a pass


def generate(session: TextSession, method: str = "specexec") -> list[int]:
    steps = session.generate(
        session.encode("some text to go on with"), method=method,
        generation=GenerationConfig(max_tokens=16), tree=TreeConfig(budget=12, max_depth=4),
    )  # fmt: skip
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("method", ["specexec", "autoregressive"])
def test_a_read_error_surfaces_at_once_and_the_session_goes_on(
    pair: tuple[Path, Path], disk: Disk, method: str
) -> None:
    folders = {"model": str(pair[0]), "draft": str(pair[1])}
    with Session.open(**folders, dtype="float32", offload="ssd") as session:
        expected = generate(session, method)
        for reads in range(1, 9):  # in every layer of the first passes
            session.forget()
            disk.fails_after(reads - 1)
            with pytest.raises(StreamError, match=r"model\.safetensors failed at byte \d+: "):
                generate(session, method)
            disk.on_read = None
            assert generate(session, method) == expected, "the same session, right again"


def test_a_file_cut_while_it_is_read(pair: tuple[Path, Path], target: Path) -> None:
    """Never a shorter forward: the very pass that misses bytes fails."""
    with Session.open(
        model=str(target), draft=str(pair[1]), dtype="float32", offload="ssd"
    ) as session:
        steps = session.generate("abc", generation=GenerationConfig(max_tokens=200),
                                 tree=TreeConfig(budget=1, max_depth=1))  # fmt: skip
        next(steps)
        os.truncate(target / WEIGHTS, 40_000)
        with pytest.raises(StreamError, match=r"model\.safetensors"):
            list(steps)  # what was read ahead may serve a pass or two, not 200 tokens
        with pytest.raises(StreamError, match=r"model\.safetensors"):
            generate(session)
