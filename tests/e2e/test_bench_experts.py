"""The form of scripts/bench_experts.py's report, on rigs too small for its figures to matter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from checkpoints import byte_llama, save_byte_tokenizer, save_checkpoint
from torch import bfloat16

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_experts
import make_rig

from specexec_cli.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHAPE = "hidden=128,layers=4,heads=4,kv_heads=2,head_dim=8,intermediate=1024"
RATES = {"read_bytes", "bytes_per_s", "burst_bytes_per_s", "raw_bytes_per_s", "rate_of_burst",
         "rate_of_raw"}  # fmt: skip
SHARES = {"missed_by_a_visit", "reads_of_a_visit", "read_of_needed", "reading_share",
          "waiting_share"}  # fmt: skip


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "draft"
    config = byte_llama(head_dim=8, intermediate_size=64)
    save_checkpoint(folder, config, std=0.12, dtype=bfloat16)
    save_byte_tokenizer(folder)
    return folder


def argv(rig: Path, draft: Path, *more: str) -> list[str]:
    return ["--rig", str(rig), "--draft", str(draft), "--tokens", "4", "--texts", "1", "--budget",
            "6", *more]  # fmt: skip


@pytest.mark.parametrize(
    ("experts", "row_format"), [("experts=16,chosen=2", None), ("experts=64,chosen=4", "gpt-oss")]
)
def test_mixtures_of_other_shapes_are_measured(
    experts: str,
    row_format: str | None,
    draft: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Mixtral, beside whole layers and another checkout, and as gpt-oss in its own format."""
    rig = make_rig.write_rig(draft, f"{SHAPE},{experts}", tmp_path / "rig", row_format=row_format)
    monkeypatch.setattr(bench_experts, "RAW_S", 0.05)
    options = ["--without-whole"] if row_format else ["--before", str(ROOT)]
    report = bench_experts.run(bench_experts.parse(argv(rig, draft, *options)))
    json.dumps(report)
    assert report["different"] == []
    runs = {"experts"} if row_format else {"whole layers", "before", "experts"}
    assert set(report["found"]) == runs
    assert set(report["reads"]) == set(bench_experts.METHODS)
    for row in report["reads"].values():
        assert set(row) == SHARES | RATES
        assert row["read_bytes"] % 4096 == 0
        assert all(value > 0 for value in row.values())
    if not row_format:  # the same version asks for the same experts
        before, now = (report["found"][name]["methods"] for name in ("before", "experts"))
        assert before["autoregressive"]["touched"] == now["autoregressive"]["touched"] > 0


def test_a_rig_that_stays_whole_is_refused(draft: Path, tmp_path: Path) -> None:
    rig = make_rig.write_rig(draft, f"{SHAPE},experts=2,chosen=2", tmp_path / "rig")
    with pytest.raises(ConfigError, match=r"whole layers stay: lower --share"):
        bench_experts.run(bench_experts.parse(argv(rig, draft, "--share", "9")))
