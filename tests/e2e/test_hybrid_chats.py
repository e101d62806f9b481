"""Chats on models with recurrent layers: what a text is cropped to, and which rows run anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import open_float32, random_tokens
from gguf_toys import TOYS, save_toy

from specexec_cli.core import DraftTree
from specexec_cli.models.layer_state import ModelState
from specexec_cli.models.recurrent import RecurrentState, Windows
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.planning.memory import CHECKPOINTS, Work, checkpoints
from specexec_cli.planning.sizes import checkpoint_bytes
from specexec_cli.verify.verifier import LocalTarget

_TOKENS = [3 + token % 45 for token in random_tokens(400)]


def _read(target: LocalTarget, text: list[int]) -> tuple[torch.Tensor, int]:
    """Crops the target to what it has of a text and reads the rest; logits, and the rows read."""
    same = next((n for n, (a, b) in enumerate(zip(target.tokens, text, strict=False)) if a != b),
                min(len(target.tokens), len(text)))  # fmt: skip
    target.crop(min(same, len(text) - 1))
    pending = text[len(target.tokens) :]
    logits = target.verify(pending, DraftTree.empty())
    target.commit([])
    return logits, len(pending)


def _recurrent(state: ModelState) -> list[RecurrentState]:
    parts = [part for layer in state.layers for part in getattr(layer, "parts", (layer,))]
    return [part for part in parts if isinstance(part, RecurrentState)]


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "falcon_h1", "nemotron_h"])
def test_an_undone_turn_is_read_from_its_checkpoint(tmp_path: Path, name: str) -> None:
    save_toy(TOYS[name], tmp_path)
    model = open_float32(tmp_path)
    target = LocalTarget(model)
    assert _read(target, _TOKENS[:60])[1] == 60
    for token in _TOKENS[60:70]:  # a reply
        target.verify([token], DraftTree.empty())
        target.commit([])
    assert _read(target, _TOKENS[:100])[1] == 30  # the next turn
    undone = [*_TOKENS[:70], *_TOKENS[200:225]]
    logits, rows = _read(target, undone)
    assert rows == 25
    assert torch.equal(logits, _read(LocalTarget(model), undone)[0])
    # the last tokens of the prompt before are other ones, as where a template leaves thoughts out
    again = [*undone[:-5], *_TOKENS[300:320]]
    logits, rows = _read(target, again)
    assert rows == len(again) - (len(undone) - 16)
    assert torch.equal(logits, _read(LocalTarget(model), again)[0])
    states = _recurrent(target.state)
    assert states
    assert all(0 < len(each.checkpoints) <= CHECKPOINTS for each in states)
    assert len({tuple(each.checkpoints) for each in states}) == 1


@pytest.mark.parametrize("chunk", [8000, 128, 32])
def test_where_a_turn_began_is_kept_however_many_passes_read_it(chunk: int) -> None:
    state = Windows(4)

    def read(count: int, rows: int) -> None:
        for at in range(0, count, rows):
            pending = min(rows, count - at)
            state.begin(np.arange(state.length - 1, state.length - 1 + pending), pending)
            state.run(torch.zeros(1, pending, 2))
            state.commit(state.length, torch.tensor([], dtype=torch.int64))

    for reply in (300, 2000):
        read(8000, chunk)
        read(reply, 1)
        began = state.length
        read(1500, chunk)
        read(50, 1)
        assert state.reachable(began) == began
        assert state.reachable(began + 1490) == began + 1500 - 16
        assert len(state.checkpoints) <= CHECKPOINTS


def test_the_plan_counts_checkpoints(tmp_path: Path) -> None:
    save_toy(TOYS["lfm2"], tmp_path)
    [(_, planned)] = checkpoints(checkpoint_bytes(read_checkpoint(tmp_path)), None, Work())
    target = LocalTarget(open_float32(tmp_path))
    for turn in range(1, 9):
        _read(target, _TOKENS[: 40 * turn])
        target.verify([_TOKENS[40 * turn]], DraftTree.empty())  # a reply, without which it goes on
        target.commit([])
    kept = [state for each in _recurrent(target.state) for state in each.checkpoints.values()]
    assert planned == sum(part.numel() * part.element_size() for state in kept for part in state)
