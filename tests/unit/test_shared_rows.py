"""Texts that begin alike share rows, and are bit for bit what they are by themselves."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import architecture, random_tokens, random_tree, save_checkpoint
from fake_cuda import CUDA, fake_cuda
from faults import Interruption, points
from gguf_toys import TOYS, save_toy
from specexec_kernels import cpu_layer
from specexec_kernels.split_rows import BLOCK_SLOTS
from transformers import LlamaConfig

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.decoding.batch import Batch, BatchText, Seat
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.forest import Forest
from specexec_cli.drafting.learned import Learned
from specexec_cli.errors import SpecexecError
from specexec_cli.models import kv_cache
from specexec_cli.models.kv_cache import SlotCache, SlotLayer
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget, verify_together

# an architecture, and its dtype or 8-bit rows
CASES = [
    ("llama", "float32"), ("llama", "8bit"), ("gemma3", "bfloat16"), ("falcon_h1", "float32"),
]  # fmt: skip
# whole vectors, so that few rows of a layer are one compiled call
WIDE = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2,
}  # fmt: skip
RESERVED = 400
TEXT = [3 + token % 45 for token in random_tokens(230)]


def opened(name: str, kind: str, folder: Path) -> StreamedModel:
    if name == "falcon_h1":
        save_toy(TOYS[name], folder)
    else:
        config = architecture(name)
        for key, value in WIDE.items():
            setattr(config, key, value)
        config.layer_types = None
        save_checkpoint(folder, type(config)(**config.to_diff_dict()), std=0.1)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    model = ModelSpec(device=torch.device("cpu"), dtype=dtype, tiers="ram").open(
        read_checkpoint(folder)
    )
    if kind == "8bit":
        model.keep_rows_in_8_bits()
    return model


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def model(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamedModel]:
    model = opened(*request.param, tmp_path_factory.mktemp("model"))
    yield model
    model.close()


def reading(model: StreamedModel, tokens: Sequence[int], parting: int = 0) -> LocalTarget:
    """A text that has been read, and that others can part from at `parting`."""
    target = LocalTarget(model)
    target.reserve(RESERVED)
    target.keep_at(parting)
    target.verify(list(tokens), DraftTree.empty())
    target.commit([])
    return target


def layers_of(state: ModelState) -> list[SlotLayer]:
    """The layers that keep keys and values."""
    parts = [part for layer in state.layers for part in getattr(layer, "parts", (layer,))]
    return [part for part in parts if isinstance(part, SlotLayer)]


def slots_of(states: Sequence[ModelState]) -> tuple[int, int]:
    """Slots of keys in memory, of all layers: those in blocks, each counted once, and others."""
    layers = [layer for state in states for layer in layers_of(state)]
    blocks = {block.data_ptr() for layer in layers for block in layer.front[0].blocks}
    return len(blocks) * BLOCK_SLOTS, sum(layer.keys.shape[2] for layer in layers)


def path_of(tree: DraftTree, rng: np.random.Generator) -> list[int]:
    """A random path from the root."""
    path, node = [], -1
    while len(children := np.flatnonzero(tree.parents == node)) and rng.random() < 0.7:
        node = int(rng.choice(children))
        path.append(node)
    return path


def assert_as_alone(
    model: StreamedModel, texts: list[tuple[LocalTarget, list[int], DraftTree]]
) -> None:
    """Runs a pass, and compares its logits with those of texts that are read anew."""
    found = verify_together(texts)
    for logits, (target, pending, tree) in zip(found, texts, strict=True):
        alone = LocalTarget(model)
        assert torch.equal(logits, alone.verify([*target.tokens, *pending], tree))


def test_texts_part_are_cut_back_and_copied_again(
    model: StreamedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    run = cpu_layer.Program.run

    def counted(program: cpu_layer.Program, *args: Any) -> Any:
        calls.append(args[-1][0].slots)
        return run(program, *args)

    monkeypatch.setattr(cpu_layer.Program, "run", counted)
    rng = np.random.default_rng(0)
    targets = [reading(model, TEXT[:200], 190), LocalTarget(model), LocalTarget(model)]
    targets[1].copy_rows(targets[0], 190)
    targets[2].copy_rows(targets[1], min(150, len(targets[1].tokens)))
    for number in range(6):
        texts = []
        for target in targets:
            nodes = int(rng.integers(0, 9))
            pending = [int(each) for each in rng.integers(3, 48, int(rng.integers(1, 4)))]
            texts.append((target, pending, random_tree(nodes, number)))
        if number % 2:
            assert_as_alone(model, texts)
        else:  # few rows of one text are one compiled call a layer
            for text in texts:
                assert_as_alone(model, [text])
        for target, _, tree in texts:
            target.commit(path_of(tree, rng))
        one, other = (targets[each] for each in rng.permutation(3)[:2])
        if number % 2:
            one.crop(int(len(one.tokens) * rng.uniform(0.2, 1)))
        elif number:
            one.copy_rows(other, int(len(other.tokens) * rng.uniform(0.4, 1)))
    if model.dtype == torch.float32 and isinstance(targets[0].state, SlotCache):
        assert any(calls), "a layer's few rows behind blocks are one compiled call"


def test_a_gpu_reads_blocks_where_they_lie(tmp_path: Path) -> None:
    """With Triton's kernels, in its interpreter."""
    sizes = {**WIDE, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        **{**sizes, "intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 1},
        vocab_size=64,
    )
    save_checkpoint(tmp_path, config, std=0.1)
    with fake_cuda(triton=True):
        model = ModelSpec(device=CUDA, dtype=torch.float16, tiers="ram").open(
            read_checkpoint(tmp_path)
        )
        with closing(model):
            targets = [reading(model, TEXT[:70]), LocalTarget(model)]
            targets[1].copy_rows(targets[0], 68)
            for length in (71, 40):  # within its own rows, and within the block
                shared = [layers_of(target.state)[0].shared_slots for target in targets]
                assert shared == [BLOCK_SLOTS, BLOCK_SLOTS]
                tree = random_tree(5, length)
                assert_as_alone(model, [(target, [5, 6], tree) for target in targets])
                last = int(np.flatnonzero(tree.parents < 0)[-1])
                assert last, "its row moves"
                for target in targets:
                    target.commit([last])
                targets[1].crop(length)
            assert_as_alone(model, [(target, [7], DraftTree.empty()) for target in targets])


def test_rows_of_a_common_beginning_are_there_once(model: StreamedModel) -> None:
    first = reading(model, TEXT, parting=200)
    others = [*(reading(model, [9, 8, 7]) for _ in range(4))]
    for other in others:
        other.copy_rows(first, 200)
        assert len(other.tokens) == 200
    states = [text.state for text in (first, *others)]
    layers = len(layers_of(first.state))
    # nobody has more than was reserved, with the blocks
    assert slots_of(states) == (layers * 192, layers * len(states) * (RESERVED - 192))
    fresh = layers_of(reading(model, TEXT[:200], parting=200).state)
    for own, expected in zip(layers_of(states[-1]), fresh, strict=True):
        for start, stop in ((0, 200), (60, 70), (64, 128), (195, 200)):
            rows = own.kept_rows(start, stop), expected.kept_rows(start, stop)
            assert all(map(torch.equal, *rows)), "as they are written to disk"
        assert all(map(torch.equal, own.first_rows(150), expected.first_rows(150)))
    gone = [weakref.ref(layer.front[0].blocks[0]) for layer in layers_of(first.state)]
    for text in (first, *others):
        assert all(each() is not None for each in gone)
        assert_as_alone(model, [(text, [5], DraftTree.empty())])
        text.crop(0)
    assert not any(each() is not None for each in gone), "no text has them any more"


def test_caches_that_captured_steps_read_hold_copies() -> None:
    rows = torch.randn(1, 2, 150, 8)
    first, second, third = (SlotCache(1) for _ in range(3))
    first.layers[0].run(rows, rows)
    second.let_steps_read()
    for cache, blocks in ((second, 0), (third, 2)):
        cache.copy(first, 140)
        [layer] = cache.layers
        assert len(layer.front[0].blocks) == blocks
        assert torch.equal(layer.kept_rows(0, 140)[0], rows[:, :, :140])


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[StreamedModel]]:
    """A target and a draft model."""
    models = [opened("llama", "float32", tmp_path_factory.mktemp("llama")) for _ in range(2)]
    yield models
    for model in models:
        model.close()


def decoded(
    models: list[StreamedModel], prompts: list[list[int]], seats: int
) -> tuple[list[list[int]], list[Seat]]:
    """The texts behind some prompts, `seats` of them at once, and the seats."""
    target, drafts = models
    tree = TreeConfig(budget=8, max_depth=4, policy="fixed", past=False)
    sampler, learned = Sampler(SamplingConfig(temperature=1.0)), Learned()
    all_seats = [
        Seat(LocalTarget(target), ModelDrafter(drafts, sampler, tree, 64, learned=learned))
        for _ in range(seats)
    ]
    batch = Batch(Forest(drafts, tree, seats, learned), all_seats)
    found: list[list[int]] = []
    for first in range(0, len(prompts), seats):
        texts: list[BatchText] = []
        for prompt in prompts[first : first + seats]:
            seat = batch.seat_for(prompt, [text.seat for text in texts])
            texts.append(BatchText(seat, sampler, prompt, 5, ()))
        going = texts
        while going:
            assert not any(isinstance(each, SpecexecError) for each in batch.step(going))
            going = [text for text in going if len(text.context) < text.stop]
        found += [text.context for text in texts]
    return found, all_seats


def test_texts_of_a_batch_share_their_prompts_rows(llamas: list[StreamedModel]) -> None:
    """A system prompt in two questions of which each is asked twice, and one prompt of another."""
    first, second = ([*TEXT[:140], *random_tokens(70, seed)] for seed in (1, 2))
    prompts = [[*each, 7 + n] for n, each in enumerate((first, second, first, second))]
    prompts.append(TEXT[:100])
    expected = [decoded(llamas, [prompt], 1)[0][0] for prompt in prompts]
    found, seats = decoded(llamas, prompts[:4], 4)
    assert found == expected[:4]
    for states in (
        [seat.target.state for seat in seats], [seat.drafter.rows.state for seat in seats],
    ):  # fmt: skip
        layers = len(layers_of(states[0]))
        assert slots_of(states)[0] == layers * (128 + 64 + 64), "a tree of blocks"
    assert decoded(llamas, prompts, 2)[0] == expected, "in seats that others had"


class Rows:
    """Two texts of one layer, in which token t has rows of the value t."""

    def __init__(self) -> None:
        self.first, self.second = SlotLayer(), SlotLayer()
        self.tokens: dict[SlotLayer, list[int]] = {self.first: [], self.second: []}

    def read(self, layer: SlotLayer, tokens: Sequence[int]) -> None:
        rows = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None].expand(1, 2, -1, 4)
        layer.append((rows, -rows), np.arange(len(tokens)))
        self.tokens[layer] += tokens

    def crop(self, layer: SlotLayer, length: int) -> None:
        del self.tokens[layer][length:]
        layer.crop(length)

    def keep(self, layer: SlotLayer, length: int, slots: Sequence[int]) -> None:
        kept = [self.tokens[layer][slot] for slot in slots]
        del self.tokens[layer][length:]
        layer.commit(length, torch.tensor(slots))
        self.tokens[layer] += kept

    def write(self) -> None:
        """Two turns, of which a second text takes a part, goes back into it, and reads on."""
        self.read(self.first, TEXT[:200])
        self.tokens[self.second] = []
        self.second.copy(self.first, 190)
        self.tokens[self.second] = TEXT[:190]
        self.read(self.second, TEXT[90:110])
        self.crop(self.second, 150)
        self.read(self.first, TEXT[200:])
        self.crop(self.first, 70)
        self.read(self.second, TEXT[20:40])
        self.keep(self.second, 160, [162, 165])
        self.crop(self.second, 64)  # a block's edge
        self.read(self.second, TEXT[40:60])

    def check(self) -> None:
        for layer, tokens in self.tokens.items():
            if tokens:
                rows = torch.tensor(tokens, dtype=torch.float32)
                keys, values = layer.kept_rows(0, len(tokens))
                assert torch.equal(keys, rows[None, None, :, None].expand(1, 2, -1, 4))
                assert torch.equal(values, -keys)


def test_rows_are_whole_wherever_ctrl_c_came() -> None:
    """At every line of the layer, while a text shares its rows and goes back into shared ones."""
    Rows().write()
    texts, recorded = Rows(), Interruption()
    with recorded:
        texts.write()
    sites = [site for site in recorded.sites if site[0] == kv_cache.__file__]
    reached = {int(line) for _, line, _ in sites}
    for part in ("_replace", "in_blocks", "copy", "_leave_blocks", "compact"):
        lines, first = inspect.getsourcelines(getattr(SlotLayer, part))
        assert reached.intersection(range(first, first + len(lines))), part
    for point in points(sites):
        texts = Rows()
        with pytest.raises(KeyboardInterrupt), Interruption(point):
            texts.write()
        texts.check()
        for layer in texts.tokens:  # it goes on from there, as after Ctrl-C in a chat
            texts.crop(layer, len(texts.tokens[layer]))
            texts.read(layer, TEXT[:80])
        texts.check()


def test_a_layer_s_call_is_whole_wherever_ctrl_c_came(tmp_path: Path) -> None:
    """At every line in front of it: another text's next pass reads its own rows."""
    with closing(opened("llama", "float32", tmp_path)) as model:
        first, other = reading(model, TEXT[:100]), LocalTarget(model)
        other.copy_rows(first, 80)
        other.verify([7], DraftTree.empty())
        right, recorded = first.verify([5], DraftTree.empty()), Interruption()
        with recorded:
            other.verify([7], DraftTree.empty())
        found = points([site for site in recorded.sites if site[0] == cpu_layer.__file__])
        lines = inspect.getsourcelines(cpu_layer.Program._place_cache)
        assert {site[1] for site, _ in found} & {*range(lines[1], lines[1] + len(lines[0]))}
        for point in found:
            first.verify([5], DraftTree.empty())
            with pytest.raises(KeyboardInterrupt), Interruption(point):
                other.verify([7], DraftTree.empty())
            assert torch.equal(first.verify([5], DraftTree.empty()), right), point
