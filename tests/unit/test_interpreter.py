"""Triton's interpreter made quick refuses what the slow one does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreter import interpret_quickly

pytest.importorskip("triton")


def test_a_size_that_is_no_integer_is_refused_after_one_that_is() -> None:
    from triton.language import core

    interpret_quickly()
    assert core.block_type(core.float32, [8]).numel == 8
    assert core.block_type(core.float32, [1]).numel == 1
    for size in (8.0, True):
        known = core.block_type(core.float32, [8 if size == 8.0 else 1])
        try:
            found = core.block_type(core.float32, [size])
        except TypeError:
            continue
        assert found.name != known.name


def test_a_kernel_that_does_not_see_the_language_is_refused() -> None:
    from triton.runtime import interpreter

    interpret_quickly()
    unseeing = eval("lambda: None", {})
    with pytest.raises(AssertionError, match="must be visible"):
        interpreter._patch_lang(unseeing)


def test_numbers_become_bfloat16_as_pytorch_rounds_them() -> None:
    """Also halves between two of them, the largest, infinities, NaN, and denormal numbers."""
    from triton import language
    from triton.runtime import interpreter

    interpret_quickly()
    firsts = np.array([0, 1, 0x80, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF], dtype=np.uint32)
    firsts = np.concatenate([firsts, firsts | 0x8000])[:, None] << 16
    rests = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    numbers = (firsts | rests).view(np.float32)
    given = interpreter.TensorHandle(numbers, language.float32)
    found = interpreter.interpreter_builder.cast_impl(given, language.bfloat16).data
    expected = torch.from_numpy(numbers).bfloat16()
    found = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    real = ~expected.isnan()
    assert torch.equal(found[real].view(torch.int16), expected[real].view(torch.int16))
