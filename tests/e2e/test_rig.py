"""A speed rig computes its source's function: same logits in float32, same greedy tokens."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import (
    architecture,
    chain_logits,
    open_float32,
    random_tokens,
    save_byte_tokenizer,
    save_checkpoint,
)
from computer import Computer
from quantize_columns import PACKERS
from safetensors import safe_open
from specexec_kernels.packing import pack_rows, store_zeros, unpack_rows
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.errors import CheckpointError, ConfigError
from specexec_cli.models.experts import StreamedExperts
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import checkpoint_bytes
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gguf
import gguf_repeat
import gguf_rig
import make_rig
import quantize_rtn
from gguf_gptq import GptqLinear
from rig_random import RandomRig
from rig_routing import Routing, routing_of
from rig_shapes import MODELS, SHAPES, Shape, parse_shape, place_dims, place_heads

DEMO = make_rig.DEMO


def shape_text(**sizes: int) -> str:
    return ",".join(f"{name}={value}" for name, value in sizes.items())


# hidden/d a power of 4; with extra heads, extra intermediate units and an extra layer
PLAIN = shape_text(hidden=256, layers=3, heads=8, kv_heads=8, head_dim=64, intermediate=200)
# hidden/d = 5 and fewer KV heads: float32 norms, extra query heads that share live KV heads
GROUPED = shape_text(hidden=320, layers=2, heads=16, kv_heads=4, head_dim=16, intermediate=96)
MIXTURE = shape_text(hidden=256, layers=3, heads=8, kv_heads=8, head_dim=64, intermediate=96,
                     experts=8, chosen=3)  # fmt: skip
# three of four layers keep a state in place of keys and values
HYBRID = shape_text(hidden=256, layers=12, heads=8, kv_heads=8, head_dim=64, intermediate=200,
                    state_heads=4)  # fmt: skip
SAME = shape_text(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with four query heads over two KV heads and tied embeddings."""
    folder = tmp_path_factory.mktemp("source")
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # far from linear: attention must be peaked and norms must matter
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """(len(tokens), vocab) from transformers' own forward."""
    return model(torch.tensor([list(tokens)])).logits[0]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    scale = float(theirs.std())
    assert scale > 0.1
    torch.testing.assert_close(ours, theirs, atol=2e-4 * scale, rtol=0.0)


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long), pad_token_id=0,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def assert_same_function(source: Path, rig: Path, vocab: int, count: int = 16) -> None:
    tokens = np.random.default_rng(1).integers(0, vocab, 48).tolist()
    ours, theirs = load(rig), load(source)
    assert_close(logits(ours, tokens), logits(theirs, tokens))
    assert greedy(ours, tokens[:5], count) == greedy(theirs, tokens[:5], count)


@pytest.mark.parametrize("shape", [PLAIN, GROUPED, SAME, MIXTURE, HYBRID])
def test_logits_and_greedy_tokens_are_the_sources(source: Path, tmp_path: Path, shape: str) -> None:
    rig = make_rig.write_rig(source, shape, tmp_path / "rig")
    assert_same_function(source, rig, vocab=320)


@pytest.mark.parametrize("bits", [16, 4])
def test_a_source_in_float32_four_times_as_wide(tmp_path: Path, bits: int) -> None:
    """Written by the command; computes the source rounded to bfloat16, or then quantized."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=96, intermediate_size=160, num_hidden_layers=2, head_dim=32,
        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=256,
        tie_word_embeddings=True,
    )  # fmt: skip
    source, wide = tmp_path / "source", tmp_path / "wide"
    model = save_checkpoint(source, config, std=0.2)
    code = make_rig.main(["--source", str(source), "--times", "4", "--out", str(wide),
                          "--bits", str(bits)])  # fmt: skip
    assert code == 0
    written = json.loads((wide / "config.json").read_text())
    assert (written["hidden_size"], written["num_hidden_layers"]) == (384, 2)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "rounded")
    small = tmp_path / "rounded"
    if bits == 4:
        quantize_rtn.write_quantized(small, tmp_path / "quantized", bits)
        small = tmp_path / "quantized"
    tokens, found = random_tokens(40), []
    for folder in (wide, small):
        opened = open_float32(folder)
        found.append(chain_logits(opened, tokens))
        opened.close()
    assert_close(*found)
    assert torch.equal(found[0].argmax(-1), found[1].argmax(-1))


def test_a_mistral_rig_and_its_shards(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistral = Shape(hidden=256, layers=4, heads=8, kv_heads=2, head_dim=64, intermediate=128,
                    model_type="mistral")  # fmt: skip
    monkeypatch.setitem(SHAPES, "small-mistral", mistral)
    rig = make_rig.write_rig(source, "small-mistral", tmp_path / "rig", shard_bytes=1_000_000)
    assert json.loads((rig / "config.json").read_text())["model_type"] == "mistral"
    assert len(list(rig.glob("model-*-of-*.safetensors"))) > 2
    assert_same_function(source, rig, vocab=320)


def drafted_text(target: Path, draft: Path, prompt: list[int]) -> list[list[int]]:
    """The tokens of each pass of a text with draft trees."""
    sampler, config = Sampler(SamplingConfig()), TreeConfig(budget=16, max_depth=6, batch=4)
    models = [open_float32(target), open_float32(draft)]
    drafter = ModelDrafter(models[1], sampler, config, models[0].vocab_size)
    steps = list(specexec(LocalTarget(models[0]), drafter, sampler, prompt, 48, ()))
    for model in models:
        model.close()
    return [list(step.tokens) for step in steps]


def test_a_hybrid_rig_commits_as_many_tokens_a_pass_as_one_that_attends(
    source: Path, tmp_path: Path
) -> None:
    """Text and acceptance are those of a rig of the same source without states; states are kept."""
    draft = tmp_path / "draft"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    model.save_pretrained(draft)
    found = []
    for name, shape in ("plain", PLAIN), ("hybrid", HYBRID):
        rig = make_rig.write_rig(source, shape, tmp_path / name)
        found.append(drafted_text(rig, draft, [3, 1, 4, 1, 5, 9]))
    assert found[0] == found[1]
    assert len(found[0]) < sum(map(len, found[0])), "some drafts are accepted"
    assert checkpoint_bytes(read_checkpoint(tmp_path / "hybrid")).state_elements > 0


def test_a_hybrid_rig_says_what_it_cannot_be(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layers must be a multiple of 4, not 10"):
        make_rig.write_rig(source, HYBRID, tmp_path / "rig", layers=10)
    with pytest.raises(ConfigError, match="does not fit into the shape's 1"):
        make_rig.write_rig(source, HYBRID, tmp_path / "rig", layers=4)
    with pytest.raises(ConfigError, match="leave --bits and --format away"):
        make_rig.write_rig(source, HYBRID, tmp_path / "rig", bits=4)
    with pytest.raises(ConfigError, match="hidden must be a multiple of state_heads"):
        parse_shape(HYBRID.replace("state_heads=4", "state_heads=3"))


# weights of the real models in billions: arXiv:2503.19786, table 1, less what reads pictures;
# arXiv:2508.10925, table 1. The hub counts 27.8 and 36.0 billion for Qwen's, of which 0.46 and 0.45
# read pictures, and 0.42 and 0.84 predict several tokens
@pytest.mark.parametrize(
    ("model", "vocab", "billions"),
    [("gemma-3-27b", 262144, 27.0), ("gpt-oss-20b", 201088, 20.9),
     ("qwen3.8-27b", 248320, 26.9), ("qwen3.6-35b-a3b", 248320, 34.7)],
)  # fmt: skip
def test_random_rigs_have_the_sizes_of_real_models(
    source: Path, model: str, vocab: int, billions: float
) -> None:
    rig = RandomRig(make_rig.Source(source), model, make_rig.RandomPool(0))
    sizes = {name: np.prod(size) for name, size, _ in rig.tensors()}
    tables = sum(size // 320 * vocab for name, size in sizes.items() if size % 320 == 0
                 and name in ("model.embed_tokens.weight", "lm_head.weight"))  # fmt: skip
    layers = sum(size for name, size in sizes.items() if "layers." in name)
    assert round((layers + tables) / 1e9, 1) == billions


@pytest.mark.parametrize("model", MODELS)
def test_a_random_rig_streams(
    source: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small, beside transformers' own model of the same files."""
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "sliding_window": 8, "intermediate_size": 96}  # fmt: skip
    if MODELS[model]["model_type"].startswith("qwen3_5"):
        del small["sliding_window"]
        small |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2,
                  "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
    if "moe" in MODELS[model]["model_type"]:
        del small["intermediate_size"]
        small |= {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
                  "shared_expert_intermediate_size": 32}  # fmt: skip
    monkeypatch.setitem(MODELS, model, MODELS[model] | small)
    rig = make_rig.write_rig(source, model, tmp_path / "rig", layers=4, shard_bytes=400_000)
    own = AutoModelForCausalLM.from_pretrained(
        rig, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = list(range(3, 40))
    streamed = open_float32(rig)
    found = chain_logits(streamed, tokens)
    streamed.close()
    torch.testing.assert_close(found, logits(own, tokens), atol=1e-5, rtol=1e-4)


def test_a_random_rig_has_no_formats(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is random, in bfloat16"):
        make_rig.write_rig(source, "gpt-oss-20b", tmp_path / "rig", bits=4)


def test_the_engine_streams_it(source: Path, tmp_path: Path) -> None:
    rig = make_rig.write_rig(source, GROUPED, tmp_path / "rig", shard_bytes=300_000)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    model = open_float32(rig)
    try:
        streamed = chain_logits(model, tokens)
    finally:
        model.close()
    assert_close(streamed, logits(load(source), tokens))


def routing_of_rig(rig: Path, texts: list[list[int]], experts: int) -> list[Routing]:
    """What each layer's router does with the texts."""
    model = open_float32(rig, expert_bytes=1 << 24)
    blocks = [m for m in model.skeleton.model.modules() if isinstance(m, StreamedExperts)]
    choices: list[list[np.ndarray]] = [[] for _ in blocks]
    for block, seen in zip(blocks, choices, strict=True):
        block.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[1].numpy()))
    for tokens in texts:
        chain_logits(model, tokens)
    model.close()
    return [routing_of(seen, experts) for seen in choices]


def test_routers_follow_the_skew_and_the_locality_that_are_asked_for(
    source: Path, tmp_path: Path
) -> None:
    """Measured on the rig's own passes over the texts that its routers were made for."""
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    words = save_byte_tokenizer(folder)
    prompts = [item["prompt"] for item in json.loads(make_rig.TEXTS.read_text("utf-8"))]
    texts = [words(prompt)["input_ids"][:250] for prompt in prompts[:6]]
    shape = MIXTURE.replace("experts=8,chosen=3", "experts=16,chosen=2")
    found = {}
    for skew, locality in ((0.3, 0.5), (0.6, 0.5), (0.6, 0.15)):
        rig = make_rig.write_rig(
            folder, shape, tmp_path / f"rig-{skew}-{locality}",
            routing=Routing(skew=skew, locality=locality),
        )  # fmt: skip
        assert_same_function(folder, rig, vocab=256, count=4)
        layers = routing_of_rig(rig, texts, 16)
        found[skew, locality] = layers
        for layer in layers:
            assert layer.skew == pytest.approx(skew, abs=0.13)
    mean = {asked: np.mean([layer.locality for layer in got]) for asked, got in found.items()}
    assert mean[0.6, 0.5] > mean[0.6, 0.15] + 0.1


@pytest.mark.skipif(not (DEMO / "model.safetensors").is_file(), reason="no demo weights")
def test_the_demo_target_in_a_wide_shape(tmp_path: Path) -> None:
    shape = shape_text(
        hidden=1280, layers=9, heads=10, kv_heads=10, head_dim=128, intermediate=1024
    )
    rig = make_rig.write_rig(DEMO, shape, tmp_path / "rig")
    assert_same_function(DEMO, rig, vocab=4096, count=8)


def test_nothing_is_compressible(source: Path, tmp_path: Path) -> None:
    rig = make_rig.write_rig(
        source,
        shape_text(hidden=1024, layers=3, heads=16, kv_heads=16, head_dim=64, intermediate=2048),
        tmp_path / "rig",
    )
    with safe_open(rig / "model.safetensors", "pt") as file:
        layers = [file.get_tensor(name) for name in file.keys() if ".layers." in name]  # noqa: SIM118
    zeros = sum(int((tensor == 0).sum()) for tensor in layers)
    assert zeros < 0.05 * sum(tensor.numel() for tensor in layers)
    blocks = torch.cat([t.flatten().view(torch.uint8) for t in layers if t.dim() == 2])
    blocks = blocks[: len(blocks) // 4096 * 4096].view(-1, 4096)
    live = blocks[blocks.ne(0).any(1)]
    assert len(torch.unique(live, dim=0)) == len(live)  # nor would deduplication help


def test_the_real_shapes_hold_the_demo_target() -> None:
    demo = Shape(hidden=256, layers=8, heads=8, kv_heads=4, head_dim=32, intermediate=896)
    for name in SHAPES:
        heads, kv_heads, kv_sources = place_heads(demo, parse_shape(name))
        group = SHAPES[name].group
        for query, head in enumerate(heads):
            assert kv_sources[kv_heads.index(head // group)] == query // demo.group
        assert len(set(heads)) == demo.heads
    assert place_dims(32, 128).tolist() == [*range(0, 64, 4), *range(64, 128, 4)]


def test_tensors_lie_as_in_checkpoints_of_the_hub(source: Path, tmp_path: Path) -> None:
    rig = make_rig.write_rig(source, PLAIN, tmp_path / "rig", shard_bytes=800_000)
    index = json.loads((rig / "model.safetensors.index.json").read_text())
    stored = read_checkpoint(rig)
    assert index["metadata"]["total_size"] == stored.total_bytes
    for path in rig.glob("*.safetensors"):
        in_file = sorted((t for t in stored.values() if t.path == path), key=lambda t: t.start)
        assert [t.name for t in in_file] == sorted(t.name for t in in_file)
        assert path.stat().st_size <= 800_000 + 100_000 or len(in_file) == 1
        assert in_file[-1].stop == path.stat().st_size
    assert (rig / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("llama2-7", "Did you mean 'llama2-7b'"),
        ("hidden=64", "whole numbers"),
        ("hidden=4096,layers=1,heads=8,kv_heads=8,head_dim=64,intermediate=96", "layers 2"),
        ("hidden=256,layers=2,heads=4,kv_heads=2,head_dim=32,intermediate=96", "head_dim 32"),
        ("hidden=256,layers=2,heads=2,kv_heads=2,head_dim=16,intermediate=96", "4 KV heads"),
        (MIXTURE.replace("chosen=3", "chosen=9"), "chooses some of several"),
        ("hidden=256,layers=2,heads=8,kv_heads=3,head_dim=16,intermediate=96", "multiple"),
    ],
)
def test_what_cannot_be_is_one_line(source: Path, tmp_path: Path, shape: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_rig.write_rig(source, shape, tmp_path / "rig")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_before_writing(
    source: Path, tmp_path: Path, computer: Computer
) -> None:
    computer.has_free_disk(100_000)
    with pytest.raises(ConfigError, match=r"needs .* MB but .* has 100 kB free"):
        make_rig.write_rig(source, PLAIN, tmp_path / "rig")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_rig_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_rig.write_rig(source, PLAIN, tmp_path / "rig", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rig").mkdir()
    code = make_rig.main(["--shape", PLAIN, "--source", str(source), "--out", f"{tmp_path}/rig"])
    assert code == ConfigError.exit_code
    assert "exists: give another --out" in capsys.readouterr().err


def test_a_source_that_is_not_a_plain_llama_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "qwen2", architecture("qwen2"))
    with pytest.raises(CheckpointError, match="model_type qwen2"):
        make_rig.write_rig(tmp_path / "qwen2", PLAIN, tmp_path / "rig")


def test_same_seed_same_bytes(source: Path, tmp_path: Path) -> None:
    first, second, other = (
        make_rig.write_rig(source, PLAIN, tmp_path / str(n), seed=seed)
        for n, seed in enumerate((0, 0, 1))
    )
    read = [np.fromfile(f / "model.safetensors", np.uint8) for f in (first, second, other)]
    assert np.array_equal(read[0], read[1])
    assert not np.array_equal(read[0], read[2])


@pytest.mark.parametrize("recipe", [*PACKERS, "gpt-oss"])
def test_a_packed_rig_is_read_and_nearly_computes_the_source(recipe: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    save_checkpoint(tmp_path / "plain", config, dtype=torch.bfloat16)
    shape = "hidden=256,layers=3,heads=8,kv_heads=8,head_dim=64,intermediate=192"
    shape += ",experts=4,chosen=2" if recipe == "gpt-oss" else ""
    rig = make_rig.write_rig(tmp_path / "plain", shape, tmp_path / "rig", row_format=recipe)
    logits = []
    for folder in (tmp_path / "plain", rig):
        model = open_float32(folder)
        logits.append(chain_logits(model, [1, 5, 9, 3, 60, 33]))
        model.close()
    error = (logits[1] - logits[0]).std() / logits[0].std()
    assert 0 < error < 0.5
    assert_planned_as_stored(rig)


def assert_planned_as_stored(rig: Path) -> None:
    """`plan` counts every byte of the files but those of tensors that no product needs."""
    checkpoint = read_checkpoint(rig)
    model = open_float32(rig)
    unused = sum(checkpoint.tensors[name].n_bytes for name in model.skeleton.unused)
    streamed = sum(
        each.n_bytes for layer in model.skeleton.layer_tensors for each in layer.values()
    )
    model.close()
    planned = checkpoint_bytes(checkpoint)
    assert planned.total == checkpoint.total_bytes
    assert sum(planned.layers) - unused <= streamed <= sum(planned.layers)
    assert unused < 0.02 * planned.total


def test_a_longer_gguf_of_a_rig_writes_the_same_text(source: Path, tmp_path: Path) -> None:
    rig = make_rig.write_rig(source, PLAIN, tmp_path / "rig")
    short, long = tmp_path / "short.gguf", tmp_path / "long.gguf"
    gguf_rig.write(rig, short, 16)
    gguf_repeat.repeat(short, long, 7, source_layers=2)
    found = []
    for path in (short, long):
        model = open_float32(path)
        found.append(chain_logits(model, [1, 5, 9, 3, 60, 33]))
        model.close()
    assert torch.equal(*found)
    assert len(checkpoint_bytes(read_checkpoint(long)).layers) == 7
    with pytest.raises(SystemExit, match="has 3 layers: it needs more than the source's 3"):
        gguf_repeat.repeat(short, tmp_path / "none.gguf", 7, source_layers=3)


def packed_linear(outputs: int, inputs: int, group: int, zero: int = 8) -> GptqLinear:
    """Random codes and scales as GPTQ checkpoints store them."""
    rng = np.random.default_rng(5)
    codes = torch.from_numpy(rng.integers(0, 16, (inputs, outputs)))
    zeros = torch.full((inputs // group, outputs), zero)
    return GptqLinear(
        pack_rows(codes, 4).numpy().view(np.uint32),
        store_zeros(zeros, 4, minus_one=True).numpy().view(np.uint32),
        rng.uniform(0.001, 0.1, (inputs // group, outputs)).astype(np.float16),
    )


def test_q4_0_of_packed_weights_is_not_rounded_anew() -> None:
    """Held against llama.cpp's own reading of Q4_0, in Python."""
    packed = packed_linear(24, 192, 64)
    codes = unpack_rows(torch.from_numpy(packed.qweight.view(np.int32)), 4).numpy()
    scales = np.repeat(packed.scales.astype(np.float32), 64, axis=0)
    expected = (scales * (codes - 8.0)).T.astype(np.float32)
    found = gguf.quants.dequantize(packed.q4_0(), gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(found, expected)


def test_packed_weights_that_q4_0_cannot_say_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 16 inputs"):
        packed_linear(8, 64, 16).q4_0()
    with pytest.raises(ValueError, match="zero points differ from 8"):
        packed_linear(8, 64, 32, zero=7).q4_0()


def test_a_gguf_of_a_packed_mixture_computes_the_same(source: Path, tmp_path: Path) -> None:
    """Reordered queries and keys, stacked experts, several shards; and its bits are its own."""
    rig = make_rig.write_rig(source, MIXTURE, tmp_path / "rig", bits=4, shard_bytes=300_000)
    gguf_rig.write(rig, tmp_path / "rig.gguf")
    found = []
    for path in (rig, tmp_path / "rig.gguf"):
        model = open_float32(path)
        found.append(chain_logits(model, [1, 5, 9, 3, 60, 33]))
        model.close()
    assert_close(*found)
    stored = read_checkpoint(tmp_path / "rig.gguf").total_bytes
    assert stored < 1.1 * read_checkpoint(rig).total_bytes
    with pytest.raises(SystemExit, match="has 4 bits already: leave BITS away"):
        gguf_rig.write(rig, tmp_path / "other.gguf", 8)
