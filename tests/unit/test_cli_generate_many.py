"""`specexec generate --jsonl`: a text per line, each what it is alone; jobs that go on."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
from cli_runner import run_cli

from specexec_cli.config import GenerationConfig, SamplingChoice
from specexec_cli.engine.jobs import Job, ResultFile, read_jobs
from specexec_cli.engine.one_at_a_time import OneAtATime
from specexec_cli.errors import ConfigError, StreamError
from specexec_cli.offload.stream import LayerStream
from specexec_cli.sampling import Sampler

SHORT = ("--raw", "--max-tokens", 4, "--offload", "ssd", "-q")
PROMPTS = [
    {"prompt": "import os\n"},
    {"id": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    {"id": "drawn", "prompt": "def f(x):", "temperature": 0.8, "seed": 5},
]


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines(*PROMPTS))
    return path


@pytest.fixture(scope="module")
def alone() -> list[str]:
    runs = (
        ("import os\n", *SHORT),
        ("hi", "--max-tokens", 3, "-q"),
        ("def f(x):", *SHORT, "--temperature", 0.8, "--seed", 5),
    )
    return [run_cli("generate", *run).out.removesuffix("\n") for run in runs]


def test_lines_on_stdout_in_the_order_of_the_prompts(prompts: Path, alone: list[str]) -> None:
    ran = run_cli("generate", "-f", prompts, "--jsonl", *SHORT)
    assert (ran.code, ran.err) == (0, "")
    found = [json.loads(line) for line in ran.out.splitlines()]
    assert [each["text"] for each in found] == alone
    assert [each["id"] for each in found] == [1, "chat", "drawn"]
    assert [len(each["tokens"]) for each in found] == [4, 3, 4]
    keys = {"id", "text", "tokens", "finish_reason", "seed", "pair", "made_of"}
    assert all(set(each) == keys for each in found)


def test_a_job_goes_on_where_it_was_ended(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "texts.jsonl"
    assert run_cli("generate", "-f", prompts, "--jsonl", *SHORT, "-o", out).code == 0
    whole = out.read_text()
    kept = whole.splitlines(keepends=True)
    out.write_text(kept[2] + kept[0][:40])  # as a crash in the middle of a line leaves it
    submitted: list[str | int] = []
    monkeypatch.setattr(
        Job, "tokens", lambda job, encoder, tokens=Job.tokens: (
            submitted.append(job.id), tokens(job, encoder))[1],
    )  # fmt: skip
    assert run_cli("generate", "-f", prompts, "--jsonl", *SHORT, "-o", out).code == 0
    assert submitted == [1, "chat"]
    assert out.read_text() == whole


def test_a_prompt_is_a_turn_of_a_chat_unless_raw(tmp_path: Path) -> None:
    """A line's own messages stay as they are, whatever --system says."""
    path, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    turn = [{"role": "user", "content": "hi"}]
    path.write_text(lines({"prompt": "hi"}, {"messages": turn}))
    job = ("generate", "-f", path, "--jsonl", "--max-tokens", 3, "-q")

    def texts(*options: object) -> list[str]:
        return [json.loads(line)["text"] for line in run_cli(*job, *options).out.splitlines()]

    one = ("generate", "hi", "--max-tokens", 3, "-q")
    answer, raw, told = (
        run_cli(*one, *way).out.removesuffix("\n")
        for way in ((), ("--raw",), ("--system", "Be short"))
    )
    assert texts() == [answer, answer]
    assert texts("--raw") == [raw, answer]
    assert texts("--system", "Be short") == [told, answer]
    assert run_cli(*job, "-o", out).code == 0
    for other in ("--raw", "--no-think"):
        assert "with another prompt or other settings" in run_cli(*job, "-o", out, other).error


def test_other_settings_are_another_job(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    job = ("generate", "-f", prompts, "--jsonl", "-o", out)
    assert run_cli(*job, *SHORT).code == 0
    before = out.read_text()
    ran = run_cli(*job, "--max-tokens", 5, "-q")
    assert ran.code == 2
    assert "with another prompt or other settings" in ran.error
    assert out.read_text() == before


def test_a_prompt_that_does_not_fit_costs_the_others_nothing(
    tmp_path: Path, alone: list[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines({"id": "long", "prompt": "x " * 5000}, PROMPTS[0]))
    ran = run_cli("generate", "-f", path, "--jsonl", "--raw", "--max-tokens", 4)
    assert ran.code == 2
    assert [json.loads(line)["text"] for line in ran.out.splitlines()] == alone[:1]
    long, cut = ran.err.splitlines()[-2:]
    assert long.startswith("notice: long: the prompt has")
    assert cut == "notice: 1 of 2 texts were cut: --max-tokens, or a line's, allows more"


def test_a_disk_that_is_gone_ends_the_job(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "texts.jsonl"

    def failing(self: LayerStream, index: int) -> None:
        raise StreamError("the disk is gone")

    monkeypatch.setattr(LayerStream, "layer", failing)
    ran = run_cli("generate", "-f", prompts, "--jsonl", *SHORT, "-o", out)
    assert (ran.code, ran.error) == (7, "the disk is gone")
    assert out.read_text() == ""


def test_ctrl_c_keeps_what_there_is(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "texts.jsonl"
    add = ResultFile.add

    def interrupted(self: ResultFile, result: dict[str, object]) -> None:
        add(self, result)
        raise KeyboardInterrupt

    monkeypatch.setattr(ResultFile, "add", interrupted)
    ran = run_cli("generate", "-f", prompts, "--jsonl", *SHORT, "-o", out, "--slots", 1)
    assert ran.code == 130
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == [1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: not JSON: "),
        ("[]", "must be a JSON object"),
        ('{"prompt": ""}', "a text that is not empty"),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"messages": [{"role": "user"}]}', "'role' and a 'content'"),
        ('{"prompt": "a", "temprature": 1}', "unknown key 'temprature'"),
        ('{"prompt": "a", "temperature": "hot"}', "must be a number"),
        ('{"prompt": "a", "seed": 1.5}', "must be a whole number"),
        ('{"prompt": "a", "seed": true}', "must be a whole number"),
        ('{"prompt": "a", "max_tokens": 0}', "must be 1 or more"),
        ('{"prompt": "a", "stop": 3}', "'stop'"),
        ('{"prompt": "a", "id": null}', "'id'"),
        ('{"prompt": "a"}\n{"prompt": "b", "id": 1}', "line 2: id 1 stands in an earlier line"),
        ('{"prompt": "\\ud800"}', "half of a character"),
        ("\n", "has no prompts"),
        ("[" * 100_000, "line 1"),
    ],
)
def test_each_mistake_in_the_file_gets_one_line(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_jobs(line, "prompts.jsonl", SamplingChoice(), GenerationConfig())
    assert said in str(raised.value)
    assert str(raised.value).startswith("prompts.jsonl")


def test_a_prompt_may_hold_line_breaks_that_are_none_of_json() -> None:
    line = json.dumps({"prompt": "a\u2028b\x85c", "repetition_penalty": 2}, ensure_ascii=False)
    (job,) = read_jobs(line, "prompts.jsonl", SamplingChoice(), GenerationConfig())
    assert job.prompt == "a\u2028b\x85c"
    Sampler(job.sampling)


def test_a_first_line_that_was_cut_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"id": 1, "te')
    file = ResultFile(path, {1: "a"})
    file.add({"id": 1, "made_of": "a"})
    file.close()
    assert path.read_text() == '{"id": 1, "made_of": "a"}\n'


def test_a_disk_that_takes_no_more_is_told_and_the_same_command_goes_on(tmp_path: Path) -> None:
    path, made_of = tmp_path / "texts.jsonl", {1: "a", 2: "b"}
    results = [{"id": 1, "made_of": "a"}, {"id": 2, "made_of": "b", "text": "x" * 100}]
    file = ResultFile(path, made_of)
    file.add(results[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))  # the second line begins at 26
    try:
        for step in (lambda: file.add(results[1]), file.close):
            with pytest.raises(ConfigError, match=r"texts\.jsonl: File too large\. Once"):
                step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (list(tmp_path.iterdir()), path.stat().st_size) == ([path], 40)
    again = ResultFile(path, made_of)
    assert again.done == {1}
    again.add(results[1])
    again.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == results


def test_what_cannot_be_put_in_order_leaves_the_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "texts.jsonl"
    file = ResultFile(path, {1: "a"})
    file.add({"id": 1, "made_of": "a"})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        file.close()
    assert (list(tmp_path.iterdir()), path.read_text()) == ([path], '{"id": 1, "made_of": "a"}\n')


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000 + "\n",
        '{"id": ' * 100_000 + "\n",
        "nonsense\n",
        "[1]\n",
        '{"id": {}}\n',
        "\xff\n",
        "my notes, without an end",
    ],
)
def test_another_file_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="holds something else"):
        ResultFile(path, {1: "a"})
    assert path.read_bytes() == content.encode("latin-1")


def test_a_link_stays_and_its_target_has_the_texts(tmp_path: Path) -> None:
    """Also one that leads to a file which is not there yet, in another folder."""
    place, link = tmp_path / "elsewhere" / "texts.jsonl", tmp_path / "link"
    place.parent.mkdir()
    link.symlink_to(place)
    for number in (2, 1):
        file = ResultFile(link, {1: "a", 2: "b"})
        file.add({"id": number, "made_of": {1: "a", 2: "b"}[number]})
        file.close()
        assert link.is_symlink()
        place.chmod(0o640)
    assert [json.loads(line)["id"] for line in place.read_text().splitlines()] == [1, 2]
    assert place.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.rglob("*")) == [place.parent, place, link]


@pytest.mark.parametrize("kind", ["folder", "pipe", "terminal", "link to a pipe"])
def test_what_is_no_file_is_refused_before_a_model_is_loaded(
    kind: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ends = tmp_path / "texts.jsonl", os.openpty()
    if kind == "folder":
        path.mkdir()
    elif kind == "terminal":
        path = Path(os.ttyname(ends[1]))
    else:
        os.mkfifo(path)
    if kind.startswith("link"):
        path = Path(shutil.move(path, tmp_path / "pipe"))
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    before = path.lstat()
    monkeypatch.setattr("specexec_cli.session.open_session", None)
    ran = run_cli("generate", "-f", prompts, "--jsonl", "-o", path, "-q")
    assert ran.code == 2
    assert (
        f"cannot write texts to {path}: it is {'a folder' if kind == 'folder' else 'no file'}"
        in (ran.error)
    )
    with pytest.raises(ConfigError, match="leave out `--output`"):
        ResultFile(path, {1: "a"})
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    for end in ends:
        os.close(end)


def test_options_that_contradict(prompts: Path, tmp_path: Path) -> None:
    for options, said in (
        (("x", "--jsonl"), "from a file"),
        (("-f", prompts, "--jsonl", "--json"), "--jsonl and --json exclude each other"),
        (("-f", prompts, "--jsonl", "--stats"), "--jsonl and --stats exclude each other"),
        (("-f", prompts, "-o", tmp_path / "out"), "--output needs --jsonl"),
        (("-f", prompts, "--jsonl", "-o", tmp_path / "no" / "out"), "cannot write texts"),
    ):
        ran = run_cli("generate", *options, "-q")
        assert ran.code == 2
        assert said in ran.error


def test_one_slot_is_one_text_at_a_time(
    prompts: Path, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[OneAtATime] = []
    init = OneAtATime.__init__
    monkeypatch.setattr(
        OneAtATime, "__init__", lambda self, *a, **k: (opened.append(self), init(self, *a, **k))[1]
    )
    ran = run_cli("generate", "-f", prompts, "--jsonl", *SHORT, "--slots", 1)
    assert [json.loads(line)["text"] for line in ran.out.splitlines()] == alone
    assert len(opened) == 1
