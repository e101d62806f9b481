"""--method dsi through a Session: worker processes with real (tiny) models, or a fallback."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import typer
from checkpoints import BYTE_VOCAB, architecture, save_pair

from specexec_cli.cli.option_groups import grouped, with_drafts
from specexec_cli.config import DSI_REJECTION, DsiOptions, GenerationConfig, SamplingConfig
from specexec_cli.dsi.messages import DRAFTER, Ready
from specexec_cli.dsi.processes import ProcessWorkers
from specexec_cli.errors import ConfigError
from specexec_cli.planning.request import Request
from specexec_cli.prefixes.folder import kept_prefixes
from specexec_cli.session import Session, TextSession, dsi_session
from specexec_cli.session.dsi_session import DsiSession
from specexec_cli.session.local_session import LocalSession


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"), noise=0.02)


def test_rows_of_texts_are_kept_and_brought_back(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By worker processes; a plain session has the same rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target, draft = map(str, pair)
    prompt = [4 + each % 250 for each in range(7, 400)]
    usual = {"model": target, "device": "cpu", "offload": "ssd", "remember": True}
    dsi = {"draft": draft, "method": "dsi", "dsi": DsiOptions(sp=1, lookahead=2)}
    generation = GenerationConfig(max_tokens=20)
    found = []
    for asked in ({"cache": False}, {**dsi, "cache": False}, dsi, {}):
        with Session.open(**usual, **asked) as session:
            steps = session.generate(prompt, generation=generation)
            found.append([token for step in steps for token in step.tokens])
            if not asked.get("cache", True):
                assert kept_prefixes() == []
    assert all(each == found[0] for each in found)
    assert session.stats.prompt_rows < 64, "the rows were those of the workers"
    assert len(kept_prefixes()) == 2, "of the target and of the draft model"


def tokens_of(
    session: TextSession, temperature: float, max_tokens: int, method: str | None = None
) -> list[int]:
    steps = session.generate(
        "def f(x):",
        method=method,
        sampling=SamplingConfig(temperature=temperature, seed=4),
        generation=GenerationConfig(max_tokens=max_tokens),
    )
    return [token for step in steps for token in step.tokens]


def test_processes_generate_the_plain_text_and_are_gone_afterwards(pair):
    target, draft = map(str, pair)
    notices: list[str] = []
    with Session.open(model=target, method="autoregressive", device="cpu") as plain:
        expected = [tokens_of(plain, temperature, 24) for temperature in (0.0, 1.0)]
    children = set(psutil.Process().children(recursive=True))
    with Session.open(
        model=target, draft=draft, method="dsi", device="cpu", offload="ssd",
        notice=notices.append, dsi=DsiOptions(sp=2, lookahead=2, more_drafts=(target,)),
    ) as session:  # fmt: skip
        assert isinstance(session, DsiSession)
        for temperature, tokens in zip((0.0, 1.0), expected, strict=True):
            assert tokens_of(session, temperature, 24) == tokens
        assert tokens_of(session, 0.0, 3) == expected[0][:3]
        assert session.stats.generated_tokens == 3
        assert session.stats.target_passes >= 1
        assert session.stats.bytes_streamed > 0
        assert session.method == "dsi"
        assert session.settings["sp"] == "2"
        assert session.context_length == 4096
        workers = set(psutil.Process().children(recursive=True)) - children
        assert len(workers) >= 4
        assert tokens_of(session, 0.0, 24, DSI_REJECTION) == expected[0], "nothing is random"
        assert len(tokens_of(session, 1.0, 24, DSI_REJECTION)) == 24
    assert not [worker for worker in workers if "spawn_main" in _command(worker)]
    session.close()
    with pytest.raises(ConfigError, match="this session is closed: open another"):
        next(session.generate("abc"))
    assert notices[0].startswith("DSI: lookahead 2, ")


def test_servers_of_a_mixture_keep_and_read_experts_as_planned(tmp_path: Path, monkeypatch):
    started = []

    def process_workers(targets, drafters):
        started.append(targets)
        return ProcessWorkers(targets, drafters)

    monkeypatch.setattr(dsi_session, "ProcessWorkers", process_workers)
    config = architecture("qwen3-moe")
    config.vocab_size = BYTE_VOCAB
    target, draft = map(str, save_pair(tmp_path, target=config))
    with Session.open(model=target, method="autoregressive", device="cpu") as plain:
        expected = tokens_of(plain, 1.0, 16)
    with Session.open(
        model=target, draft=draft, method="dsi", device="cpu", offload="ssd",
        dsi=DsiOptions(sp=2, lookahead=2), notice=lambda line: None,
    ) as session:  # fmt: skip
        assert isinstance(session, DsiSession)
        assert tokens_of(session, 1.0, 16) == expected
    (loaders,) = started
    assert [loader.args[1].expert_bytes > 0 for loader in loaders] == [True, True]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def test_one_device_falls_back_and_says_so(pair):
    target, draft = map(str, pair)
    notices: list[str] = []
    with Session.open(
        model=target, draft=draft, method="dsi", device="cpu", notice=notices.append
    ) as session:
        assert not isinstance(session, DsiSession)
        assert session.method == "specexec"
        assert len(tokens_of(session, 0.0, 4)) == 4
    assert notices == ["DSI needs two devices or more and there is one: using `method='specexec'`"]


class SlowDrafter:
    """Workers that measured a drafter as slow as two targets."""

    servers = (0, 1)
    ready = dict.fromkeys((0, 1), Ready({1: 0.1}, 64)) | {DRAFTER: Ready({1: 0.2}, 64)}

    def __init__(self, targets: object, drafters: object) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_session_that_dsi_would_not_pay_for_has_all_memory(pair, computer, monkeypatch):
    """Half of it was planned for each of two target servers, which are gone."""
    monkeypatch.setattr(dsi_session, "ProcessWorkers", SlowDrafter)
    computer.has_free_ram(12 << 30)
    target, draft = map(str, pair)
    notices: list[str] = []
    with Session.open(
        model=target, draft=draft, method="dsi", dsi=DsiOptions(devices=("cpu", "cpu")),
        notice=notices.append,
    ) as session:  # fmt: skip
        assert isinstance(session, LocalSession)
        assert session.decision.settings["ram"].value == 12 << 30
        assert session.decision.machine.base_bytes == 0, "this process is loaded already"
    assert notices[0].endswith("not worth it, using `method='specexec'`")


def test_several_draft_models_are_for_dsi_alone(tmp_path):
    assert with_drafts(Request()) == Request()
    both = with_drafts(Request(draft="a, org/b", method="dsi"))
    assert (both.draft, both.dsi.more_drafts) == ("a", ("org/b",))
    folder = tmp_path / "a,b"
    folder.mkdir()
    named = Request(draft=str(folder))
    assert with_drafts(named) == named
    with pytest.raises(ConfigError, match="--draft takes models as in A,B, not 'a,,b'"):
        with_drafts(Request(draft="a,,b"))
    asked = Request(model="t", draft="a,b")
    assert with_drafts(asked, several=True).draft == "a"
    with pytest.raises(ConfigError, match="'a,b': several models are for --method dsi alone"):
        with_drafts(asked)


def of_options(*words: str) -> DsiOptions:
    """What a command is given with these options."""
    app, given = typer.Typer(), []

    @app.command()
    @grouped
    def command(*, dsi: DsiOptions) -> None:
        given.append(dsi)

    app(words, standalone_mode=False)
    return given[0]


def test_options_are_numbers_or_auto():
    assert of_options() == of_options("--sp", "auto", "--lookahead", "auto") == DsiOptions()
    assert of_options("--sp", "3", "--lookahead", "7", "--devices", "cpu, cpu") == DsiOptions(
        sp=3, lookahead=7, devices=("cpu", "cpu")
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sp", "two"), "--sp takes a whole number or auto, not 'two'"),
        (("--lookahead", "0"), "`lookahead` must be between 1 and 64, or auto, not 0"),
        (("--sp", "99"), "`sp` must be between 1 and 64, or auto, not 99"),
        (("--devices", "cuda:0,"), "--devices takes names as in cuda:0,cuda:1, not 'cuda:0,'"),
    ],
)
def test_bad_options_are_one_clear_error(words, message):
    with pytest.raises(ConfigError, match=message):
        of_options(*words)
