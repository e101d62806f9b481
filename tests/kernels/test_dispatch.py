"""The dispatcher: every path gives the product, in the caller's dtype."""

from __future__ import annotations

import subprocess

import pytest
import torch
from other_cpu import other_cpu
from random_weights import V1_4BIT, down_weight
from specexec_kernels import cpu_jit, dispatch
from specexec_kernels.cpu_matmul_plan import multiplies_pairs
from specexec_kernels.formats.gguf import GGUF_FORMATS


@pytest.mark.parametrize("rows", [3, 60])
@pytest.mark.parametrize(
    ("dtype", "pairs"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)],
)
def test_cpu_paths(
    dtype: torch.dtype, pairs: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 rows are multiplied by pairs where the CPU can, all others as float32."""
    if pairs and not cpu_jit.has_dot():
        pytest.skip("no instruction for pairs of bfloat16")
    other_cpu(monkeypatch, dot=pairs)
    assert multiplies_pairs(dtype) == (pairs and dtype == torch.bfloat16)
    weight = down_weight(V1_4BIT, 64, 128, 32)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = dispatch.quantized_matmul(x, weight)
    assert found.dtype == dtype
    exact = x.float() @ weight.unpack().T
    tolerance = 4 * torch.finfo(dtype).eps * float(exact.abs().max()) + 1e-6
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=tolerance)


def test_too_narrow_for_the_kernels() -> None:
    weight = down_weight(V1_4BIT, 64, 8, 32)
    x = torch.randn(3, 64)
    torch.testing.assert_close(dispatch.quantized_matmul(x, weight), x @ weight.unpack().T)


def test_choices_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = dispatch.choices(torch.device("cpu"))["quantized linears"]
    assert "LLVM" in linears
    named = linears.partition("unpacks ")[2].split(", ")
    assert named == [each.name for each in GGUF_FORMATS.values() if not each.compiled]
    assert all(name[:3] in ("IQ1", "IQ2", "IQ3") for name in named)  # others have IR
    for obstacle, name in ((None, "Triton"), ("no compiler", "PyTorch")):
        monkeypatch.setattr(dispatch, "triton_obstacle", lambda device, found=obstacle: found)
        told = dispatch.choices(torch.device("cuda"))
        assert {each.partition(";")[0] for each in told.values()} == {name}
        assert ("; of GGUF's types PyTorch unpacks " in told["quantized linears"]) == (
            obstacle is None
        )


def test_what_is_told_of_ggufs_types_is_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: None)
    linears = dispatch.choices(torch.device("cuda"))["quantized linears"]
    named = linears.partition("unpacks ")[2].split(", ")
    assert named == [each.name for each in GGUF_FORMATS.values() if each.triton() is None]
    assert "Q4_K" not in named


@pytest.mark.parametrize(
    ("capability", "error", "obstacle"),
    [
        ((7, 5), None, "compute capability 7.5 is below Triton's 8.0"),
        ((8, 6), RuntimeError("No C compiler.\nPlease"), "start: No C compiler."),
        ((8, 6), subprocess.CalledProcessError(1, "gcc"), "returned non-zero exit status 1"),
        ((8, 6), None, None),
    ],
)
def test_triton_that_cannot_run_is_not_used(
    capability: tuple[int, int],
    error: Exception | None,
    obstacle: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime import driver

    class Driver:
        def get_current_target(self) -> None:
            if error is not None:
                raise error

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(type(driver), "active", Driver())
    device = torch.device("cuda", 0)
    dispatch.triton_obstacle.cache_clear()
    try:
        found = dispatch.triton_obstacle(device)
        assert found is None if obstacle is None else obstacle in str(found)
        assert dispatch.uses_triton(device) == (obstacle is None)
    finally:
        dispatch.triton_obstacle.cache_clear()
