"""Sessions over a mixture beside the stand-in for a GPU, wherever experts are computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from checkpoints import ARCHITECTURES, BYTE_VOCAB, save_byte_tokenizer
from fake_cuda import fake_cuda
from quantized_checkpoints import GROUP, save_quantized
from specexec_kernels.formats.awq import Awq

from specexec_cli import loading
from specexec_cli.config import SUFFIX, ExpertPlace, GenerationConfig, SamplingConfig
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.offload.expert_device import DeviceExperts
from specexec_cli.planning.placement import place
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.planning.resolve import resolve
from specexec_cli.session import open_session
from specexec_cli.session.local_session import LocalSession

# many experts of which a row needs few, so that they come one by one
FINE = {"vocab_size": BYTE_VOCAB, "num_hidden_layers": 2, "num_experts": 64,
        "num_experts_per_tok": 3, "moe_intermediate_size": 384}  # fmt: skip
METHODS = ("autoregressive", SUFFIX)  # with trees, without a draft model


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A mixture whose experts are packed one by one as AWQ, and what it computes as plain."""
    folder = tmp_path_factory.mktemp("mixture")
    awq = Awq(GROUP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "fine", (transformers.Qwen3MoeConfig, FINE))
        plain, packed = save_quantized(folder, "fine", lambda name: awq, sym=False)
    for each in (plain, packed):
        save_byte_tokenizer(each)
    return {"plain": plain, "awq": packed}


def request(target: Path, **more: object) -> Request:
    return Request(model=str(target), draft=SUFFIX, dtype="float32", context_tokens=64,
                   tree=TreeRequest(budget=8, depth=4, policy="fixed"), **more)  # fmt: skip


def texts(session: LocalSession, temperature: float) -> list[list[int]]:
    written = []
    for method in METHODS:
        steps = session.generate(
            "a b a b a b", method=method, sampling=SamplingConfig(temperature=temperature, seed=3),
            generation=GenerationConfig(max_tokens=8),
        )  # fmt: skip
        written.append([token for step in steps for token in step.tokens])
    return written


def opened(asked: Request) -> LocalSession:
    session = open_session(asked)
    assert isinstance(session, LocalSession)
    return session


def little_vram(asked: Request) -> int:
    """Bytes, so few that some experts, and not all, have slots of their own in VRAM."""
    found = resolve(asked, loading.this_site(loading.pick_device("cuda")))
    for free in range(1 << 20, 1 << 26, 1 << 17):
        machine = replace(found.machine, vram_bytes=free)
        try:
            plan = place("auto", found.target.sizes, None, found.work, machine, asked.experts)
        except OutOfMemoryError:
            continue
        if plan.expert_bytes and (plan.device_expert_bytes or asked.experts == "cpu"):
            return free
    raise AssertionError("no memory in which experts come one by one")


@pytest.mark.parametrize("kind", ["plain", "awq"])
@pytest.mark.parametrize("where", ["auto", "gpu", "cpu"])
def test_the_text_is_the_plain_one_wherever_experts_are_computed(
    where: ExpertPlace, kind: str, mixtures: dict[str, Path]
) -> None:
    expected = {}
    with opened(request(mixtures["plain"], device="cpu")) as session:
        for temperature in (0.0, 0.8):
            expected[temperature] = texts(session, temperature)[0]
    with fake_cuda(bare=True) as runtime:
        asked = request(mixtures[kind], device="cuda", experts=where)
        runtime.free_bytes = little_vram(asked)
        with opened(asked) as session:
            plan = session.decision.plan
            assert (plan.copy_rows is None) == (where == "cpu")
            experts = session.target.model.source.experts  # type: ignore[union-attr]
            assert isinstance(experts, DeviceExperts)
            for temperature in (0.0, 0.8):
                for written in texts(session, temperature):
                    assert written == expected[temperature]
                    assert len(written) > 4
            assert experts.store.touched > 0
            assert (experts.bytes_copied > 0) == (where != "cpu")
            assert (experts.hits > 0) == (where != "cpu")
