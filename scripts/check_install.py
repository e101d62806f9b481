"""Check that specexec can be installed on machines that are not this one.

    python scripts/check_install.py

uv resolves what `pip install` would, for every platform and Python below: with the versions of
constraints.txt, with the newest ones, and with the lowest that pyproject.toml allows. All extras
are asked for at once; what resolves with them resolves without them. Only wheels count, because a
machine need not have a compiler. uv reads the metadata of wheels and downloads none of them. That
something resolves does not say that it runs: specexec does not run on Windows, whose requirements
are checked all the same.

Exits with 1 if something does not resolve. Where no package index answers, it says that it has
checked nothing, and exits with 0.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_31",
    "Linux aarch64": "aarch64-manylinux_2_31",
    "macOS arm64": "aarch64-apple-darwin",
    "Windows x86-64": "x86_64-pc-windows-msvc",
}
PYTHONS = ("3.11", "3.13", "3.14")
VERSIONS = {
    "the versions of constraints.txt": ["--constraints", "constraints.txt"],
    "the newest versions": [],
    "the lowest versions": ["--resolution", "lowest-direct"],
}
OLDEST_MACOS = "14.0"  # that torch has wheels for
AT_ONCE = 6  # resolutions, each of which mostly waits for the package index


def obstacle(project: Path, source: str, *options: str) -> str:
    """Why requirements do not resolve, in uv's words; empty if they do.

    Args:
        source: a file in the folder `project`, or "-" for typer alone, which is pure Python: any
            index has a wheel of it for any machine.
        options: more options for `uv pip compile`.
    """
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", source, "--quiet",
         "--python", sys.executable, *options],
        env=os.environ | {"MACOSX_DEPLOYMENT_TARGET": OLDEST_MACOS},
        input="typer", cwd=project, capture_output=True, text=True,
    )  # fmt: skip
    return done.stderr.strip() if done.returncode else ""


def failures(project: Path) -> int:
    """Resolves every combination; prints those that fail and returns how many they are."""
    combinations = list(itertools.product(PLATFORMS, PYTHONS, VERSIONS))
    start, failed = time.monotonic(), 0

    def reason_of(combination: tuple[str, str, str]) -> str:
        platform, python, versions = combination
        return obstacle(
            project, "pyproject.toml", "--all-extras", "--only-binary", ":all:",
            "--python-platform", PLATFORMS[platform], "--python-version", python,
            *VERSIONS[versions],
        )  # fmt: skip

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for combination, reason in zip(
            combinations, pool.map(reason_of, combinations), strict=True
        ):
            if reason:
                failed += 1
                platform, python, versions = combination
                print(f"{platform}, Python {python}, {versions}:\n{reason}\n", flush=True)
    print(
        f"check_install: {len(combinations) - failed} of {len(combinations)} installations "
        f"resolve ({time.monotonic() - start:.0f} s)"
    )
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("project", nargs="?", type=Path, default=Path(__file__).parents[1])
    project = parser.parse_args(argv).project
    # The cache would answer for an index that is gone.
    if reason := obstacle(project, "-", "--no-deps", "--no-cache"):
        print(f"check_install: skipped, because no package index answers:\n{reason}")
        return 0
    return 1 if failures(project) else 0


if __name__ == "__main__":
    sys.exit(main())
