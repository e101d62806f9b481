"""How often a text on a GPU waits for the device: counted on the stand-in, tests/fake_cuda.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import architecture, random_tokens, save_checkpoint
from fake_cuda import CUDA, counted, fake_cuda
from torch import Tensor

from specexec_cli import sampling
from specexec_cli.config import SamplingConfig, TreeConfig
from specexec_cli.core import DraftTree
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.drafter import ModelDrafter
from specexec_cli.drafting.scoring import DraftScorer, signals
from specexec_cli.drafting.search import Frontier
from specexec_cli.errors import NonFiniteLogitsError
from specexec_cli.lab.baselines.sampled import SampledChildren
from specexec_cli.models.model_spec import ModelSpec
from specexec_cli.offload.store import read_checkpoint
from specexec_cli.sampling import Sampler, noise_there
from specexec_cli.verify.accept import accept
from specexec_cli.verify.verifier import LocalTarget

VOCAB = 40


def logits_on_device(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)).to(CUDA)


@pytest.mark.parametrize("top_logprobs", [None, 0, 3])
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 9}, {"repetition_penalty": 1.2}]
)
def test_a_token_is_drawn_with_one_wait(
    settings: dict[str, float], top_logprobs: int | None
) -> None:
    config = SamplingConfig(**settings)  # type: ignore[arg-type]
    with fake_cuda():
        logits = logits_on_device(1)[0]
        here = Sampler(config, top_logprobs=top_logprobs)
        there = Sampler(config, top_logprobs=top_logprobs)
        with counted() as found:
            token = there.token(logits, [1, 2])
        assert found.waits == 1
        assert here.token(logits.cpu(), [1, 2]) == token
        assert here.recorded(2, 1) == there.recorded(2, 1)


def a_path(logits: Tensor, sampler: Sampler, context: list[int]) -> DraftTree:
    """A tree in which the walk goes three nodes down, and two others."""
    path: list[int] = []
    for row in (0, 1, 3):  # of the root and of the accepted nodes
        path.append(sampler.token(logits[row], [*context, *path]))
    wrong = [(path[0] + 1) % VOCAB, (path[1] + 1) % VOCAB]
    tokens = np.array([path[0], wrong[0], path[1], wrong[1], path[2]])
    depths = np.array([1, 1, 2, 2, 3])
    return DraftTree(tokens, np.array([-1, -1, 0, 0, 2]), depths, -1.0 * depths)


@pytest.mark.parametrize("drawn_rows", [4, 16])
@pytest.mark.parametrize(
    ("settings", "waits"),
    [({}, 1), ({"temperature": 0.7}, 1), ({"temperature": 0.7, "top_k": 9}, 1),
     ({"temperature": 0.7, "top_p": 0.9}, 4), ({"repetition_penalty": 1.2}, 4)],
)  # fmt: skip
def test_a_tree_is_walked_with_one_wait_unless_a_row_must_be_drawn_alone(
    settings: dict[str, float], waits: int, drawn_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_DRAWN_ROWS", drawn_rows)
    context, sampler = [1, 2], Sampler(SamplingConfig(**settings))  # type: ignore[arg-type]
    with fake_cuda(triton=True):
        there = logits_on_device(6)
        here = there.cpu()
        tree = a_path(here, sampler, context)
        there[2] = there[4] = torch.nan  # of nodes that nobody reaches
        expected = accept(tree, here, sampler, context, 9, ())
        assert len(expected.tokens) == 4
        with counted() as found:
            assert accept(tree, there, sampler, context, 9, ()) == expected
        assert found.waits == waits
        there[3] = torch.nan
        with pytest.raises(NonFiniteLogitsError, match="position 4"):
            accept(tree, there, sampler, context, 9, ())


def test_probabilities_come_with_one_wait() -> None:
    with fake_cuda():
        logits = logits_on_device(1)[0]
        with counted() as found:
            probs = Sampler(SamplingConfig(temperature=1.0)).probs(logits, [1])
    assert probs.sum() == pytest.approx(1.0)
    assert found.waits == 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_scores_of_a_draft_step_come_in_one_transfer(temperature: float) -> None:
    config = SamplingConfig(temperature=temperature)
    rows = torch.arange(5).numpy()
    frontier = Frontier(rows, rows, rows, rows)
    with fake_cuda():
        logits = logits_on_device(5)
        scorer = DraftScorer(Sampler(config), "noise")
        utilities = scorer.utilities(logits, [3] * 5, [1])
        sampled = SampledChildren(Sampler(config))
        for ask in (
            lambda: scorer.best(utilities, 4, rows + 1),
            lambda: signals(utilities),
            lambda: sampled.children(frontier, logits, [1], 4),
        ):
            with counted() as found:
                ask()
            assert found.waits == 1


def test_what_a_pass_settled_is_learned_with_one_wait() -> None:
    with fake_cuda():
        there, here = (DraftScorer(Sampler(SamplingConfig()), "noise") for _ in range(2))
        utilities = there.utilities(logits_on_device(6), range(6), [1])
        settled = [(row, depth, depth) for depth, row in enumerate(utilities, 1)]
        there.observe(settled[:1])  # the candidates for c go to the device once
        with counted() as found:
            there.observe(settled[1:])
        assert found.waits == 1
        with counted() as found:
            there.observe([])
        assert found.operations == 0
        for row, depth, token in settled:
            here.observe([(row.cpu(), depth, token)])
        assert here.trust.state() == there.trust.state()


@pytest.mark.parametrize(("temperature", "triton"), [(0.0, False), (0.8, False), (0.8, True)])
def test_waits_of_a_text(temperature: float, triton: bool, tmp_path: Path) -> None:
    """One for each draft step, and two for each pass: its tokens, and what they teach. Where the
    CPU draws the noise, one for each token; none for the noise."""
    save_checkpoint(tmp_path, architecture("llama"))
    noise_there.cache_clear()
    with fake_cuda(triton=triton):
        model = ModelSpec(device=CUDA, dtype=torch.float32, tiers=None).open(
            read_checkpoint(tmp_path)
        )
        sampler = Sampler(SamplingConfig(temperature=temperature))
        tree = TreeConfig(budget=8, max_depth=3, batch=4)
        drafter = ModelDrafter(model, sampler, tree, model.vocab_size)
        assert drafter.rows.steps is not None
        steps, forward = [0], drafter.rows.steps.forward

        def noted(*args: Any) -> Tensor:
            steps[0] += 1
            return forward(*args)

        drafter.rows.steps.forward = noted  # type: ignore[method-assign]
        target, tokens, passes = LocalTarget(model), 0, 0
        with counted() as found:
            for step in specexec(target, drafter, sampler, random_tokens(9), 6, ()):
                tokens += len(step.tokens)
                passes += 1
        assert tokens == 6
        assert passes < tokens
        drawn = passes if triton or not temperature else tokens
        assert found.waits <= steps[0] + drawn + passes
        model.close()
