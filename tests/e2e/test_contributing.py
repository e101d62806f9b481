"""What CONTRIBUTING.md shows works when it is done, and README lists what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import chain_logits, open_float32, random_tokens, save_checkpoint

from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning import architectures
from specexec_cli.planning.architectures import Architecture
from specexec_cli.planning.sizes import checkpoint_bytes

ROOT = Path(__file__).parents[2]


def example(name: str) -> str:
    """The Python code below a marker in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found, f"CONTRIBUTING.md has no example '{name}'"
    return found[1]


@pytest.fixture
def own_table() -> Iterator[dict[str, Architecture]]:
    """The table of architectures, as it was again after the test."""
    before = dict(architectures._table)
    yield architectures._table
    architectures._table.clear()
    architectures._table.update(before)


@torch.no_grad()
def test_the_example_of_an_architecture(tmp_path: Path, own_table: dict[str, Architecture]) -> None:
    before = set(own_table)
    exec(compile(example("architecture"), "CONTRIBUTING.md", "exec"), {})
    (added,) = set(own_table) - before
    config = transformers.AutoConfig.for_model(
        added, vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    own, tokens = save_checkpoint(tmp_path, config), random_tokens(20)
    model = open_float32(tmp_path)
    expected = own(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(chain_logits(model, tokens), expected, rtol=1e-4, atol=1e-4)
    model.close()
    sizes = checkpoint_bytes(read_checkpoint(tmp_path))
    assert sum(sizes.layers) == 4 * sizes.layer_params


def test_readme_lists_every_architecture() -> None:
    limits = (ROOT / "README.md").read_text().partition("## Limits")[2]
    listed = " ".join(limits.partition("Architectures:")[2].partition("Others are")[0].split())
    for entry in architectures.ARCHITECTURES.values():
        assert entry.title in listed
