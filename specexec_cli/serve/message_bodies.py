"""The fields of requests to /v1/messages, and the chat request that each of them stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from specexec_cli.serve.api_errors import ApiError
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
    Stop,
    Text,
    Tool,
    ToolCall,
)


class _Block(Body):
    cache_control: Any = None  # prompts that begin alike share their rows unasked


class TextBlock(_Block):
    """Text; pictures and documents are refused."""

    type: Literal["text"]
    text: Text
    citations: Any = None


class ToolUse(_Block):
    """A call of a function in an earlier reply."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    caller: Any = None
    toolset_name: Any = None


class ToolResult(_Block):
    """What a function has returned."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | First[list[TextBlock]] | None = None
    is_error: bool | None = None
    toolset_name: Any = None


class ThinkingBlock(_Block):
    """The thinking of an earlier reply, which templates leave out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Any = None
    signature: Any = None
    data: Any = None


_AnyBlock = Annotated[TextBlock | ToolUse | ToolResult | ThinkingBlock, Field(discriminator="type")]


class Message(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: Text | Annotated[list[_AnyBlock], Field(fail_fast=True)]

    @property
    def blocks(self) -> list[Any]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


class InputTool(_Block):
    """A function that the model may call."""

    name: FunctionName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    input_examples: Any = None
    eager_input_streaming: Any = None


class ToolChoice(Body):
    """Whether, and what, to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether to think; the number of tokens for it has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Any = None
    display: Any = None


class OutputFormat(Body):
    """JSON by a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """How much to think, and the reply's form."""

    effort: Effort | Literal["xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(Sampling):
    """The body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    model: Text | None = None
    system: Text | First[list[TextBlock]] | None = None
    tools: Annotated[list[InputTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # fields without effect on the text
    cache_control: Any = None
    context_management: Any = None
    metadata: Any = None
    service_tier: Any = None
    # only their default values are accepted
    container: None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


class MessageBody(CountBody):
    """The body of POST /v1/messages."""

    max_tokens: Count | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None


def chat_body(body: CountBody) -> ChatBody:
    """The chat request that a request stands for.

    Raises:
        ApiError: the conversation ends with the assistant, or the choice of a tool has no name.
    """
    if body.messages[-1].role == "assistant":
        raise ApiError(
            400, "messages: the last one is the assistant's, and a reply that is begun is not "
            "continued here: end with a user's message", param="messages",
        )  # fmt: skip
    messages = [one for message in body.messages for one in _messages(message)]
    if body.system:
        system = body.system
        text = system if isinstance(system, str) else "\n\n".join(part.text for part in system)
        messages.insert(0, ChatMessage(role="system", content=text))
    more: dict[str, Any] = {}
    if isinstance(body, MessageBody):
        stop = body.stop_sequences or None
        more = {"max_tokens": body.max_tokens, "stop": stop, "stream": body.stream}
    choice = body.tool_choice
    return ChatBody(
        messages=messages, model=body.model, tools=_tools(body), tool_choice=_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        response_format=_format(body), reasoning_effort=_effort(body), **body.sampling(), **more,
    )  # fmt: skip


def _messages(message: Message) -> Iterator[ChatMessage]:
    """Messages of chat completions: the results of functions come first, each as its own."""
    calls, texts = [], []
    for block in message.blocks:
        if isinstance(block, ToolResult):
            content = block.content or ""
            text = content if isinstance(content, str) else "".join(one.text for one in content)
            yield ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id)
        elif isinstance(block, ToolUse):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = FunctionCall(name=block.name, arguments=arguments)
            calls.append(ToolCall(id=block.id, function=function))
        elif isinstance(block, TextBlock):
            texts.append(block.text)
    if texts or calls or not message.blocks:
        yield ChatMessage(role=message.role, content="".join(texts), tool_calls=calls or None)


def _tools(body: CountBody) -> list[Tool] | None:
    tools = [
        Tool(
            type="function",
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.input_schema
            ),
        )
        for tool in body.tools or ()
    ]
    return tools or None


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(
                400, "tool_choice.name: it is missing, and says which tool must be called",
                param="tool_choice.name",
            )  # fmt: skip
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _format(body: CountBody) -> ResponseFormat | None:
    asked = body.output_config and body.output_config.format
    if not asked:
        return None
    return ResponseFormat(type="json_schema", json_schema={"schema": asked.schema_})


def _effort(body: CountBody) -> Effort | None:
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    asked = None if body.output_config is None else body.output_config.effort
    if asked is None and body.thinking is not None and body.thinking.type == "enabled":
        return "medium"
    return "high" if asked == "xhigh" or asked == "max" else asked
