"""A hundred mutants of every kind of file: read, or refused in one short line; nothing else.

scripts/fuzz_files.py tries more of them, and looks at memory.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from file_kinds import KINDS, outcome

MUTANTS = 100
HANGS_S = 10.0


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_read_or_refused_in_a_line(name: str, tmp_path: Path) -> None:
    sample = KINDS[name](tmp_path)
    assert outcome(sample, sample.raw) == "", "it is right before it is damaged"
    for seed in range(MUTANTS):
        start = time.process_time()
        outcome(sample, sample.mutate(sample.raw, random.Random(seed)))
        assert time.process_time() - start < HANGS_S, seed
