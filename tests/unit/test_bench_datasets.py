"""Datasets by name and by file, in the papers' forms; a mistake is named with its line."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench.adapters import ADAPTERS
from specexec_cli.lab.bench.datasets import load_dataset


def load(reference: str, folder: Path = Path("nowhere"), count: int = 1000):
    return load_dataset(reference, data_folder=folder, count=count)


def written(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize(
    ("name", "count", "is_chat"),
    [("oasst", 540, True), ("wikitext2", 629, False), ("c4", 179, False),
     ("mt-bench", 80, True), ("humaneval", 164, False)],
)  # fmt: skip
def test_real_files_are_read_whole(shared, name, count, is_chat):
    dataset = load(name, shared / "data" / "prompts")
    assert len(dataset.prompts) == count
    assert all(prompt.chat is is_chat for prompt in dataset.prompts)
    assert len({prompt.id for prompt in dataset.prompts}) == count


def test_the_malformed_template_of_oasst_comes_off(shared):
    prompts = load("oasst", shared / "data" / "prompts").prompts
    assert prompts[0].messages == (("user", "What is a Dyson Sphere?"),)
    roles = [role for role, _ in prompts[1].messages]
    assert roles == ["user", "assistant", "user"]
    assert not any("INST]" in text or "SYS>" in text for p in prompts for _, text in p.messages)


def test_both_forms_of_mt_bench_hold_the_same_questions(shared):
    folder = shared / "data" / "prompts"
    ours = [p.text for p in load("mt-bench", folder).prompts]
    theirs = [p.text for p in load(f"mt-bench={folder / 'mtbench_prompts.json'}").prompts]
    assert ours[0] == theirs[0]
    assert len(set(ours) & set(theirs)) > 70


def test_the_built_in_prompts_mix_code_and_questions():
    prompts = load("demo", count=4).prompts
    assert [prompt.chat for prompt in prompts] == [False, True, False, True]


def test_papers_forms(tmp_path):
    article = load("cnn-dailymail=" + written(tmp_path / "c.jsonl", {"id": 1, "article": "News."}))
    assert article.prompts[0].text == "Summarize:\nNews.\nSummary:\n"
    record = {"instruction": "Add.", "input": "1 2", "output": "3"}
    alpaca = load("alpaca=" + written(tmp_path / "a.jsonl", record, {**record, "input": ""}))
    assert "paired with an input" in alpaca.prompts[0].text
    assert "### Input:\n1 2\n\n### Response:\n" in alpaca.prompts[0].text
    assert "Input" not in alpaca.prompts[1].text
    problem = {"task_id": 7, "text": "Write f.", "test_list": ["assert f() == 1"], "code": ""}
    mbpp = load("mbpp=" + written(tmp_path / "m.jsonl", problem)).prompts[0]
    assert not mbpp.chat
    assert mbpp.text == '"""Write f.\nassert f() == 1\n"""', "DSI, figure 2; DISCO, figure 7"
    code = {"task_id": "0", "prompt": "\n\ndef f():\n    "}
    human = load("humaneval=" + written(tmp_path / "h.jsonl", code)).prompts[0]
    assert human.text == code["prompt"], "only the prompt field, and all of it"
    assert ADAPTERS["cnn-dailymail"].hub == ("abisee/cnn_dailymail", "2.0.0"), "DISCO, appendix B.3"
    assert ADAPTERS["mbpp"].hub[1] == "full", "DISCO, appendix B.1"
    rows = [
        {"message_id": "1", "role": "prompter", "parent_id": None, "text": "Hi?"},
        {"message_id": "2", "role": "assistant", "parent_id": "1", "text": "Yes."},
    ]
    assert [p.id for p in load("oasst=" + written(tmp_path / "o.jsonl", *rows)).prompts] == ["1"]
    heading, text = {"text": " = Title = \n"}, {"text": "word " * 50}
    wiki = load("wikitext2=" + written(tmp_path / "w.jsonl", heading, text))
    assert len(wiki.prompts) == 1


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(["one", "two"]),
        json.dumps([[1, "one"], [2, "two"]]),
        json.dumps({"prompts": [{"prompt": "one"}, {"prompt": "two"}]}),
        '{"text": "one"}\n\n{"text": "two"}\n',
        '{"question": "one"}\n{"instruction": "two"}',
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_of_ones_own(tmp_path, content, packed):
    path = tmp_path / ("prompts.json.gz" if packed else "prompts.json")
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    assert [prompt.text for prompt in load(str(path)).prompts] == ["one", "two"]
    assert len(load(str(path), count=1).prompts) == 1


def test_conversations_of_ones_own_are_chats(tmp_path):
    roles = [{"role": r, "content": r[0]} for r in ("user", "assistant", "user")]
    path = written(tmp_path / "chats.jsonl", {"messages": roles}, {"turns": ["q", "later"]})
    first, second = load(path).prompts
    assert first.chat
    assert first.messages == (("user", "u"), ("assistant", "a"), ("user", "u"))
    assert second.messages == (("user", "q"),)


def test_the_hash_follows_the_prompts(tmp_path):
    first = load(written(tmp_path / "a.jsonl", "one", "two"))
    assert first.sha256 == load(written(tmp_path / "b.jsonl", "one", "two")).sha256
    assert first.sha256 != load(written(tmp_path / "c.jsonl", "one", "2")).sha256


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', r"prompts\.jsonl, line 2: not JSON"),
        ('{"prompt": "a"}\n{"answer": "b"}\n', r"line 2: no field 'prompt'.*found: answer"),
        ('{"prompt": 7}\n', r"line 1: the prompt is int, not text"),
        ('{"prompt": "  "}\n', r"line 1: the prompt is empty"),
        ("3\n", r"line 1: a prompt is text, \[id, text\] or an object, not int"),
        ("\n\n", r"holds no prompt"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, content, expected):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=expected):
        load(str(path))


def test_a_file_of_another_dataset_is_refused(tmp_path):
    path = written(tmp_path / "x.jsonl", {"article": "News."})
    with pytest.raises(ConfigError, match=r"line 1: not a record of this dataset.*article"):
        load(f"humaneval={path}")


def test_broken_files(tmp_path):
    (tmp_path / "cut.json").write_text('["one",\n"tw')
    with pytest.raises(ConfigError, match=r"cut\.json, line 2: not JSON"):
        load(str(tmp_path / "cut.json"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'"one"\n' * 100)[:-9])
    with pytest.raises(ConfigError, match="cannot read the dataset"):
        load(str(tmp_path / "cut.jsonl.gz"))
    (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 2\)"):
        load(str(tmp_path / "latin.json"))


def test_unknown_and_missing_datasets():
    with pytest.raises(ConfigError, match=r"unknown dataset 'humanevl'.*Did you mean 'humaneval'"):
        load("humanevl")
    with pytest.raises(ConfigError, match=r"no dataset file prompts\.jsonl"):
        load("prompts.jsonl")
    with pytest.raises(ConfigError, match="no dataset file nowhere"):
        load("c4=nowhere")


def test_a_name_without_its_file_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"mbpp\.jsonl.*'datasets' is not installed.*`data`"):
        load("mbpp", tmp_path)


def test_prompts_are_drawn_by_the_seed_from_all_of_a_file(tmp_path):
    texts = [f"text {number}" for number in range(200)]
    path = written(tmp_path / "p.jsonl", *texts)

    def drawn(seed, count, reference=str(path)):
        found = load_dataset(reference, data_folder=tmp_path, count=count, seed=seed)
        return [prompt.text for prompt in found.prompts]

    assert drawn(None, 3) == texts[:3]
    assert drawn(1, 30) == drawn(1, 30)
    assert drawn(1, 30) != drawn(2, 30)
    assert len(set(drawn(1, 30))) == 30
    assert sorted(drawn(1, 999)) == sorted(texts)
    # each as likely as any other: of 100 draws of a half no text is always or never among them
    counts = Counter(text for seed in range(100) for text in drawn(seed, 100))
    assert len(counts) == 200
    assert 20 < min(counts.values()) <= max(counts.values()) < 80
    built_in = load_dataset("demo", data_folder=tmp_path, count=4)
    assert drawn(1, 4, "demo") != [prompt.text for prompt in built_in.prompts]


def test_the_hub_is_asked_where_there_is_no_file(monkeypatch, tmp_path):
    class Hub:
        @staticmethod
        def load_dataset(*arguments, split, streaming):
            assert arguments == ADAPTERS["humaneval"].hub
            assert (split, streaming) == ("test", True)
            return iter([{"task_id": "HumanEval/0", "prompt": "\ndef f():\n"}] * 5)

    monkeypatch.setitem(sys.modules, "datasets", Hub)
    dataset = load("humaneval", tmp_path, count=2)
    assert [prompt.text for prompt in dataset.prompts] == ["\ndef f():\n"] * 2
    assert dataset.source == "hub: openai/openai_humaneval"


def test_parquet(monkeypatch, tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="needs pyarrow"):
        load(str(tmp_path / "p.parquet"))
    monkeypatch.undo()
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["one", "two"]}), tmp_path / "p.parquet")
    assert [prompt.text for prompt in load(str(tmp_path / "p.parquet")).prompts] == ["one", "two"]
    (tmp_path / "q.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(ConfigError, match="cannot read the dataset"):
        load(str(tmp_path / "q.parquet"))
