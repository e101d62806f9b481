"""The form of scripts/bench_offload.py's report, on a rig too small for its figures to matter."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from checkpoints import byte_llama, save_byte_tokenizer, save_checkpoint
from fake_cuda import fake_cuda
from gguf import GGMLQuantizationType as Kind
from gguf_files import all_of, write_gguf
from torch import bfloat16, float32
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_offload
import make_rig
from memory_cap import KIND_VARIABLE, run_capped

from specexec_cli.errors import ConfigError

SHAPE = "hidden=128,layers=5,heads=4,kv_heads=2,head_dim=8,intermediate=64"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A rig, and as its draft model the very model it computes."""
    folder = tmp_path_factory.mktemp("bench")
    config = byte_llama(head_dim=8, intermediate_size=64)
    save_checkpoint(folder / "draft", config, std=0.12, dtype=bfloat16)
    save_byte_tokenizer(folder / "draft")
    return make_rig.write_rig(folder / "draft", SHAPE, folder / "rig"), folder / "draft"


@pytest.fixture(scope="module", params=["cpu", "cuda ssd", "cuda ram"])
def report(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> dict[str, Any]:
    """On the CPU, and on a stand-in for a GPU."""
    device, _, tier = request.param.partition(" ")
    rig, draft = folders
    config = bench_offload.parse(
        ["--rig", str(rig), "--draft", str(draft), "--cap", "none", "--rows", "1,3", "--repeats",
         "2", "--steps", "2", "--budget", "6", "--depth", "4", "--batch", "2", "--dtype", "float32",
         "--device", device, "--tier", tier or "ssd"]
    )  # fmt: skip
    with fake_cuda() if device == "cuda" else nullcontext():
        return bench_offload.run(config)


def test_all_three_tiers_of_a_gpu_at_once(folders: tuple[Path, Path]) -> None:
    """Held against the SSD, which is the slowest of them."""
    rig, draft = folders
    config = bench_offload.parse(
        ["--rig", str(rig), "--draft", str(draft), "--rows", "1", "--repeats", "1", "--steps", "1",
         "--budget", "2", "--depth", "2", "--batch", "1", "--dtype", "float32", "--device", "cuda",
         "--keep", "thirds"]
    )  # fmt: skip
    with fake_cuda():
        report = bench_offload.run(config)
    assert report["config"]["layers_resident"] == report["config"]["layers_in_ram"] == 2
    layer = 128 * (2 * 32 + 2 * 16) + 3 * 64 * 128
    assert report["bytes_per_pass"] == 2 * (layer + 2 * 128), "one layer of five comes from the SSD"
    with pytest.raises(ConfigError, match="--keep thirds"):
        bench_offload.parse(["--rig", str(rig), "--keep", "thirds"])


@pytest.mark.parametrize("kind", ["gpt-oss", "gguf", "hybrid"])
def test_rigs_of_other_layouts_are_measured(
    kind: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in one tensor, a GGUF file, and layers of two kinds; knees are of such arithmetic."""
    draft, rig = folders[1], tmp_path / "rig"
    if kind == "gguf":
        model = AutoModelForCausalLM.from_pretrained(draft, dtype=float32)
        write_gguf(model, rig, all_of(Kind.Q8_0), tokenizer=draft)
    elif kind == "hybrid":
        layers = SHAPE.replace("layers=5", "layers=16")
        make_rig.write_rig(draft, f"{layers},state_heads=4", rig)
    else:
        make_rig.write_rig(draft, f"{SHAPE},experts=4,chosen=2", rig, row_format=kind)
    probed = []

    def probe(dtype: str, packed_bits: int) -> tuple[tuple[int, float], ...]:
        probed.append((dtype, packed_bits))
        return ((1, 1e9),)

    monkeypatch.setattr(bench_offload, "probe_arithmetic", probe)
    config = bench_offload.parse(
        ["--rig", str(rig), "--draft", str(draft), "--cap", "none", "--rows", "1", "--repeats", "1",
         "--steps", "1", "--budget", "2", "--depth", "2", "--batch", "1", "--dtype", "float32"]
    )  # fmt: skip
    report = bench_offload.run(config)
    assert [each["rows"] for each in report["passes"]] == [1, 3]
    assert report["knee"]["planned_rows"] is not None
    assert report["same_tokens"]
    assert probed == [("float32", {"gpt-oss": 4, "gguf": 8, "hybrid": 0}[kind])]
    assert bool(report["memory"]["bench_bytes"]) == (kind == "hybrid")


def test_a_rig_of_which_nothing_is_streamed_is_refused(folders: tuple[Path, Path]) -> None:
    rig, draft = folders
    config = bench_offload.parse(
        ["--rig", str(rig), "--draft", str(draft), "--cap", "none", "--keep", "plan"]
    )
    with pytest.raises(ConfigError, match="nothing of the rig is streamed in this memory"):
        bench_offload.run(config)


def assert_spread(values: dict[str, float]) -> None:
    assert set(values) == {"p20", "p50", "p80"}
    assert 0 < values["p20"] <= values["p50"] <= values["p80"]


def test_it_says_what_was_measured_where(
    report: dict[str, Any], folders: tuple[Path, Path]
) -> None:
    assert report["bench"] == "offload"
    assert report["schema"] == 1
    assert report["rig"] == {"shape": SHAPE, "source_hidden_size": 32, "source_layers": 4}
    assert report["config"]["rows"] == (1, 3)
    assert report["config"]["compute_dtype"] == "float32"
    assert report["hardware"]["cores"] >= 1
    assert report["seed"] == 0
    assert {"python", "torch", "transformers", "specexec", "kernel"} == set(report["versions"])
    json.dumps(report)


def test_passes_are_held_against_their_floor(report: dict[str, Any]) -> None:
    # bfloat16 weights of 5 layers, without embeddings and head
    layer = 128 * (2 * 32 + 2 * 16) + 3 * 64 * 128
    assert report["bytes_per_pass"] == 5 * 2 * (layer + 2 * 128)
    assert_spread(report["raw"]["bytes_per_s"])
    assert [row["rows"] for row in report["passes"]] == [1, 3, 7]  # 7: a full tree and its root
    for row in [report["stream"], *report["passes"], *report["decode"].values()]:
        assert_spread(row["s"])
        assert_spread(row["ratio"])
    assert set(report["passes"][0]["of_one_row"].values()) == {1.0}
    for row in report["passes"]:
        assert_spread(row["of_one_row"])
        assert_spread(row["compute_s"])
        expected = 2 * 5 * layer * row["rows"] / row["compute_s"]["p50"]
        assert row["flop_per_s"] == pytest.approx(expected)


def test_decoding_is_held_against_the_roofline(report: dict[str, Any]) -> None:
    plain, tree = report["decode"]["autoregressive"], report["decode"]["specexec"]
    assert plain["tau"] == 1.0
    assert plain["iterations"] == 4
    assert tree["tau"] > 1.5  # the draft model is the target itself
    assert report["speedup"] == pytest.approx(tree["tokens_per_s"] / plain["tokens_per_s"])
    assert report["speedup_over_tau"] == pytest.approx(report["speedup"] / tree["tau"])
    assert tree["of_roofline"] == pytest.approx(
        tree["tokens_per_s"] / tree["roofline_tokens_per_s"]
    )
    assert report["same_tokens"] is True


def test_memory_is_held_against_the_plan(report: dict[str, Any]) -> None:
    assert report["memory"]["cap_bytes"] is None
    assert report["memory"]["peak_rss_bytes"] > 0
    assert report["memory"]["planned_bytes"] > 0
    on_gpu = report["config"]["device"] == "cuda"
    for name in ("peak_vram_bytes", "planned_vram_bytes"):
        assert bool(report["memory"][name]) == on_gpu
    assert set(report["knee"]) == {"measured_rows", "planned_rows"}


def test_the_last_line_is_json(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_offload, "run", lambda config: report)
    assert bench_offload.main(["--rig", "anywhere", "--cap", "none"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith(f"a speed rig of shape {SHAPE}")
    assert json.loads(lines[-1])["bench"] == "offload"


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench_offload.main(["--rig", str(tmp_path / "none"), "--cap", "none"]) == 5
    assert bench_offload.main(["--rig", ".", "--cap", "4 apples"]) == 2
    assert bench_offload.main(["--rig", ".", "--rows", "0"]) == 2
    assert bench_offload.main(["--rig", ".", "--tier", "ram"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 4
    assert all(line.startswith("error: ") for line in errors)


def test_a_cap_is_a_cap(tmp_path: Path) -> None:
    """A child may take what it is allowed, no more, and is told what holds it."""
    out = tmp_path / "kind"
    code = (
        "import os, sys; block = bytearray(int(sys.argv[1])); block[::4096] = b'1' * "
        f"len(block[::4096]); open({str(out)!r}, 'w').write(os.environ[{KIND_VARIABLE!r}])"
    )
    command = [sys.executable, "-S", "-c", code]
    assert run_capped([*command, "400_000_000"], 200_000_000) != 0
    assert not out.exists()
    assert run_capped([*command, "50_000_000"], 200_000_000) == 0
    assert out.read_text() in ("cgroup", "rlimit")
