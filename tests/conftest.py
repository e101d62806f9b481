"""Fixtures that all tests share."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from platformdirs import user_cache_path

if TYPE_CHECKING:
    from computer import Computer
    from disk import Disk


def folder_for_now(name: str) -> str:
    """An empty folder that is gone once this process has ended."""
    folder = tempfile.mkdtemp(prefix=f"specexec-tests-{name}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# Real models are kept from run to run: scripts/real_models.py brings them.
os.environ.setdefault(
    "SPECEXEC_REAL_MODELS", str(user_cache_path("specexec", appauthor=False) / "real_models")
)

# What sessions learn about a pair must not pass from one run of the tests to the next.
os.environ["XDG_CACHE_HOME"] = folder_for_now("cache")

# Each CPU kernel is compiled once, by whichever process of whichever run needs it first: a file's
# name is the digest of all that its machine code follows from, and others' folders are not read.
if "SPECEXEC_KERNEL_CACHE" not in os.environ:
    kernels = Path(tempfile.gettempdir(), f"specexec-tests-kernels-{os.getuid()}")
    os.environ["SPECEXEC_KERNEL_CACHE"] = str(kernels)

# tests import toys.py by name, and quantizers and rigs of scripts/
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "scripts")]

# No test asserts a speed: where others are at work, a drawn example takes as long as it takes.
if hypothesis.settings.get_current_profile_name() == "default":
    hypothesis.settings.register_profile(
        "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("patient")

# A runner in the background ignores SIGINT, and so would every program that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """--groups, which scripts/test and scripts/nightly give: see nightly_groups.py."""
    parser.addoption("--groups", help="changed, all, or groups of tests/nightly.toml, as in a,b")


def pytest_configure(config: pytest.Config) -> None:
    """Lets Triton compile kernels where tests with a GPU are asked for, and interpret them else.

    Triton reads the variable when it is first imported, which many a test does long before those of
    the kernels. Without a GPU, tests hand the kernels tensors in ordinary memory.
    """
    if not re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")):
        os.environ["TRITON_INTERPRET"] = "1"
    if choice := config.getoption("groups"):
        from nightly_groups import Selection

        config.pluginmanager.register(Selection(choice))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: it is not searched for garbage, neither meanwhile nor later."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()  # what is garbage by now would never be found once it is frozen
        gc.freeze()
        if enabled:
            gc.enable()


@pytest.fixture(scope="session", autouse=True)
def others_unseen() -> Iterator[None]:
    """What runs beside the tests decides nothing: by default measurements count as undisturbed."""
    from specexec_cli import quiet

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quiet, "user_seconds", lambda: None)
        yield


SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real prompts and checkpoints beside the repository."""
    if not SHARED.is_dir():
        pytest.skip("the shared data folder is not beside the repository")
    return SHARED


@pytest.fixture(scope="session", autouse=True)
def compilers_and_interpreters_uncounted() -> Iterator[None]:
    """Whichever test needs a kernel: it is written, compiled and interpreted at full speed."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.gettrace() is not None:
            from specexec_kernels import cpu_jit
            from uncounted import uncounted

            patch.setattr(cpu_jit, "compiled", uncounted(cpu_jit.compiled))
            if os.environ.get("TRITON_INTERPRET") and find_spec("triton"):
                from triton.runtime.interpreter import InterpretedFunction

                patch.setattr(InterpretedFunction, "run", uncounted(InterpretedFunction.run))
        yield


@pytest.fixture
def computer(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Computer:
    """This computer with nothing kept on it and no GPU, which a test may describe further."""
    from computer import Computer

    return Computer(tmp_path_factory.mktemp("computer"), monkeypatch)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The disk that weights are read from, which a test may slow down or break."""
    from disk import Disk

    return Disk(monkeypatch)
