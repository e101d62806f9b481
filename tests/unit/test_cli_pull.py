"""Nothing is fetched before it was said how much, and agreed to: pull, rm, generate, chat, bench.

The real program and the real huggingface_hub against a hub on this machine that gates, crawls and
breaks off: in processes of their own where these end or have a terminal, else in this one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runner import Ran, run_cli
from computer import Computer
from fake_hub import TOKEN, FakeHub, asked_instead, running
from huggingface_hub import constants
from terminal import CTRL_C, Terminal

import specexec_cli
from specexec_cli.cli import fetching
from specexec_cli.device import format_bytes
from specexec_cli.errors import NotFetchedError, UnknownModelError

DEMO = Path(specexec_cli.__file__).parent / "demo"
SPECEXEC = [sys.executable, "-m", "specexec_cli.cli.main"]
MODELS = """
[models.big]
repo = "org/big"
revision = "main"
[models.small]
repo = "org/small"
[models.closed]
repo = "org/closed"
[models.huge]
repo = "org/huge"
model_type = "llama"
dtype = "float16"
shape = { hidden_size = 65536, num_hidden_layers = 2, intermediate_size = 262144, \
num_attention_heads = 64, vocab_size = 32000 }
[pairs.couple]
target = "big"
draft = "small"
budget = 8
depth = 4
"""


def files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (DEMO / folder).iterdir() if path.is_file()}


def packed() -> dict[str, bytes]:
    """GGUF files of one model: a whole one, and one in two parts in a folder."""
    parts = {f"big/m-0000{n}-of-00002.gguf": b"GGUF" + bytes([n] * 40) for n in (1, 2)}
    return {"m-Q4_K_M.gguf": b"GGUF" + bytes(60), "m-Q8_0.gguf": b"GGUF" + bytes(90), **parts}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    (tmp_path / "models.toml").write_text(MODELS)
    target, draft = files("target"), files("draft")
    hub = FakeHub(
        repos={
            "org/big": target,
            "org/small": draft,
            "org/closed": draft,
            "org/huge": draft,
            "org/packed": packed(),
        },
        gated=frozenset({"org/closed"}),
    )
    with running(hub):
        yield hub


def environment(hub: FakeHub, tmp_path: Path, **more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {
        **clean, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1", **more,
    }  # fmt: skip


def specexec(
    hub: FakeHub, tmp_path: Path, *argv: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """The program without a terminal, of the models above."""
    done = subprocess.run(
        [*SPECEXEC, *argv, "--models-file", str(tmp_path / "models.toml")],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120,
        env=environment(hub, tmp_path, **more),
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


def here(
    hub: FakeHub, tmp_path: Path, *argv: str, token: str = "", kept: Path | None = None
) -> Ran:
    """The same in this process, which has imported most of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", token)
        patch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        asked_instead(hub, kept or tmp_path / "hf" / "hub", patch)
        return run_cli(*argv, "--models-file", tmp_path / "models.toml", stdin=b"")


def cache(tmp_path: Path, repo: str) -> Path:
    return tmp_path / "hf" / "hub" / ("models--" + repo.replace("/", "--"))


@pytest.mark.parametrize(
    "command",
    [("generate", "x", "-m"), ("chat",), ("bench", "--prompts", "1"), ("bench", "coverage"),
     ("train-policy",)],
)  # fmt: skip
def test_nobody_to_ask_is_one_line_and_code_10(
    hub: FakeHub, tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = here(hub, tmp_path, *command, "couple")
    assert done.code == 10
    assert done.err.count("\n") == 1
    assert re.search(
        r"error: big and small are not on this machine, and 2\d\.\d MB would .* --yes", done.err
    )
    assert hub.downloads() in ([], ["config.json"] * 2)


def test_yes_fetches_says_how_much_and_runs(hub: FakeHub, tmp_path: Path) -> None:
    argv = ("generate", "--raw", "import os\n", "-m", "couple", "--max-tokens", "4")
    done = specexec(hub, tmp_path, *argv, "--yes")
    assert done.returncode == 0, done.stderr
    assert "Not here: big, " in done.stderr
    assert "(org/big@main)" in done.stderr
    assert "It fits this machine" in done.stderr
    assert re.search(r"To fetch: 2\d\.\d MB; [\d.]+ .B are free on the disk", done.stderr)
    demo = specexec(hub, tmp_path, "generate", "--raw", "import os\n", "--max-tokens", "4")
    assert done.stdout == demo.stdout
    again = specexec(hub, tmp_path, *argv)
    cut = "notice: cut at 4 tokens: --max-tokens 8 allows more\n"
    assert (again.returncode, again.stdout, again.stderr) == (0, demo.stdout, cut)


def test_what_does_not_fit_is_refused_before_anything_is_fetched(
    hub: FakeHub, tmp_path: Path
) -> None:
    done = here(hub, tmp_path, "generate", "x", "-m", "huge", "--draft", "small", "--yes")
    assert done.code == 6
    assert done.err.startswith("error: even fully streamed, the target needs ")
    assert set(hub.downloads()) <= {"config.json"}
    pulled = here(hub, tmp_path, "pull", "huge", "--yes")
    assert pulled.code == 0
    assert "It does not fit this machine: even fully streamed" in pulled.err


def test_a_gate_is_named_before_anything_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    done = here(hub, tmp_path, "pull", "closed", "--yes")
    assert done.code == 3
    assert re.fullmatch(
        r"error: org/closed is gated: accept its licence at \S+/org/closed, then log in .*\n",
        done.err,
    )
    assert "model.safetensors" not in hub.downloads()
    allowed = here(hub, tmp_path, "pull", "closed", "--yes", token=TOKEN)
    assert allowed.code == 0, allowed.err
    assert "gated (your licence is accepted)" in allowed.err


def test_a_full_disk_is_told_before_anything_is_fetched(
    hub: FakeHub, tmp_path: Path, computer: Computer
) -> None:
    from specexec_cli.catalog.downloads import Download
    from specexec_cli.catalog.models_file import ModelEntry

    found = Download(
        entry=ModelEntry(name="big", repo="org/big"), total_bytes=9 * 10**9,
        fetch_bytes=8 * 10**9, gated=False, allowed=True,
    )  # fmt: skip
    computer.has_free_disk(8 * 10**9 - 1)
    with pytest.raises(NotFetchedError, match=r"^8\.0 GB to fetch, but the disk .* 8\.0 GB free"):
        fetching.agree([found], "", yes=True, quiet=True)
    computer.has_free_disk(8 * 10**9)
    fetching.agree([found], "", yes=True, quiet=True)


def test_a_broken_download_goes_on_where_it_broke(hub: FakeHub, tmp_path: Path) -> None:
    size = len(hub.repos["org/big"]["model.safetensors"])
    hub.breaks["model.safetensors"] = 1
    done = here(hub, tmp_path, "pull", "big", "--yes")
    assert done.code == 0, done.err
    begins = [begin for _, path, begin in hub.asked if path.endswith("model.safetensors") and begin]
    assert len(begins) == 1
    assert 0 < begins[0] < size
    assert "Trying to resume" not in done.err


def test_a_hub_that_goes_away_is_one_line_and_what_came_is_kept(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.breaks["model.safetensors"] = 1000
    done = specexec(hub, tmp_path, "pull", "big", "--yes", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert done.returncode == 3
    assert re.search(r"^error: cannot fetch org/big from .*check the network", done.stderr, re.M)
    (kept,) = cache(tmp_path, "org/big").glob("blobs/*.incomplete")
    size = kept.stat().st_size
    hub.breaks.clear()
    hub.asked.clear()
    assert here(hub, tmp_path, "pull", "big", "--yes").code == 0
    assert (hub.downloads().count("model.safetensors"), kept.exists()) == (1, False)
    assert size in [begin for _, path, begin in hub.asked if path.endswith("model.safetensors")]


def test_a_cache_that_cannot_be_written_to_is_one_line(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    impossible = tmp_path / "file" / "hub"
    done = here(hub, tmp_path, "pull", "big", "--yes", kept=impossible)
    assert done.code == 10
    assert done.err.count("\n") == 1
    assert done.err.startswith(f"error: cannot store org/big in {impossible}: ")


def test_pull_again_and_rm(hub: FakeHub, tmp_path: Path) -> None:
    assert here(hub, tmp_path, "pull", "couple", "--yes").code == 0
    again = here(hub, tmp_path, "pull", "couple")
    assert (again.code, again.err) == (0, "couple is on this machine already\n")
    kept = here(hub, tmp_path, "rm", "small")
    assert kept.code == 10
    assert re.fullmatch(r"error: org/small \(.* MB\) would be deleted: .*--yes\n", kept.err)
    gone = here(hub, tmp_path, "rm", "small", "--yes")
    assert gone.code == 0
    assert re.fullmatch(r"deleted org/small \(.* MB\)\n", gone.err)
    assert not cache(tmp_path, "org/small").exists()
    assert cache(tmp_path, "org/big").exists()
    nothing = here(hub, tmp_path, "rm", "small", "--yes")
    assert nothing.code == 3
    assert "nothing of small is in the hub's cache" in nothing.err
    own = here(hub, tmp_path, "rm", "demo", "--yes")
    assert own.code == 2
    assert "nothing was deleted" in own.err
    assert (DEMO / "target" / "model.safetensors").is_file()


def killed_within_a_file(hub: FakeHub, tmp_path: Path) -> Path:
    """What a `pull` of big leaves that is killed in the midst of its weights."""
    hub.bytes_per_s = 2e6
    running_pull = subprocess.Popen(
        [*SPECEXEC, "pull", "big", "--yes", "--models-file", str(tmp_path / "models.toml")],
        env=environment(hub, tmp_path), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not hub.sent.get("model.safetensors") and time.monotonic() < until:
        time.sleep(0.05)
    left: list[Path] = []
    while not any(path.stat().st_size for path in left) and time.monotonic() < until:
        time.sleep(0.05)
        left = list(cache(tmp_path, "org/big").glob("blobs/*.incomplete"))
    running_pull.send_signal(signal.SIGKILL)
    running_pull.wait()
    hub.bytes_per_s = None
    assert len(left) == 1
    return left[0]


def test_a_killed_pull_goes_on_within_the_file(hub: FakeHub, tmp_path: Path) -> None:
    weights = hub.repos["org/big"]["model.safetensors"]
    kept = killed_within_a_file(hub, tmp_path).read_bytes()
    assert 0 < len(kept) < len(weights)
    hub.asked.clear()
    again = here(hub, tmp_path, "pull", "big", "--yes")
    assert again.code == 0, again.err
    assert f"{format_bytes(len(kept))} of it here already" in again.err
    begins = [begin for method, path, begin in hub.asked
              if method == "GET" and path.endswith("model.safetensors")]  # fmt: skip
    assert begins == [len(kept)], "no byte that is on the disk comes a second time"
    (stored,) = cache(tmp_path, "org/big").glob("snapshots/*/model.safetensors")
    assert stored.read_bytes() == weights


def test_rm_takes_what_a_killed_download_left(hub: FakeHub, tmp_path: Path) -> None:
    killed_within_a_file(hub, tmp_path)
    gone = here(hub, tmp_path, "rm", "big", "--yes")
    assert gone.code == 0, gone.err
    assert not cache(tmp_path, "org/big").exists()


# --- At a terminal ---


def at_terminal(hub: FakeHub, tmp_path: Path, *argv: str, columns: int = 80) -> Terminal:
    return Terminal(
        [*SPECEXEC, *argv, "--models-file", str(tmp_path / "models.toml")],
        environment=environment(hub, tmp_path), columns=columns,
    )  # fmt: skip


@pytest.mark.parametrize("answer", ["n", ""])
def test_no_is_the_default_answer(hub: FakeHub, tmp_path: Path, answer: str) -> None:
    terminal = at_terminal(hub, tmp_path, "generate", "x", "-m", "couple")
    text = terminal.wait("? [y/N]")
    assert "Not here: small, " in text
    terminal.type(answer + "\r")
    terminal.wait("error: nothing was fetched")
    assert terminal.end() == 10
    assert "model.safetensors" not in hub.downloads()


def test_a_bar_while_it_comes_and_ctrl_c(hub: FakeHub, tmp_path: Path) -> None:
    hub.bytes_per_s = 1e6
    terminal = at_terminal(hub, tmp_path, "pull", "couple", columns=60)
    terminal.wait("? [y/N]")
    terminal.type("y\r")
    until = time.monotonic() + 60
    while not re.search(r"big .*[1-9][\d.]*/2\d\.\d MB", terminal.text()):
        assert terminal.pump(), terminal.text()
        assert time.monotonic() < until, terminal.text()
    started = time.monotonic()
    terminal.type(CTRL_C)
    terminal.wait("the same command goes on")
    assert terminal.end() == 130
    assert time.monotonic() - started < 10
    hub.bytes_per_s = None
    kept = sum(
        path.stat().st_size for path in cache(tmp_path, "org/big").glob("blobs/*.incomplete")
    )
    assert kept
    hub.asked.clear()
    again = here(hub, tmp_path, "pull", "couple", "--yes")
    assert again.code == 0
    assert f"{format_bytes(kept)} of it here already" in again.err
    begins = [begin for _, path, begin in hub.asked if path.endswith("model.safetensors")]
    assert kept in begins


def test_an_obstacle_is_a_sentence() -> None:
    from specexec_cli.catalog.downloads import Download
    from specexec_cli.catalog.models_file import ModelEntry

    entry = ModelEntry(name="c", repo="org/closed")
    closed = Download(entry=entry, total_bytes=1, fetch_bytes=1, gated=True, allowed=False)
    with pytest.raises(UnknownModelError, match="org/closed is gated: accept its licence"):
        fetching.agree([closed], "", yes=True, quiet=True)


def test_one_gguf_file_of_a_repository_is_fetched_alone(hub: FakeHub, tmp_path: Path) -> None:
    done = here(hub, tmp_path, "pull", "org/packed:m-Q4_K_M.gguf", "--yes")
    assert done.code == 0, done.err
    assert hub.downloads() == ["m-Q4_K_M.gguf"]
    again = here(hub, tmp_path, "pull", "org/packed:m-Q4_K_M.gguf", "--yes")
    assert "is on this machine already" in again.err
    split = here(hub, tmp_path, "pull", "org/packed:big/m-00001-of-00002.gguf", "--yes")
    assert split.code == 0, split.err
    assert sorted(hub.downloads())[:2] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


def test_a_gguf_file_that_a_repository_does_not_have(hub: FakeHub, tmp_path: Path) -> None:
    done = here(hub, tmp_path, "pull", "org/packed:other.gguf", "--yes")
    assert done.code == 3
    assert "org/packed has no file 'other.gguf'" in done.err
