"""Prompts to train, validate and test on: random, apart, and from MBPP's own splits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench.parts import PARTS, load_parts


def alpaca(folder: Path, count: int) -> Path:
    records = [{"id": f"{n}", "instruction": f"Task {n}"} for n in range(count)]
    (folder / "alpaca_data.json").write_text(json.dumps(records))
    return folder


def ids(parts: dict) -> dict[str, list[int]]:
    return {name: [int(prompt.id) for prompt in part.prompts] for name, part in parts.items()}


def test_parts_are_random_apart_and_the_same_for_a_seed(tmp_path: Path) -> None:
    """Table 3: 500 to train, 80 to validate and 80 to test on, of Alpaca's one split."""
    alpaca(tmp_path, 700)
    found = ids(load_parts("alpaca", data_folder=tmp_path, counts=(500, 80, 80), seed=1))
    assert [len(found[part]) for part in PARTS] == [500, 80, 80]
    every = [one for part in PARTS for one in found[part]]
    assert len(set(every)) == 660
    assert every != sorted(every)
    assert ids(load_parts("alpaca", data_folder=tmp_path, counts=(500, 80, 80), seed=1)) == found
    assert ids(load_parts("alpaca", data_folder=tmp_path, counts=(500, 80, 80), seed=2)) != found


def test_mbpp_has_its_own_splits(tmp_path: Path) -> None:
    """Appendix B.1: the whole 'train' split, 374 tasks, and 80 of each of the others."""
    records = [{"task_id": n, "text": "t", "test_list": ["a"]} for n in range(1, 975)]
    (tmp_path / "mbpp.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = ids(load_parts("mbpp", data_folder=tmp_path, counts=(374, 80, 80), seed=0))
    assert sorted(found["train"]) == list(range(601, 975))
    assert len(found["validation"]) == len(found["test"]) == 80
    assert set(found["validation"]) <= set(range(511, 601))
    assert set(found["test"]) <= set(range(11, 511))


def test_too_few_prompts(tmp_path: Path) -> None:
    alpaca(tmp_path, 10)
    with pytest.raises(ConfigError, match="alpaca has 2 prompts left for its part 'test', not 3"):
        load_parts("alpaca", data_folder=tmp_path, counts=(5, 3, 3), seed=0)
    parts = ids(load_parts("alpaca", data_folder=tmp_path, counts=(24, 8, 8), seed=0, at_most=True))
    assert [len(parts[part]) for part in PARTS] == [6, 2, 2]


def test_of_each_split_there_may_be_fewer(tmp_path: Path) -> None:
    records = [{"task_id": n, "text": "t", "test_list": ["a"]} for n in (*range(1, 31), 520, 610)]
    (tmp_path / "mbpp.jsonl").write_text("\n".join(map(json.dumps, records)))

    def sizes(counts: tuple[int, int, int]) -> list[int]:
        parts = load_parts("mbpp", data_folder=tmp_path, counts=counts, seed=0, at_most=True)
        return [len(parts[part].prompts) for part in PARTS]

    assert sizes((24, 8, 8)) == [1, 1, 8]
    assert sizes((0, 0, 40)) == [0, 0, 20]


def test_the_hub_s_splits_are_shuffled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CNN-DM 2.0.0 from a package that is asked as `datasets` is."""
    asked = []

    class Rows(list):
        def shuffle(self, seed: int, buffer_size: int) -> Rows:
            asked.append(seed)
            return Rows(reversed(self))

    def load_dataset(*names: str, split: str, streaming: bool) -> Rows:
        asked.append((names, split))
        return Rows({"id": f"{n}", "article": split} for n in range(9))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    found = load_parts("cnn-dailymail", data_folder=tmp_path, counts=(4, 2, 2), seed=7)
    assert asked == [
        word for part in PARTS for word in ((("abisee/cnn_dailymail", "2.0.0"), part), 7)
    ]
    assert sorted(ids(found)["train"]) == [5, 6, 7, 8]
    assert {prompt.text for prompt in found["test"].prompts} == {"Summarize:\ntest\nSummary:\n"}
    for counts, kept in (((6, 2, 2), [6, 2, 2]), ((0, 0, 40), [0, 0, 9])):
        parts = load_parts(
            "cnn-dailymail", data_folder=tmp_path, counts=counts, seed=7, at_most=True
        )
        assert [len(parts[part].prompts) for part in PARTS] == kept
