"""What lives on a GPU is what was planned, byte by byte, on the stand-in for one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from checkpoints import byte_llama, save_pair
from fake_cuda import fake_cuda

from specexec_cli.config import GenerationConfig, SamplingConfig, TreeConfig
from specexec_cli.models.linear import MixedLinear
from specexec_cli.models.packed_linear import QuantizedLinear
from specexec_cli.offload.cuda import DeviceStream
from specexec_cli.planning import speed
from specexec_cli.planning.request import TreeRequest
from specexec_cli.sampling import noise_there
from specexec_cli.session import Session
from specexec_cli.session.local_session import LocalSession

TREE = TreeConfig(budget=96, max_depth=24, batch=16)
# a vocabulary beside which little else counts, as beside one of 128k words
CONFIG = byte_llama(
    vocab_size=20_000, hidden_size=64, intermediate_size=96, num_hidden_layers=6,
)  # fmt: skip


def saved_models(folder: Path, own_copy: bool) -> dict[str, str]:
    """A pair, or a target that drafts for itself, in groups of 64 inputs."""
    config = copy.deepcopy(CONFIG)
    if own_copy:
        config.intermediate_size = 128
    target, draft = save_pair(folder, target=config, noise=0.01)
    return {"model": str(target), "draft": "self" if own_copy else str(draft)}


@pytest.mark.parametrize(
    ("own_copy", "gain"), [(False, 0.0), (True, 9.0), (True, -1.0)],
    ids=["a draft model", "layers shared", "copies of all layers"],
)  # fmt: skip
def test_no_more_lives_on_the_device_than_was_planned(
    own_copy: bool,
    gain: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Without what is set aside for libraries, which the stand-in has none of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(speed, "_GAIN_OF_EXACT_LAYERS", {4: gain})
    free = 80_000_000  # too little for all layers
    if own_copy:
        free -= 6_000_000  # its tables and cache rows are the target's
    noise_there.cache_clear()
    models = saved_models(tmp_path, own_copy)
    with fake_cuda(bare=True) as runtime:
        runtime.free_bytes = free
        with Session.open(**models, device="cuda", dtype="float32", offload="ram",
                          context_tokens=256,
                          tree=TreeRequest(budget=TREE.budget, depth=TREE.max_depth,
                                           batch=TREE.batch)) as session:  # fmt: skip
            assert isinstance(session, LocalSession)
            plan = session.decision.plan
            assert {"resident", "ram"} == set(plan.tiers), "it is tight, and streams"
            assert plan.shared_layers == (plan.tiers.count("resident") if gain > 0 else 0)
            opened = runtime.memory.peak
            # sampled, so that noise is kept for more positions than are counted at once
            steps = session.generate(
                "def f(x):\n" * 4, tree=TREE, sampling=SamplingConfig(temperature=0.8, seed=1),
                generation=GenerationConfig(max_tokens=16 if own_copy else 48),
            )  # fmt: skip
            assert sum(len(step.tokens) for step in steps) > 1
            _assert_shared(session)
            parts = dict(plan.vram)
            assert opened <= plan.peak_vram_bytes
            assert runtime.memory.peak <= plan.peak_vram_bytes, parts
            if own_copy:
                return  # which expands few nodes
            # What captures hold is not seen here. Without the scores the rest would be too small.
            seen = plan.peak_vram_bytes - parts["draft steps"]
            assert runtime.memory.peak > seen - parts["scores of draft nodes"], parts
    noise_there.cache_clear()


def _assert_shared(session: LocalSession) -> None:
    """What a copy of the target shares is there once, in the memory where the target has it."""
    target, draft = session.target.model, session.draft
    assert draft is not None
    work, exact = session.decision.work, target.shared_parts(None).tables
    own = draft.shared_parts(None).tables
    shared = {name for name, table in own.items() if table is exact.get(name)}
    assert shared == ({"lm_head.weight"} if work.shares_tables else set())
    if not work.shares_layers:
        return
    assert isinstance(target.source, DeviceStream)
    for index, layer in enumerate(draft.skeleton.layers):
        linear = layer.layer.mlp.gate_proj
        stored = target.source.staying.get(index, {})
        weights = [each for name, each in stored.items() if name.endswith("gate_proj.weight")]
        assert isinstance(linear, MixedLinear if weights else QuantizedLinear)
        for weight in weights:
            assert linear.weight.inner.data_ptr() == weight.inner.data_ptr()
