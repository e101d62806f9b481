"""Other operating systems: what they lack is removed before the program is imported."""

from __future__ import annotations

import subprocess
import sys

ARGV = """
sys.argv = ["specexec", "generate", "--raw", "import os", "--offload", "ssd", "--max-tokens", "8"]
"""
MACOS = (
    """
import fcntl, mmap, os, sys
for name in ("O_DIRECT", "posix_fadvise", "sched_getaffinity"):
    delattr(os, name)
del mmap.MADV_HUGEPAGE
cached, fcntl.F_NOCACHE, real = [], 48, fcntl.fcntl
def stand_in(descriptor, command, value=0):
    if command == fcntl.F_NOCACHE:
        cached.append(value)
        return 0
    return real(descriptor, command, value)
fcntl.fcntl = stand_in
from specexec_cli.cli.main import main
"""
    + ARGV
    + """
try:
    main()
finally:
    assert cached and all(cached), "files are read past the cache"
"""
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_windows_is_refused_in_one_line_before_anything_is_imported() -> None:
    ran = run("import sys; sys.platform = 'win32'; import specexec_cli.cli.main")
    assert ran.returncode == 1
    assert ran.stderr.startswith(
        "error: specexec does not run on Windows itself: install it in WSL2"
    )
    assert ran.stderr.count("\n") == 1


def test_without_what_macos_lacks_the_text_is_the_same() -> None:
    elsewhere = run(MACOS)
    assert elsewhere.returncode == 0, elsewhere.stderr
    here = run("import sys; from specexec_cli.cli.main import main\n" + ARGV + "main()")
    assert elsewhere.stdout == here.stdout
    assert "this system has no O_DIRECT" in elsewhere.stderr
    assert "O_DIRECT" not in here.stderr
