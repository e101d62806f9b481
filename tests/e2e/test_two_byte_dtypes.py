"""Sessions in bfloat16 and float16 beside plain decoding in the same dtype.

On a CPU without arithmetic in the dtype, and in bfloat16 on one that multiplies pairs of them,
passes of any rows round alike and the texts are equal. Where PyTorch multiplies in the dtype they
may part at near-ties. Every machine can take both ways: PyTorch does so everywhere, if slowly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, chain_logits, random_tokens, random_tree, save_checkpoint
from other_cpu import other_cpu
from specexec_kernels import cpu_attention, cpu_jit
from torch import Tensor
from transformers import DeepseekV3Config, Gemma2Config, GptOssConfig, PretrainedConfig

import specexec_cli
from specexec_cli.config import DtypeName, SamplingConfig
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.sampling import gumbel_noise
from specexec_cli.session import Session
from specexec_cli.verify.masks import verification_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from count_dtype_differences import Comparison, compare, first_difference, main, token_gap

DEMO = Path(specexec_cli.__file__).parent / "demo"
needs_dot = pytest.mark.skipif(not cpu_jit.has_dot(), reason="no instruction for pairs of bfloat16")
DTYPES: tuple[DtypeName, ...] = ("bfloat16", "float16")
PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "<|user|>What does os.path.join do?<|end|><|assistant|>",
)
SAMPLINGS = (SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.8, seed=3))
# Logits of one row in passes of other rows are up to 0.2 apart in bfloat16 by PyTorch's sums,
# and float16 has 8 times its precision. The gap is that of two of them.
NEAR_TIE = {"bfloat16": 0.4, "float16": 0.05}


@contextmanager
def arithmetic(there: bool) -> Iterator[None]:
    """As on a CPU that has arithmetic in two bytes, or has none."""
    with pytest.MonkeyPatch.context() as patch:
        other_cpu(patch, matmul=there)
        yield


def compared(
    dtype: DtypeName, max_tokens: int, budgets: tuple[int, ...], pair: str = "demo"
) -> list[Comparison]:
    found = []
    with Session.open(model=pair, dtype=dtype, device="cpu") as session:
        assert session.settings["dtype"] == dtype
        for prompt in PROMPTS:
            for sampling in SAMPLINGS:
                tokens = session.encode(prompt)
                found += compare(session, prompt, tokens, sampling, max_tokens, budgets)[1]
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_arithmetic_in_the_dtype_texts_are_equal(dtype: DtypeName) -> None:
    with arithmetic(there=False):
        texts = compared(dtype, max_tokens=32, budgets=(24,))
    assert [text for text in texts if text.differs_at is not None] == []
    assert sum(text.tokens for text in texts) > 100


@needs_dot
@pytest.mark.parametrize("pair", ["demo", "demo-gptq"])
def test_with_products_of_pairs_texts_are_equal(pair: str) -> None:
    texts = compared("bfloat16", max_tokens=32, budgets=(24,), pair=pair)
    assert [text for text in texts if text.differs_at is not None] == []
    assert sum(text.tokens for text in texts) > 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_arithmetic_in_the_dtype_texts_part_at_near_ties(dtype: DtypeName) -> None:
    with arithmetic(there=True), pytest.MonkeyPatch.context() as patch:
        other_cpu(patch, dot=False)
        texts = compared(dtype, max_tokens=24, budgets=(24,))
    gaps = [text.gap for text in texts if text.gap is not None]
    assert all(gap < NEAR_TIE[dtype] for gap in gaps), gaps
    assert len(gaps) <= len(texts) // 3


def test_the_counting_script_reports_what_it_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--dtype", "float32", "--prompts", "2", "--max-tokens", "6", "--budget", "3,9"]) == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["config"]["dtype"] == "float32"
    assert result["config"]["prompts"] == 2
    counts = {(row["temperature"], row["budget"]): row for row in result["counts"]}
    assert set(counts) == {(0.0, 3), (0.0, 9), (0.8, 3), (0.8, 9)}
    assert all(row["texts"] == 2 and row["differing"] == 0 for row in counts.values())
    assert result["positions"] == counts[0.0, 3]["tokens"] + counts[0.8, 3]["tokens"]
    assert {"schema", "seed", "commit", "versions", "hardware", "tied_positions"} <= result.keys()


def test_the_counting_script_finds_differences() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    logits = torch.tensor([0.5, 2.0, 1.75])
    assert token_gap(logits, SamplingConfig(), [7], (1, 2)) == pytest.approx(0.25)
    noise = gumbel_noise(3, 1, 3)
    gap = abs(0.25 + 0.8 * float(noise[1] - noise[2]))
    sampling = SamplingConfig(temperature=0.8, seed=3)
    assert token_gap(logits, sampling, [7], (1, 2)) == pytest.approx(gap, rel=1e-5)


def one_by_one(model: StreamedModel, tokens: list[int], first: int) -> Tensor:
    """The last logits when all tokens from `first` on have passes of their own."""
    cache = model.new_state()
    logits = model.forward(PassRows.chain(tokens[:first], 0), cache, [first - 1])
    for index in range(first, len(tokens)):
        logits = model.forward(PassRows.chain(tokens[index : index + 1], index), cache, [0])
    return logits[0]


@pytest.mark.parametrize(
    ("dtype", "there", "folder"),
    [
        (torch.bfloat16, False, "target"),
        (torch.float16, False, "target"),
        (torch.float32, True, "target"),
        (torch.float32, True, "target-gptq"),
        pytest.param(torch.bfloat16, True, "target", marks=needs_dot),
        pytest.param(torch.bfloat16, True, "target-gptq", marks=needs_dot),
    ],
)
def test_a_row_has_the_same_bits_in_every_pass(
    dtype: torch.dtype, there: bool, folder: str
) -> None:
    with arithmetic(there):
        assert_rows_bits_are_their_own(DEMO / folder, dtype, list(range(100, 137)))


_SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 8,
    "max_position_embeddings": 512,
}  # fmt: skip
# soft-capped scores, sinks, and values of another size than their keys, in heads that kernels read
OTHER_ATTENTION: dict[str, PretrainedConfig] = {
    "gemma2": Gemma2Config(**_SMALL, attn_logit_softcapping=1.0, final_logit_softcapping=2.0),
    "gpt_oss": GptOssConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Config(
        **_SMALL | {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": None},
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=64, q_lora_rank=16,
        kv_lora_rank=16, first_k_dense_replace=1, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=32,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gemma2", torch.float32),
        ("deepseek_v3", torch.float32),
        pytest.param("gpt_oss", torch.bfloat16, marks=needs_dot),
    ],
)
def test_a_row_has_the_same_bits_in_other_attention(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(cpu_attention, "_in_whole_vectors")  # keys are read where they lie
    own = save_checkpoint(tmp_path, OTHER_ATTENTION[name], dtype=torch.bfloat16)
    tokens = random_tokens(37)
    last = assert_rows_bits_are_their_own(tmp_path, dtype, tokens)
    with torch.no_grad():
        expected = own(torch.tensor([tokens])).logits[0, -1]
    allowed = 1e-4 if dtype == torch.float32 else 0.05
    assert float((last - expected).norm() / expected.norm()) < allowed


def assert_rows_bits_are_their_own(folder: Path, dtype: torch.dtype, context: list[int]) -> Tensor:
    """Returns the logits behind the context."""
    tree = random_tree(29, seed=2)
    model = ModelSpec(device=torch.device("cpu"), dtype=dtype, tiers="ram").open(
        read_checkpoint(folder)
    )
    try:
        rows = verification_rows(context, tree, 0)
        together = model.forward(rows, model.new_state(), range(36, len(rows.tokens)))
        assert torch.equal(chain_logits(model, context)[-1], together[0])
        for leaf in sorted(set(range(29)) - set(tree.parents.tolist()))[::3]:
            path, node = [], leaf
            while node >= 0:
                path.insert(0, int(tree.tokens[node]))
                node = int(tree.parents[node])
            alone = one_by_one(model, [*context, *path], len(context) - 7)
            assert torch.equal(alone, together[leaf + 1])
    finally:
        model.close()
    return together[0]
