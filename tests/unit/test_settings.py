"""A setting is declared once: whoever offers settings has all of them, with the same bounds."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from cli_runner import run_cli
from typer.main import get_command

from specexec_cli.chat.settings import KEYS, ChatSettings
from specexec_cli.cli.main import app
from specexec_cli.cli.option_groups import option_name
from specexec_cli.config import (
    DsiOptions,
    GenerationConfig,
    SamplingChoice,
    SamplingConfig,
    setting_of,
)
from specexec_cli.engine.jobs import read_jobs
from specexec_cli.errors import ConfigError
from specexec_cli.planning.request import Request, TreeRequest
from specexec_cli.serve.bodies import ChatBody, CompletionBody
from specexec_cli.serve.service import sampling_of

SAMPLING = [field.name for field in fields(SamplingConfig)]
CONFIGS = (SamplingChoice, GenerationConfig, TreeRequest, DsiOptions, Request)
CHANGED = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5,
    "seed": 3,
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_is_an_option_with_its_help_and_default(config: type) -> None:
    shown = {param.name: param for param in get_command(app).commands["generate"].params}  # type: ignore[attr-defined]
    for field in fields(config):
        told = setting_of(field)
        if told is None:
            continue
        option = shown[option_name(field)]
        assert told.help.partition("{")[0] in option.help
        assert (option.default or None) == ("auto" if told.auto else field.default or None)


def test_every_sampling_setting_reaches_prompts_requests_and_chats() -> None:
    assert set(CHANGED) == set(SAMPLING)
    wanted = SamplingConfig(**CHANGED)  # type: ignore[arg-type]
    line = json.dumps({"prompt": "x", "max_tokens": 3, **CHANGED})
    (job,) = read_jobs(line, "here", SamplingChoice(), GenerationConfig())
    assert (job.sampling, job.generation) == (wanted, GenerationConfig(max_tokens=3))
    bodies = (
        ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **CHANGED}),
        CompletionBody.model_validate({"prompt": "x", **CHANGED}),
    )
    assert [sampling_of(body, SamplingConfig()) for body in bodies] == [wanted, wanted]
    chat = ChatSettings()
    for name, value in CHANGED.items():
        assert name in KEYS
        chat = chat.with_value(name, str(value))
    assert chat.sampling == wanted


@pytest.mark.parametrize("name", SAMPLING)
def test_a_setting_out_of_bounds_is_one_error_wherever_it_is_set(name: str) -> None:
    with pytest.raises(ConfigError) as told:
        SamplingConfig(**{name: -1})  # type: ignore[arg-type]
    flag = f"--{name.replace('_', '-')}"
    value = "-1" if name in ("top_k", "seed") else "-1.0"
    whole = str(told.value).replace("not -1", f"not {value}")
    assert run_cli("generate", "x", flag, "-1").error == whole
    line = json.dumps({"prompt": "x", name: -1})
    with pytest.raises(ConfigError) as of_line:
        read_jobs(line, "here", SamplingChoice(), GenerationConfig())
    assert str(of_line.value) == f"here, line 1: {told.value}"
