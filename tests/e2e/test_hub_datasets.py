"""Datasets of the hub through the package `datasets` itself, with a folder in the hub's place.

The package takes `org/name` for a folder where there is one. So each of these folders is laid out
as its repository is: configurations and splits in the README's header, rows with the hub's columns.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from specexec_cli.errors import ConfigError
from specexec_cli.lab.bench.adapters import ADAPTERS
from specexec_cli.lab.bench.datasets import Dataset, load_dataset
from specexec_cli.lab.bench.parts import PARTS, load_parts

pytest.importorskip("datasets", reason="the extra 'datasets' is not installed")

HEAD = "The article goes on for a while, as heads of articles do. " * 4

# By dataset: the configuration that the hub has, and rows as its viewer shows them.
ROWS: Mapping[str, tuple[str, Sequence[dict[str, Any]]]] = {
    "oasst": ("default", [
        {"message_id": "m1", "parent_id": None, "role": "prompter", "text": "Why?", "lang": "en"},
        {"message_id": "m2", "parent_id": "m1", "role": "assistant", "text": "So.", "lang": "en"},
        {"message_id": "m3", "parent_id": None, "role": "prompter", "text": "How?", "lang": "en"},
    ]),
    "wikitext2": ("wikitext-2-raw-v1", [{"text": ""}, {"text": " = A = "}, {"text": HEAD},
                                        {"text": HEAD[::-1]}]),
    "c4": ("en", [{"text": HEAD, "timestamp": "2019-04-25T12:57:54Z", "url": "u"},
                  {"text": HEAD[::-1], "timestamp": "2019-04-25T12:57:55Z", "url": "v"}]),
    "mt-bench": ("default", [
        {"category": "math", "prompt": ["One?", "Two?"], "reference": [], "prompt_id": 43},
        {"category": "math", "prompt": ["Three?", "Four?"], "reference": ["4"], "prompt_id": 44},
    ]),
    "humaneval": ("openai_humaneval", [
        {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():", "canonical_solution": "",
         "test": "", "entry_point": "f"} for n in range(2)
    ]),
    "mbpp": ("full", [
        {"task_id": n, "text": f"Write f{n}.", "code": "", "test_list": [f"assert f{n}()"],
         "test_setup_code": "", "challenge_test_list": []} for n in range(2)
    ]),
    "cnn-dailymail": ("2.0.0", [
        {"article": f"News {n}.", "highlights": "", "id": str(n)} for n in range(2)
    ]),
    "alpaca": ("default", [
        {"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "t"},
        {"instruction": "Sing.", "input": "", "output": "La", "text": "t"},
    ]),
}  # fmt: skip

TEXTS = {
    "oasst": ["Why?", "How?"],
    "wikitext2": [HEAD.strip(), HEAD[::-1].strip()],
    "c4": [HEAD.strip(), HEAD[::-1].strip()],
    "mt-bench": ["One?", "Three?"],
    "humaneval": ["def f0():", "def f1():"],
    "mbpp": [f'"""Write f{n}.\nassert f{n}()\n"""' for n in range(2)],
    "cnn-dailymail": [f"Summarize:\nNews {n}.\nSummary:\n" for n in range(2)],
}


@pytest.fixture(autouse=True)
def nothing_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


def repository(name: str, splits: Mapping[str, Sequence[dict[str, Any]]], form: str) -> None:
    """Lays the dataset's repository out in the working directory."""
    adapter = ADAPTERS[name]
    config, _ = ROWS[name]
    folder = Path(adapter.hub[0])
    folder.mkdir(parents=True)
    header = ["configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        path = folder / f"{split}.{form}"
        header += [f"  - split: {split}", f"    path: {path.name}"]
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if form == "json.gz":
            path.write_bytes(gzip.compress(lines))
        else:
            parquet, json_reader = (
                pytest.importorskip(f"pyarrow.{each}") for each in ("parquet", "json")
            )
            path.with_suffix(".jsonl").write_bytes(lines)
            parquet.write_table(json_reader.read_json(path.with_suffix(".jsonl")), path)
            path.with_suffix(".jsonl").unlink()
    (folder / "README.md").write_text("\n".join(["---", *header, "---", ""]))


def loaded(name: str, **more: Any) -> Dataset:
    return load_dataset(name, data_folder=Path("nowhere"), **{"count": 10, **more})


@pytest.mark.parametrize("name", ADAPTERS)
def test_rows_with_the_hub_s_columns_become_prompts(name: str) -> None:
    form = "json.gz" if name == "c4" else "parquet"
    repository(name, {ADAPTERS[name].split: ROWS[name][1]}, form)
    found = loaded(name)
    assert found.source == f"hub: {'/'.join(ADAPTERS[name].hub)}"
    assert len(found.prompts) == 2
    if name in TEXTS:
        assert [prompt.text for prompt in found.prompts] == TEXTS[name]
    else:
        assert [prompt.text.count("### Input:") for prompt in found.prompts] == [1, 0]
    assert [prompt.id for prompt in loaded(name, count=1).prompts] == [found.prompts[0].id]


def test_a_seed_shuffles_the_rows_of_a_stream() -> None:
    rows = [{"task_id": str(n), "prompt": f"text {n}"} for n in range(50)]
    repository("humaneval", {"test": rows}, "parquet")
    orders = [[prompt.id for prompt in loaded("humaneval", seed=seed, count=50).prompts]
              for seed in (1, 1, 2)]  # fmt: skip
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0], key=int) == [str(n) for n in range(50)] != orders[0]


def test_splits_of_its_own_are_the_parts() -> None:
    splits = {
        part: [{"article": f"{part} {n}", "highlights": "", "id": f"{part}-{n}"} for n in range(6)]
        for part in PARTS
    }
    repository("cnn-dailymail", splits, "parquet")
    parts = load_parts("cnn-dailymail", data_folder=Path("nowhere"), counts=(4, 2, 2), seed=3)
    assert [len(parts[part].prompts) for part in PARTS] == [4, 2, 2]
    for part in PARTS:
        assert {prompt.id.split("-")[0] for prompt in parts[part].prompts} == {part}


def test_what_the_package_refuses_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^cannot load dataset 'humaneval' from the hub: .+$"):
        loaded("humaneval")
    repository("humaneval", {"train": ROWS["humaneval"][1]}, "parquet")
    with pytest.raises(ConfigError, match=r"^cannot load dataset 'humaneval' .*split.*test"):
        loaded("humaneval")
