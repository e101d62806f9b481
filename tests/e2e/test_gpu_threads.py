"""On a machine with several GPUs every thread has the one it works on for its own.

The stand-in (tests/fake_cuda.py) refuses what CUDA would do on the first device, or by a context of
0.4 GB there.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    BYTE_VOCAB,
    architecture,
    open_float32,
    random_tokens,
    save_checkpoint,
    save_pair,
)
from computer import Computer
from fake_cuda import fake_cuda, seen
from test_experts import logits_of_a_text, slot_bytes
from torch import Tensor

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.dsi.layout import Layout
from specexec_cli.errors import WorkerError
from specexec_cli.loading import prepare, this_site
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload import link
from specexec_cli.offload.link_probe import probe_link
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.request import Request
from specexec_cli.sampling import Sampler
from specexec_cli.session import Session, dsi_session
from specexec_cli.session.dsi_session import worker_loaders

SECOND = torch.device("cuda", 1)


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What the work gives in a new thread, whose device is the first one, as an engine's is."""

    def run() -> Any:
        with seen():
            return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_passes_and_copies_on_the_second_device_leave_the_first_alone(
    name: str, tmp_path: Path
) -> None:
    """Layers that stay, are copied by a thread, and experts that come one by one."""
    save_checkpoint(tmp_path, architecture(name))
    model = open_float32(tmp_path)
    expected = torch.cat(logits_of_a_text(model))
    model.close()
    experts = {}
    if name == "qwen3-moe":
        each = slot_bytes(tmp_path)
        experts = {"expert_bytes": 3 * each, "device_expert_bytes": 4 * each, "copy_rows": 1}

    def logits() -> Tensor:
        return torch.cat(logits_of_a_text(model)).cpu()

    with fake_cuda(devices=2) as runtime:
        model = ModelSpec(
            device=SECOND, dtype=torch.float32, tiers=["resident", "ram", "ssd"], **experts
        ).open(read_checkpoint(tmp_path))
        torch.testing.assert_close(in_a_thread(logits), expected, rtol=1e-4, atol=1e-4)
        model.close()
        assert runtime.contexts == {1}
        assert runtime.memories[0].peak == 0


def test_draft_steps_are_captured_on_the_device_of_the_model(tmp_path: Path) -> None:
    """Also where another thread goes on with the drafter."""
    save_checkpoint(tmp_path, architecture("llama"))

    def drafter_of(model: StreamedModel) -> ModelDrafter:
        tree = TreeConfig(budget=8, max_depth=4)
        return ModelDrafter(model, Sampler(SamplingConfig()), tree, model.vocab_size)

    def grown(drafter: ModelDrafter, tokens: int) -> list[int]:
        return drafter.grow(random_tokens(tokens), 4).tokens.tolist()  # type: ignore[no-any-return]

    drafter = drafter_of(open_float32(tmp_path, None))
    expected = [grown(drafter, tokens) for tokens in (9, 11)]
    with fake_cuda(devices=2, triton=True) as runtime:
        model = ModelSpec(device=SECOND, dtype=torch.float32, tiers=None).open(
            read_checkpoint(tmp_path)
        )
        drafter = drafter_of(model)
        assert [grown(drafter, 9), in_a_thread(lambda: grown(drafter, 11))] == expected
        assert runtime.contexts == {1}


def test_the_link_of_the_second_device_is_measured_there() -> None:
    with fake_cuda(devices=2) as runtime:
        assert probe_link(SECOND, 16 << 20, 0, repeats=1) > 0
        assert runtime.contexts == {1}


def test_a_server_computes_experts_on_its_gpu_where_the_plan_has_them_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent to its process opens the target as a session of one device would."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of the worker's process
    config = architecture("qwen3-moe")
    config.vocab_size = BYTE_VOCAB
    target, draft = save_pair(tmp_path, target=config)
    each = slot_bytes(target)
    layout = Layout(devices=["cuda:0", "cuda:1"], servers=2)
    with fake_cuda(devices=2) as runtime:
        request = Request(model=str(target), draft=str(draft), context_tokens=64)
        found = prepare(request, workers=layout)
        plan = replace(
            found.decision.plan, expert_bytes=3 * each, device_expert_bytes=4 * each, copy_rows=1
        )
        found = replace(found, decision=replace(found.decision, plan=plan))
        targets, _ = worker_loaders(found, [draft], layout)
        server = pickle.loads(pickle.dumps(targets[1]))()
        with closing(server.cached.model) as model:
            server.score([1, 40, 80, 120], 1)
            assert model.context.chunk_rows == found.decision.prompt_rows
            assert model.source.experts.bytes_copied > 0
        assert runtime.contexts == {1}


def test_a_session_of_workers_makes_no_context_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks what is free by another process, and measures no link."""
    target, draft = map(str, save_pair(tmp_path))

    def start(*loaders: object) -> None:
        raise WorkerError("the workers would start now")

    monkeypatch.setattr(dsi_session, "ProcessWorkers", start)
    with fake_cuda(devices=2) as runtime:
        with pytest.raises(WorkerError, match="would start now"):
            Session.open(model=target, draft=draft, method="dsi", offload="ram")
        assert runtime.contexts == set()


class Matmul:
    """torch.backends.cuda.matmul of some version: what is allowed, by name."""

    def __init__(self, knows_pieces: bool) -> None:
        for dtype in ("fp16", "bf16"):
            name = f"allow_{dtype}_reduced_precision_reduction"
            setattr(self, name, True)
            if knows_pieces:
                setattr(self, f"{name}_split_k", True)


@pytest.fixture
def plain_settings(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the environment nor PyTorch's flags have been touched, nor are they afterwards."""
    for name in link.ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, "")  # so that what the test sets is taken back
        monkeypatch.delenv(name)
    computer.files["/proc/sys/kernel/osrelease"] = "6.1.0-generic\n"


def test_the_allocator_is_set_before_the_card_is_asked_anything(
    monkeypatch: pytest.MonkeyPatch, plain_settings: None
) -> None:
    """The first question starts CUDA, which reads the setting once."""
    asked: list[bool] = []

    def name(device: object = None) -> str:
        asked.append(any(os.environ.get(each) for each in link.ALLOCATOR_SETTINGS))
        return "stand-in"

    with fake_cuda():
        monkeypatch.setattr(torch.cuda, "get_device_name", name)
        this_site(torch.device("cuda", 0))
    assert asked
    assert all(asked)


@pytest.mark.parametrize("knows_pieces", [False, True])
def test_sums_are_never_cut_or_rounded_to_two_bytes(
    knows_pieces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_settings: None
) -> None:
    """Whoever opens a model on a GPU, by a session or not."""
    save_checkpoint(tmp_path, architecture("llama"))
    allowed = Matmul(knows_pieces)
    monkeypatch.setattr(torch.backends.cuda, "matmul", allowed)
    with fake_cuda():
        ModelSpec(device=torch.device("cuda", 0), dtype=torch.float32, tiers=None).open(
            read_checkpoint(tmp_path)
        )
    expected = (False, False) if knows_pieces else False
    assert allowed.allow_fp16_reduced_precision_reduction == expected  # type: ignore[attr-defined]
    assert allowed.allow_bf16_reduced_precision_reduction == expected  # type: ignore[attr-defined]


def test_this_torch_takes_both_flags() -> None:
    matmul = torch.backends.cuda.matmul
    link.prepare_cuda()
    for dtype in ("fp16", "bf16"):
        for flag in ("", "_split_k"):
            name = f"allow_{dtype}_reduced_precision_reduction{flag}"
            assert getattr(matmul, name, False) is False


@pytest.mark.parametrize(
    ("version", "name"),
    [("2.9.1+cu128", "PYTORCH_CUDA_ALLOC_CONF"), ("2.10.0", "PYTORCH_ALLOC_CONF"),
     ("2.13.0+cu130", "PYTORCH_ALLOC_CONF")],
)  # fmt: skip
def test_segments_grow_unless_the_user_says_otherwise(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch, plain_settings: None
) -> None:
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    link.prepare_cuda()
    assert os.environ[name] == "expandable_segments:True"
    assert len(os.environ.keys() & set(link.ALLOCATOR_SETTINGS)) == 1


@pytest.mark.parametrize("name", link.ALLOCATOR_SETTINGS)
def test_the_users_allocator_is_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, plain_settings: None
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    link.prepare_cuda()
    assert os.environ[name] == "max_split_size_mb:64"
    assert len(os.environ.keys() & set(link.ALLOCATOR_SETTINGS)) == 1


def test_under_wsl_segments_do_not_grow(computer: Computer, plain_settings: None) -> None:
    computer.files["/proc/sys/kernel/osrelease"] = "5.15.167.4-microsoft-standard-WSL2\n"
    link.prepare_cuda()
    assert not os.environ.keys() & set(link.ALLOCATOR_SETTINGS)
