"""On a GPU a committed row has the same bits in a pass by itself and in one of many rows.

Held on a stand-in for a GPU: by the shapes that PyTorch is asked to multiply and to sum, and bit by
bit with our kernels in Triton's interpreter; on a GPU bit by bit (pytest -m gpu).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    architecture,
    random_tokens,
    random_tree,
    save_checkpoint,
    save_pair,
)
from fake_cuda import CUDA, fake_cuda, watched
from quantized_checkpoints import save_quantized
from specexec_kernels.formats.base import PackedWeight
from torch import Tensor

from specexec_cli.config import Tier
from specexec_cli.models import attention
from specexec_cli.models.linear import mixed_linear
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.link import prepare_cuda
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.memory import BLOCK_ROWS
from specexec_cli.planning.request import TreeRequest
from specexec_cli.session import Session
from specexec_cli.verify.masks import verification_rows

TIERS: list[Tier] = ["resident", "ram", "ssd"]
aten = torch.ops.aten


def opened(folder: Path, dtype: torch.dtype) -> StreamedModel:
    return ModelSpec(device=CUDA, dtype=dtype, tiers=TIERS).open(read_checkpoint(folder))


@contextmanager
def rows_asked_for(found: set[tuple[str, int]]) -> Iterator[None]:
    """Notes of every product and mean on the device how many rows it is given."""

    def noted(packet: Any, args: tuple[Any, ...], result: Any) -> None:
        if packet in (aten.mm, aten.linear):
            found.add(("product", args[0].shape[0]))
        elif packet is aten.addmm:
            found.add(("product", args[1].shape[0]))
        elif packet is aten.mean:
            found.add(("mean", args[0].shape[1]))

    with watched(noted):
        yield


def passes_of_many_sizes(model: StreamedModel) -> None:
    for count in (1, 65, 2 * BLOCK_ROWS + 3):
        rows = PassRows.chain(random_tokens(count), 0)
        model.forward(rows, model.new_state(), [*range(min(count, 9))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "qwen3-moe", "gpt-bigcode", "packed"])
def test_pytorch_is_asked_for_one_number_of_rows(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tmp_path
    if name == "packed":
        _, folder = save_quantized(tmp_path, lm_head=True)
    else:
        save_checkpoint(tmp_path, architecture(name), dtype=dtype)
    found: set[tuple[str, int]] = set()
    with fake_cuda():
        model = opened(folder, dtype)
        with rows_asked_for(found):
            passes_of_many_sizes(model)
        model.close()
    assert {rows for what, rows in found if what == "product"} == {BLOCK_ROWS}
    means = {rows for what, rows in found if what == "mean"}
    # a LayerNorm is a kernel of its own, which takes each row by itself
    assert (min(means) >= BLOCK_ROWS) if name != "gpt-bigcode" else not means


def test_a_full_tree_of_the_default_budget_is_one_block(tmp_path: Path) -> None:
    """Its root is among the rows of the block: seven products a layer, and not fourteen."""
    target, draft = map(str, save_pair(tmp_path))
    asked: list[int] = []

    def noted(packet: Any, args: tuple[Any, ...], result: Any) -> None:
        if packet in (aten.mm, aten.linear, aten.addmm):
            asked.append(1)

    with fake_cuda(), Session.open(
        model=target, draft=draft, device="cuda", dtype="float16", offload="ram",
        tree=TreeRequest(policy="fixed"),
    ) as session:  # fmt: skip
        assert session.pair.tree.budget == BLOCK_ROWS - 1
        tree = random_tree(session.pair.tree.budget, seed=0)
        with watched(noted):
            session.target.verify([5], tree)  # type: ignore[attr-defined]
        assert len(asked) == 7 * session.layers + 1  # the head's


def test_a_draft_model_computes_no_more_rows_than_it_has(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"), dtype=torch.float16)
    found: set[tuple[str, int]] = set()
    with fake_cuda():
        model = ModelSpec(device=CUDA, dtype=torch.float16, tiers=None, own_rows=False).open(
            read_checkpoint(tmp_path)
        )
        with rows_asked_for(found):
            model.forward(PassRows.chain(random_tokens(5), 0), model.new_state(), [0, 4])
    assert found == {("product", 5), ("product", 2), ("mean", 5)}


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Of two bytes; to bfloat16 Triton's interpreter cuts numbers off, where a GPU rounds them."""
    if request.param == "gpu":
        yield torch.bfloat16
        return
    with fake_cuda(triton=True):
        yield torch.float16


@pytest.mark.parametrize("kind", ["plain", "windows", "packed"])
def test_bits_do_not_depend_on_the_pass(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Logits and cache rows of a text in one pass, in parts, with single rows, before a tree."""
    folder = tmp_path
    if kind == "packed":
        _, folder = save_quantized(tmp_path)
    else:
        name = "llama" if kind == "plain" else "mistral"
        save_checkpoint(tmp_path, architecture(name), dtype=torch.float16)
    tokens = random_tokens(65)

    def run(parts: list[int], tree_nodes: int) -> tuple[Tensor, list[Tensor]]:
        cache, logits, start = model.new_state(), [], 0
        for count in parts:
            own = tokens[start : start + count]
            rows = PassRows.chain(own, start)
            if tree_nodes and start + count == len(tokens):
                rows = verification_rows(own, random_tree(tree_nodes, seed=1), start)
            logits.append(model.forward(rows, cache, range(count)).cpu())
            start += count
        kept = [
            each[:, :, : len(tokens)].cpu()
            for layer in cache.layers
            for each in (layer.keys, layer.values)
        ]
        return torch.cat(logits), kept

    model = opened(folder, dtype)
    expected, expected_rows = run([65], 0)
    for parts, nodes in (([40, 1, 1, 1, 22], 0), ([1, 33, 31], 0), ([50, 15], 20)):
        found, rows = run(parts, nodes)
        assert torch.equal(found, expected), parts
        assert all(map(torch.equal, rows, expected_rows)), parts
    model.close()


@pytest.mark.parametrize("kind", ["llama", "mistral"])  # mistral's layers have windows
def test_a_node_has_the_bits_that_it_will_have_once_committed(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, architecture(kind), dtype=torch.float16)
    prompt, tree = random_tokens(40), random_tree(24, seed=3)
    node, path = int(np.argmax(tree.depths)), []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    assert path != list(range(len(path))), "its slots are not in place"
    model = opened(tmp_path, dtype)

    drafted = model.new_state()
    rows = verification_rows(prompt, tree, 0)
    logits = model.forward(rows, drafted, [len(prompt) + node for node in path])
    drafted.commit(len(prompt), [len(prompt) + node for node in path])

    plain, text = model.new_state(), [*prompt, *tree.tokens[path].tolist()]
    model.forward(PassRows.chain(text[:-1], 0), plain, [0])
    last = model.forward(PassRows.chain(text[-1:], len(text) - 1), plain, [0])
    assert torch.equal(last[0], logits[-1])
    for ours, theirs in zip(drafted.layers, plain.layers, strict=True):
        for found, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert torch.equal(found[:, :, : len(text)], expected[:, :, : len(text)])
    model.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(2048, 512), (4096, 4096), (8192, 28672), (28672, 8192)]
)
def test_bits_do_not_depend_on_the_place_in_a_block(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    """Of matrices that a library may share out among a GPU's cores in other ways than tiles."""
    prepare_cuda()
    torch.manual_seed(0)
    others = torch.randn(BLOCK_ROWS, inputs, dtype=dtype, device=CUDA)
    row = torch.randn(inputs, dtype=dtype, device=CUDA)
    weight = torch.randn(outputs, inputs, dtype=dtype, device=CUDA)

    def at(place: int) -> Tensor:
        rows = others.clone()
        rows[place] = row
        return mixed_linear(rows, weight, None, BLOCK_ROWS)[place]

    expected = at(0)
    assert all(torch.equal(at(place), expected) for place in range(1, BLOCK_ROWS))


@pytest.mark.parametrize("attends", [False, True])
def test_a_prompt_converts_each_stored_matrix_once_for_all_rows_that_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attends: bool
) -> None:
    """Its logits do not tell how many rows those are, bit for bit where rows do not attend.

    Where they do, PyTorch attends here in the place of the GPU's kernel, and on some CPUs it rounds
    by the shape of a product.
    """
    attended: list[int] = []

    def own_row(module: object, query: Tensor, *others: object, **more: object) -> Any:
        attended.append(query.shape[2])
        return query.transpose(1, 2), None

    if not attends:
        monkeypatch.setattr(attention, "sdpa_attention_forward", own_row)
    _, folder = save_quantized(tmp_path)
    converted: list[int] = []
    convert = PackedWeight.unpack_to

    def counted(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        converted.append(1)
        return convert(weight, dtype)

    monkeypatch.setattr(PackedWeight, "unpack_to", counted)
    prompt, logits, counts = PassRows.chain(random_tokens(700), 0), [], []
    with fake_cuda():
        for chunk_rows in (None, 768):
            model = ModelSpec(
                device=CUDA, dtype=torch.float16, tiers=TIERS, chunk_rows=chunk_rows
            ).open(read_checkpoint(folder))
            converted.clear()
            logits.append(model.forward(prompt, model.new_state(), [0, 600, 699]).cpu())
            counts.append(len(converted))
            model.close()
    linears = len(TIERS) * 7
    assert counts == [2 * linears, linears]
    if attends:
        allowed = 4 * torch.finfo(torch.float16).eps * float(logits[0].abs().max())
        torch.testing.assert_close(*logits, rtol=0.0, atol=allowed)
    else:
        assert attended == [512, 188] * len(TIERS) + [700] * len(TIERS)
        assert torch.equal(*logits)
