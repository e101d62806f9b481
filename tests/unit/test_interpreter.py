"""Triton's interpreter made quick refuses what the slow one does."""

from __future__ import annotations

import pytest
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
