"""What lives on a GPU is what was planned, byte by byte, on the stand-in for one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import byte_llama, save_pair
from fake_cuda import fake_cuda

from specexec_cli import loading
from specexec_cli.config import GenerationConfig, SamplingConfig, TreeConfig
from specexec_cli.planning import memory
from specexec_cli.planning.request import TreeRequest
from specexec_cli.sampling import _moved_noise
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession

TREE = TreeConfig(budget=96, max_depth=24, batch=16)
# a vocabulary beside which little else counts, as beside one of 128k words
CONFIG = byte_llama(
    vocab_size=20_000, hidden_size=64, intermediate_size=96, num_hidden_layers=6,
)  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    target, draft = save_pair(tmp_path, target=CONFIG, noise=0.01)
    return {"target": str(target), "draft": str(draft)}


def test_no_more_lives_on_the_device_than_was_planned(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what is set aside for libraries, which the stand-in has none of."""
    monkeypatch.setattr(memory, "SCRATCH_BYTES", 0)
    monkeypatch.setattr(loading, "GPU_LIBRARY_BYTES", 0)
    monkeypatch.setattr(loading, "_measured", lambda *args: {})
    free = 80_000_000  # too little for all layers
    _moved_noise.cache_clear()
    with fake_cuda() as runtime:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, free))
        with Session.open(**folders, device="cuda", dtype="float32", offload="ram",
                          context_tokens=256,
                          tree=TreeRequest(budget=TREE.budget, depth=TREE.max_depth,
                                           batch=TREE.batch)) as session:  # fmt: skip
            assert isinstance(session, LocalSession)
            plan = session._decision.plan
            assert {"resident", "ram"} == set(plan.tiers), "it is tight, and streams"
            opened = runtime.memory.peak
            # sampled, so that noise is kept for more positions than are counted at once
            steps = session.generate(
                "def f(x):\n" * 4, tree=TREE, sampling=SamplingConfig(temperature=0.8, seed=1),
                generation=GenerationConfig(max_tokens=48),
            )  # fmt: skip
            assert sum(len(step.tokens) for step in steps) > 1
            parts = dict(plan.vram)
            assert opened <= plan.peak_vram_bytes
            assert runtime.memory.peak <= plan.peak_vram_bytes, parts
            # What captures hold is not seen here. Without the scores the rest would be too small.
            seen = plan.peak_vram_bytes - parts["draft steps"]
            assert runtime.memory.peak > seen - parts["scores of draft nodes"], parts
    _moved_noise.cache_clear()
