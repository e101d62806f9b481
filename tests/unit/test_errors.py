"""Memory that runs out becomes one line, whichever library reports it; other errors stay."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from specexec_cli.errors import ConfigError, OutOfMemoryError, SpecexecError, clear_shortage

GPU = r"the GPU's memory is too small: it ran out here\. Close what else runs on the GPU.*`budget`"
RAM = r"RAM is too small: it ran out here\. Close other programs.*`offload='ssd'`"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n20.00 MiB."), GPU),
        (RuntimeError("CUDA error: out of memory"), GPU),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), GPU),
        (RuntimeError("Triton Error [CUDA]: out of memory"), GPU),
        (RuntimeError("CUDA error: operation failed due to a previous error during capture"), GPU),
        (MemoryError(), RAM),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 B"), RAM),
    ],
    ids=str,
)
def test_every_shortage_is_one_line(error: Exception, line: str) -> None:
    with pytest.raises(OutOfMemoryError, match=line) as found, clear_shortage("it ran out here"):
        raise error
    assert "\n" not in str(found.value)
    assert found.value.exit_code == 6


@pytest.mark.parametrize("allocate", [torch.empty, np.empty])
def test_what_the_libraries_say_today(allocate) -> None:
    """More than any machine has, so that the allocators themselves speak."""
    with pytest.raises(OutOfMemoryError, match=RAM), clear_shortage("it ran out here"):
        allocate(1 << 58)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        ConfigError("no"),
        OutOfMemoryError("already one line"),
        ValueError("out of memory"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_errors_stay_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as found, clear_shortage("it ran out here"):
        raise error
    assert found.value is error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, OutOfMemoryError])
def test_whoever_keeps_the_error_keeps_no_memory(error: type[Exception]) -> None:
    """A conversation remembers why a reply failed, and goes on."""
    held: list[weakref.ref[torch.Tensor]] = []

    def fails() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise error("CUDA out of memory.")

    kept: list[SpecexecError] = []
    try:
        with clear_shortage("it ran out here"):
            fails()
    except SpecexecError as error:
        kept.append(error)
    assert kept
    assert held[0]() is None
