"""Thread workers with injected latency: the real clock, the same text."""

from __future__ import annotations

import random
import threading
import time

import pytest
from dsi_toys import RandomDelay, ToyDrafter, ToyServer, autoregressive
from thread_workers import ThreadWorkers

from specexec_cli.config import SamplingConfig
from specexec_cli.core import common_prefix
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.errors import WorkerError
from specexec_cli.lab.simulate.clock import Latencies
from specexec_cli.lab.simulate.methods import run_dsi

SEED, PROMPT = 5, [1, 2, 3]


def run(
    servers: list[ToyServer],
    drafter: ToyDrafter | None,
    lookahead: int,
    tokens: int = 24,
    timeout_s: float = 30.0,
    reports: list[str] | None = None,
) -> tuple[list[int], float]:
    """The text and the seconds it took."""
    workers = ThreadWorkers(drafter, servers)
    config = DsiConfig(lookahead=lookahead, timeout_s=timeout_s)
    report = (reports if reports is not None else []).append
    try:
        start = time.perf_counter()
        commits = list(Orchestrator(workers, config, report).generate(PROMPT, tokens))
        return [t for c in commits for t in c.tokens], time.perf_counter() - start
    finally:
        workers.close()


def jittery(count: int, **faults: list[int]) -> list[ToyServer]:
    return [
        ToyServer(SEED, RandomDelay(0.0, 0.006, n), **{name: f[n] for name, f in faults.items()})
        for n in range(count)
    ]


@pytest.mark.parametrize("servers", [1, 2, 3, 4])
@pytest.mark.parametrize("lookahead", [1, 2, 5, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_any_timing_yields_the_autoregressive_tokens(servers, lookahead, acceptance):
    drafter = ToyDrafter(SEED, acceptance, RandomDelay(0.0, 0.001))
    tokens, _ = run(jittery(servers), drafter, lookahead)
    assert tokens == autoregressive(SEED, PROMPT, 24)


def test_failing_and_hanging_servers_lose_and_repeat_no_token():
    reports: list[str] = []
    servers = jittery(4, dies_at=[3, -1, -1, -1], hangs_at=[-1, -1, 2, -1])
    for slow in servers:  # slow enough that every server is needed
        slow.delay_s = lambda: 0.03
    # without rejections the hung task never turns stale: it must be waited for and sent again
    drafter = ToyDrafter(SEED, 1.0, lambda: 0.004)
    tokens, _ = run(servers, drafter, 1, tokens=60, timeout_s=1.0, reports=reports)
    assert tokens == autoregressive(SEED, PROMPT, 60)
    assert any("target server 0 is lost (RuntimeError: injected failure)" in r for r in reports)
    assert any("target server 2 is lost (no answer for 1 s)" in r for r in reports)


def test_a_failing_drafter_leaves_plain_decoding():
    reports: list[str] = []
    drafter = ToyDrafter(SEED, 0.8, dies_at=4)
    tokens, _ = run(jittery(2), drafter, 2, reports=reports)
    assert tokens == autoregressive(SEED, PROMPT, 24)
    assert "the DSI drafter is lost" in reports[0]


def test_no_drafter_at_all_is_plain_decoding():
    assert run(jittery(2), None, 2)[0] == autoregressive(SEED, PROMPT, 24)


def test_no_server_left_is_one_clear_error():
    with pytest.raises(WorkerError, match="every DSI target server is lost"):
        run(jittery(2, dies_at=[2, 3]), ToyDrafter(SEED, 0.8), 2)


def test_settings_reach_every_worker_before_the_next_text():
    workers = ThreadWorkers(ToyDrafter(SEED, 0.9), jittery(3))
    try:
        orchestrator = Orchestrator(workers, DsiConfig(lookahead=2))
        for seed in (0, 11):
            workers.configure(SamplingConfig(seed=seed))
            commits = list(orchestrator.generate(PROMPT, 12))
            tokens = [t for c in commits for t in c.tokens]
            assert tokens == autoregressive(SEED + seed, PROMPT, 12)
    finally:
        workers.close()


def test_close_leaves_no_thread():
    before = threading.active_count()
    workers = ThreadWorkers(ToyDrafter(SEED, 0.9, lambda: 0.001), jittery(3))
    next(iter(Orchestrator(workers, DsiConfig(lookahead=2)).generate(PROMPT, 1000)))
    workers.close()
    assert threading.active_count() == before


def test_passes_really_overlap():
    """Wall time is within 10% of the simulator's prediction, sleep in place of compute.

    A loaded machine may oversleep, so the best of a few tries counts: serial passes would take
    1.5 times the prediction in every one of them.
    """
    target_s, draft_s, lookahead, servers, tokens = 0.12, 0.02, 2, 4, 20
    accepted = [random.Random(f"{SEED}/{3 + i}").random() < 0.8 for i in range(tokens)]
    latencies = Latencies(target_s=target_s, draft_s=draft_s)
    predicted = run_dsi(latencies, accepted, lookahead, servers).seconds
    ratios = []
    for _ in range(5):
        drafter = ToyDrafter(SEED, 0.8, lambda: draft_s)
        text, seconds = run(
            [ToyServer(SEED, lambda: target_s) for _ in range(servers)], drafter, lookahead, tokens
        )
        assert text == autoregressive(SEED, PROMPT, tokens)
        ratios.append(seconds / predicted)
        if abs(ratios[-1] - 1.0) <= 0.1:
            return
    pytest.fail(f"wall time over prediction: {ratios}")


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [
        ([], [1], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 9, 3], 1),
        ((1, 2), (1, 2), 2),
        ([4, 5, 6], (4, 5, 7), 2),
        ([4, 5], (4, 5), 2),
    ],
)
def test_common_prefix(left, right, length):
    assert common_prefix(left, right) == length
