"""Errors in a pass of DSI: some end the text, some rest a server; none does more than that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from dsi_toys import RandomDelay, ToyDrafter, ToyServer, autoregressive
from thread_workers import ThreadWorkers

from specexec_cli.dsi.messages import WorkerLost
from specexec_cli.dsi.orchestrator import DsiConfig, Orchestrator
from specexec_cli.errors import NonFiniteLogitsError, SpecexecError, StreamError

SEED, PROMPT, COUNT = 5, [1, 2, 3], 24
TEXT = [*PROMPT, *autoregressive(SEED, PROMPT, COUNT)]
Fails = Callable[[Sequence[int], int], SpecexecError | None]


class Pool:
    """Threads with toy models; `servers` may be told anew what fails between two texts."""

    def __init__(
        self,
        count: int,
        acceptance: float = 0.7,
        lookahead: int = 2,
        kind: type[ToyServer] = ToyServer,
        **drafter,
    ) -> None:
        self.servers = [kind(SEED, RandomDelay(0.0, 0.004, n)) for n in range(count)]
        self.drafter = ToyDrafter(SEED, acceptance, RandomDelay(0.0, 0.001), **drafter)
        self.reports: list[str] = []
        self.workers = ThreadWorkers(self.drafter, self.servers)
        config = DsiConfig(lookahead=lookahead, timeout_s=30.0)
        self.orchestrator = Orchestrator(self.workers, config, self.reports.append)

    def fail(self, fails: Fails, *servers: int) -> None:
        for number in servers or range(len(self.servers)):
            self.servers[number].fails = fails

    def text(self, prompt: Sequence[int] = PROMPT, **options) -> list[int]:
        """What is committed until the text or an error ends it; the error is `self.error`."""
        tokens, self.error = [], None
        try:
            for commit in self.orchestrator.generate(prompt, COUNT, **options):
                tokens += commit.tokens
        except SpecexecError as error:
            self.error = error
        return tokens

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.workers.close()


def not_finite_at(position: int) -> Fails:
    error = NonFiniteLogitsError(f"position {position}")
    return lambda tokens, at: error if at == position else None


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("lookahead", [1, 4])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("position", [3, 4, 11, 26])
def test_a_position_that_cannot_be_drawn_ends_the_text_there(
    servers: int, lookahead: int, acceptance: float, position: int
) -> None:
    with Pool(servers, acceptance, lookahead) as pool:
        pool.fail(not_finite_at(position))
        for _ in range(2):
            assert pool.text() == TEXT[len(PROMPT) : position]
            assert isinstance(pool.error, NonFiniteLogitsError)
            assert str(pool.error) == f"position {position}"
        pool.fail(lambda tokens, at: None)
        assert pool.text() == TEXT[len(PROMPT) :]
        assert pool.error is None
    assert pool.reports == []


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("lookahead", [1, 4])
def test_wrong_drafts_cannot_spoil_a_text(servers: int, lookahead: int) -> None:
    """Neither behind themselves, nor in front: masked values that are not finite spoil a pass."""

    def spoilt(tokens: Sequence[int], position: int) -> SpecexecError | None:
        wrong = list(tokens) != TEXT[: len(tokens)]
        return NonFiniteLogitsError("a pass with a wrong draft") if wrong else None

    with Pool(servers, 0.5, lookahead) as pool:
        pool.fail(spoilt)
        for _ in range(2):
            assert pool.text() == TEXT[len(PROMPT) :]
            assert pool.error is None
    assert pool.reports == []


def test_a_server_whose_pass_fails_rests_until_the_next_text() -> None:
    broken = StreamError("layer 3 cannot be read")
    with Pool(3) as pool:
        pool.fail(lambda tokens, at: broken, 0)
        for text in (1, 2):
            assert pool.text() == TEXT[len(PROMPT) :]
            assert (
                pool.reports
                == ["DSI target server 0: layer 3 cannot be read; 2 go on without it"] * text
            )
        pool.fail(lambda tokens, at: None, 0)
        before = pool.servers[0].passes
        assert pool.text() == TEXT[len(PROMPT) :]
        assert pool.servers[0].passes > before, "it takes part again"
        assert len(pool.reports) == 2


@pytest.mark.parametrize("servers", [1, 3])
def test_a_pass_that_fails_everywhere_ends_the_text_with_its_own_error(servers: int) -> None:
    with Pool(servers) as pool:
        pool.fail(lambda tokens, at: StreamError("no disk") if at >= 10 else None)
        for _ in range(2):
            tokens = pool.text()
            assert tokens == TEXT[len(PROMPT) :][: len(tokens)]
            assert isinstance(pool.error, StreamError)
            assert pool.error.exit_code == 7
        pool.fail(lambda tokens, at: None)
        assert pool.text() == TEXT[len(PROMPT) :]
    assert len(pool.reports) == 2 * (servers - 1), "the last one's trouble is the text's error"


def test_a_server_that_rests_may_be_lost_as_well() -> None:
    """It must not be waited for in the next text."""
    with Pool(2) as pool:
        pool.fail(lambda tokens, at: StreamError("no disk"), 0)
        commits = pool.orchestrator.generate(PROMPT, COUNT)
        tokens = [*next(commits).tokens]
        assert pool.reports == ["DSI target server 0: no disk; 1 go on without it"]
        pool.workers._events.put((0, WorkerLost(0, "killed")))
        tokens += [token for commit in commits for token in commit.tokens]
        assert tokens == TEXT[len(PROMPT) :]
        assert pool.text() == TEXT[len(PROMPT) :]
    assert pool.reports[1:] == ["DSI target server 0 is lost (killed); 1 left"]


class LateServer(ToyServer):
    """Every pass over PROMPT and more fails, some time after nobody wants it any more."""

    def verify(self, tokens, first, stale, proposals=()):
        if list(tokens[: len(PROMPT)]) == PROMPT and len(tokens) > len(PROMPT):
            self.passes += 1
            while not stale():
                time.sleep(0.001)
            time.sleep(0.1)
            raise StreamError("no disk")
        return super().verify(tokens, first, stale)


def test_a_failure_of_the_text_before_is_not_this_text_s() -> None:
    with Pool(1, kind=LateServer) as pool:
        commits = pool.orchestrator.generate(PROMPT, COUNT)
        next(commits)
        while pool.servers[0].passes < 2:
            time.sleep(0.001)
        commits.close()
        assert pool.text([4, 5, 6]) == autoregressive(SEED, [4, 5, 6], COUNT)
        assert pool.error is None
    assert pool.reports == []


@pytest.mark.parametrize("window", [0, 3, 10, 20])
def test_a_drafter_that_has_nothing_more_to_say_leaves_plain_decoding(window: int) -> None:
    with Pool(2, 1.0, 3, window=window) as pool:
        for _ in range(2):
            assert pool.text() == TEXT[len(PROMPT) :]
        drafted = pool.drafter.drafted
    assert (drafted > 0) == (window > len(PROMPT))
    assert pool.reports == []


def test_plain_decoding_is_one_pass_a_token_by_one_server() -> None:
    with Pool(3, 1.0) as pool:
        assert pool.text(drafts=False) == TEXT[len(PROMPT) :]
        assert [server.passes for server in pool.servers] == [COUNT, 0, 0]
        assert pool.drafter.drafted == 0
        assert pool.orchestrator.passes == COUNT
        assert pool.text() == TEXT[len(PROMPT) :]
        assert pool.drafter.drafted > 0
