"""What a plan takes a pass to start and to move on a GPU is what a pass of the running code does.

Of README's table it is held for every pair: for its architecture and format in small.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, random_tokens
from computer import Computer
from fake_cuda import CUDA, Counts, counted, fake_cuda
from gguf_toys import TOYS, save_toy
from gpt_oss_checkpoints import gpt_oss_config, save_mxfp4
from quantized_checkpoints import GROUP, V1, random_packed, save_quantized
from safetensors.torch import load_file, save_file
from specexec_kernels.formats.awq import Awq

from specexec_cli.core import DraftTree
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.machine import ASSUMED, described_site
from specexec_cli.planning.machine_rates import card_named
from specexec_cli.planning.pass_time import Launches, asked_of_each, pass_launches, pass_time
from specexec_cli.planning.request import Request
from specexec_cli.planning.resolve import resolve
from specexec_cli.planning.sizes import ModelBytes, checkpoint_bytes
from specexec_cli.verify.verifier import LocalTarget

README = Path(__file__).parents[2] / "README.md"
PREFIX = 8
OFF = 0.25  # of what is counted: architectures differ, and rows by which experts they choose
HYBRID = {"hidden_size": 64, "intermediate_size": 128, "linear_num_key_heads": 4,
          "linear_num_value_heads": 8, "num_attention_heads": 4, "head_dim": 16}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A small model, and how a session opens it.

    Attributes:
        kind: architecture and format.
        one_by_one: whether a mixture's experts are kept in slots, instead of with their layers.
        streamed: whether layers come from RAM.
    """

    kind: str
    rows: int = 1
    drafts: bool = False
    one_by_one: bool = False
    streamed: bool = False


# The last seven are of the architectures and formats of README's pairs.
CASES = [
    Case("llama gptq"), Case("llama gptq", 128), Case("qwen3_moe gptq"),
    Case("qwen3_moe gptq", 64), Case("qwen3_moe gptq", one_by_one=True),
    Case("qwen3_moe gptq", 64, one_by_one=True), Case("qwen3 awq"), Case("mistral awq"),
    Case("gpt_oss mxfp4"), Case("gpt_oss mxfp4", one_by_one=True),
    Case("qwen3_5_text gptq", 9, streamed=True), Case("qwen3_5_text", 16, drafts=True),
    Case("qwen3 gptq", 16, drafts=True),
]  # fmt: skip


def saved(kind: str, folder: Path) -> Path:
    """A checkpoint of a kind."""
    if kind == "gpt_oss mxfp4":
        return save_mxfp4(folder, gpt_oss_config(num_local_experts=8, num_experts_per_tok=4))[1]
    if not kind.startswith("qwen3_5_text"):
        name, _, method = kind.replace("_", "-").partition(" ")
        packed = Awq(group=GROUP) if method == "awq" else V1
        return save_quantized(folder, name, lambda linear: packed)[1]
    toy = TOYS["qwen3_5"]
    save_toy(replace(toy, options={**toy.options, **HYBRID}), folder)
    if kind.endswith("gptq"):  # of every matrix in a layer, as in the published file
        path, stored = folder / "model.safetensors", {}
        for index, (name, tensor) in enumerate(load_file(path).items()):
            if ".layers." not in name or tensor.ndim != 2:
                stored[name] = tensor.half()
                continue
            packed = random_packed(tuple(tensor.shape), V1, sym=True, shuffled=False, seed=index)
            linear = name.removesuffix(".weight")
            parts = {leaf: part for leaf, part in packed.tensors.items() if leaf != "g_idx"}
            stored |= {f"{linear}.{leaf}": part for leaf, part in parts.items()}
        save_file(stored, path, {"format": "pt"})
        edit_json(folder / "config.json", quantization_config={
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False,
        })  # fmt: skip
    return folder


@pytest.fixture(name="folder_of", scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a kind, which is written once."""
    return cache(lambda kind: saved(kind, tmp_path_factory.mktemp("model")))


def of_a_pass(case: Case, folder: Path) -> tuple[Counts, int]:
    """What a pass over a token and drafts starts, and the bytes that come over a link, behind a
    pass that warms the model up."""
    extra: dict[str, Any] = {"tiers": "ram" if case.streamed else "resident"}
    if case.drafts:
        extra = {"tiers": None}
    if case.one_by_one:
        extra |= {"expert_bytes": 1 << 22, "device_expert_bytes": 1 << 30, "copy_rows": 1}
    first, *drafts = random_tokens(case.rows)
    with fake_cuda(triton=True):
        model = ModelSpec(
            device=CUDA, dtype=torch.float16, own_rows=not case.drafts, **extra
        ).open(read_checkpoint(folder))  # fmt: skip
        target = LocalTarget(model)
        target.verify(random_tokens(PREFIX), DraftTree.empty())
        target.commit([])
        before = model.bytes_streamed
        with counted() as counts:
            logits = target.verify([first], DraftTree.chain(drafts))
        n_bytes = model.bytes_streamed - before
        assert len(logits) == case.rows
        model.close()
    return counts, n_bytes


def planned(case: Case, sizes: ModelBytes) -> Launches:
    """What a plan counts for a case."""
    asked = asked_of_each(sizes.experts, case.rows, one_by_one=case.one_by_one)
    streamed = case.streamed * len(sizes.layers)
    return pass_launches(sizes, asked, streamed=streamed, drafts=case.drafts)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plan_counts_what_a_pass_starts_and_moves(
    case: Case, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(case.kind)
    sizes = checkpoint_bytes(read_checkpoint(folder))
    found, n_bytes = of_a_pass(case, folder)
    told = planned(case, sizes)
    for what in ("operations", "kernels", "waits"):
        assert getattr(told, what) == pytest.approx(getattr(found, what), rel=OFF), (what, found)
    if not case.one_by_one:
        assert n_bytes == (sum(sizes.layers) if case.streamed else 0)


def table() -> list[tuple[str, int, str]]:
    """Card, GB of RAM and pairs of each line in README's table."""
    found = re.findall(
        r"^\| (RTX [^(]+) \(\d+ GB\), (\d+) GB(.*)$", README.read_text("utf-8"), re.MULTILINE
    )
    assert found
    return [
        (card, int(ram_gb), pair) for card, ram_gb, rest in found
        for pair in dict.fromkeys(re.findall(r"`([^`]+)`", rest))
    ]  # fmt: skip


def kind_of(sizes: ModelBytes) -> str:
    return f"{sizes.model_type} {sizes.packed_as}".strip()


@pytest.mark.parametrize(("card", "ram_gb", "pair"), table())
def test_plans_of_readmes_pairs_are_of_what_is_counted(
    card: str, ram_gb: int, pair: str, folder_of: Callable[[str], Path], computer: Computer
) -> None:
    """A pass of the plan starts as much a layer as one of the small model, counted above."""
    site = described_site(
        ram_bytes=ram_gb * 10**9, ssd_bytes_per_s=ASSUMED["ssd"],
        memory_bytes_per_s=ASSUMED["CPU memory"], card=card_named(card),
    )  # fmt: skip
    decision = resolve(Request(model=pair), site)
    plan = decision.plan
    case = Case(kind_of(plan.target), one_by_one=bool(plan.expert_bytes))
    assert case.kind in {each.kind for each in CASES if each.one_by_one == case.one_by_one}
    assert plan.work.verify_rows == decision.tree.budget + 1
    if decision.draft is not None:
        drafts = {each.kind for each in CASES if each.drafts}
        assert kind_of(decision.draft.sizes) in drafts
    streamed = [
        size for size, tier in zip(plan.target.layers, plan.tiers, strict=True)
        if tier != "resident"
    ]  # fmt: skip
    told = pass_time(plan, 1)
    if not plan.expert_bytes:
        assert told.link_bytes - plan.kv_link_bytes == sum(streamed)
    if plan.replays:
        return
    small = checkpoint_bytes(read_checkpoint(folder_of(case.kind)))
    outside = pass_launches(replace(small, layers=(), layer_states=()), None)
    of_layers = planned(case, small) + outside.times(-1)
    of_pass = of_layers.times(len(plan.tiers) / len(small.layers)) + outside
    assert told.starting_s == pytest.approx(of_pass.host_s(plan.machine.gpu))
    waits = of_pass.waits + len(streamed)
    assert told.waits_s == pytest.approx(waits * plan.machine.gpu.wait_s)


def test_waits_are_what_the_host_waits_for() -> None:
    """Results that it reads and ordinary memory that is copied, not what is only started."""
    with fake_cuda(), counted() as counts:
        rows = torch.ones(4, device=CUDA)
        pinned = torch.ones(4).pin_memory()
        rows += pinned.to(CUDA, non_blocking=True)
        before = counts.waits
        rows.view(2, 2).sum()
        assert counts.waits == before
        rows.sum().item()
        rows += torch.ones(4).to(CUDA)
        rows[torch.tensor([1])]
        assert counts.waits == before + 3
