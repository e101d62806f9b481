"""The stock openai client drives every endpoint of a server over the demo pair."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import openai
import pytest
from serving import Served, served, speaking, wait_until_idle
from tool_templates import OTHERS, TEMPLATES, WEATHER

from specexec_cli.config import GenerationConfig, SamplingConfig
from specexec_cli.planning.request import TreeRequest
from specexec_cli.session import Session, TextSession

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def session() -> Iterator[TextSession]:
    # a policy that weighs seconds would leave off drafting while other tests take the cores
    tree = TreeRequest(policy="fixed")
    with Session.open(model="demo", offline=True, tree=tree) as session:
        yield session


@pytest.fixture(scope="module")
def server(session: TextSession) -> Iterator[Served]:
    with served(session) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with closing(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)) as it:
        yield it


def alone(session: TextSession, prompt: str, count: int, stop: tuple[str, ...] = (), **sampling):
    """The text as `specexec generate` makes it; the server must be idle."""
    config = GenerationConfig(max_tokens=count, stop=stop)
    steps = session.generate(prompt, sampling=SamplingConfig(**sampling), generation=config)
    return "".join(step.text for step in steps)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "specexec"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4' is open"):
        client.models.retrieve("gpt-4")


def test_the_documented_connections_work_as_copied(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    (pair,) = re.findall(r"^    specexec serve (\S+)$", page, re.M)
    assert pair == server.service.model
    connect = page.partition("## Connect")[2].partition("## ")[0]
    assert set(re.findall(r'model(?:=|: )"?([\w.-]+)', connect)) == {pair}
    (snippet,) = re.findall(r"```python\n(.*?)```", connect, re.S)
    assert "http://127.0.0.1:8000/v1" in snippet
    names: dict[str, openai.OpenAI] = {}
    exec(snippet.replace("http://127.0.0.1:8000", server.url), names)
    names["client"].close()
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9},
        {"temperature": 1.0, "seed": 3, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
)
def test_completions_are_what_generate_makes(
    client: openai.OpenAI, server: Served, session: TextSession, sampling: dict[str, float]
) -> None:
    more = {name: sampling[name] for name in sampling if name not in ("temperature", "seed")}
    known = {name: sampling[name] for name in sampling if name not in more}
    asked = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 20, **known}
    whole = client.completions.create(**asked, extra_body=more)
    parts = list(client.completions.create(**asked, extra_body=more, stream=True))
    text = "".join(part.choices[0].text for part in parts)
    assert whole.choices[0].text == text
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    told = whole.usage.model_dump()["specexec"][0]
    assert told["generated_tokens"] == whole.usage.completion_tokens
    assert told["seed"] == sampling.get("seed", told["seed"])
    wait_until_idle(server.url)
    assert alone(session, "def add(a, b):", 20, **sampling) == text


def test_stop_strings_several_prompts_and_choices(
    client: openai.OpenAI, server: Served, session: TextSession
) -> None:
    found = client.completions.create(
        model="demo", prompt=["import os", "class A:"], n=2, seed=5, temperature=1.0,
        max_tokens=12, stop=["\n"],
    )  # fmt: skip
    wait_until_idle(server.url)
    expected = [
        alone(session, prompt, 12, ("\n",), temperature=1.0, seed=seed)
        for prompt in ("import os", "class A:")
        for seed in (5, 6)
    ]
    assert [choice.text for choice in found.choices] == expected
    assert found.usage is not None
    lengths = [len(session.encode(prompt)) for prompt in ("import os", "class A:")]
    assert found.usage.prompt_tokens == sum(lengths), "a prompt counts once"


def test_tokens_as_prompt(client: openai.OpenAI, server: Served, session: TextSession) -> None:
    tokens = session.encode("def add(a, b):")
    found = client.completions.create(model="demo", prompt=tokens, max_tokens=8)
    wait_until_idle(server.url)
    assert found.choices[0].text == alone(session, "def add(a, b):", 8)


def test_logprobs_do_not_depend_on_drafts(
    client: openai.OpenAI, server: Served, session: TextSession
) -> None:
    asked = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 10}
    asked |= {"temperature": 0.9, "seed": 2}
    found = client.completions.create(**asked, logprobs=3).choices[0]
    assert found.logprobs is not None
    assert "".join(found.logprobs.tokens) == found.text
    wait_until_idle(server.url)
    steps = session.generate(
        "def add(a, b):", sampling=SamplingConfig(temperature=0.9, seed=2),
        generation=GenerationConfig(max_tokens=10), method="autoregressive", top_logprobs=3,
    )  # fmt: skip
    plain = [one for step in steps for one in step.logprobs]
    assert found.logprobs.token_logprobs == [one.log_prob for one in plain]
    assert all(len(one.top) == 3 for one in plain)
    parts = client.completions.create(**asked, logprobs=3, stream=True)
    streamed = [part.choices[0].logprobs for part in parts]
    assert [x for one in streamed if one for x in one.text_offset] == found.logprobs.text_offset


def test_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "messages": HELLO, "max_tokens": 12}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    parts = list(
        client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )  # fmt: skip
    told = [part.choices[0].delta.content for part in parts if part.choices]
    choice = whole.choices[0]
    assert choice.message.content == "".join(one for one in told if one)
    assert choice.message.content
    assert parts[-1].usage == whole.usage or parts[-1].usage.completion_tokens
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert whole.usage is not None
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    assert max(one.logprob for one in choice.logprobs.content) <= 0.0


def test_progress_is_told_where_asked_for(client: openai.OpenAI) -> None:
    parts = client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=64, stream=True,
        stream_options={"include_progress": True},  # type: ignore[typeddict-unknown-key]
        extra_body={"n": 4, "temperature": 1.5},
    )  # fmt: skip
    told = [part.model_dump()["specexec"] for part in parts if not part.choices]
    passes = [one for one in told if "layer" in one]
    assert passes, "the first change is told of too"
    assert all(1 <= one["layer"] <= one["layers"] == 8 for one in passes)


def test_json_mode_is_what_it_is_without_drafts(
    client: openai.OpenAI, server: Served, session: TextSession
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["name", "ages"],
        "additionalProperties": False,
    }
    ways = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    ]
    drafted = 0.0
    for way in ways:
        found = client.chat.completions.create(
            model="demo", messages=HELLO, max_tokens=120, temperature=0.7, seed=11,
            response_format=way,  # type: ignore[arg-type]
        )  # fmt: skip
        text = found.choices[0].message.content
        assert text is not None
        if found.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(text), dict)
        wait_until_idle(server.url)
        grammars = server.service.grammars
        grammar = grammars.json_schema(schema if "json_schema" in way else {"type": "object"})
        prompt = session.encode_chat(HELLO)
        plain = session.generate(
            prompt, sampling=SamplingConfig(temperature=0.7, seed=11), method="autoregressive",
            generation=GenerationConfig(max_tokens=120),
            constraint=grammars.constraint(grammar, len(prompt)),
        )  # fmt: skip
        assert "".join(step.text for step in plain) == text
        assert found.usage is not None
        drafted = max(drafted, found.usage.model_dump()["specexec"][0]["generation_rate"])
    assert drafted > 1.0, "no drafted token was accepted: it proves nothing"
    assert found.choices[0].finish_reason == "stop"
    assert set(json.loads(text)) == {"name", "ages"}


@pytest.mark.parametrize("family", sorted(OTHERS))
def test_tools_of_a_form_that_is_not_read_are_refused(
    client: openai.OpenAI, server: Served, family: str
) -> None:
    with (
        speaking(server, OTHERS[family]),
        pytest.raises(openai.BadRequestError, match=r"not read here \(read are .* GLM.*Mistral"),
    ):
        client.chat.completions.create(model="demo", messages=HELLO, tools=[WEATHER])


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_tools(client: openai.OpenAI, server: Served, family: str) -> None:
    asked = {"model": "demo", "messages": HELLO, "max_tokens": 100, "tools": [WEATHER]}
    with pytest.raises(openai.BadRequestError, match="its chat template has no place for them"):
        client.chat.completions.create(**asked)
    with speaking(server, TEMPLATES[family]):
        named = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", named):
            found = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
            assert found.finish_reason == "tool_calls"
            assert found.message.tool_calls is not None
            call = found.message.tool_calls[0]
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments)["day"] in ("today", "tomorrow")
            assert found.message.content is None
        parts = client.chat.completions.create(**asked, tool_choice="required", stream=True)
        calls = [one for part in parts for one in part.choices[0].delta.tool_calls or []]
        assert [(one.index, one.function.name) for one in calls] == [(0, "weather")]
        plain = client.chat.completions.create(
            **asked, tool_choice="required", parallel_tool_calls=False
        )
        assert len(plain.choices[0].message.tool_calls or []) == 1
        # and the call goes back with its result
        turn = [*HELLO, found.message.model_dump(exclude_none=True)]
        turn.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
        answer = client.chat.completions.create(**{**asked, "messages": turn})
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert not answer.choices[0].message.tool_calls
        with pytest.raises(openai.BadRequestError, match="not among the tools"):
            client.chat.completions.create(
                **asked, tool_choice={"type": "function", "function": {"name": "other"}}
            )


def test_a_template_is_told_how_much_to_think(client: openai.OpenAI, server: Served) -> None:
    template = "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}hello"
    with speaking(server, template):
        lengths = []
        for effort in (None, "none", "high"):
            more = {} if effort is None else {"reasoning_effort": effort}
            found = client.chat.completions.create(
                model="demo", messages=HELLO, max_tokens=1, **more  # type: ignore[arg-type]
            )  # fmt: skip
            assert found.usage is not None
            lengths.append(found.usage.prompt_tokens)
        assert lengths[0] == lengths[2] < lengths[1]


def test_embeddings_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="has no embeddings") as told:
        client.embeddings.create(model="demo", input="x")
    assert told.value.status_code == 501


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 0}, "top-p must be"),
        ({"seed": -1}, "seed must be"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 17}, "n: "),
        ({"stop": ""}, "stop"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"top_logprobs": 2}, "set logprobs to true"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, "context window"),
        ({"extra_body": {"mirostat": 2}}, "'mirostat' is not known here"),
        ({"extra_body": {"min_p": 2}}, "min-p must be"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {
                "name": "x", "schema": {"type": "frob"}}}},
            "Invalid type: frob",
        ),
    ],
)  # fmt: skip
def test_wrong_requests(client: openai.OpenAI, more: dict[str, object], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(message)) as told:
        client.chat.completions.create(**{"model": "demo", "messages": HELLO, **more})
    assert told.value.type == "invalid_request_error"


def test_endpoints_that_are_not_there_name_those_that_are(server: Served) -> None:
    found = httpx.post(f"{server.url}/v1/moderations", json={"model": "demo", "input": "x"})
    assert found.status_code == 404
    message = found.json()["error"]["message"]
    assert message.startswith(
        "POST /v1/moderations: Not Found. This server has /v1/chat/completions"
    )


def test_another_model_is_not_opened(client: openai.OpenAI) -> None:
    for name in ("demo-target-gptq", "/etc/passwd", "../demo", "meta-llama/Llama-3.1-8B"):
        with pytest.raises(openai.NotFoundError) as told:
            client.chat.completions.create(model=name, messages=HELLO)
        assert told.value.code == "model_not_found"


def test_texts_of_different_requests_share_passes(
    client: openai.OpenAI, server: Served, session: TextSession
) -> None:
    """Sampled, constrained and with log-probabilities, side by side: each is what it is alone."""
    prompts = ("def add(a, b):", "import os\n", "class A:")
    found: dict[str, str] = {}

    def ask(prompt: str) -> None:
        asked = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0.8, "seed": 4}
        found[prompt] = client.completions.create(**asked, logprobs=1).choices[0].text

    wait_until_idle(server.url)
    before = server.service.engine.figures()
    askers = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    wait_until_idle(server.url)
    after = server.service.engine.figures()
    for prompt in prompts:
        assert found[prompt] == alone(session, prompt, 24, temperature=0.8, seed=4)
    assert after.passes - before.passes < 72


def test_metrics_and_health(server: Served, client: openai.OpenAI) -> None:
    client.completions.create(model="demo", prompt="x", max_tokens=2)
    page = httpx.get(f"{server.url}/metrics").text
    assert float(re.search(r"^specexec_generated_tokens_total (\S+)", page, re.M)[1]) >= 2
    assert 'specexec_texts_total{finish="length"}' in page
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
