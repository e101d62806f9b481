"""Draft steps over static buffers say what plain passes say; on a GPU, so do their graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fake_cuda as fake
import numpy as np
import pytest
import torch
from checkpoints import architecture, assert_fresh, random_tokens, save_checkpoint
from fake_cuda import fake_cuda
from slot_toys import few_slots
from torch import Tensor, nn

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.models import attention, graphs
from specexec_cli.models.graphs import StepRunner
from specexec_cli.models.kv_cache import SlotCache, SlotLayer
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.memory import PART_SLOTS
from specexec_cli.sampling import Sampler

TREE = TreeConfig(budget=24, max_depth=6, batch=5)
GRAPHS = ["llama", "mistral", "gemma2", "gemma3", "gpt-bigcode"]


def opened(folder: Path, device: str = "cpu") -> StreamedModel:
    """A draft model: loaded to stay."""
    return ModelSpec(device=torch.device(device), dtype=torch.float32, tiers=None).open(
        read_checkpoint(folder)
    )


def drafter_of(model: StreamedModel, stepping: bool) -> ModelDrafter:
    drafter = ModelDrafter(model, Sampler(SamplingConfig()), TREE, model.vocab_size)
    if not stepping:
        drafter.rows.steps = None
    elif model.device.type == "cpu":  # on a GPU that is the drafter's own choice
        drafter.rows.steps = StepRunner(model, drafter.rows.state, capture=False)
    return drafter


def assert_same_trees(
    stepping: ModelDrafter, plain: ModelDrafter, rounds: int, lengths: Sequence[int] = (9, 80, 1)
) -> None:
    """The same trees from the same accepted paths, prompt after prompt of these lengths."""
    rng = np.random.default_rng(0)
    for seed, length in enumerate(lengths):
        prompt = random_tokens(length, seed=seed)
        context = list(prompt)
        for _ in range(rounds):
            ours, theirs = stepping.grow(context, 6), plain.grow(context, 6)
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert ours.parents.tolist() == theirs.parents.tolist()
            np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-4)
            path, node = [], -1
            for _ in range(int(rng.integers(0, 5))):
                children = np.flatnonzero(ours.parents == node)
                if len(children) == 0:
                    break
                node = int(rng.choice(children))
                path.append(node)
            tokens = [*ours.tokens[path].tolist(), int(rng.integers(0, 64))]
            for drafter in (stepping, plain):
                drafter.commit(path, tokens)
            context += tokens


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt-bigcode", "mixtral"])
def test_steps_draft_the_same_trees(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_slots(monkeypatch, 32)  # buffers grow on the way
    save_checkpoint(tmp_path, architecture(name))
    with_steps, without = opened(tmp_path), opened(tmp_path)
    stepping = drafter_of(with_steps, stepping=True)
    assert_same_trees(stepping, drafter_of(without, stepping=False), rounds=4)
    assert stepping.rows.state.capacity == 112
    assert stepping.rows.steps is not None
    buckets = set(stepping.rows.steps.prepared)
    assert {1, 8} <= buckets, "a bonus token and a batch of five have buckets of their own"


def test_a_bucket_is_prepared_once_whatever_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int] = []
    original = graphs.Step.__init__

    def counted(
        step: graphs.Step, model: StreamedModel, cache: SlotCache, bucket: int, masks: graphs.Masks
    ) -> None:
        prepared.append(bucket)
        original(step, model, cache, bucket, masks)

    monkeypatch.setattr(graphs.Step, "__init__", counted)
    save_checkpoint(tmp_path, architecture("llama"))
    model = opened(tmp_path)
    assert_same_trees(drafter_of(model, True), drafter_of(opened(tmp_path), False), rounds=4)
    assert sorted(prepared) == sorted(set(prepared))


def test_an_aborted_step_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    model = opened(tmp_path)
    stepping, plain = drafter_of(model, True), drafter_of(opened(tmp_path), False)
    context = random_tokens(9)
    stepping.grow(context, 6)

    def stop(index: int) -> None:
        raise KeyboardInterrupt

    model.on_layer = stop
    with pytest.raises(KeyboardInterrupt):
        stepping.grow([*context, 5], 6)
    model.on_layer = lambda index: None
    ours, theirs = stepping.grow([*context, 5], 6), plain.grow([*context, 5], 6)
    assert ours.tokens.tolist() == theirs.tokens.tolist()


def assert_goes_on(stepping: ModelDrafter, context: list[int]) -> None:
    """The tree of a new drafter, and a cache as after a prefill."""
    fresh = drafter_of(stepping.rows.model, stepping=False)
    ours, expected = stepping.grow(context, 6), fresh.grow(context, 6)
    assert ours.tokens.tolist() == expected.tokens.tolist()
    assert ours.parents.tolist() == expected.parents.tolist()
    stepping.commit([0], [int(ours.tokens[0]), 1])
    assert_fresh(stepping.rows.model, stepping.rows.state, stepping.rows.tokens)


def out_of_memory(*args: object) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n20.00 MiB.")


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_first_pass_that_fails_is_begun_again(layer: int, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture("llama"))
    model = opened(tmp_path)
    stepping = drafter_of(model, stepping=True)
    model.on_layer = lambda index: out_of_memory() if index == layer else None
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match="it ran out in a pass of"):
            stepping.grow(random_tokens(9), 6)
    model.on_layer = lambda index: None
    assert_goes_on(stepping, random_tokens(9))


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_buffers_that_cannot_double(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocation number `at` of the six that three layers need."""
    few_slots(monkeypatch, 32)
    save_checkpoint(tmp_path, architecture("llama"))
    stepping, context = drafter_of(opened(tmp_path), stepping=True), random_tokens(40)
    stepping.grow(context[:5], 6)
    stepping.commit([], [context[5]])
    make, made = SlotLayer._buffer, 0

    def buffer(layer: SlotLayer, like: Tensor, capacity: int) -> Tensor:
        nonlocal made
        made += 1
        return out_of_memory() if made == at + 1 else make(layer, like, capacity)

    with monkeypatch.context() as patch:
        patch.setattr(SlotLayer, "_buffer", buffer)
        with pytest.raises(torch.OutOfMemoryError):
            stepping.grow(context, 6)
    assert made == at + 1
    assert {layer.keys.numel() for layer in stepping.rows.state.layers} == {0}
    assert_goes_on(stepping, context)


def test_steps_are_gone_before_their_buffers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C right behind the growth: a step of before would go on with the old buffers."""
    few_slots(monkeypatch, 32)
    save_checkpoint(tmp_path, architecture("llama"))
    stepping, context = drafter_of(opened(tmp_path), stepping=True), random_tokens(40)
    stepping.grow(context[:5], 6)
    stepping.commit([], [context[5]])
    assert stepping.rows.steps is not None
    assert stepping.rows.steps.prepared
    grow = SlotCache.grow_zeroed

    def interrupted(cache: SlotCache, capacity: int) -> None:
        grow(cache, capacity)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SlotCache, "grow_zeroed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stepping.grow(context, 6)
    assert_goes_on(stepping, context)


def assert_graphs_draft_the_same_trees(
    folder: Path, rounds: int, lengths: Sequence[int] = (9, 80, 1)
) -> None:
    stepping = drafter_of(opened(folder, "cuda"), stepping=True)
    assert stepping.rows.steps is not None
    plain = drafter_of(opened(folder, "cuda"), stepping=False)
    assert_same_trees(stepping, plain, rounds, lengths)


def slots_of(triton: bool) -> int:
    """Few enough for the interpreter; without it PyTorch's operations sum values in two parts."""
    return PART_SLOTS if triton else 2 * PART_SLOTS


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_draft_the_same_trees(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture(name))
    assert_graphs_draft_the_same_trees(tmp_path, rounds=6)


@pytest.mark.parametrize(
    ("name", "triton"), [*((name, False) for name in GRAPHS), ("llama", True), ("gemma2", True)]
)
def test_a_step_can_be_captured(
    name: str, triton: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in it waits for the device or reaches into memory that is not pinned."""
    few_slots(monkeypatch, slots_of(triton))
    save_checkpoint(tmp_path, architecture(name))
    # kernels take long in the interpreter: a short prompt has a prefill and two buckets
    rounds, lengths = (2, (9, 1)) if triton else (1, (9, 80, 1))
    with fake_cuda(triton=triton):
        assert_graphs_draft_the_same_trees(tmp_path, rounds, lengths)


def test_steps_are_captured_again_where_buffers_have_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another pool: CUDA refuses one whose graphs are all gone."""
    few_slots(monkeypatch, 32)
    save_checkpoint(tmp_path, architecture("llama"))
    with fake_cuda():
        assert_graphs_draft_the_same_trees(tmp_path, rounds=4)


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_step_uploads_once(name: str, triton: bool, tmp_path: Path) -> None:
    """Windows or none, whatever is asked of it; with Triton the step reads pinned memory itself."""
    save_checkpoint(tmp_path, architecture(name))
    uploads: list[tuple[int, ...]] = []

    def noted(packet: Any, args: tuple[Any, ...], found: Any) -> None:
        sources = [each for each in args if type(each) is Tensor and each.dim()]
        if isinstance(found, fake.CudaTensor) and sources:
            uploads.append(tuple(sources[0].shape))

    with fake_cuda(triton=triton):
        stepping = drafter_of(opened(tmp_path, "cuda"), stepping=True)
        assert stepping.rows.steps is not None
        stepping.grow(random_tokens(9), 6)
        length = stepping.rows.state.length
        with fake.watched(noted), fake.counted() as counts:
            for tokens, wanted in (([5, 6, 7], [0, 2]), ([8], [0])):
                rows = PassRows.chain(tokens, stepping.rows.state.length)
                assert stepping.rows.steps.forward(rows, wanted).shape[0] == len(wanted)
        assert stepping.rows.state.length == length + 4
    assert [len(shape) for shape in uploads] == ([] if triton else [1, 1])
    assert counts.waits == 0


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("refused", [False, True])
def test_what_is_uploaded_need_not_be_pinned(
    refused: bool, triton: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_slots(monkeypatch, slots_of(triton))
    save_checkpoint(tmp_path, architecture("llama"))
    asked = []

    def pin_memory(tensor: Tensor) -> Tensor:
        asked.append(tensor.numel())
        if refused:
            raise RuntimeError("CUDA error: out of memory")
        return tensor.clone()

    with fake_cuda(triton=triton), monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", pin_memory)
        assert_graphs_draft_the_same_trees(tmp_path, rounds=1, lengths=(9, 1))
    assert asked


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_are_picked_by_python_so_no_graph_can_hold_them(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, architecture(name))
    with fake_cuda():
        drafter = drafter_of(opened(tmp_path, "cuda"), stepping=True)
        assert drafter.rows.steps is None
        assert len(drafter.grow(random_tokens(9), 6)) == TREE.budget


@pytest.mark.parametrize(
    ("inside", "expected", "word"),
    [
        (out_of_memory, OutOfMemoryError, "the GPU's memory is too small"),
        # an error of our own must not be hidden by that of ending the capture
        (lambda *args: torch.zeros(1) + "a", TypeError, "unsupported operand"),
    ],
)
def test_a_capture_that_fails(
    inside: Callable[..., Tensor],
    expected: type[Exception],
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step is left half made, no other stream current, and the next capture succeeds."""
    save_checkpoint(tmp_path, architecture("llama"))
    with fake_cuda():
        stepping, context = drafter_of(opened(tmp_path, "cuda"), stepping=True), random_tokens(9)
        assert stepping.rows.steps is not None
        here, run = torch.cuda.current_stream(), graphs.Step.run

        def fails_in_captures(step: graphs.Step) -> None:
            run(step)
            if fake.is_captured():
                inside()

        with monkeypatch.context() as patch:
            patch.setattr(graphs.Step, "run", fails_in_captures)
            for _ in range(2):
                with pytest.raises(expected, match=word) as found:
                    stepping.grow(context, 6)
                assert "\n" not in str(found.value)
                assert torch.cuda.current_stream() is here
                assert not stepping.rows.steps.prepared
        assert_goes_on(stepping, context)
        assert stepping.rows.steps.prepared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (8, 1)])
@pytest.mark.parametrize("slots", [28, 256, 768])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_slots_that_are_shared_out_give_the_same_attention(
    slots: int, heads: tuple[int, int], dtype: torch.dtype, scaling: float | None
) -> None:
    """Over what PyTorch's own gives for the same numbers in float32."""
    generator, rows = torch.Generator().manual_seed(slots), 5

    def random(count: int, length: int) -> Tensor:
        return torch.randn(1, count, length, 16, generator=generator).to(dtype)

    query, key, value = random(heads[0], rows), random(heads[1], slots), random(heads[1], slots)
    mask = torch.rand(1, 1, rows, slots, generator=generator) < 0.3
    mask[..., 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), mask, scale=scaling, enable_gqa=True
    ).transpose(1, 2)
    with fake_cuda():
        given = [tensor.to("cuda") for tensor in (query, key, value, mask)]
        found = attention._split(*given, scaling).cpu()
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("slots", [28, 512])
@pytest.mark.parametrize(
    "kwargs",
    [{"softcap": 2.0}, {"s_aux": [0.3, -1.0, 2.0, 0.0]}, {"softcap": 3.0, "s_aux": [0.5] * 4}],
)
def test_captured_steps_of_capped_scores_and_sinks_share_slots_out_too(
    kwargs: dict[str, Any], slots: int, dtype: torch.dtype
) -> None:
    """Over the same operation by operation in float64; values are smaller than keys."""
    generator, rows = torch.Generator().manual_seed(slots), 5
    query, key, value = (
        torch.randn(1, count, length, size, generator=generator).to(dtype)
        for count, length, size in ((4, rows, 24), (2, slots, 24), (2, slots, 8))
    )
    mask = torch.rand(1, 1, rows, slots, generator=generator) < 0.3
    mask[..., 0] = True
    if "s_aux" in kwargs:
        kwargs = {**kwargs, "s_aux": torch.tensor(kwargs["s_aux"], dtype=dtype)}
    wide = (query.double(), key.double(), value.double())
    expected = attention._written_out(*wide, mask, None, kwargs)
    with fake_cuda():
        given = [tensor.to("cuda") for tensor in (query, key, value, mask)]
        on_device = {
            name: one.to("cuda") if isinstance(one, Tensor) else one for name, one in kwargs.items()
        }
        found = attention._attention(nn.Identity(), *given, None, **on_device)[0].cpu()
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
