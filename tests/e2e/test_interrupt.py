"""Real processes: Ctrl-C, pipes, closed ends, no decoration where there is no terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_runner import ROOT

# The console script's own function, whatever is on PATH. A runner in the background may ignore
# SIGINT, and children inherit that.
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from specexec_cli.cli.main import main
main()
"""
COMMAND = (sys.executable, "-c", PROGRAM)
PATIENCE_S = 300  # a busy machine; nothing here waits that long on a quiet one


def start(*argv: object, **options: object) -> subprocess.Popen[bytes]:
    """specexec ARGV from the repository's root, as a user would."""
    settings: dict[str, object] = {
        "cwd": ROOT, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE, "env": {**os.environ, "PYTHONUNBUFFERED": "1"},
    }  # fmt: skip
    return subprocess.Popen([*COMMAND, *map(str, argv)], **{**settings, **options})  # type: ignore[call-overload]


def finished(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert b"Traceback" not in (err or b""), err
    return process.returncode, (out or b"").decode(), (err or b"").decode()


def test_ctrl_c_keeps_the_text_and_exits_with_130():
    process = start("generate", "--raw", "def f(", "--method", "autoregressive", "--offload", "ssd",
                    "--max-tokens", 3000, "--temperature", 1)  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(20)  # it is at work
    process.send_signal(signal.SIGINT)
    code, rest, err = finished(process)
    assert code == 130
    assert err == ""
    assert len(first) == 20
    assert rest.endswith("\n")


def test_ctrl_c_while_it_waits_for_its_prompt(tmp_path: Path):
    """A named pipe tells when the program has begun to read."""
    pipe = tmp_path / "prompt"
    os.mkfifo(pipe)
    process = start("generate", "-f", pipe)
    with pipe.open("wb"):  # returns once the other end is open
        process.send_signal(signal.SIGINT)
        code, out, err = finished(process)
    assert (code, out, err) == (130, "", "")


def test_piped_in_and_out_without_decoration():
    environment = {**os.environ, "FORCE_COLOR": "", "TERM": "xterm-256color"}
    process = start("generate", "-m", "demo", "--raw", "--max-tokens", 6, "--stats",
                    stdin=subprocess.PIPE, env=environment)  # fmt: skip
    assert process.stdin is not None
    process.stdin.write("# naïve 😀\nimport os\n".encode())
    process.stdin.close()
    process.stdin = None
    code, out, err = finished(process)
    assert code == 0
    assert out.endswith("\n")
    assert "\x1b" not in out + err
    assert "\r" not in out + err
    cut, *statistics = err.splitlines()
    assert cut == "notice: cut at 6 tokens: --max-tokens 12 allows more"
    assert len(statistics) == 1


@pytest.mark.parametrize("no_color", [True, False])
def test_a_terminal_for_status_leaves_the_text_alone(no_color: bool):
    """stdout goes to a file, stderr to a terminal: the text is the same bytes as ever."""
    screen, terminal = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("NO_COLOR", None)
    if no_color:
        environment["NO_COLOR"] = "1"
    process = start("generate", "--raw", "import os\n", "--max-tokens", 6, "--stats",
                    "--offload", "ram", stderr=terminal, env=environment)  # fmt: skip
    os.close(terminal)
    shown = b""
    while chunk := _read(screen):
        shown += chunk
    os.close(screen)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert b"\x1b" not in out
    assert b"tok/pass" in shown
    colors = re.findall(rb"\x1b\[[0-9;]*3[0-9][0-9;]*m", shown)
    assert not (no_color and colors)


def _read(screen: int) -> bytes:
    try:
        return os.read(screen, 65536)
    except OSError:  # Linux says so when the last writer has closed
        return b""


def group_is_gone(leader: int) -> bool:
    """Whether no process of the group is left; workers may take a moment to end."""
    for _ in range(100):
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    "options", [("--method", "autoregressive"), ("--method", "dsi", "--sp", "1")]
)
def test_a_reader_that_leaves_early(options: tuple[str, ...], tmp_path: Path):
    """specexec generate ... | head -c 1; the session is closed all the same."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    process = start("generate", "--raw", "def f(", "--max-tokens", 300, "--quiet",
                    "--temperature", 1, *options,
                    env=environment, start_new_session=True)  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    process.stdout = None
    code, _, err = finished(process)
    assert (code, err) == (141, "")
    assert group_is_gone(process.pid)


@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    [
        (("--help",), ""),
        (("models", "list"), ""),
        (("models", "list"), "1"),
        (("plan",), ""),
        (("generate", "x", "-m", "demo", "--max-tokens", "2", "--json", "-q"), ""),
        (("bench", "--prompts", "1", "--max-tokens", "2", "--results", os.devnull), "1"),
    ],
)
def test_nobody_reads(argv: tuple[str, ...], unbuffered: str):
    """specexec ... | true, whatever is written at once, and what only when Python ends."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    process = start(*argv, stdout=writer, env=environment)
    os.close(writer)
    code, _, err = finished(process)
    assert (code, err) == (141, "")


@pytest.mark.parametrize(
    ("argv", "code", "word"),
    [
        (("generate", "x", "-m", "dmeo"), 3, "Did you mean 'demo'?"),
        (("generate", b"caf\xe9"), 2, "not UTF-8"),
        (("generate", "x", "--seed", "-4"), 2, "seed"),
    ],
)
def test_mistakes_in_a_real_process(argv, code, word):
    process = subprocess.Popen([*COMMAND, *argv], cwd=ROOT, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    found, out, err = finished(process)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert word in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "command", [["models", "list"], ["plan", "--json"], ["generate", "x", "--max-tokens", "2"]]
)
def test_an_output_that_is_full_is_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "specexec_cli.cli.main", *command],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == (
            "error: the output cannot be written (No space left on device): write it elsewhere"
        )
        assert "Traceback" not in done.stderr
        silent = subprocess.run(
            [sys.executable, "-m", "specexec_cli.cli.main", *command], stdout=full, stderr=full
        )
    assert silent.returncode == 2
