"""The steps of scripts/first_gpu that no other script has; each prints its checks as one JSON line.

    python scripts/first_gpu_steps.py trees

A session on the GPU writes what one on the CPU writes: in float32 both round in other places, but
so little that no choice between two tokens of these texts hangs on it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from first_gpu_report import Check, NotPossibleError
from quantize_gptq import round_to_nearest
from safetensors.torch import load_file, save_file
from specexec_kernels import dispatch
from specexec_kernels.packing import pack_rows, store_zeros

from specexec_cli.config import (
    SELF,
    DtypeName,
    GenerationConfig,
    Method,
    OffloadMode,
    SamplingConfig,
    TreeConfig,
)
from specexec_cli.core import StepResult
from specexec_cli.device import HUGE_PAGE_BYTES, gpus
from specexec_cli.lab.bench.environment import environment
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.link import CudaLink, prepare_cuda
from specexec_cli.offload.memory import HugeBuffer
from specexec_cli.offload.resident import as_blob
from specexec_cli.planning.draft_sizes import quantization_keys
from specexec_cli.planning.memory import GPU_LIBRARY_BYTES, STEP_SLOTS, DoesNotFitError
from specexec_cli.planning.request import TreeRequest
from specexec_cli.session import Session, TextSession
from specexec_cli.session.local_session import LocalSession

DEMO = Path(__file__).parents[1] / "specexec_cli" / "demo"
TREE = TreeConfig(budget=48, max_depth=12, batch=16)
PROMPT = "def read_lines(path):\n"
LOGITS_SHARE = 0.02  # of their norm, by which float16 logits may differ from the CPU's in float32
PINNED_BYTES = 1 << 30


def environment_step() -> list[Check]:
    """What the report needs to be believed, and whether memory can be pinned."""
    device = torch.device("cuda", 0)
    card, obstacle = gpus(), dispatch.triton_obstacle(device)
    buffer = HugeBuffer(PINNED_BYTES, "a test of pinning", "Close other programs")
    blob, link = as_blob(buffer), CudaLink(device)
    pinned = link.register(blob)
    if pinned:
        link.unregister(blob)
    free, total = torch.cuda.mem_get_info(device)
    return [
        Check("machine", True, json.dumps(environment())),
        Check("driver and link", True, ", ".join(
            f"{each.name}: R{each.driver}, PCIe {each.pcie_gen} x{each.pcie_width}" for each in card
        )),
        Check("CUDA", True, f"torch {torch.__version__} for CUDA {torch.version.cuda}"),
        Check("VRAM", True, f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"),
        Check("Triton", obstacle is None, obstacle or "it starts", "it starts"),
        Check("1 GiB of RAM is pinned", pinned, str(pinned), "True"),
    ]  # fmt: skip


def decoded(
    session: TextSession,
    prompt: str | Sequence[int],
    tree: TreeConfig,
    count: int,
    method: Method = "specexec",
) -> list[StepResult]:
    """The steps of a greedy text."""
    return list(
        session.generate(
            prompt, tree=tree, sampling=SamplingConfig(), method=method,
            generation=GenerationConfig(max_tokens=count),
        )
    )  # fmt: skip


def tokens(
    session: TextSession,
    prompt: str | Sequence[int],
    tree: TreeConfig,
    count: int,
    method: Method = "specexec",
) -> list[int]:
    """A greedy text."""
    return [
        token for step in decoded(session, prompt, tree, count, method) for token in step.tokens
    ]


def by_the_cpu(prompt: str | Sequence[int], count: int) -> list[int]:
    """What the demo pair's target writes, one token after another."""
    with Session.open(model="demo", device="cpu", dtype="float32") as session:
        return tokens(session, prompt, TREE, count, "autoregressive")


def same(name: str, found: list[int], expected: list[int]) -> Check:
    """Whether two texts are one, and where they part."""
    pairs = zip(found, expected, strict=False)
    parts = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if parts is None and len(found) == len(expected):
        return Check(name, True, f"all {len(found)} tokens are the CPU's", "the same tokens")
    at = min(len(found), len(expected)) if parts is None else parts
    return Check(name, False, f"they part at token {at} of {len(expected)}", "the same tokens")


@contextmanager
def streaming(
    offload: OffloadMode,
    tree: TreeConfig = TREE,
    draft: str | None = None,
    dtype: DtypeName = "float32",
) -> Iterator[LocalSession]:
    """A session of the demo's target on a GPU that some of its layers fit into and not all.

    Args:
        draft: the pair's own unless told.
    """
    free = GPU_LIBRARY_BYTES
    for _ in range(100):
        with patch.object(torch.cuda, "mem_get_info", lambda device=None, free=free: (free, free)):
            try:
                session = Session.open(
                    model="demo", device="cuda", dtype=dtype, offload=offload,
                    tree=TreeRequest(budget=tree.budget, depth=tree.max_depth, batch=tree.batch),
                    **({"draft": draft} if draft else {}),
                )  # fmt: skip
            except DoesNotFitError as error:
                free = max(free + HUGE_PAGE_BYTES, error.needed_bytes)
                continue
        with session:
            assert isinstance(session, LocalSession)
            if {offload, "resident"} == set(session.settings["offload"].split("+")):
                yield session
                return
        free += HUGE_PAGE_BYTES
    raise AssertionError("no memory was right")


def growth_step(slots: int = STEP_SLOTS) -> list[Check]:
    """The caches of captured draft steps grow in the middle of a text.

    Args:
        slots: of those caches at first.
    """
    with Session.open(model="demo", device="cuda", dtype="float32") as session:
        text = "\n".join(f"    total += values[{number}]" for number in range(1000))
        prompt = session.encode(text)[: slots - 88]
        found = tokens(session, prompt, TREE, 120)
        drafter = session.drafter  # type: ignore[attr-defined]
        found_slots = drafter.rows.state.zeroed_capacity
    return [
        Check("slots of the draft model's cache", found_slots > slots, str(found_slots),
              f"more than {slots}"),
        same("text", found, by_the_cpu(prompt, 120)),
    ]  # fmt: skip


def trees_step() -> list[Check]:
    """Trees of 1024 nodes over layers that are streamed."""
    tree = TreeConfig(budget=1024, max_depth=32, batch=64)
    expected = by_the_cpu(PROMPT, 64)
    with streaming("ram", tree) as session:
        steps = decoded(session, PROMPT, tree, 64)
    largest = max(step.tree_nodes for step in steps)
    found = [token for step in steps for token in step.tokens]
    return [
        Check("nodes of the largest tree", largest > 512, str(largest), "more than 512"),
        same("text", found, expected),
    ]


def self_draft_step(count: int = 64) -> list[Check]:
    """A low-bit copy of the target drafts over the target's cache rows.

    Args:
        count: of tokens.
    """
    tree = replace(TREE, max_depth=6)
    expected = by_the_cpu(PROMPT, count)
    with streaming("ram", tree, SELF) as session:
        found = tokens(session, PROMPT, tree, count)
    with streaming("ram", tree, SELF, "bfloat16") as session:  # as the demo is stored
        plain = tokens(session, PROMPT, tree, count, "autoregressive")
        drafted = tokens(session, PROMPT, tree, count)
        shared, layers = shared_tables(session), session.decision.plan.shared_layers
    alike = sum(a == b for a, b in zip(plain, drafted, strict=False))
    return [
        Check("the target's tables with which its copy drafts", bool(shared), ", ".join(shared),
              "one at least"),
        Check("and its layers", True, str(layers)),
        Check("tokens in bfloat16 that are those of plain decoding",
              alike == len(plain) or not dispatch.uses_triton(torch.device("cuda", 0)),
              f"{alike} of {len(plain)}", "all where Triton attends"),
        same("text", found, expected),
    ]  # fmt: skip


def shared_tables(session: LocalSession) -> list[str]:
    """Tables of the draft model that are the target's, in the same memory."""
    assert session.draft is not None
    own = session.draft.shared_parts(None).tables
    theirs = session.target.model.shared_parts(None).tables
    return [name for name, table in own.items() if table is theirs.get(name)]


def interrupt_step(where: str) -> list[Check]:
    """KeyboardInterrupt while layers are copied, or inside a capture; then another text."""
    expected = by_the_cpu(PROMPT, 40)
    with streaming("ram") as session:
        calls = 0

        def break_off(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 4:  # behind three runs that warm up comes the capture
                raise KeyboardInterrupt
            return step(*args, **kwargs)

        step = StreamedModel.step
        interrupted = False
        if where == "copy":
            session.on_layer(break_off_at(3))
            hook: Any = patch.object(StreamedModel, "step", step)
        else:
            hook = patch.object(StreamedModel, "step", break_off)
        with hook:
            try:
                tokens(session, PROMPT, TREE, 40)
            except KeyboardInterrupt:
                interrupted = True
        session.on_layer(lambda progress: None)
        found = tokens(session, PROMPT, TREE, 40)
    return [
        Check("interrupted", interrupted, str(interrupted), "True"),
        same("the next text", found, expected),
    ]


def break_off_at(layer: int) -> Callable[[Any], None]:
    """A callback that interrupts the pass behind a layer."""

    def callback(progress: Any) -> None:
        if progress.layer == layer:
            raise KeyboardInterrupt

    return callback


def text_step() -> list[Check]:
    """A 4-bit GPTQ target whose inputs are grouped in another order than they lie, in float16.

    float16 rounds, so its text may be another one; its logits must be near the CPU's.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_act_order(Path(folder))
        open_ = {"model": folder, "draft": "demo-draft"}
        with Session.open(**open_, device="cpu", dtype="float32") as session:
            written = tokens(session, PROMPT, TREE, 60, "autoregressive")
            text = [*session.encode(PROMPT), *written]
            expected = session.score(text, 1)[0]
        with Session.open(**open_, device="cuda", dtype="float32") as session:
            found = same("text in float32", tokens(session, PROMPT, TREE, 60), written)
        with Session.open(**open_, device="cuda", dtype="float16") as session:
            logits = session.score(text, 1)[0].cpu()
            wrote = tokens(session, PROMPT, TREE, 60)
    share = float((logits - expected).norm() / expected.norm())
    alike = sum(a == b for a, b in zip(wrote, written, strict=False))
    return [
        found,
        Check("logits in float16", share < LOGITS_SHARE, f"{share:.2%} from the CPU's in float32",
              f"below {LOGITS_SHARE:.0%}"),
        Check("tokens in float16 that are those of float32", True, f"{alike} of {len(wrote)}"),
    ]  # fmt: skip


def write_act_order(folder: Path) -> None:
    """The demo's target with its layers in 4-bit GPTQ, groups chosen across the inputs."""
    group = 128
    generator = torch.Generator().manual_seed(0)
    stored = {}
    for name, weight in load_file(DEMO / "target" / "model.safetensors").items():
        if "_proj." not in name:
            stored[name] = weight.half()
            continue
        outputs, inputs = weight.shape
        order = torch.randperm(inputs, generator=generator)
        sorted_codes, scales = round_to_nearest(weight[:, order].float(), 4, group)
        codes, groups = torch.empty_like(sorted_codes), torch.empty(inputs, dtype=torch.int32)
        codes[:, order] = sorted_codes
        groups[order] = torch.arange(inputs, dtype=torch.int32) // group
        zeros = torch.full((scales.shape[1], outputs), 8)
        linear = name.removesuffix(".weight")
        stored |= {
            f"{linear}.qweight": pack_rows(codes.T, 4), f"{linear}.qzeros": store_zeros(zeros, 4),
            f"{linear}.scales": scales.T.contiguous(), f"{linear}.g_idx": groups,
        }  # fmt: skip
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((DEMO / "target" / "config.json").read_text())
    keys = {**quantization_keys(4, group), "desc_act": True}
    (folder / "config.json").write_text(
        json.dumps({**config, "torch_dtype": "float16", "quantization_config": keys})
    )
    for path in DEMO.joinpath("target").glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())


def memory_step(cap_gb: int, rig: Path) -> list[Check]:
    """What a session reserves on a GPU of so many GB, against its plan and against the card.

    Raises:
        NotPossibleError: the card has fewer.
    """
    device, cap = torch.device("cuda", 0), cap_gb * 10**9
    prepare_cuda()
    free, total = torch.cuda.mem_get_info(device)
    context = total - free  # other programs' memory included
    if free < cap - context:
        raise NotPossibleError(f"a card of {total / 1e9:.0f} GB holds no cap of {cap_gb} GB")
    torch.cuda.set_per_process_memory_fraction((cap - context) / total, device)
    left = cap - context
    with (
        patch.object(torch.cuda, "mem_get_info", lambda device=None: (left, total)),
        Session.open(model=str(rig), draft="demo-draft", device="cuda",
                     tree=TreeRequest(budget=128), context_tokens=1024) as session,
    ):  # fmt: skip
        assert isinstance(session, LocalSession)
        plan = session.decision.plan
        count = len(tokens(session, PROMPT * 80, TREE, 24))
    reserved, planned = torch.cuda.max_memory_reserved(device), plan.peak_vram_bytes
    return [
        Check("layers", True, plan.label),
        Check("tokens", count == 24, str(count), "24"),
        Check("reserved against the plan", reserved <= planned,
              f"{reserved / 1e9:.2f} GB", f"at most {planned / 1e9:.2f} GB"),
        Check("and with the context", reserved + context <= cap,
              f"{(reserved + context) / 1e9:.2f} GB", f"at most {cap_gb} GB"),
    ]  # fmt: skip


STEPS: dict[str, Callable[..., list[Check]]] = {
    "environment": environment_step,
    "text": text_step,
    "growth": growth_step,
    "trees": trees_step,
    "self-draft": self_draft_step,
    "interrupt": interrupt_step,
    "memory": lambda cap_gb, rig: memory_step(int(cap_gb), Path(rig)),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=STEPS)
    parser.add_argument("arguments", nargs="*")
    args = parser.parse_args(argv)
    try:
        found: dict[str, Any] = {"checks": list(map(asdict, STEPS[args.name](*args.arguments)))}
    except NotPossibleError as error:
        found = {"not_possible": str(error)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
