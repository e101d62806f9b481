"""GGUF files of small models, written as llama.cpp's converter does, beside their safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    architecture,
    byte_llama,
    chain_logits,
    open_float32,
    random_tokens,
    save_byte_tokenizer,
    save_sentencepiece_tokenizer,
)
from checkpoints import save_checkpoint as save
from cli_runner import run_cli
from gguf import GGMLQuantizationType as Kind
from gguf_files import PACKED_KINDS, all_of, gguf_tensors, split, write_gguf, write_vocabulary
from transformers import AutoModelForCausalLM

from specexec_cli.config import GenerationConfig, Method, SamplingConfig, TreeConfig
from specexec_cli.errors import TokenizerMismatchError
from specexec_cli.models.skeleton import load_config
from specexec_cli.models.tokenizer import load_tokenizer
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.sizes import checkpoint_bytes
from specexec_cli.session import Session

_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "long_factor": [1.5, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3],
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
# what GGUF files leave to llama.cpp, which knows it of the real models
_GEMMA = {"query_pre_attn_scalar": 8}
_SIX = {"num_hidden_layers": 7, "layer_types": [*["sliding_attention"] * 5, "full_attention",
                                                "sliding_attention"]}  # fmt: skip
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama-tied", {}),
    ("llama-biases", {}),
    ("llama", {"rope_parameters": _LLAMA3, "head_dim": 16}),
    ("llama", {"rope_parameters": _YARN}),
    ("mistral-full", {}),
    ("mixtral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3-moe", {"norm_topk_prob": True}),
    ("phi3", {}),
    ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 64}),
    ("gemma2", _GEMMA),
    ("gemma3", {**_GEMMA, **_SIX}),
    ("gpt-oss", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}),
]


@pytest.mark.parametrize(("name", "changes"), MODELS)
def test_logits_of_a_float32_file_are_those_of_the_safetensors(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    base = architecture(name)
    config = type(base)(**{**base.to_dict(), **changes})
    model = save(tmp_path / "plain", config)
    write_gguf(model, tmp_path / "m.gguf")
    tokens = random_tokens(40)
    found, expected = (
        chain_logits(open_float32(path), tokens)
        for path in (tmp_path / "m.gguf", tmp_path / "plain")
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "qwen3-moe"])
def test_two_byte_weights_are_multiplied_as_what_they_mean(
    tmp_path: Path, name: str, kind: Kind
) -> None:
    """Bit for bit the logits of the same values in float32: linears, tables, experts and heads."""
    base = architecture(name)
    model = save(tmp_path / "plain", type(base)(**{**base.to_dict(), "norm_topk_prob": True}))
    stored = torch.bfloat16 if kind == Kind.BF16 else torch.float16
    plain = write_gguf(model, tmp_path / "exact.gguf")
    path = write_gguf(model, tmp_path / "m.gguf", all_of(kind))
    kinds = {tensor.dtype for tensor in read_checkpoint(path).values()}
    assert kinds == {"F32", kind.name}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and not key.endswith("gate.weight"):  # a router is in float32
                parameter.copy_(parameter.to(stored))
    rounded = write_gguf(model, tmp_path / "rounded.gguf")
    tokens = random_tokens(24)
    found, expected, exact = (
        chain_logits(open_float32(each), tokens) for each in (path, rounded, plain)
    )
    assert torch.equal(found, expected)
    assert not torch.equal(found, exact)


def test_factors_that_are_nobodys_rule_are_taken_as_they_are(tmp_path: Path) -> None:
    """Llama 3's rule over another length of context, of which the list alone tells."""
    config = architecture("llama3-rope")
    model = save(tmp_path / "plain", config)
    write_gguf(model, tmp_path / "m.gguf")
    rope = load_config(read_checkpoint(tmp_path / "m.gguf")).rope_parameters
    assert rope["rope_type"] == "longrope"
    tokens = random_tokens(40)
    found, expected = (
        chain_logits(open_float32(path), tokens)
        for path in (tmp_path / "m.gguf", tmp_path / "plain")
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tokens_of_padding_beyond_a_pass_do_no_harm(tmp_path: Path) -> None:
    """An embedding's padding row may have a higher number than a pass has rows (Phi-3's 32000)."""
    config = architecture("llama")
    config.pad_token_id = 60
    save(tmp_path / "plain", config)
    logits = chain_logits(open_float32(tmp_path / "plain"), random_tokens(2))
    assert logits.shape == (2, config.vocab_size)


DEMO = Path(__file__).parents[2] / "specexec_cli" / "demo"
_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize("kind", PACKED_KINDS, ids=lambda kind: kind.name)
def test_a_pass_over_packed_weights_is_one_over_what_they_mean(tmp_path: Path, kind: Kind) -> None:
    """Embeddings, a tied head and linears, reordered rows and all."""
    config = byte_llama(**_BLOCKS, tie_word_embeddings=True)
    model = save(tmp_path / "plain", config, std=0.05)
    packed = write_gguf(model, tmp_path / "packed.gguf", all_of(kind))
    unpacked = write_gguf(model, tmp_path / "unpacked.gguf", all_of(kind), unpacked=True)
    assert read_checkpoint(packed).total_bytes < read_checkpoint(unpacked).total_bytes / 3
    tokens = random_tokens(24)
    found, expected = (chain_logits(open_float32(path), tokens) for path in (packed, unpacked))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def assert_lossless(target: Path, draft: Path, offload: str) -> int:
    """Both methods write the same behind one prompt, greedily and drawn.

    Trees are of a fixed size: a policy that weighs times may find that none pays, and grow none.

    Returns:
        how many passes the drafts saved.
    """
    saved = 0
    with Session.open(
        model=str(target), draft=str(draft), dtype="float32", offload=offload
    ) as session:
        for temperature in (0.0, 1.0):
            written: dict[Method, list[int]] = {}
            for method in ("autoregressive", "specexec"):
                steps = list(
                    session.generate(
                        "def read(path):\n",
                        sampling=SamplingConfig(temperature=temperature, seed=3),
                        tree=TreeConfig(budget=12, max_depth=6, batch=4),
                        generation=GenerationConfig(max_tokens=16),
                        method=method,
                    )
                )
                written[method] = [token for step in steps for token in step.tokens]
                saved += len(steps) if method == "autoregressive" else -len(steps)
            assert written["specexec"] == written["autoregressive"]
            assert len(written["specexec"]) > 2
    return saved


@pytest.mark.parametrize(
    ("kind", "offload"),
    [(Kind.F32, "ssd"), (Kind.F16, "ssd"), (Kind.Q8_0, "ssd"), (Kind.Q4_0, "ssd"),
     (Kind.Q4_K, "ssd"), (Kind.Q4_K, "none")],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_texts_are_the_autoregressive_ones(tmp_path: Path, kind: Kind, offload: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    target = write_gguf(model, tmp_path / "target.gguf", all_of(kind), tokenizer=DEMO / "target")
    small = AutoModelForCausalLM.from_pretrained(DEMO / "draft", dtype=torch.float32)
    draft = write_gguf(small, tmp_path / "draft.gguf", all_of(Kind.Q8_0), tokenizer=DEMO / "draft")
    assert_lossless(target, draft, offload)


@pytest.mark.parametrize("kind", [*PACKED_KINDS, Kind.BF16], ids=lambda kind: kind.name)
def test_every_type_writes_the_autoregressive_text(tmp_path: Path, kind: Kind) -> None:
    """A small target of one type, which the same weights in float32 draft for."""
    model = save(tmp_path / "plain", byte_llama(**_BLOCKS), std=0.05)
    words = tmp_path / "words"
    save_byte_tokenizer(words)
    target = write_gguf(model, tmp_path / "target.gguf", all_of(kind), tokenizer=words)
    draft = write_gguf(model, tmp_path / "draft.gguf", all_of(kind), tokenizer=words, unpacked=True)
    assert assert_lossless(target, draft, "ssd") > 8, "drafts were accepted"


def test_a_gguf_draft_beside_a_safetensors_target(tmp_path: Path) -> None:
    """Where both spell text alike; a vocabulary of another model is refused."""
    config = byte_llama()
    model = save(tmp_path / "target", config, std=0.12)
    save_byte_tokenizer(tmp_path / "target", unk_token="<unk>")
    draft = write_gguf(model, tmp_path / "draft.gguf", tokenizer=tmp_path / "target")
    assert_lossless(tmp_path / "target", draft, "none")
    small = AutoModelForCausalLM.from_pretrained(DEMO / "draft", dtype=torch.float32)
    other = write_gguf(small, tmp_path / "other.gguf", tokenizer=DEMO / "draft")
    with pytest.raises(TokenizerMismatchError, match="do not share a tokenizer"):
        assert_lossless(tmp_path / "target", other, "none")


def test_the_tokenizer_is_the_one_that_was_written(tmp_path: Path) -> None:
    model = save(tmp_path / "plain", byte_llama(), std=0.12)
    expected = save_byte_tokenizer(tmp_path / "plain", chat_template="{{ messages[0].content }}")
    path = write_gguf(model, tmp_path / "m.gguf", tokenizer=tmp_path / "plain")
    for _ in range(2):  # built, and then as it was kept
        found = load_tokenizer(path)
        text = "naïve ✓ def f(x):\n\treturn 12_345<s>"
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
        assert found.get_vocab() == expected.get_vocab()
        assert found.chat_template == "{{ messages[0].content }}"
        assert (found.bos_token_id, found.eos_token_id) == (1, 2)


def test_a_sentencepiece_vocabulary_is_read_as_the_model_it_was_made_of(tmp_path: Path) -> None:
    import sentencepiece  # its import is slow

    folder = tmp_path / "plain"
    folder.mkdir()
    save_sentencepiece_tokenizer(folder, None)
    words = sentencepiece.SentencePieceProcessor(
        model_proto=(folder / "tokenizer.model").read_bytes()
    )
    found = load_tokenizer(write_vocabulary(tmp_path / "m.gguf", words))
    for text in ("def f(x):\n    return x  # naïve ✓ 12,345", "  two", "", "\n\n\tTab"):
        ids = words.encode(text)
        assert found.encode(text, add_special_tokens=False) == ids
        assert found.decode(ids) == text
    behind_special = [*words.encode("a"), words.eos_id(), *words.encode("b")]
    assert found.encode("a</s>b", add_special_tokens=False) == behind_special
    assert found.encode("a") == [words.bos_id(), *words.encode("a")]


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_packed_experts_come_one_by_one(tmp_path: Path, name: str) -> None:
    base = architecture(name)
    changes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96,
               "head_dim": 16, "norm_topk_prob": True}  # fmt: skip
    model = save(tmp_path / "plain", type(base)(**{**base.to_dict(), **changes}))
    path = write_gguf(model, tmp_path / "m.gguf", all_of(Kind.Q4_0))
    unpacked = write_gguf(model, tmp_path / "unpacked.gguf", all_of(Kind.Q4_0), unpacked=True)
    tokens = random_tokens(20)
    whole = chain_logits(open_float32(path), tokens)
    experts = open_float32(path, "ram", expert_bytes=1 << 20)
    assert experts.experts is not None
    assert torch.equal(chain_logits(experts, tokens), whole)
    expected = chain_logits(open_float32(unpacked), tokens)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    sizes = checkpoint_bytes(read_checkpoint(path)).experts
    assert sizes is not None
    biases = 4 * (2 * 96 + 64) if name == "gpt-oss" else 0
    assert sizes.largest == 3 * 64 * 96 * 18 // 32 + biases


def test_tokens_that_say_so_end_a_text(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "draft", dtype=torch.float32)
    path = write_gguf(model, tmp_path / "m.gguf", tokenizer=DEMO / "draft")
    raw = path.read_bytes()
    assert load_config(read_checkpoint(path)).eos_token_id == 2
    path.write_bytes(raw.replace(b"<|user|>", b"<|im_end", 1))
    assert load_config(read_checkpoint(path)).eos_token_id == 2
    path.write_bytes(raw.replace(b"<|assistant|>", b"<|endoftext|>", 1))
    assert load_config(read_checkpoint(path)).eos_token_id == [2, 6]


def test_a_split_file_runs_as_the_whole_one(tmp_path: Path) -> None:
    model = save(tmp_path / "plain", architecture("llama"))
    whole = write_gguf(model, tmp_path / "m.gguf")
    first = split(whole, 2)
    tokens = random_tokens(10)
    found, expected = (chain_logits(open_float32(path), tokens) for path in (first, whole))
    assert torch.equal(found, expected)


def test_plan_knows_the_bytes(tmp_path: Path) -> None:
    model = save(tmp_path / "plain", byte_llama(**_BLOCKS), std=0.05)
    path = write_gguf(model, tmp_path / "m.gguf", all_of(Kind.Q4_K))
    ran = run_cli("plan", str(path), "--method", "autoregressive", "--json")
    assert ran.code == 0, ran.err
    tensors = gguf_tensors(model)
    expected = sum(
        tensor.size * 144 // 256 if tensor.shape[-1] % 256 == 0 < tensor.ndim - 1
        else 4 * tensor.size
        for name, tensor in tensors.items() if name.startswith("blk.0.")
    )  # fmt: skip
    assert checkpoint_bytes(read_checkpoint(path)).layers == (expected, expected)
    assert checkpoint_bytes(read_checkpoint(path)).packed_bits == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[: len(raw) // 2], "truncated or damaged"),
        (lambda raw: raw.replace(b"llama.block_count", b"llama.block_c0unt"), "no 'llama.block_"),
        (lambda raw: raw.replace(b"blk.1.attn_q.weight", b"blk.1.attn_9.weight"), "belongs to no"),
        (lambda raw: raw.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lIama"),
         "architecture 'lIama' are not supported"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_in_a_line(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    model = save(tmp_path / "plain", byte_llama(num_hidden_layers=2), std=0.05)
    save_byte_tokenizer(tmp_path / "plain")
    path = write_gguf(model, tmp_path / "m.gguf", tokenizer=tmp_path / "plain")
    path.write_bytes(damage(path.read_bytes()))
    ran = run_cli("generate", "x", "-m", str(path), "--method", "autoregressive")
    assert ran.code == 5
    assert message in ran.error
