"""Kill programs with -9 at random moments: nothing promised is lost, and the next start works.

    python scripts/kill_at_random.py --kills 100

Each program (chat, serve, generate over a file of prompts, quantize, pull) runs the demo pair and
is killed at moments drawn evenly over its whole run; all runs of a program share a home folder.
Then its promise is checked: a chat has every message with a printed reply, a job file ends with the
texts of a run that was not killed, a quantized folder is whole or absent, a fetched file has the
hub's bytes, a server answers as before. The last line is one JSON object; the exit code is 1 if
anything was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the hub is the tests' own

from fake_hub import FakeHub, running

import specexec_cli

DEMO = Path(specexec_cli.__file__).parent / "demo"
SPECEXEC = [sys.executable, "-m", "specexec_cli.cli.main"]
QUESTIONS = ["What does dict.get do?", "And list.append?", "What does os.path.join do?"]
TIMEOUT_S = 120


class Lost(Exception):
    """A killed program did not keep what it had promised."""


class Runs:
    """Runs of one program that share a home folder, some of them killed."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        homes = {
            name: str(folder / name)
            for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HOME")
        }
        settings = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        self.environment = {**kept, **homes, **settings, **environment}
        # compiled kernels are not what is tried here, and compiling them would take most of a run
        self.environment["SPECEXEC_KERNEL_CACHE"] = str(folder.parent / "kernels")

    def start(self, *arguments: str, typed: str = "") -> subprocess.Popen[str]:
        """Starts the program; `typed` is its whole standard input."""
        (self.folder / "typed").write_text(typed)
        with (self.folder / "typed").open() as keys:
            return subprocess.Popen(
                [*SPECEXEC, *arguments], stdin=keys, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, env=self.environment, start_new_session=True,
            )  # fmt: skip

    def killed(self, moment_s: float, *arguments: str, typed: str = "") -> str:
        """Runs the program and kills it; returns what it had printed by then, or by its end."""
        process = self.start(*arguments, typed=typed)
        try:
            out, _ = process.communicate(timeout=moment_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        return out

    def whole(self, *arguments: str, typed: str = "") -> str:
        """Runs the program to its end; returns what it printed.

        Raises:
            Lost: it ends with an error, or not at all; says where each of its threads was then.
        """
        process = self.start(*arguments, typed=typed)
        try:
            out, told = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # has Python's faulthandler print its threads
            try:
                _, told = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                _, told = process.communicate()
            hung = f"{' '.join(arguments[:2])} did not end in {TIMEOUT_S} s:\n{told[-5000:]}"
            raise Lost(hung) from None
        if process.returncode:
            raise Lost(f"{' '.join(arguments[:2])} ended with {process.returncode}: {told[-500:]}")
        return out


def timed(work: Callable[[], object]) -> float:
    """The seconds that `work` takes."""
    start = time.monotonic()
    work()
    return time.monotonic() - start


def chat(folder: Path, moments: Iterator[float]) -> None:
    """Every turn whose reply was printed is in the transcript, and --continue starts."""
    runs, typed = Runs(folder), "".join(f"{question}\n" for question in QUESTIONS)
    whole = runs.whole("chat", typed=typed)
    replies = [reply for reply in whole.splitlines() if reply]
    seconds = timed(lambda: runs.whole("chat", typed=typed))
    for moment in moments:
        shutil.rmtree(folder / "XDG_STATE_HOME", ignore_errors=True)
        printed = runs.killed(moment * seconds, "chat", typed=typed).splitlines()
        files = list((folder / "XDG_STATE_HOME" / "specexec" / "chats").glob("*.jsonl"))
        kept = "".join(path.read_text() for path in files)
        # a reply is recorded once it has ended: when the next one begins it has to be there
        for line, following in pairwise(replies):
            if following in printed and json.dumps(line)[1:-1] not in kept:
                raise Lost(f"a reply was printed and is in no transcript: {line}")
        if "user" in kept:
            runs.whole("chat", "--continue", typed="What does dict.get do?\n")


def jobs(folder: Path, moments: Iterator[float]) -> None:
    """After any number of kills, a job file ends with the texts of a run that was not killed."""
    runs, prompts = Runs(folder), folder / "prompts.jsonl"
    lines = (json.dumps({"prompt": f"def add_{n}(a, b):"}) for n in range(12))
    prompts.write_text("\n".join(lines) + "\n")

    def arguments(out: Path) -> tuple[str, ...]:
        sizes = ("--max-tokens", "24", "--slots", "3")
        return ("generate", "--raw", "-f", str(prompts), "--jsonl", "-o", str(out), *sizes)

    def texts(out: Path) -> list[tuple[int, str]]:
        """The texts of all whole lines."""
        lines = out.read_text().splitlines(True) if out.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return sorted((row["id"], row["text"]) for row in rows)

    reference, out = folder / "reference.jsonl", folder / "texts.jsonl"
    seconds = timed(lambda: runs.whole(*arguments(reference)))
    for moment in moments:
        before = texts(out)
        runs.killed(moment * seconds, *arguments(out))
        if not set(before) <= set(texts(out)):
            raise Lost(f"of {len(before)} texts that were there, some are gone")
        runs.whole(*arguments(out))
        if texts(out) != texts(reference):
            raise Lost("the texts differ from those of a run that nobody killed")
        # the next run finds a file that was left in the middle
        out.write_bytes(out.read_bytes()[: int(moment * out.stat().st_size)])


def quantize(folder: Path, moments: Iterator[float]) -> None:
    """The quantized folder is whole or absent, and the next run writes the same bytes."""
    runs, out = Runs(folder), folder / "copy"
    arguments = (
        "quantize",
        str(DEMO / "draft"),
        "--group-size",
        "32",
        "--calibration",
        "none",
        "-o",
        str(out),
    )
    seconds = timed(lambda: runs.whole(*arguments))
    expected = {path.name: path.read_bytes() for path in out.iterdir()}
    for moment in moments:
        shutil.rmtree(out, ignore_errors=True)
        runs.killed(moment * seconds, *arguments)
        if not out.exists():
            runs.whole(*arguments)
        if {path.name: path.read_bytes() for path in out.iterdir()} != expected:
            raise Lost("the folder is there and is not whole")


def pull(folder: Path, moments: Iterator[float]) -> None:
    """A fetched file has the hub's bytes, and the next pull ends."""
    files = {path.name: path.read_bytes() for path in (DEMO / "target").iterdir() if path.is_file()}
    with running(FakeHub(repos={"org/big": files}, bytes_per_s=2e7)) as hub:
        runs = Runs(folder, HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1", NO_PROXY="127.0.0.1")
        arguments = ("pull", "org/big", "--yes")
        seconds = timed(lambda: runs.whole(*arguments))
        for moment in moments:
            shutil.rmtree(folder / "HF_HOME", ignore_errors=True)
            runs.killed(moment * seconds, *arguments)
            runs.whole(*arguments)
            (snapshot,) = (folder / "HF_HOME" / "hub" / "models--org--big" / "snapshots").iterdir()
            if {path.name: path.read_bytes() for path in snapshot.iterdir()} != files:
                raise Lost("what was fetched is not what the hub has")


def serve(folder: Path, moments: Iterator[float]) -> None:
    """After a kill at any moment, the next server answers as the one before."""
    runs, asked = Runs(folder), {"prompt": "def add(a, b):", "max_tokens": 32, "seed": 3}

    def answers(moment_s: float | None) -> str | None:
        """The text of a server that is killed at a moment, or once it has answered."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = runs.start("serve", "demo", "--port", str(port))
        text, ends = None, time.monotonic() + (moment_s or TIMEOUT_S)
        try:
            while time.monotonic() < ends and (text is None or moment_s is not None):
                left = max(0.01, ends - time.monotonic())
                try:
                    url = f"http://127.0.0.1:{port}/v1/completions"
                    answer = client.post(url, json=asked, timeout=left)
                    text = answer.json()["choices"][0]["text"]
                except httpx.TransportError:
                    time.sleep(0.05)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return text

    with httpx.Client() as client:  # one for all: each reads the system's certificates
        expected = answers(None)
        seconds = timed(lambda: answers(None))
        for moment in moments:
            text = answers(2 * moment * seconds)
            if text not in (None, expected) or answers(None) != expected:
                raise Lost("the text differs from that of the first server")


PROGRAMS = (chat, serve, jobs, quantize, pull)


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of all programs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[program.__name__ for program in PROGRAMS])
    given = parser.parse_args()
    programs = [p for p in PROGRAMS if given.only in (None, p.__name__)]
    draw, lost = random.Random(given.seed), {}
    each = -(-given.kills // len(programs))
    with scratch() as folder:
        for program in programs:
            (folder / program.__name__).mkdir()
            start = time.monotonic()
            try:
                program(folder / program.__name__, (draw.random() for _ in range(each)))
            except Lost as reason:
                lost[program.__name__] = str(reason)
            told = lost.get(program.__name__, "nothing lost")
            print(f"{program.__name__}: {each} kills, {time.monotonic() - start:.0f} s: {told}")
    print(json.dumps({"kills": each * len(programs), "seed": given.seed, "lost": lost}))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
