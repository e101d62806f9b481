"""Read mutants of every kind of file and answer: no traceback, hang or growth of memory.

    python scripts/fuzz_files.py --mutants 1000

tests/file_kinds.py has the kinds and what each must do; the tests try a hundred mutants of each.
Each kind runs in a process of its own with a limited address space, which ends itself if one mutant
takes longer than a minute. Prints a line for each kind, then one JSON object; the exit code is 1 if
anything was wrong. To try a mutant again: --only KIND --first SEED.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

HANGS_S = 10.0  # seconds of processor time after which a mutant counts as a hang
_GIVES_UP_S = 60.0
_MOST_BYTES = 24 << 30  # bytes of address space; torch reserves much that it does not use
_MOST_GROWTH = 200_000_000  # bytes that a process may grow by
_WARM = 20  # mutants before memory is measured first


def resident_bytes() -> int:
    """The resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def try_kind(name: str, first: int, mutants: int, folder: Path) -> dict[str, Any]:
    """Reads mutants of one kind; returns counts and failures."""
    from file_kinds import KINDS, outcome

    warnings.simplefilter("ignore")
    sample = KINDS[name](folder)
    failures: list[str] = []
    refused, slowest, before = 0, 0.0, 0
    for seed in range(first - 1, first + mutants):  # before them the right file, as a test of it
        data = sample.raw if seed < first else sample.mutate(sample.raw, random.Random(seed))
        if seed == first + min(_WARM, mutants - 1):
            before = resident_bytes()
        faulthandler.dump_traceback_later(_GIVES_UP_S, exit=True)
        start = time.process_time()
        try:
            message = outcome(sample, data)
            if seed < first and message:
                failures.append(f"the right file is refused: {message}")
            refused += bool(message)
        except Exception as error:  # it is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(f"{seed}: {type(error).__name__}: {str(error)[:200]}, {where.filename}:"
                            f"{where.lineno}")  # fmt: skip
        seconds = time.process_time() - start
        faulthandler.cancel_dump_traceback_later()
        if seconds > HANGS_S:
            failures.append(f"{seed}: {seconds:.1f} s")
        slowest = max(slowest, seconds)
    growth = resident_bytes() - before
    if growth > _MOST_GROWTH:
        failures.append(f"{growth / 1e6:.0f} MB more are held than at the beginning")
    return {"kind": name, "mutants": mutants, "refused": refused, "slowest_s": round(slowest, 3),
            "growth_mb": round(growth / 1e6, 1), "failures": failures}  # fmt: skip


def in_a_process(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """`try_kind` in a process of its own, which may die of a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        # the home folder is temporary, so what sessions keep is deleted with it
        quiet = {"HF_HUB_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error"}
        environment = {**os.environ, **quiet, "XDG_CACHE_HOME": f"{folder}/cache"}
        (Path(folder) / "files").mkdir()
        command = [sys.executable, __file__, "--child", f"{folder}/files", "--only", name,
                   "--mutants", str(given.mutants), "--first", str(given.first)]  # fmt: skip
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = ran.stdout.splitlines()
    if ran.returncode or not lines:
        return {"kind": name, "mutants": given.mutants, "failures": [f"died: {ran.stderr[-2000:]}"]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> int:
    """Command line."""
    from file_kinds import KINDS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=1000, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="seed of the first mutant")
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
        print(json.dumps(try_kind(given.only, given.first, given.mutants, given.child)))
        return 0
    found = []
    for name in [given.only] if given.only else list(KINDS):
        found.append(in_a_process(name, given))
        one = {**found[-1], "failures": len(found[-1]["failures"])}
        print(", ".join(f"{key} {value}" for key, value in one.items()), flush=True)
        for failure in found[-1]["failures"][:5]:
            print(f"    {failure}", flush=True)
    wrong = {each["kind"]: each["failures"] for each in found if each["failures"]}
    total = sum(each["mutants"] for each in found)
    print(json.dumps({"kinds": len(found), "mutants": total, "first": given.first, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
