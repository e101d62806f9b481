"""A session: prompts one after another through the same caches, limits, ends, statistics."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import byte_llama, edit_json, save_byte_tokenizer, save_checkpoint, save_pair
from computer import Computer

from specexec_cli.chat.chat import add_stats
from specexec_cli.cli.mends import with_mend
from specexec_cli.cli.render import stats_line
from specexec_cli.config import GenerationConfig, SamplingConfig, TreeConfig
from specexec_cli.core import GenerationStats, StepResult
from specexec_cli.drafting.classifier import FEATURES, Classifier
from specexec_cli.drafting.iteration_cost import CostModel
from specexec_cli.drafting.learned import Learned
from specexec_cli.drafting.pauses import Pauses
from specexec_cli.errors import CheckpointError, ConfigError, OutOfMemoryError
from specexec_cli.lab.baselines import policies_for
from specexec_cli.planning import placement
from specexec_cli.session import Session, TextSession
from specexec_cli.session.local_session import LocalSession

TREE = TreeConfig(budget=20, max_depth=6, batch=5)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    config = byte_llama(max_position_embeddings=96)
    return save_pair(tmp_path_factory.mktemp("pair"), target=config)


@pytest.fixture(scope="module")
def session(pair: tuple[Path, Path]) -> Iterator[TextSession]:
    folders = {"model": str(pair[0]), "draft": str(pair[1])}
    with Session.open(**folders, dtype="float32", offload="ssd") as session:
        yield session


def run(
    session: TextSession, prompt: str | list[int], count: int = 24, **options
) -> list[StepResult]:
    generation = GenerationConfig(max_tokens=count, stop=options.pop("stop", ()))
    return list(session.generate(prompt, generation=generation, tree=TREE, **options))


def tokens_of(steps: list[StepResult]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def test_a_method_that_nobody_has_imported_is_told_with_what_to_import(
    pair: tuple[Path, Path],
) -> None:
    """In a process of its own, since tests import the baselines."""
    code = (
        "import sys\n"
        "from specexec_cli.config import TreeConfig\n"
        "from specexec_cli.errors import ConfigError\n"
        "from specexec_cli.session import Session\n"
        "fixed = TreeConfig(budget=4, max_depth=4, policy='fixed')\n"
        "with Session.open(model=sys.argv[1], draft=sys.argv[2], dtype='float32') as session:\n"
        "    try: session.generate('hello', method='chain', tree=fixed)\n"
        "    except ConfigError as error: print(error)\n"
        "    import specexec_cli.lab.baselines\n"
        "    steps = session.generate('hello', method='chain', tree=fixed)\n"
        "    print(next(steps).tokens != ())\n"
    )
    command = [sys.executable, "-c", code, *map(str, pair)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "`method='chain'` is not among those known here, which are autoregressive, specexec, "
        "suffix: for what SpecExec is measured against, `import specexec_cli.lab.baselines` "
        "first, as `specexec bench` does",
        "True",
    ]


@pytest.mark.parametrize("count", range(1, 12))
def test_max_tokens_is_never_exceeded(session: TextSession, count: int) -> None:
    steps = run(session, "abc", count)
    assert len(tokens_of(steps)) == count
    assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + ["length"]
    assert all(len(step.tokens) == len(step.drafted) == len(step.pieces) for step in steps)
    assert any(len(step.tokens) > 1 for step in steps) or count < 4, "bursts, or it proves nothing"


def test_one_prompt_after_another(session: TextSession) -> None:
    """Longer, shorter, diverging and equal prompts; each as from a fresh session."""
    prompts = ["abc", "abcdefgh", "abcx", "abcx", "q", "abcdefgh ijk"]
    methods = ("specexec", "autoregressive")
    continued = [tokens_of(run(session, p, 12, method=m)) for p in prompts for m in methods]
    fresh = []
    for prompt in prompts:
        session.forget()
        fresh += [tokens_of(run(session, prompt, 12, method="autoregressive"))] * 2
    assert continued == fresh


def test_a_continued_text_costs_only_its_new_tokens(session: TextSession) -> None:
    session.forget()
    first = run(session, "hello there", 16)
    assert first[0].pending_rows == len(session.encode("hello there"))
    again = run(session, [*session.context, *session.encode("more")], 4)
    assert again[0].pending_rows <= len(session.encode("more")) + 1
    assert session.stats.prompt_tokens == len(session.context) - 4


def test_leaving_early_keeps_the_caches_right(session: TextSession) -> None:
    session.forget()
    expected = tokens_of(run(session, "abc"))
    for passes in (0, 1, 2):
        session.forget()
        steps = session.generate("abc", tree=TREE, generation=GenerationConfig(max_tokens=24))
        for _ in range(passes):
            next(steps)
        steps.close()
        assert tokens_of(run(session, "abc")) == expected


@pytest.mark.parametrize("layer", [0, 2])
def test_an_exception_in_the_middle_of_a_pass(session: TextSession, layer: int) -> None:
    """As Ctrl-C: the session goes on, with the same tokens."""
    session.forget()
    expected = tokens_of(run(session, "abc"))
    session.forget()

    def interrupt(progress) -> None:
        if progress.layer == layer + 1 and progress.number == 2:
            raise KeyboardInterrupt

    session.on_layer(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(session, "abc")
    session.on_layer(lambda progress: None)
    assert tokens_of(run(session, "abc")) == expected


@pytest.mark.parametrize("method", ["specexec", "autoregressive"])
def test_a_text_cannot_begin_in_the_middle_of_a_pass(session: TextSession, method: str) -> None:
    """As another thread would try to, or a callback."""
    expected = tokens_of(run(session, "abc"))
    refused: list[str] = []

    def begin_another(progress) -> None:
        try:
            next(session.generate("another text", tree=TREE, method=method))
        except ConfigError as error:
            refused.append(str(error))

    session.on_layer(begin_another)
    try:
        assert tokens_of(run(session, "abc", method=method)) == expected
    finally:
        session.on_layer(lambda progress: None)
    assert refused
    assert all("in the middle of a pass for another generation" in line for line in refused)


@pytest.mark.parametrize("method", ["specexec", "autoregressive"])
def test_the_window_ends_the_text(session: TextSession, method: str) -> None:
    assert session.context_length == 96
    prompt = list(range(4, 84))
    steps = run(session, prompt, 50, method=method)
    assert len(prompt) + len(tokens_of(steps)) == 96
    assert steps[-1].finish_reason == "length"
    assert len(tokens_of(run(session, list(range(4, 99)), 50, method=method))) == 1
    with pytest.raises(ConfigError, match="96 tokens, the context window holds 96"):
        session.generate(list(range(4, 100)), method=method)


def test_prompts_that_cannot_be(session: TextSession) -> None:
    with pytest.raises(ConfigError, match="empty"):
        session.generate([])
    for token in (260, 10**6, -1):
        with pytest.raises(ConfigError, match="the target knows only 260"):
            session.generate([5, token])


@pytest.mark.parametrize("method", ["specexec", "autoregressive"])
@pytest.mark.parametrize("as_list", [False, True])
def test_every_eos_of_the_generation_config_ends_the_text(
    pair: tuple[Path, Path], tmp_path: Path, as_list: bool, method: str, session: TextSession
) -> None:
    """One id or several (Llama-3 has two), also in the middle of an accepted path."""
    import shutil

    plain = tokens_of(run(session, "abc", 24, method="autoregressive"))
    end = plain[6]
    shutil.copytree(pair[0], tmp_path / "target")
    edit_json(tmp_path / "target" / "generation_config.json",
              eos_token_id=[259, end] if as_list else end)  # fmt: skip
    folders = {"model": str(tmp_path / "target"), "draft": str(pair[1])}
    with Session.open(**folders, dtype="float32") as other:
        assert other.eos_ids == ({259, end} if as_list else {end})
        steps = run(other, "abc", 24, method=method)
    assert tokens_of(steps) == plain[: plain.index(end) + 1]
    assert steps[-1].finish_reason == "eos"


def test_stop_strings_cut_text_and_tokens(session: TextSession) -> None:
    whole = run(session, "abc")
    text = "".join(step.text for step in whole)
    assert text == session.tokenizer.decode(
        session.encode("abc") + tokens_of(whole), skip_special_tokens=True
    ).removeprefix("abc")
    for cut in (text[0], text[5:7], text[10:14]):
        steps = run(session, "abc", stop=(cut, "never in there"))
        assert "".join(step.text for step in steps) == text[: text.index(cut)]
        assert steps[-1].finish_reason == "stop"
        assert tokens_of(steps) == tokens_of(whole)[: len(tokens_of(steps))]
        assert session.context == session.encode("abc") + tokens_of(steps)
    assert tokens_of(run(session, "abc")) == tokens_of(whole), "and the next one is right"


def test_statistics_add_up(session: TextSession) -> None:
    session.forget()
    steps = run(session, "abc", sampling=SamplingConfig(temperature=0.8, seed=4))
    stats = session.stats
    assert stats.prompt_tokens == len(session.encode("abc"))
    assert stats.generated_tokens == len(tokens_of(steps)) == 24
    assert stats.target_passes == len(steps)
    layer_bytes = 4 * sum(
        parameter.numel() for parameter in session.target.model.skeleton.layers.parameters()
    )
    assert stats.bytes_streamed == len(steps) * layer_bytes
    assert 0 < stats.ttft_s <= stats.total_s
    assert stats.draft_s + stats.verify_s <= stats.total_s * 1.001


@pytest.mark.parametrize("policy", ["heuristic", "cost"])
def test_policies_size_trees_and_change_no_token(session: TextSession, policy: str) -> None:
    tree = replace(TREE, policy=policy)
    plain = tokens_of(run(session, "abcdef", 40, method="autoregressive"))
    # a machine on which a row costs as much as the pass: what it really takes decides nothing yet
    dear = CostModel(base_s=0.01, row_s=0.01, knee_rows=0.0, step_s=0.001)
    session.learned = Learned(session.classifier, lambda: dear)
    steps = list(session.generate("abcdef", generation=GenerationConfig(max_tokens=40), tree=tree))
    session.learned = Learned(session.classifier, session.cost_prior)
    assert tokens_of(steps) == plain
    assert steps[0].tree_nodes < TREE.budget
    assert max(step.tree_nodes for step in steps) <= TREE.budget


@pytest.mark.parametrize("policy", policies_for("specexec"))
def test_every_policy_writes_the_plain_text(
    session: TextSession, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ones = np.ones(FEATURES)
    tensors = {"norm.mean": 0 * ones, "norm.scale": ones, "hidden.weight": ones[None],
               "hidden.bias": np.zeros(1), "out.weight": np.ones((1, 1)),
               "out.bias": np.full(1, -2.5)}  # fmt: skip
    classifier = Classifier(tensors, threshold=0.5, max_length=6)
    monkeypatch.setattr(session, "classifier", lambda: classifier)
    session.learned = Learned(session.classifier, session.cost_prior)
    plain = tokens_of(run(session, "abcdef", 40, method="autoregressive"))
    tree, limit = replace(TREE, policy=policy), GenerationConfig(max_tokens=40)
    assert tokens_of(list(session.generate("abcdef", generation=limit, tree=tree))) == plain
    assert session.stats.target_passes < 40, "something was drafted"
    session.learned = Learned(session.classifier, session.cost_prior)


def test_passes_that_the_policy_wants_no_tree_for_are_told_with_what_drafting_cost(
    session: TextSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = replace(TREE, policy="cost")
    passes = iter(range(100))
    session.learned = Learned(session.classifier, session.cost_prior)
    monkeypatch.setattr(Pauses, "goes_without", lambda pauses, expected_plain_s: next(passes) > 1)
    list(session.generate("abcdef", generation=GenerationConfig(max_tokens=30), tree=tree))
    stats = session.stats
    assert stats.paused_passes >= 10
    stats.tree_s = 100.0  # whatever this machine took: drafting was slower
    line = stats_line(stats)
    assert f"ms without, so {stats.paused_passes} passes went without" in line
    total = GenerationStats()
    for _ in range(2):
        add_stats(total, stats)
    assert (total.paused_passes, total.prompt_tokens) == (
        2 * stats.paused_passes,
        2 * stats.prompt_tokens,
    )
    assert total.peak_ram_bytes == stats.peak_ram_bytes
    assert "passes went without" in stats_line(total)


def test_cost_sizes_best_first_trees_alone(session: TextSession) -> None:
    with pytest.raises(ConfigError, match="`policy='cost'` cannot size the trees of method chain"):
        session.generate("abc", tree=replace(TREE, policy="cost"), method="chain-coupled")


def test_a_missing_classifier_is_told_of_at_the_call(session: TextSession) -> None:
    with pytest.raises(CheckpointError, match="train-policy"):
        session.generate("abc", tree=replace(TREE, policy="disco"))


def test_another_seed_gives_another_text(session: TextSession) -> None:
    texts = {
        tuple(tokens_of(run(session, "abc", sampling=SamplingConfig(temperature=1.0, seed=seed))))
        for seed in range(5)
    }
    assert len(texts) == 5


def test_a_session_without_draft_model(pair: tuple[Path, Path], session: TextSession) -> None:
    with Session.open(model=str(pair[0]), method="autoregressive", dtype="float32") as alone:
        assert tokens_of(run(alone, "abc")) == tokens_of(run(session, "abc"))
        with pytest.raises(ConfigError, match="without a draft model"):
            alone.generate("abc", method="specexec")


def test_nothing_is_left_behind(pair: tuple[Path, Path]) -> None:
    import os
    import threading

    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    folders = {"model": str(pair[0]), "draft": str(pair[1])}
    session = Session.open(**folders, offload="ssd")
    steps = session.generate("abc", tree=TREE)
    next(steps)
    session.close()
    session.close()
    with pytest.raises(ConfigError, match="this session is closed: open another"):
        next(steps)
    with pytest.raises(ConfigError, match="this session is closed: open another"):
        next(session.generate("abc", tree=TREE))
    with pytest.raises(ConfigError, match="this session is closed: open another"):
        next(session.generate("abc", tree=replace(TREE, policy="cost")))  # measures nothing first
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_draft_with_a_shorter_window_than_the_target(tmp_path: Path) -> None:
    target = byte_llama(max_position_embeddings=128)
    own = save_checkpoint(tmp_path / "target", target, std=0.12)
    short = byte_llama(max_position_embeddings=24)
    save_checkpoint(tmp_path / "draft", short, noise_of=own, noise=0.01)
    for name in ("target", "draft"):
        save_byte_tokenizer(tmp_path / name)
    folders = {"model": str(tmp_path / "target"), "draft": str(tmp_path / "draft")}
    with Session.open(**folders, dtype="float32") as session:
        ours = tokens_of(run(session, "abcdefgh", 60))
        assert len(ours) == 60
        assert ours == tokens_of(run(session, "abcdefgh", 60, method="autoregressive"))


def test_memory_is_planned_for_the_tokens_that_were_asked_for(
    tmp_path: Path, computer: Computer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of a million tokens need not fit if the prompt and its text do."""
    config = byte_llama(max_position_embeddings=1_000_000)
    target, _ = save_pair(tmp_path, target=config)
    monkeypatch.setattr(placement, "_STAY_SHARE", 10**9)  # small, yet to be streamed
    computer.has_free_ram(200_000_000)

    def planned_for(count: int) -> TextSession:
        return Session.open(model=str(target), method="autoregressive", context_tokens=count)

    with planned_for(200) as session:
        assert session.context_length == 1_000_000
        session.context_limit = 300
        assert session.context_length == 300
    with pytest.raises(OutOfMemoryError, match="target's KV cache") as error:
        planned_for(900_000)
    assert re.search(r"It fits with \d+ tokens of prompt and text", with_mend(error.value))


def test_a_closed_session_keeps_no_model() -> None:
    """A chat that goes on with another model still has the first one's session."""
    session = Session.open(model="demo", offline=True)
    assert isinstance(session, LocalSession)
    models = [weakref.ref(session.target.model), weakref.ref(session.draft)]
    assert all(model() is not None for model in models)
    list(session.generate("def", generation=GenerationConfig(max_tokens=4)))
    session.close()
    gc.collect()
    assert [model() for model in models] == [None, None]
    assert session.stats.generated_tokens == 4
