"""The fields of requests to /v1/responses, and the chat request that each of them stands for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from specexec_cli.serve.bodies import (
    Body,
    ChatBody,
    ChatMessage,
    Count,
    Effort,
    First,
    Function,
    FunctionCall,
    FunctionName,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Sampling,
    Text,
    Tool,
    ToolCall,
)
from specexec_cli.serve.conversations import Conversations


class InputText(Body):
    """A piece of a message or of a function's result; pictures and files are refused."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Any = None
    logprobs: Any = None


_Content = Text | First[list[InputText]]


class _Item(Body):
    """Fields of items that were sent by a server and come back unchanged, without effect."""

    id: Any = None
    status: Any = None
    phase: Any = None
    namespace: Any = None
    caller: Any = None


class InputMessage(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class InputCall(_Item):
    """A call of a function in an earlier reply."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class InputResult(_Item):
    """What a function has returned."""

    type: Literal["function_call_output"]
    call_id: Text
    output: _Content


class InputThinking(_Item):
    """The thinking of an earlier reply, which templates leave out."""

    type: Literal["reasoning"]
    summary: Any = None
    content: Any = None
    encrypted_content: Any = None


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "")
    return f"{kind} item"  # no word, so that errors leave it out of the field's name


InputItem = Annotated[
    Annotated[InputMessage, Tag("message item")]
    | Annotated[InputCall, Tag("function_call item")]
    | Annotated[InputResult, Tag("function_call_output item")]
    | Annotated[InputThinking, Tag("reasoning item")],
    Discriminator(_kind),
]


class FlatTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class FlatChoice(Body):
    """The choice of a function that must be called."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Body):
    """Free text, or JSON."""

    type: Literal["text", "json_object", "json_schema"]
    name: Any = None
    description: Any = None
    strict: Any = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Body):
    """Options for the reply's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # the default, which changes nothing


class Reasoning(Body):
    """How much to think; a summary is not made, the thinking itself is sent."""

    effort: Effort | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponseStreamOptions(Body):
    """Options for a stream; obfuscation hides lengths from listeners and has no effect here."""

    include_obfuscation: bool = False


class ResponseBody(Sampling):
    """The body of POST /v1/responses."""

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=10_000, fail_fast=True)]
    model: Text | None = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[FlatTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    # only their default values are accepted; clients send these fields explicitly
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    # fields without effect on the text; a prompt that is too long is refused, never cut
    truncation: Literal["auto", "disabled"] | None = None
    include: Any = None
    max_tool_calls: Any = None
    metadata: Any = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    client_metadata: Any = None

    @property
    def format(self) -> ResponseFormat | None:
        """The reply's form as chat completions have it."""
        asked = self.text and self.text.format
        if not asked:
            return None
        return ResponseFormat(type=asked.type, json_schema={"schema": asked.schema_})


def new_messages(body: ResponseBody) -> list[ChatMessage]:
    """The messages of a request's input, without its instructions."""
    if isinstance(body.input, str):
        return [ChatMessage(role="user", content=body.input)]
    return list(_messages(body.input))


def chat_body(body: ResponseBody, kept: Conversations) -> ChatBody:
    """The chat request that a request stands for.

    Raises:
        ApiError: the response that it continues is not known.
    """
    messages = [*kept.messages(body.previous_response_id), *new_messages(body)]
    if body.instructions:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    choice: Any = body.tool_choice
    if isinstance(choice, FlatChoice):
        choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
    tools = [
        Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))
        for tool in body.tools or ()
    ]
    return ChatBody(
        messages=messages, model=body.model, stream=body.stream,
        max_completion_tokens=body.max_output_tokens, tools=tools or None, tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls, response_format=body.format,
        reasoning_effort=body.reasoning and body.reasoning.effort, **body.sampling(),
    )  # fmt: skip


def _messages(items: Sequence[Any]) -> Iterator[ChatMessage]:
    """Messages of chat completions: calls join the assistant's message that they follow."""
    spoken: ChatMessage | None = None  # the assistant's message that calls may join
    for item in items:
        if isinstance(item, InputCall):
            if spoken is None:
                spoken = ChatMessage(role="assistant", content=None)
            spoken.tool_calls = [*(spoken.tool_calls or ()), _call(item)]
            continue
        if isinstance(item, InputThinking):
            continue
        if spoken is not None:
            yield spoken
            spoken = None
        if isinstance(item, InputResult):
            yield ChatMessage(role="tool", content=_text(item.output), tool_call_id=item.call_id)
        elif item.role == "assistant":
            spoken = ChatMessage(role="assistant", content=_text(item.content))
        else:
            yield ChatMessage(role=item.role, content=_text(item.content))
    if spoken is not None:
        yield spoken


def _call(item: InputCall) -> ToolCall:
    return ToolCall(
        id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments)
    )


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
