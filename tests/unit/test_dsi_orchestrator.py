"""The orchestrator under the virtual clock: times, lost workers, early ends."""

from __future__ import annotations

import math
import random

import pytest
from dsi_toys import balanced

from specexec_cli.dsi.closed_forms import dsi_s, servers_needed, speculative_s
from specexec_cli.dsi.messages import DRAFTER, Verify
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.errors import ConfigError, WorkerError
from specexec_cli.lab.simulate.clock import Latencies, VirtualWorkers
from specexec_cli.lab.simulate.methods import run_dsi, run_speculative


@pytest.mark.parametrize(
    ("target", "draft", "acceptance", "lookahead"),
    [
        (37.7, 2.5, 0.63, 5),
        (20.6, 6.8, 0.93, 1),
        (20.6, 6.8, 0.93, 3),
        (50.0, 2.0, 0.8, 10),
        (50.0, 2.0, 0.8, 20),
        (10.0, 1.0, 0.5, 3),
        (10.0, 10.0, 0.6, 1),
        (10.0, 3.0, 0.05, 2),
    ],
)
def test_times_agree_with_the_closed_forms_within_one_percent(target, draft, acceptance, lookahead):
    accepted = balanced(acceptance, 400)
    latencies = Latencies(target_s=target, draft_s=draft)
    servers = servers_needed(target, draft, lookahead) + 1
    dsi = run_dsi(latencies, accepted, lookahead, servers).seconds / len(accepted)
    assert dsi == pytest.approx(dsi_s(target, draft, acceptance, lookahead), rel=0.01)
    si = run_speculative(latencies, accepted, lookahead).seconds / len(accepted)
    assert si == pytest.approx(speculative_s(target, draft, acceptance, lookahead), rel=0.01)


def test_lookahead_one_is_proposition_one():
    target, draft, acceptance = 7.0, 2.0, 0.3
    expected = (1 - acceptance) * target + acceptance * draft
    assert dsi_s(target, draft, acceptance, 1) == pytest.approx(expected)


@pytest.mark.parametrize(("lookahead", "needed"), [(1, 8), (2, 4), (3, 3), (8, 1)])
def test_the_rule_for_servers_suffices(lookahead, needed):
    """ceil(t / (k c)) servers keep every block from waiting."""
    assert servers_needed(40.0, 5.0, lookahead) == needed
    latencies, accepted = Latencies(target_s=40.0, draft_s=5.0), [True] * 64
    unlimited = run_dsi(latencies, accepted, lookahead, 64).seconds
    last_block_s = lookahead * 5.0  # the last block may be short and find no server idle yet
    assert run_dsi(latencies, accepted, lookahead, needed).seconds <= unlimited + last_block_s


def test_scarce_servers_get_bigger_blocks_instead_of_a_queue():
    """One server, a perfect drafter: every pass verifies all that was drafted meanwhile."""
    latencies = Latencies(target_s=10.0, draft_s=1.0)
    outcome = run_dsi(latencies, [True] * 100, 1, 1)
    assert outcome.forwards == pytest.approx(100 / 10, abs=2)


def workers_of(
    servers: int = 3, acceptance: float = 0.7, kind: type[VirtualWorkers] = VirtualWorkers,
    **latency: float,
) -> VirtualWorkers:  # fmt: skip
    numbers = random.Random(3)
    agree = [numbers.random() < acceptance for _ in range(1000)]
    return kind(
        Latencies(**{"target_s": 10.0, "draft_s": 1.0, **latency}),
        lambda sequence, position: position * 7 % 101,
        lambda sequence, position: position * 7 % 101 if agree[position] else -1,
        servers,
    )


EXPECTED = [position * 7 % 101 for position in range(2, 62)]


def text_of(orchestrator: Orchestrator, tokens: int = 60) -> list[int]:
    return [token for commit in orchestrator.generate([5, 6], tokens) for token in commit.tokens]


def test_killed_servers_change_the_time_and_not_the_text():
    reports: list[str] = []
    workers = workers_of()
    workers.kill(0, 15.0)
    workers.kill(2, 33.0)
    orchestrator = Orchestrator(workers, DsiConfig(lookahead=3), reports.append)
    assert text_of(orchestrator) == EXPECTED
    assert len(reports) == 2
    assert "target server 0 is lost (killed); 2 left" in reports[0]


def test_a_lost_drafter_leaves_plain_decoding():
    reports: list[str] = []
    workers = workers_of()
    workers.kill(DRAFTER, 15.0)
    assert text_of(Orchestrator(workers, DsiConfig(lookahead=3), reports.append)) == EXPECTED
    assert "going on without drafts" in reports[0]


def test_no_server_left_is_one_clear_error():
    workers = workers_of(servers=2)
    workers.kill(0, 15.0)
    workers.kill(1, 25.0)
    with pytest.raises(WorkerError, match="every DSI target server is lost"):
        text_of(Orchestrator(workers, DsiConfig(lookahead=3), lambda line: None))


class HangingWorkers(VirtualWorkers):
    """Server 1 takes its third task and never answers."""

    tasks = 0

    def verify(self, server: int, message: Verify) -> None:
        if server == 1:
            self.tasks += 1
            if self.tasks == 3:
                return
        super().verify(server, message)


def test_a_hung_server_is_dropped_and_its_task_sent_again():
    reports: list[str] = []
    workers = workers_of(kind=HangingWorkers)
    config = DsiConfig(lookahead=3, timeout_s=50.0)
    assert text_of(Orchestrator(workers, config, reports.append)) == EXPECTED
    assert reports == ["DSI target server 1 is lost (no answer for 50 s); 2 left"]


def test_an_early_end_leaves_the_pool_usable():
    workers = workers_of(abort_s=4.0)
    orchestrator = Orchestrator(workers, DsiConfig(lookahead=3))
    commits = orchestrator.generate([5, 6], 60)
    first = next(commits)
    commits.close()
    assert list(first.tokens) == EXPECTED[: len(first.tokens)]
    assert text_of(orchestrator) == EXPECTED
    assert text_of(orchestrator, 1) == EXPECTED[:1]


def test_a_prompt_is_broadcast_so_that_later_tasks_are_short():
    """Rows cost time here: without the broadcast each server would run the prompt late."""
    workers = workers_of(target_row_s=1.0, prefill_s=0.0)
    prompt = [position * 7 % 101 for position in range(200)]
    orchestrator = Orchestrator(workers, DsiConfig(lookahead=3))
    commits = list(orchestrator.generate(prompt, 12))
    assert [t for c in commits for t in c.tokens] == [p * 7 % 101 for p in range(200, 212)]
    assert workers.now() < 2 * (10.0 + 200.0)


def test_drafted_flags_tell_drafts_from_corrections():
    workers = workers_of(acceptance=0.5)
    commits = list(Orchestrator(workers, DsiConfig(lookahead=3)).generate([5, 6], 60))
    for commit in commits:
        assert all(commit.drafted[:-1]), "only the last token of a commit can be a correction"
    assert any(not commit.drafted[-1] for commit in commits)
    assert any(len(commit.tokens) > 1 for commit in commits)


@pytest.mark.parametrize(
    "settings",
    [{"lookahead": 0}, {"lookahead": 65}, {"timeout_s": 0.0}, {"timeout_s": math.nan}],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        DsiConfig(**settings)
