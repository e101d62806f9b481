"""Whatever fails and wherever Ctrl-C comes: one line, and the next text and the caches are right.

A generation is recorded first, line by line and allocation by allocation. Then it is run again and
again, each time broken at another of these points, and after each time the conversation goes on:
its next turn must be that of autoregressive decoding over a session that nothing ever happened to.
The caches grow all the while, by few slots at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import (
    BYTE_VOCAB,
    architecture,
    assert_fresh,
    byte_llama,
    recurrent_parts,
    save_pair,
)
from fake_cuda import fake_cuda
from faults import Fault, Interruption, NoMemory, Point, points
from slot_toys import few_slots
from torch.overrides import _get_current_function_mode_stack

from specexec_cli.config import (
    BenchMethod,
    GenerationConfig,
    Method,
    SamplingConfig,
    TreeConfig,
)
from specexec_cli.decoding import loop
from specexec_cli.drafting.learned import Learned
from specexec_cli.errors import OutOfMemoryError
from specexec_cli.lab import baselines
from specexec_cli.models import graphs, kv_cache
from specexec_cli.models.layer_state import ModelState
from specexec_cli.planning import resolve
from specexec_cli.planning.tiers import Plan, plan_of
from specexec_cli.session import Session, TextSession, cost_prior, local_session
from specexec_cli.verify.verifier import LocalTarget

TREE = TreeConfig(budget=4, max_depth=2, batch=2)
TOKENS = GenerationConfig(max_tokens=5)
PROMPT, TURN = list(range(10, 20)), [5, 6]
# Where a generation keeps what outlives it: here every point is tried, elsewhere a sample.
KEEPERS = ["models/kv_cache.py", "verify/verifier.py", "offload/stream.py"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Two layers each; caches that grow by eight slots, steps whose buffers begin at fourteen."""
    config = byte_llama(
        num_hidden_layers=2, hidden_size=8, intermediate_size=8, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), target=config, noise=0.03, std=0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache.SlotCache, "reserve", lambda cache, slots: None)
        few_slots(patch, 14, growth=8)
        patch.setattr(graphs, "_WARM_UPS", 1)
        yield {"model": str(target), "draft": str(draft)}


class Conversation:
    """A session to break, and what it ought to say."""

    def __init__(
        self,
        session: TextSession,
        unharmed: TextSession,
        method: Method | BenchMethod,
        temperature: float,
        policy: str = "fixed",
    ) -> None:
        self.session = session
        self._tree = replace(TREE, policy=policy)
        self._unharmed = unharmed
        self._method = method
        self._sampling = SamplingConfig(temperature=temperature, seed=3)
        self._expected: dict[tuple[int, ...], list[int]] = {}
        session.on_layer(lambda progress: None)

    def begin(self) -> None:
        """As a session that has just been opened."""
        self.session.target = LocalTarget(self.session.target.model)
        self.session.drafter = None
        self.session.learned = Learned(cost_prior=self.session.cost_prior)
        self.session._measured_cost = None
        self.session.context = []

    def say(self, prompt: Sequence[int]) -> list[int]:
        return self._tokens(self.session, prompt, self._method)

    def expected(self, prompt: Sequence[int]) -> list[int]:
        """By autoregressive decoding."""
        key = tuple(prompt)
        if key not in self._expected:
            self._unharmed.forget()
            self._expected[key] = self._tokens(self._unharmed, prompt, "autoregressive")
        return self._expected[key]

    def _tokens(
        self, session: TextSession, prompt: Sequence[int], method: Method | BenchMethod
    ) -> list[int]:
        steps = session.generate(
            prompt, method=method, tree=self._tree, sampling=self._sampling, generation=TOKENS
        )
        return [token for step in steps for token in step.tokens]

    def record(self, fault: Fault) -> list[Point]:
        """Where the fault could break the first turn."""
        self.begin()
        with fault:
            said = self.say(PROMPT)
        assert said == self.expected(PROMPT)
        return points(fault.sites)

    def goes_on(self, fault: Fault, error: type[BaseException]) -> None:
        """The first turn with the fault in it, then the second."""
        self.begin()
        message = None
        try:
            with fault:
                said = self.say(PROMPT)
        except error as failure:
            message = str(failure)
        if message is None:  # how far the disk is ahead decides whether some points are reached
            assert not fault.fired, "the error was swallowed"
            assert said == self.expected(PROMPT)
        elif error is OutOfMemoryError:
            assert "is too small: " in message
            assert "\n" not in message
        prompt = [*(self.session.context or PROMPT), *TURN]
        assert self.say(prompt) == self.expected(prompt)
        target, drafter = self.session.target, self.session.drafter
        assert_fresh(target.model, target.state, target.tokens)
        if drafter is None:
            return
        drafter.rows.state.crop(len(drafter.rows.tokens))  # behind them is what was found ahead
        if self.session.decision.work.shares_cache:
            assert_shared(drafter.rows.state, target.state)
        else:
            assert_fresh(drafter.rows.model, drafter.rows.state, drafter.rows.tokens)


def assert_shared(own: ModelState, target: ModelState) -> None:
    """A copy's recurrent layers have the states of its target, and none of their own."""
    pairs = list(zip(recurrent_parts(own), recurrent_parts(target), strict=True))
    assert pairs
    for ours, theirs in pairs:
        assert ours.base is ours.head is theirs.base
        assert not ours.checkpoints


def sample(found: Sequence[Point], all_of: Sequence[str], every: int) -> list[Point]:
    """All points in the files `all_of`, and some of every other file that was reached."""
    files: dict[str, list[Point]] = {}
    for point in found:
        files.setdefault(point[0][0], []).append(point)
    return [
        point
        for file, in_file in files.items()
        for point in (in_file if file.endswith(tuple(all_of)) else in_file[::every])
    ]


def break_everywhere(
    conversation: Conversation,
    kind: type[NoMemory] | type[Interruption],
    all_of: Sequence[str],
    every: int,
    seen: Sequence[str],
) -> None:
    """Breaks the first turn at a sample of its points.

    Args:
        seen: files that must be among those it breaks in.
    """
    chosen = sample(conversation.record(kind()), all_of, every)
    assert {name for name in seen if any(name in point[0][0] for point in chosen)} == set(seen)
    break_at(conversation, kind, chosen)


def break_at(
    conversation: Conversation, kind: type[NoMemory] | type[Interruption], chosen: Sequence[Point]
) -> None:
    """Breaks the first turn at each of these points."""
    error = OutOfMemoryError if kind is NoMemory else KeyboardInterrupt
    faults = [kind(point) for point in chosen]
    for fault, point in zip(faults, chosen, strict=True):
        try:
            conversation.goes_on(fault, error)
        except BaseException as failure:
            failure.add_note(f"broken at {point}")
            raise
    assert sum(fault.fired for fault in faults) > 0.9 * len(chosen)


@pytest.fixture(scope="module")
def sessions(pair: dict[str, str]) -> Iterator[tuple[TextSession, TextSession]]:
    with (
        Session.open(**pair, dtype="float32", offload="ssd", device="cpu") as session,
        Session.open(**pair, dtype="float32", device="cpu") as unharmed,
    ):
        yield session, unharmed


@pytest.mark.parametrize(
    ("kind", "every", "seen"),
    [
        (NoMemory, 2, ["kv_cache.py", "compact_kv.py", "streamed.py", "scoring.py", "_rows.py"]),
        (Interruption, 15, ["_session.py", "loop.py", "verifier.py", "drafter.py", "kv_cache.py"]),
    ],
)
def test_a_session_on_the_cpu(
    sessions: tuple[TextSession, TextSession], kind: type[NoMemory], every: int, seen: list[str]
) -> None:
    break_everywhere(Conversation(*sessions, "specexec", 0.8), kind, KEEPERS, every, seen)


@pytest.mark.parametrize(("kind", "every"), [(NoMemory, 9), (Interruption, 41)])
def test_what_iterations_cost_is_measured_first(
    sessions: tuple[TextSession, TextSession],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[NoMemory],
    every: int,
) -> None:
    # what is measured decides how large trees are, and so which points are reached
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 1024)
    for module in (cost_prior, local_session, loop):
        monkeypatch.setattr(module, "time", clock)
    conversation = Conversation(*sessions, "specexec", 0.8, policy="cost")
    break_everywhere(conversation, kind, [], every, ["cost_prior.py"])


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TextSession, TextSession]]:
    config = architecture("qwen3-moe")
    config.vocab_size = BYTE_VOCAB
    folder = tmp_path_factory.mktemp("mixture")
    target, draft = map(str, save_pair(folder, target=config, noise=0.03))
    with (
        Session.open(
            model=target, draft=draft, dtype="float32", offload="ssd", device="cpu"
        ) as session,
        Session.open(model=target, dtype="float32", device="cpu", method="autoregressive") as plain,
    ):
        assert session.target.model.experts is not None
        yield session, plain


@pytest.mark.parametrize(
    ("kind", "every", "seen"),
    [(NoMemory, 23, "expert_mlp.py"), (Interruption, 83, "experts.py")],
)
def test_a_mixture_whose_experts_come_one_by_one(
    mixtures: tuple[TextSession, TextSession], kind: type[NoMemory], every: int, seen: str
) -> None:
    break_everywhere(Conversation(*mixtures, "specexec", 0.8), kind, [], every, [seen])
    assert not _get_current_function_mode_stack(), "nothing is left that other passes would see"


@pytest.mark.parametrize("kind", [NoMemory, Interruption])
@pytest.mark.parametrize(
    ("method", "temperature"),
    [("autoregressive", 0.8), ("chain-coupled", 0.8), ("beam-pruned", 0.8), ("chain", 0.0),
     ("specinfer", 0.0)],
)  # fmt: skip
def test_every_method(
    sessions: tuple[TextSession, TextSession],
    method: Method | BenchMethod,
    temperature: float,
    kind: type[NoMemory],
) -> None:
    assert method in ("autoregressive", *baselines.SOURCES)
    break_everywhere(Conversation(*sessions, method, temperature), kind, [], 31, [])


def streamed_by_a_gpu(mode: str, *args: Any) -> Plan:
    """In the place of planning.placement.place, for targets of two layers."""
    *asked, _experts = args
    return plan_of(*asked, ["ram", "ssd"], 2, 2)


def test_loading_for_a_gpu(pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever memory ends: one line, no thread and no pinned memory left, and the next succeeds.

    tests/unit/test_device_stream.py ends it at every buffer of rings and slabs.
    """

    def placed(mode: str, *args: Any) -> Plan:
        *asked, _experts = args
        return plan_of(*asked, ["resident", "ram"], 2, 2)

    monkeypatch.setattr(resolve, "place", placed)

    def opened(fault: NoMemory) -> None:
        before = set(enumerate_threads())  # other tests' sessions stay open
        with fake_cuda(bare=True):  # which holds that nothing stays registered
            try:
                with fault:
                    session = Session.open(**pair, dtype="float32", device="cuda")
                session.close()
            finally:
                began = set(enumerate_threads()) - before
                assert not [thread for thread in began if thread.name.startswith("specexec")]

    recorded = NoMemory()
    opened(recorded)
    chosen = sample(points(recorded.sites), [], 11)
    assert {"streamed.py", "upload.py"} <= {Path(point[0][0]).name for point in chosen}
    for point in chosen:
        fault = NoMemory(point)
        with pytest.raises(OutOfMemoryError) as found:
            opened(fault)
        assert fault.fired
        assert "\n" not in str(found.value)
    opened(NoMemory())


@pytest.mark.parametrize(
    ("kind", "all_of", "every", "seen"),
    [
        (NoMemory, ["kv_cache.py"], 21, ["kv_cache.py", "graphs.py"]),
        (Interruption, [], 91, ["graphs.py"]),
    ],
)
def test_a_session_on_a_gpu(
    pair: dict[str, str],
    sessions: tuple[TextSession, TextSession],
    kind: type[NoMemory],
    all_of: Sequence[str],
    every: int,
    seen: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streamed through a ring on the device, drafted by captured steps whose buffers grow."""
    monkeypatch.setattr(resolve, "place", streamed_by_a_gpu)
    with fake_cuda(bare=True), Session.open(**pair, dtype="float32", device="cuda") as session:
        conversation = Conversation(session, sessions[1], "specexec", 0.8)
        conversation.begin()
        conversation.say(PROMPT)
        assert session.drafter is not None
        assert session.drafter.rows.state.zeroed_capacity > 14, "fourteen slots have been outgrown"
        break_everywhere(conversation, kind, all_of, every, seen)
