"""The way to a GPU without one: no tensor on the wrong side, no wait inside a captured graph.

See tests/fake_cuda.py for what the stand-in checks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import (
    ARCHITECTURES,
    architecture,
    open_float32,
    random_tokens,
    random_tree,
    save_checkpoint,
)
from fake_cuda import CUDA, fake_cuda
from quantized_checkpoints import mixed_bits, save_quantized
from torch import Tensor
from transformers import AutoModelForCausalLM

from specexec_cli.config import SamplingConfig, Tier, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.models import resident_parts
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.checkpoint import TensorRange
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.sampling import Sampler
from specexec_cli.verify.masks import verification_rows


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the root to this one."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


def passes(model: StreamedModel) -> Tensor:
    """Logits of a prompt, then of a tree behind it, then of a token behind one of its paths."""
    tokens, tree = random_tokens(31), random_tree(17, seed=1)
    cache = model.new_state()
    found = [model.forward(PassRows.chain(tokens[:20], 0), cache, [19])]
    rows = verification_rows(tokens[20:], tree, 20)
    found.append(model.forward(rows, cache, range(len(rows.tokens))))
    path = path_to(tree, int(tree.depths.argmax()))
    cache.commit(31, [31 + node for node in path])
    found.append(model.forward(PassRows.chain([5], 31 + len(path)), cache, [0]))
    return torch.cat(found).cpu()


def passes_on_the_device(
    folder: Path, triton: bool, tiers: list[Tier] | None, dtype: torch.dtype
) -> Tensor:
    with fake_cuda(triton=triton):
        model = ModelSpec(device=CUDA, dtype=dtype, tiers=tiers).open(read_checkpoint(folder))
        found = passes(model)
        model.close()
    return found


def passes_on_the_cpu(folder: Path) -> Tensor:
    model = open_float32(folder)
    found = passes(model)
    model.close()
    return found


def assert_like_the_cpu(folder: Path, triton: bool, tiers: list[Tier] | None) -> None:
    expected = passes_on_the_cpu(folder)
    found = passes_on_the_device(folder, triton, tiers, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def in_float32(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tensor]:
    """A checkpoint, and the logits that it ought to have."""
    folder = tmp_path_factory.mktemp(request.param)
    save_checkpoint(folder, architecture(request.param))
    return folder, passes_on_the_cpu(folder)


@pytest.mark.parametrize("triton", [False, True])
def test_every_tier_computes_what_the_cpu_does(
    in_float32: tuple[Path, Tensor], triton: bool
) -> None:
    folder, expected = in_float32
    found = passes_on_the_device(folder, triton, ["resident", "ram", "ssd"], torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_bytes_are_near_float32(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """No operation is given operands of two dtypes, and nothing but precision is lost."""
    save_checkpoint(tmp_path, architecture(name), dtype=dtype)
    expected = passes_on_the_cpu(tmp_path)
    found = passes_on_the_device(tmp_path, False, ["resident", "ram", "ssd"], dtype)
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_packed_weights(bits: int, desc_act: bool, triton: bool, tmp_path: Path) -> None:
    _, packed = save_quantized(tmp_path, choose=lambda linear: mixed_bits(bits), desc_act=desc_act)
    assert_like_the_cpu(packed, triton, ["resident", "ram", "ssd"])


@pytest.mark.parametrize(
    ("name", "tiers", "where"),
    [("llama", ["resident", "ram", "ssd"], "cpu"), ("llama", None, "cuda"),
     ("llama-tied", ["resident", "ram", "ssd"], "cuda")],
)  # fmt: skip
def test_the_table_of_embeddings_is_in_ram_unless_the_head_needs_it(
    name: str, tiers: list[Tier] | None, where: str, tmp_path: Path
) -> None:
    """A target that is streamed has better things for VRAM to hold."""
    save_checkpoint(tmp_path, architecture(name))
    with fake_cuda():
        model = ModelSpec(device=CUDA, dtype=torch.float32, tiers=tiers).open(
            read_checkpoint(tmp_path)
        )
        table = model.skeleton.model.get_input_embeddings().table
        assert table.device.type == where
        head = model.skeleton.model.get_output_embeddings().linear.weight
        assert head.device.type == "cuda"
        model.close()


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_embeddings_and_head_reach_the_device_in_pieces(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is whole in RAM, unless it is to stay there."""
    save_checkpoint(tmp_path, architecture(name))
    expected = passes_on_the_cpu(tmp_path)
    read: dict[str, int] = {}
    read_tensors = resident_parts.read_tensors

    def noted(tensors: list[TensorRange]) -> dict[str, Tensor]:
        read.update({tensor.name: tensor.n_bytes for tensor in tensors})
        return read_tensors(tensors)

    monkeypatch.setattr(resident_parts, "COPY_BYTES", 4096)
    monkeypatch.setattr(resident_parts, "read_tensors", noted)
    with fake_cuda():
        model = ModelSpec(device=CUDA, dtype=torch.float32, tiers="ram").open(
            read_checkpoint(tmp_path)
        )
        found = passes(model)
        stays = {} if name == "llama-tied" else {"model.embed_tokens.weight"}
        large = {tensor for tensor, n_bytes in read.items() if n_bytes > 4096}
        assert large == set(stays)
        model.close()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_a_model_that_stays(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture(name))
    assert_like_the_cpu(tmp_path, True, None)


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("packed_head", [False, True])
@pytest.mark.parametrize("tiers", [["resident", "ram", "ssd"], None])
def test_in_two_bytes_the_head_keeps_its_float32_sums(
    tiers: list[Tier] | None, packed_head: bool, triton: bool, tmp_path: Path
) -> None:
    """Few rows and many, over what transformers' head gives for rows and weights in two bytes."""
    # to bfloat16 Triton's interpreter cuts numbers off, where a GPU rounds them
    dtype = torch.float16 if triton else torch.bfloat16
    plain, packed = save_quantized(tmp_path, lm_head=packed_head)
    own = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    head = own.lm_head.weight
    head.data = head.to(dtype).float()
    between: list[Tensor] = []
    own.model.norm.register_forward_hook(lambda module, args, output: output.to(dtype).float())
    own.model.layers[-1].register_forward_hook(lambda module, args, output: between[-1])
    tokens = random_tokens(21)
    with fake_cuda(triton=triton):
        model = ModelSpec(device=CUDA, dtype=dtype, tiers=tiers).open(read_checkpoint(packed))
        model.skeleton.layers[-1].register_forward_hook(
            lambda module, args, output: between.append(output.cpu())
        )
        for first in (0, 9):
            cache = model.new_state()
            rows = PassRows.chain(tokens, 0)
            found = model.forward(rows, cache, range(first, len(tokens))).cpu()
            assert found.dtype == between[-1].dtype == torch.float32
            with torch.no_grad():
                expected = own(torch.tensor([tokens])).logits[0, first:]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        model.close()


def test_a_drafter_uses_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search, graphs, compaction between trees: the same trees as on the CPU."""
    save_checkpoint(tmp_path, architecture("llama"))
    tree = TreeConfig(budget=16, max_depth=4, batch=5)

    def two_trees(device: torch.device) -> list[list[int]]:
        model = ModelSpec(device=device, dtype=torch.float32, tiers=None).open(
            read_checkpoint(tmp_path)
        )
        drafter = ModelDrafter(model, Sampler(SamplingConfig()), tree, model.vocab_size)
        context = random_tokens(9)
        first = drafter.grow(context, 4)
        path = path_to(first, len(first) - 1)
        tokens = [*first.tokens[path].tolist(), 3]
        drafter.commit(path, tokens)
        return [first.tokens.tolist(), drafter.grow([*context, *tokens], 4).tokens.tolist()]

    expected = two_trees(torch.device("cpu"))
    with fake_cuda(triton=True):
        assert two_trees(CUDA) == expected


@pytest.mark.parametrize("pins_layers", [0, 4])
def test_memory_that_cannot_be_pinned_slows_down_and_nothing_else(
    pins_layers: int, tmp_path: Path
) -> None:
    """All of it, or what there is beyond slabs and a little more. A refusal is an error of CUDA's
    that nobody must meet later, taken for a kernel's own."""
    save_checkpoint(tmp_path, architecture("llama"))
    model = open_float32(tmp_path)
    expected = passes(model)
    largest = max(sum(t.n_bytes for t in each.values()) for each in model.skeleton.layer_tensors)
    model.close()
    told: list[str] = []
    with fake_cuda(pins_bytes=pins_layers * (largest + 8192)) as runtime:
        model = ModelSpec(device=CUDA, dtype=torch.float32, tiers=["ram", "ram", "ssd"]).open(
            read_checkpoint(tmp_path), notice=told.append
        )
        assert runtime.refused
        assert bool(runtime.registered) == (pins_layers > 0)
        found = passes(model)
        model.close()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len([text for text in told if " pin" in text]) == 1


def test_a_pass_that_does_not_fit_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nlots")

    save_checkpoint(tmp_path, architecture("llama"))
    with fake_cuda():
        model = ModelSpec(device=CUDA, dtype=torch.float32, tiers="ram").open(
            read_checkpoint(tmp_path)
        )
        monkeypatch.setattr(model.skeleton.model, "forward", full)
        with pytest.raises(OutOfMemoryError, match=r"ran out in a pass of 9 rows.*`budget`"):
            model.forward(PassRows.chain(random_tokens(9), 0), model.new_state(), [8])
        model.close()
