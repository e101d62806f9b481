"""Memory and trees of several texts at once, as they are planned."""

from __future__ import annotations

import pytest

from specexec_cli.config import TreeConfig
from specexec_cli.errors import ConfigError
from specexec_cli.planning.machine import Machine
from specexec_cli.planning.memory import (
    PROMPT_ROWS,
    DoesNotFitError,
    Work,
    activation_bytes,
    fixed_parts,
    nodes_of_a_text,
)
from specexec_cli.planning.request import MOST_SLOTS, Request, TreeRequest
from specexec_cli.planning.sizes import ModelBytes, architecture_bytes
from specexec_cli.planning.tiers import make_plan

LLAMA_7B = architecture_bytes(
    {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008,
        "vocab_size": 32000, "torch_dtype": "float16",
    }
)  # fmt: skip
GB = 10**9


def parts(target: ModelBytes, texts: int) -> dict[str, int]:
    return dict(fixed_parts(target, target, Work(context_tokens=512, budget=64, texts=texts)))


@pytest.mark.parametrize("name", ["target's KV cache", "draft model's KV cache"])
def test_each_text_has_a_cache_of_its_own(name: str) -> None:
    one, four, many = (parts(LLAMA_7B, texts)[name] for texts in (1, 4, 16))
    assert four == 4 * one
    # of many no text has the whole budget
    assert many == 16 * one * (512 + 16 + 1) // (512 + 64 + 1)


def test_weights_are_there_once() -> None:
    for name in ("draft model", "embeddings and head"):
        assert parts(LLAMA_7B, 16)[name] == parts(LLAMA_7B, 1)[name]


def test_a_pass_has_room_for_other_prompts() -> None:
    work = Work(context_tokens=512, budget=64, texts=4)
    assert (work.verify_rows, work.pass_rows) == (68, 512 + PROMPT_ROWS + 68)
    alone = Work(context_tokens=512, budget=64)
    assert (alone.verify_rows, alone.pass_rows) == (65, 512 + 65)
    assert activation_bytes(LLAMA_7B, work) > activation_bytes(LLAMA_7B, alone)


def test_more_texts_than_memory_has_room_for_are_refused() -> None:
    machine = Machine(ram_bytes=4 * GB)
    make_plan(LLAMA_7B, None, Work(context_tokens=512, budget=64), machine)
    with pytest.raises(DoesNotFitError) as raised:
        make_plan(LLAMA_7B, None, Work(context_tokens=512, budget=64, texts=32), machine)
    assert raised.value.biggest == "target's KV cache"


@pytest.mark.parametrize(
    ("budget", "texts", "most"), [(64, 1, 64), (64, 4, 64), (64, 5, 52), (64, 16, 16), (3, 16, 1)]
)
def test_no_text_takes_more_than_four_shares(budget: int, texts: int, most: int) -> None:
    assert nodes_of_a_text(budget, texts) == most


def test_texts_that_share_a_pass_share_its_budget() -> None:
    recommended = TreeConfig(budget=32)

    def budget(request: TreeRequest, slots: int) -> int:
        return request.resolve(recommended, "specexec", slots).budget

    assert [budget(TreeRequest(), slots) for slots in (1, 2, 3, 4, 16)] == [64, 64, 96, 128, 128]
    assert budget(TreeRequest(budget=10, depth=5), 16) == 10
    assert budget(TreeRequest(policy="fixed"), 16) == 32


@pytest.mark.parametrize(
    ("recommended", "policy", "slots", "nodes"),
    [(128, "fixed", 1, 127), (128, "cost", 1, 255), (128, "cost", 4, 508), (1024, "cost", 1, 2047),
     (32, "cost", 1, 64), (100, "fixed", 1, 100), (127, "fixed", 1, 127), (1, "fixed", 128, 1)],
)  # fmt: skip
def test_where_rows_come_in_blocks_an_open_budget_counts_the_roots(
    recommended: int, policy: str, slots: int, nodes: int
) -> None:
    """A root that began one more block would take as long as 128 nodes."""
    pair = TreeConfig(budget=recommended, max_depth=1)
    request = TreeRequest(policy=policy)
    assert request.resolve(pair, "specexec", slots, 128).budget == nodes
    asked = TreeRequest(policy=policy, budget=recommended)
    assert asked.resolve(pair, "specexec", slots, 128).budget == recommended


@pytest.mark.parametrize("slots", [0, -1, MOST_SLOTS + 1])
def test_impossible_numbers_are_refused(slots: int) -> None:
    with pytest.raises(ConfigError, match="must be between 1 and"):
        Request(slots=slots)


def test_dsi_runs_one_text() -> None:
    with pytest.raises(ConfigError, match="one text at a time"):
        Request(method="dsi", slots=2)
