"""`--json` prints exactly one object, of exactly the documented shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cli_runner import Ran, breaks_off, run_cli

TOP = {
    "schema": int, "text": str, "tokens": list, "finish_reason": str, "seed": int, "method": str,
    "pair": str, "config": dict, "stats": dict,
}  # fmt: skip
STATS = {
    "prompt_tokens": int, "generated_tokens": int, "target_passes": int, "generation_rate": float,
    "ttft_s": float, "tpot_s": float, "tokens_per_s": float, "draft_s": float,
    "verify_s": float, "bytes_streamed": int,
    "stream_bytes_per_s": float, "peak_ram_bytes": int, "peak_vram_bytes": int,
    "experts_asked": int, "experts_held": int, "bytes_per_token": float,
}  # fmt: skip
CONFIG = {
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "budget", "max_depth",
    "batch", "scoring", "policy", "calibrated", "past", "max_tokens", "stop", "raw", "offload",
    "device", "dtype", "target", "draft",
}  # fmt: skip


def has_types(value: dict[str, Any], types: dict[str, type]) -> None:
    assert list(value) == list(types), "these keys, in this order"
    for name, kind in types.items():
        assert type(value[name]) is kind or (kind is float and value[name] == 0), name


def parsed(ran: Ran) -> dict[str, Any]:
    assert ran.out.count("\n") == 1
    value = json.loads(ran.out)
    has_types(value, TOP)
    has_types(value["stats"], STATS)
    assert value["schema"] == 1
    assert all(type(token) is int for token in value["tokens"])
    return value


def test_the_whole_object():
    argv = ("generate", "--raw", "import os\n", "-m", "demo", "--max-tokens", 9,
            "--offload", "ssd", "--budget", 8, "--temperature", 0.5, "--seed", 3,
            "--stop", "zzz")  # fmt: skip
    ran = run_cli(*argv, "--json")
    value = parsed(ran)
    assert (ran.code, ran.err) == (0, "notice: cut at 9 tokens: --max-tokens 18 allows more\n")
    assert set(value["config"]) == CONFIG
    config, stats = value["config"], value["stats"]
    assert (config["budget"], config["seed"], config["stop"]) == (8, 3, ["zzz"])
    assert (config["offload"], config["device"], config["dtype"]) == ("ssd", "cpu", "float32")
    assert config["target"].startswith("package:demo/target")
    assert (value["seed"], value["method"], value["pair"]) == (3, "specexec", "demo")
    assert value["finish_reason"] == "length"
    assert len(value["tokens"]) == stats["generated_tokens"] == 9
    assert stats["generation_rate"] == pytest.approx(9 / stats["target_passes"])
    assert stats["bytes_streamed"] > 0
    assert stats["peak_ram_bytes"] > 10**8
    assert stats["peak_vram_bytes"] == 0
    assert run_cli(*argv).out == value["text"] + "\n", "the same text without --json"


def test_without_a_draft_model():
    value = parsed(run_cli("generate", "x", "--max-tokens", 2, "--json",
                           "--method", "autoregressive"))  # fmt: skip
    assert value["method"] == "autoregressive"
    assert value["config"]["draft"] is None
    assert value["stats"]["generation_rate"] == 1.0
    assert value["stats"]["draft_s"] == 0.0


def test_finish_reasons(monkeypatch):
    argv = ("generate", "--raw", "import os\n", "--json", "--max-tokens", 8)
    whole = parsed(run_cli(*argv))
    assert whole["finish_reason"] == "length"
    cut = whole["text"][2:4]
    stopped = parsed(run_cli(*argv, "--stop", cut))
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole["text"].partition(cut)[0]
    assert stopped["tokens"] == whole["tokens"][: len(stopped["tokens"])]
    assert len(stopped["tokens"]) == stopped["stats"]["generated_tokens"]
    end = whole["tokens"][3]
    at = whole["tokens"].index(end)
    monkeypatch.setattr("specexec_cli.loading.eos_token_ids", lambda *args: frozenset([end]))
    ended = parsed(run_cli(*argv))
    assert ended["finish_reason"] == "eos"
    assert ended["tokens"] == whole["tokens"][: at + 1]


def test_an_interrupted_generation_is_still_one_object(monkeypatch):
    breaks_off(monkeypatch, KeyboardInterrupt)
    ran = run_cli("generate", "x", "--json", "--max-tokens", 30)
    assert ran.code == 130
    value = parsed(ran)
    assert value["finish_reason"] == "interrupted"
    assert value["tokens"]


def test_a_mistake_prints_no_object():
    ran = run_cli("generate", "x", "--json", "--budget", 0)
    assert (ran.code, ran.out) == (2, "")
