"""Sessions that round rows to 8 bits: their texts are those of plain decoding with such rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import BYTE_VOCAB, architecture, byte_llama, save_byte_tokenizer
from checkpoints import save_checkpoint as save
from cli_runner import run_cli
from gguf import GGMLQuantizationType as Kind
from gguf_files import all_of, write_gguf
from specexec_kernels.formats.gguf import GGUF_FORMATS
from torch import nn

from specexec_cli.config import (
    Activations,
    GenerationConfig,
    Method,
    OffloadMode,
    SamplingConfig,
    TreeConfig,
)
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.models.packed_linear import QuantizedLinear, round_rows
from specexec_cli.models.pass_rows import PassRows
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.session import Session

# whole blocks of every type
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}


def pair(folder: Path, kind: Kind, form: str = "llama") -> tuple[Path, Path]:
    """A target of one type, and the same weights in Q8_0 as its draft model."""
    config = byte_llama() if form == "llama" else architecture(form)
    config.update({**_WIDE, "vocab_size": BYTE_VOCAB})
    model = save(folder / "plain", config, std=0.05)
    words = folder / "words"
    save_byte_tokenizer(words)
    target = write_gguf(model, folder / "target.gguf", all_of(kind), tokenizer=words)
    return target, write_gguf(model, folder / "draft.gguf", all_of(Kind.Q8_0), tokenizer=words)


def texts(
    pair: tuple[Path, Path], activations: Activations, offload: OffloadMode = "ram"
) -> dict[tuple[Method, float], list[int]]:
    """What each method writes, greedily and drawn."""
    written = {}
    target, draft = map(str, pair)
    with Session.open(
        model=target, draft=draft, dtype="float32", offload=offload, activations=activations
    ) as session:
        for temperature in (0.0, 1.0):
            methods: tuple[Method, ...] = ("autoregressive", "specexec")
            for method in methods:
                steps = session.generate(
                    "def read(path):\n",
                    sampling=SamplingConfig(temperature=temperature, seed=3),
                    tree=TreeConfig(budget=12, max_depth=6, batch=4, policy="fixed"),
                    generation=GenerationConfig(max_tokens=24),
                    method=method,
                )
                tokens = [token for step in steps for token in step.tokens]
                written[method, temperature] = tokens
    return written


@pytest.mark.parametrize(
    ("kind", "form"),
    [(Kind.Q4_0, "llama"), (Kind.Q4_K, "llama"), (Kind.Q8_0, "mixtral")],
    ids=lambda value: getattr(value, "name", value),
)
def test_trees_write_the_autoregressive_text(tmp_path: Path, kind: Kind, form: str) -> None:
    written = texts(pair(tmp_path, kind, form), "8bit")
    for temperature in (0.0, 1.0):
        expected = written["autoregressive", temperature]
        assert written["specexec", temperature] == expected
        assert len(expected) > 2


def test_a_draft_model_s_rows_change_no_text(tmp_path: Path) -> None:
    models = pair(tmp_path, Kind.Q4_0)
    assert texts(models, "8bit-draft") == texts(models, "full")


def test_what_a_draft_shares_with_its_target_keeps_whole_rows() -> None:
    """An MTP layer has the target's head."""
    own, theirs = (
        QuantizedLinear(
            32, 32, GGUF_FORMATS["Q8_0"], {"weight": ((32, 34), torch.uint8)}, bias=False
        )
        for _ in range(2)
    )
    head = nn.Sequential(theirs)
    round_rows(nn.ModuleList([own, head]), [head])
    assert own.eight_bit_rows
    assert not theirs.eight_bit_rows


@pytest.mark.parametrize("form", ["llama", "mixtral"])
def test_rows_are_rounded_in_every_tier(tmp_path: Path, form: str) -> None:
    """Logits differ from those of whole rows, by little, and are the same wherever layers are."""
    target, _ = pair(tmp_path, Kind.Q4_0, form)

    def logits(tiers: str | None, rounds: bool, experts: int = 0) -> torch.Tensor:
        spec = ModelSpec(
            device=torch.device("cpu"), dtype=torch.float32, tiers=tiers,  # type: ignore[arg-type]
            eight_bit_rows=rounds, expert_bytes=experts,
        )  # fmt: skip
        model = spec.open(read_checkpoint(target))
        return model.forward(PassRows.chain(range(3, 13), 0), model.new_state(), range(10))

    whole, found = logits("ram", False), logits("ram", True)
    assert 0 < float((found - whole).abs().max()) < 0.05 * float(whole.abs().max())
    assert torch.equal(logits(None, True), found)
    if form == "mixtral":
        assert torch.equal(logits("ram", True, experts=1 << 24), found)


def test_a_gpu_rounds_no_rows() -> None:
    said = run_cli("plan", "demo", "--activations", "8bit", "--vram", "8GB", "--ram", "16GB")
    assert said.error.startswith("--activations 8bit rounds rows on a CPU alone, and cuda:0")
