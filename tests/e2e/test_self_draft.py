"""`draft='self'`: a low-bit copy of the target drafts; it is kept, and mended when damaged."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import (
    byte_llama,
    chain_logits,
    open_float32,
    save_byte_tokenizer,
    save_checkpoint,
)
from cli_runner import run_cli
from safetensors.torch import load_file

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.errors import ConfigError, NotFetchedError
from specexec_cli.models import own_copy as room
from specexec_cli.models.calibration_text import standard_pieces
from specexec_cli.models.own_copy import own_copy
from specexec_cli.models.quantize import plan_quantization, write_quantized
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning import draft_sizes
from specexec_cli.planning.alternatives import changes_that_fit
from specexec_cli.planning.draft_sizes import own_folder
from specexec_cli.planning.machine import described_site
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.planning.resolve import RequestDoesNotFitError, resolve
from specexec_cli.session import open_session


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target that writes text, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "target"
    save_checkpoint(folder, byte_llama(hidden_size=64, intermediate_size=128), std=0.12)
    save_byte_tokenizer(folder)
    return folder


def _text(target: Path, sampling: SamplingConfig, **request: object) -> tuple[list[int], float]:
    asked = Request(model=str(target), device="cpu", context_tokens=64, **request)
    with open_session(asked) as session:
        tokens, ending = session.encode("def f(x):"), GenerationConfig(max_tokens=24)
        steps = list(session.generate(tokens, sampling=sampling, generation=ending))
        return [token for step in steps for token in step.tokens], session.stats.generation_rate


@pytest.mark.parametrize("draft", ["self", "self-2"])
def test_the_text_is_that_of_plain_decoding(target: Path, draft: str) -> None:
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8, seed=3)):
        plain, _ = _text(target, sampling, method="autoregressive")
        drafted, rate = _text(
            target, sampling, draft=draft, tree=TreeRequest(budget=16, depth=8, policy="fixed")
        )
        assert drafted == plain
        if draft == "self":
            assert rate > 2.0


def test_a_copy_takes_tables_and_loads_what_else_it_embeds(tmp_path: Path) -> None:
    """OPT's table of positions is no table of words."""
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=64,
    )  # fmt: skip
    save_checkpoint(tmp_path / "opt", config)
    target = open_float32(tmp_path / "opt", None)
    shared = target.shared_parts(None)
    again = open_float32(tmp_path / "opt", None, shared=shared)
    assert shared.tables
    assert {id(table) for table in again.shared_parts(None).tables.values()} == {
        id(table) for table in shared.tables.values()
    }
    tokens = list(range(3, 30))
    assert torch.equal(chain_logits(again, tokens), chain_logits(target, tokens))


def test_the_plan_knows_the_size_before_the_copy_is_made(target: Path) -> None:
    request = Request(model=str(target), draft="self-3", context_tokens=64)
    site = described_site(ram_bytes=10**10, vram_bytes=0)
    planned = resolve(request, site)
    checkpoint = read_checkpoint(target)
    assert planned.draft is not None
    assert planned.draft.checkpoint is None
    assert not own_folder(checkpoint, 3).exists()
    assert planned.draft.sizes.total == own_copy(checkpoint, 3).total_bytes


def test_what_cannot_pay_is_refused_in_one_line(target: Path) -> None:
    site = described_site(ram_bytes=10**10, vram_bytes=0)
    with pytest.raises(ConfigError, match="quantized already"):
        resolve(Request(model="demo-target-gptq", draft="self"), site)
    with pytest.raises(ConfigError, match="4, 3 or 2 bits"):
        resolve(Request(model=str(target), draft="self-5"), site)
    with pytest.raises(ConfigError, match="method='dsi'"):
        resolve(Request(model=str(target), draft="self", method="dsi"), site)
    request = Request(model="llama2-70b", draft="self")
    tight = described_site(ram_bytes=36 * 10**9, vram_bytes=0)
    with pytest.raises(RequestDoesNotFitError):
        resolve(request, tight)
    assert ("draft", "self-2") in [
        setting for change in changes_that_fit(request, tight, 4096) for setting in change.settings
    ]


def test_a_pair_of_models_toml_may_draft_with_its_target(target: Path, tmp_path: Path) -> None:
    entries = tmp_path / "models.toml"
    entries.write_text(
        '[pairs.mine]\ntarget = "./target"\ndraft = "self-3"\nbudget = 16\ndepth = 8\n'
    )
    drafted = run_cli("generate", "x", "-m", "mine", "--models-file", entries, "--json",
                      "--max-tokens", 4, "--quiet")  # fmt: skip
    assert drafted.code == 0, drafted.err
    assert '"draft": "self-3"' in drafted.out
    assert run_cli("models", "list", "--models-file", entries).code == 0
    assert run_cli("models", "show", "mine", "--models-file", entries).code == 0


def test_the_copy_is_made_once_and_anew_for_other_files(target: Path) -> None:
    told: list[str] = []
    first = own_copy(read_checkpoint(target), 4, told.append)
    second = own_copy(read_checkpoint(target), 4, told.append)
    assert (len(told), first.folder) == (1, second.folder)
    weights = target / "model.safetensors"
    shutil.copy(weights, target / "same")
    (target / "same").replace(weights)  # written anew
    assert own_copy(read_checkpoint(target), 4, told.append).folder != first.folder
    assert len(told) == 2


def test_a_session_s_copy_keeps_the_errors_on_a_text_low(target: Path, tmp_path: Path) -> None:
    """That of Python's standard library, since nobody gave one."""
    _text(target, SamplingConfig(), draft="self")
    made = read_checkpoint(own_folder(read_checkpoint(target), 4))
    plan = plan_quantization(read_checkpoint(target), 4, draft_sizes.GROUP_SIZE)
    pieces = standard_pieces(load_tokenizer(target))
    assert len(pieces) == 8
    assert {len(piece) for piece in pieces} == {512}
    for name, text in (("fitted", ()), ("calibrated", pieces)):
        write_quantized(plan, tmp_path / name, pieces=text, drafts=True)
        own, again = (load_file(folder / "model.safetensors")
                      for folder in (made.folder, tmp_path / name))  # fmt: skip
        same = [torch.equal(tensor, again[key]) for key, tensor in own.items() if "qweight" in key]
        assert all(same) if name == "calibrated" else not any(same)


def test_old_and_half_written_folders_are_never_read(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = read_checkpoint(target)
    with monkeypatch.context() as older:
        older.setattr(draft_sizes, "_FORMAT_VERSION", 0)
        old = own_folder(checkpoint, 4)
    folder = own_folder(checkpoint, 4)
    half = folder.with_name(f"{folder.name}.partial-1")
    for left in (old, half):
        left.mkdir(parents=True)
        (left / "config.json").write_text("{")

    made = own_copy(checkpoint, 4)

    assert made.folder == folder
    assert not half.exists()


def test_a_full_disk_is_one_line(target: Path) -> None:
    checkpoint = read_checkpoint(target)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(NotFetchedError, match="make room"):
            own_copy(checkpoint, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path for path in own_folder(checkpoint, 4).parent.iterdir() if path.is_dir()] == []


def test_two_processes_at_once_make_it_once(target: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from specexec_cli.models.own_copy import own_copy\n"
        "from specexec_cli.offload.store import read_checkpoint\n"
        "print(own_copy(read_checkpoint(Path(sys.argv[1])), 4, print).folder)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(target)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("making a 4-bit copy" in output for output in outputs) == 1
    folder = own_folder(read_checkpoint(target), 4)
    assert all(output.splitlines()[-1] == str(folder) for output in outputs)


def test_a_process_that_waits_takes_what_the_other_made(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = read_checkpoint(target)
    folder = own_folder(checkpoint, 4)
    alone = room._alone

    def meanwhile(*arguments: object) -> object:
        monkeypatch.setattr(room, "_alone", alone)
        own_copy(checkpoint, 4)  # by the other one, before this one has the lock
        return alone(*arguments)

    monkeypatch.setattr(room, "_alone", meanwhile)
    told: list[str] = []
    assert own_copy(checkpoint, 4, told.append).folder == folder
    assert told == []
