"""Command lines that other programs take get one line with the right command."""

from __future__ import annotations

import shlex

import pytest
from cli_runner import run_cli
from computer import Computer


@pytest.mark.parametrize(
    ("typed", "meant"),
    {
        "run qwen3-8b": "chat qwen3-8b",
        "run": "chat MODEL",
        "run qwen3-8b 'why so?'": "generate -m qwen3-8b 'why so?'",
        "chat -m qwen3-8b": "chat qwen3-8b",
        "chat --model=org/name:Q4_K_M": "chat org/name:Q4_K_M",
        "plan --model qwen3-8b": "plan qwen3-8b",
        "serve -m qwen3-8b": "serve qwen3-8b",
        "pull -m qwen3-8b": "pull qwen3-8b",
        "use -m 'my model'": "use 'my model'",
        "models show --model qwen3-8b": "models show qwen3-8b",
        "list": "models list",
        "ls": "models list",
        "show qwen3-8b": "models show qwen3-8b",
        "recommend --task code": "models recommend --task code",
    }.items(),
)
def test_the_right_command_is_named(typed: str, meant: str, computer: Computer) -> None:
    refused = run_cli(*shlex.split(typed))
    assert refused.code == 2
    assert refused.error.endswith(f"Did you mean: specexec {meant}")


@pytest.mark.parametrize("argv", [("generate", "qwen3-8b", "why?"), ("chat", "qwen3-8b", "why?")])
def test_a_prompt_in_the_place_of_options(argv: tuple[str, ...], computer: Computer) -> None:
    assert "specexec generate -m MODEL PROMPT" in run_cli(*argv).error


@pytest.mark.parametrize("argv", [("doctor", "-m", "x"), ("frobnicate",), ("plan", "--modle", "x")])
def test_other_mistakes_name_the_help(argv: tuple[str, ...], computer: Computer) -> None:
    assert run_cli(*argv).error.endswith("--help")
