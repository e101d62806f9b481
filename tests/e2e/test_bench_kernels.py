"""The kernel benchmark's output can be read by a program: its last line is JSON of known keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import save_quantized


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report.keys() == {
        "benchmark", "config", "results", "memory_and_gemm_rates", "environment",
    }  # fmt: skip
    assert report["environment"].keys() == {"commit", "versions", "hardware"}
    return report


def test_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_kernels

    monkeypatch.setattr(bench_kernels, "machine_rates", lambda settings: (1e10, 1e11))
    threads = torch.get_num_threads()
    try:
        arguments = ["--device", "cpu", "--clock", "cpu", "--shape", "256x256", "--repeats", "1"]
        assert bench_kernels.main([*arguments, "--rows", "1,3"]) == 0
    finally:
        torch.set_num_threads(threads)
    results = last_line(capsys)["results"]
    assert isinstance(results, list)
    cases = {result["case"] for result in results}
    assert cases == {
        "linear, 1 rows", "linear, 3 rows", "packed linear, 1 rows",
        "packed linear, 3 rows", "tree attention", "log-softmax + top-k",
        "cache compaction", "one row's token",
    }  # fmt: skip
    for result in results:
        first, *others = result["implementations"].values()
        assert first["ratio"] == pytest.approx(1)
        assert all(len(row["samples_s"]) == 1 and row["p50_s"] > 0 for row in (first, *others))


def test_passes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import bench_kernels

    monkeypatch.setattr(bench_kernels, "SETTLE_S", 0.0)
    folders = [str(folder) for folder in save_quantized(tmp_path)]
    assert bench_kernels.main(["--passes", *folders, "--rows", "2", "--repeats", "1"]) == 0
    (result,) = last_line(capsys)["results"]  # type: ignore[misc]
    assert result["bytes_streamed"]["packed"] < result["bytes_streamed"]["plain"]
