"""What a command imports before it does its work: it decides how long the terminal stays empty."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from typer.main import get_command

from specexec_cli.cli.main import app
from specexec_cli.cli.registry import _OWN

COMMANDS = {place.module for place in _OWN.values()}
LIBRARIES = {"torch", "transformers", "numpy", "triton", "llvmlite", "httpx"}
HEAVY = LIBRARIES | {"filelock", "rich.progress"}


def imported(*argv: str) -> set[str]:
    """The modules that a process has imported once `specexec ARGV` is done."""
    code = (
        f"import sys; sys.argv = ['specexec', *{argv!r}]\n"
        "from specexec_cli.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, *modules = done.stderr.splitlines()[-1].split()
    assert status == "0", done.stderr
    return set(modules)


def test_the_version_imports_no_command_and_nothing_that_draws() -> None:
    found = imported("--version")
    assert not found & COMMANDS
    assert not found & HEAVY
    assert "specexec_cli.cli.option_groups" not in found
    assert not [name for name in found if name.startswith(("rich.", "specexec_cli.planning"))]


def test_the_help_imports_none_of_the_commands_it_lists() -> None:
    found = imported("--help")
    assert not found & COMMANDS
    assert not found & HEAVY
    assert not [name for name in found if name.startswith("specexec_cli.catalog")]


@pytest.mark.parametrize(
    ("argv", "modules"),
    [
        (("plan", "demo"), {"plan"}),
        (("models", "list"), {"models", "own_names"}),  # which has `models add` too
        (("generate", "--help"), {"generate"}),
    ],
)
def test_a_command_imports_no_other(argv: tuple[str, ...], modules: set[str]) -> None:
    found = imported(*argv)
    assert found & COMMANDS == {f"specexec_cli.cli.{name}" for name in modules}
    assert not found & HEAVY
    assert not [name for name in found if name.startswith("specexec_cli.lab")]


# Ends the process where torch is looked for, and says so on stderr.
ENDS_AT_TORCH = """
import os, sys
class Torch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.write(2, b"<torch>")
            raise SystemExit(0)
sys.meta_path.insert(0, Torch())
from specexec_cli.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("generate x -m demo", "loading demo"),
        ("chat demo", "loading demo"),
        ("serve demo --port 0", "loading the server"),
        ("bench demo --results {}/bench.jsonl", "loading demo"),
        ("quantize demo-target --out {}/copy", "reading demo-target"),
        ("plan {}/granite", "planning {}/granite"),
    ],
)
def test_a_terminal_shows_a_line_before_torch_is_imported(
    argv: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "granite").mkdir()
    (tmp_path / "granite" / "config.json").write_text('{"model_type": "granite"}')
    words = argv.format(tmp_path).split()
    running = pexpect.spawn(
        sys.executable, ["-c", ENDS_AT_TORCH, *words], timeout=60, dimensions=(24, 250),
        env={**os.environ, "COLUMNS": "250"},
    )  # fmt: skip
    running.expect_exact(line.format(tmp_path))
    running.expect_exact("<torch>")
    running.expect(pexpect.EOF)
    assert running.before.endswith(b"\r\x1b[1A\x1b[J\x1b[?2026l"), "the line is gone"


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_no_line_where_none_is_wanted(option: str) -> None:
    argv = ["-c", ENDS_AT_TORCH, "generate", "x", "-m", "demo", option]
    assert pexpect.spawn(sys.executable, argv, timeout=60).read() == b"<torch>"


def test_the_help_says_of_a_command_what_its_own_help_begins_with() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for name, place in _OWN.items():
        assert place.help == commands[name].help.partition("\n\n")[0]


def test_torchs_largest_library_is_loaded_while_a_command_still_plans() -> None:
    """By a thread that needs no module of torch, and that the process waits for."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from specexec_cli.cli.lean_imports import load_torch_beside\n"
        "load_torch_beside().join()\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'libtorch_cpu.so' in Path('/proc/self/maps').read_text()\n"
        "import torch\n"
        "assert torch.ones(2).sum() == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_where_no_thread_may_start_torch_is_imported_as_usual() -> None:
    code = (
        "import threading\n"
        "from specexec_cli.cli.lean_imports import load_torch_beside\n"
        "def start(thread): raise RuntimeError('cannot start new thread')\n"
        "threading.Thread.start = start\n"
        "assert load_torch_beside() is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


UNUSED = {
    "torch._dynamo", "torch.distributed.tensor", "sympy", "scipy", "accelerate", "kernels",
    "transformers.models.gemma3.modeling_gemma3",
}  # fmt: skip


@pytest.mark.parametrize("method", ["specexec", "autoregressive"])
def test_writing_imports_no_compiler_nothing_distributed_and_no_losses(method: str) -> None:
    found = imported("generate", "hi", "-m", "demo", "--max-tokens", "2", "--method", method)
    assert "transformers.modeling_utils" in found
    assert not found & UNUSED


# Opens a session's modules as a command does, then uses what they were imported without.
USES_ALL = """
from specexec_cli.cli.lean_imports import lean_imports
with lean_imports():
    import specexec_cli.session
import gc, torch
from torch.nn.attention.flex_attention import flex_attention
assert gc.isenabled()
assert torch.distributed.is_available()
assert torch._dynamo._trace_wrapped_higher_order_op
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
import scipy.optimize
"""


def test_what_a_session_leaves_out_can_be_imported_later() -> None:
    subprocess.run([sys.executable, "-c", USES_ALL], check=True)


def test_the_compiler_is_the_real_one_where_more_than_marks_is_asked_of_it() -> None:
    code = (
        "from specexec_cli.cli.lean_imports import lean_imports\n"
        "with lean_imports():\n"
        "    import torch\n"
        "    assert torch.compiler.disable(len) is len\n"
        "    assert torch.compiler.disable(recursive=False)(len) is len\n"
        "    assert torch._dynamo.config.cache_size_limit\n"
        "    assert torch.compiler.disable(print) is not print\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Opens a session's modules as a command does; prints how often a model's file was read meanwhile.
READS_NAMES = """
import sys
read = []
def listen(event, args):
    if event == "open" and str(args[0]).endswith("modeling_bert.py"):
        read.append(args[0])
sys.addaudithook(listen)
from specexec_cli.cli.lean_imports import lean_imports
with lean_imports():
    import specexec_cli.session
print(len(read))
from transformers import BertConfig, CONFIG_MAPPING
assert CONFIG_MAPPING["bert"] is BertConfig
"""


def test_names_of_models_are_read_once(tmp_path: Path) -> None:
    """And not at all by later commands; where what was kept is damaged they are read again.

    Every damage is one to its seal; tests/file_kinds.py has kinds of it.
    """

    def started() -> str:
        return subprocess.run(
            [sys.executable, "-c", READS_NAMES], capture_output=True, text=True, check=True,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        ).stdout  # fmt: skip

    assert started() == "1\n"
    assert started() == "0\n"
    (kept,) = (tmp_path / "specexec" / "imports").iterdir()
    kept.write_text('[[[], {"llama": 5}]]')
    assert started() == "1\n"
    assert started() == "0\n"
