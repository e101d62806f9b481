"""The pairs of SpecExec's tables and figures fit the cards that the paper names.

arXiv:2406.02532: table 3 (RTX 4090, 3090 and 2080 Ti), section 2.3 and appendix C (consumer cards
from 12 GB up, drafts in 4 bits), table 4 and figures 2 and 5 (A100).
"""

from __future__ import annotations

import json

import pytest
from cli_runner import run_cli

from specexec_cli.errors import OutOfMemoryError


@pytest.mark.parametrize(
    ("pair", "card", "ram", "asked"),
    [
        ("llama2-70b-chat-gptq-7b-gptq", 24, 64, ["--budget", "256"]),  # RTX 4090 and 3090
        ("llama2-70b-chat-gptq-7b-gptq", 16, 64, ["--budget", "128"]),
        ("llama2-70b-chat-gptq-7b-gptq", 12, 64, ["--budget", "128", "--context", "2048"]),
        ("llama2-70b-chat-gptq-7b-gptq", 8, 64, ["--budget", "64", "--context", "512"]),
        ("llama2-70b-gptq-7b-gptq", 16, 64, []),
        ("llama2-70b-chat-gptq-sheared", 11, 64, ["--budget", "128"]),  # RTX 2080 Ti
        ("llama2-70b-gptq-sheared", 11, 64, []),
        ("llama2-70b-chat-gptq-160m", 8, 64, []),
        ("llama2-70b-chat-160m", 24, 192, []),
        ("llama2-70b-chat-13b", 80, 192, []),
        ("llama2-70b-chat", 80, 192, ["--budget", "2048"]),
        ("vicuna-33b", 80, 64, ["--budget", "128"]),
    ],
)
def test_a_pair_of_the_paper_fits_its_card(
    pair: str, card: int, ram: int, asked: list[str]
) -> None:
    machine = ["--vram", f"{card}GB", "--ram", f"{ram}GB"]
    ran = run_cli("plan", pair, *machine, *asked, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert sum(told["vram"].values()) <= card * 10**9
    assert told["ssd_bytes"] == 0, "the paper streams from RAM"


def test_table_4_runs_without_offloading() -> None:
    machine = ("--vram", "80GB", "--ram", "64GB")
    ran = run_cli("plan", "vicuna-33b", *machine, "--context", "2048", "--json")
    assert set(json.loads(ran.out)["tiers"]) == {"resident"}


@pytest.mark.parametrize(
    ("pair", "card", "draft"),
    [
        ("llama2-70b-chat-gptq", 16, "llama2-7b-chat-gptq"),
        ("llama2-70b-chat-gptq-7b-gptq", 8, "tinyllama-1.1b-chat"),
        ("llama2-70b-chat-13b", 24, "llama2-7b-chat"),
        ("gemma3-12b-it", 6, "gemma3-270m-it"),
        ("qwen3-32b-awq", 8, "qwen3-0.6b"),
    ],
)
def test_what_does_not_fit_names_a_smaller_draft_model(pair: str, card: int, draft: str) -> None:
    ran = run_cli("plan", pair, "--vram", f"{card}GB", "--ram", "64GB")
    assert ran.code == OutOfMemoryError.exit_code
    assert f"--draft {draft}" in ran.error
