"""Sessions on a CUDA device, and on a stand-in for one (tests/fake_cuda.py); `pytest -m gpu`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import byte_llama, save_pair
from fake_cuda import fake_cuda

from specexec_cli.config import GenerationConfig, OffloadMode, SamplingConfig, TreeConfig
from specexec_cli.device import HUGE_PAGE_BYTES
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.planning.memory import GPU_LIBRARY_BYTES
from specexec_cli.session import Session, TextSession

PROMPT = "def read_lines(path):\n"
TREE = TreeConfig(budget=24, max_depth=8, batch=8)
LAYERS = byte_llama(num_hidden_layers=8)


@pytest.fixture(params=["fake", "no pins", pytest.param("gpu", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "gpu":
        yield
        return
    with fake_cuda(pins_bytes=0 if request.param == "no pins" else None):
        yield


def texts(session: TextSession, method: str) -> list[list[int]]:
    """Greedy and sampled."""
    found = []
    for temperature in (0.0, 0.8):
        steps = session.generate(
            PROMPT, tree=TREE, sampling=SamplingConfig(temperature=temperature, seed=3),
            generation=GenerationConfig(max_tokens=12), method=method,  # type: ignore[arg-type]
        )  # fmt: skip
        found.append([token for step in steps for token in step.tokens])
    return found


def open_tight(
    folders: tuple[Path, Path], offload: OffloadMode, patch: pytest.MonkeyPatch
) -> TextSession:
    """A session on a device that some of the layers fit into and not all."""
    target, draft = map(str, folders)

    def opened(pages: int) -> TextSession | None:
        """With so many huge pages beside CUDA's libraries, if that is enough."""
        free = GPU_LIBRARY_BYTES + pages * HUGE_PAGE_BYTES
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, free))
        try:
            return Session.open(
                model=target, draft=draft, device="cuda", dtype="float32", offload=offload
            )
        except OutOfMemoryError:
            return None

    def fits(pages: int) -> bool:
        session = opened(pages)
        if session is not None:
            session.close()
        return session is not None

    for pages in range(bisect_left(range(150), True, key=fits), 150):
        session = opened(pages)
        assert session is not None, "less memory was enough"
        if "resident" in session.settings["offload"]:
            return session
        session.close()
    raise AssertionError("no memory was right")


@pytest.mark.parametrize("offload", ["ram", "ssd"])
def test_the_text_of_the_cpu_from_every_tier(
    offload: OffloadMode, tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 sums differ in the last bits only, and no near-tie decides here."""
    folders = save_pair(tmp_path, target=LAYERS)
    target, draft = map(str, folders)
    with Session.open(model=target, draft=draft, device="cpu", dtype="float32") as session:
        expected = texts(session, "autoregressive")
    with open_tight(folders, offload, monkeypatch) as session:
        assert set(session.settings["offload"].split("+")) == {offload, "resident"}
        assert session.ssd_share == (offload == "ssd")
        assert texts(session, "autoregressive") == expected
        assert session.stats.bytes_streamed > 0
        assert session.stats.link_bytes_per_s
        assert texts(session, "specexec") == expected
        assert session.stats.target_passes < len(expected[-1])
        assert session.stats.peak_vram_bytes > 0
