"""Command lines that other programs take get one line with the right command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from cli_runner import run_cli
from computer import Computer

from specexec_cli.catalog.gguf_choice import check_no_adapter
from specexec_cli.errors import UnknownModelError


@pytest.mark.parametrize(
    ("typed", "meant"),
    {
        "run qwen3-8b": "chat qwen3-8b",
        "run --model=qwen3-8b": "chat qwen3-8b",
        "run qwen3-8b --verbose": "chat qwen3-8b",
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


@pytest.mark.parametrize(
    ("option", "told"),
    {"--image": "not read", "--mmproj": "not read", "--lora": "merge", "--mcp": "no MCP"}.items(),
)
def test_what_there_is_not_is_said(option: str, told: str, computer: Computer) -> None:
    for command in ("chat", "serve"):
        assert told in run_cli(command, option, "x").error


def test_an_adapter_is_one_line(tmp_path: Path, computer: Computer) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    told = run_cli("chat", tmp_path).error
    assert "is an adapter (LoRA), and adapters are not applied: merge it" in told
    with pytest.raises(UnknownModelError, match="'org/lora' is an adapter"):
        check_no_adapter(["adapter_config.json", "README.md"], "org/lora")
    check_no_adapter(["adapter_config.json", "config.json"], "org/both")


def test_a_picture_in_a_message_is_told_of(tmp_path: Path, computer: Computer) -> None:
    picture = tmp_path / "cat.PNG"
    picture.write_bytes(b"\x89PNG")
    argv = ("chat", "demo", "--max-tokens", 2, "--no-history")
    ran = run_cli(*argv, stdin=f"What is '{picture}'?\nAnd none.png?\n".encode())
    assert ran.err.count("pictures are not read") == 1
    assert f"the text '{picture}'" in ran.err
