"""Texts of a hundred tokens and more over real caches, which grow on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from checkpoints import architecture, open_float32, random_tokens, save_checkpoint

from specexec_cli.config import BenchMethod, SamplingConfig, TreeConfig
from specexec_cli.core import StepResult
from specexec_cli.decoding.autoregressive import autoregressive
from specexec_cli.decoding.loop import specexec
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.sources import DraftSetup
from specexec_cli.lab.baselines import SOURCES
from specexec_cli.models.streamed import StreamedModel
from specexec_cli.sampling import Sampler
from specexec_cli.verify.verifier import LocalTarget

PROMPT_TOKENS, TEXT_TOKENS = 170, 110
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=3)


@pytest.fixture(scope="module", params=["mistral", "gemma3"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[StreamedModel, StreamedModel]]:
    """A target with sliding windows and a draft model that mostly agrees with it."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    config = architecture(request.param)
    own = save_checkpoint(folder / "target", config)
    save_checkpoint(folder / "draft", config, noise_of=own, noise=0.02)
    opened = open_float32(folder / "target", None), open_float32(folder / "draft", None)
    yield opened
    for model in opened:
        model.close()


@pytest.mark.parametrize(
    ("sampling", "runs"),
    [
        (GREEDY, [("specexec", "cost"), ("specexec-paper", "fixed"), ("beam-pruned", "heuristic")]),
        (SAMPLED, [("specexec", "fixed"), ("chain-coupled", "heuristic")]),
    ],
    ids=["greedy", "sampled"],
)
def test_methods_write_the_plain_text(
    models: tuple[StreamedModel, StreamedModel],
    sampling: SamplingConfig,
    runs: list[tuple[BenchMethod, str]],
) -> None:
    """Both caches outgrow their first buffers; a text that an EOS ended is gone on with."""
    target, draft = models
    prompt, sampler = random_tokens(PROMPT_TOKENS, seed=5), Sampler(sampling)
    plain = tokens_of(autoregressive(LocalTarget(target), sampler, prompt, TEXT_TOKENS, ()))
    assert len(prompt) + len(plain) > 256, "more slots than an unreserved cache begins with"
    end = max(set(plain[:-1]), key=plain.index)  # comes latest for the first time
    until_end = plain[: plain.index(end) + 1]
    for method, policy in runs:
        tree = TreeConfig(budget=24, max_depth=6, batch=6, policy=policy)
        server, with_trees = LocalTarget(target), []
        drafter = SOURCES[method].make(
            DraftSetup(model=draft, sampler=sampler, tree=tree,
                       target_vocab_size=target.vocab_size, learned=Learned())
        )  # fmt: skip

        def run(context: list[int], count: int, eos_ids: set[int]) -> list[int]:
            steps = list(
                specexec(server, drafter, sampler, context, count, eos_ids)  # noqa: B023
            )
            # the cost policy goes without where a busy machine makes trees slow
            with_trees.extend(step for step in steps if step.tree_nodes)  # noqa: B023
            return tokens_of(steps)

        text = run(prompt, TEXT_TOKENS, {end})
        assert text == until_end, (method, policy)
        text += run([*prompt, *text], TEXT_TOKENS - len(text), set())
        assert text == plain, (method, policy)
        committed = sum(len(step.tokens) for step in with_trees)
        assert committed > 1.3 * len(with_trees) > 0, "trees never right would prove nothing"


def tokens_of(steps: Iterable[StepResult]) -> list[int]:
    return [token for step in steps for token in step.tokens]
