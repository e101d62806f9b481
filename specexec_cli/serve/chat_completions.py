"""Chat requests of every protocol: makes the prompt, and the texts that answer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from specexec_cli.engine.text import Running, TextRequest
from specexec_cli.guarded import parse_json
from specexec_cli.serve.api_errors import ApiError
from specexec_cli.serve.bodies import ChatBody, ChatMessage, CompletionBody, NamedTool, Tool
from specexec_cli.serve.prompts import Prompt, PromptMaker
from specexec_cli.serve.reply import ReplyText
from specexec_cli.serve.service import Service
from specexec_cli.serve.tool_dialects import KNOWN, dialect_of, has_tools
from specexec_cli.serve.tools import Dialect
from specexec_cli.session.encoding import NO_THINKING


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Converts messages to the form that chat templates take."""
    found = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        one: dict[str, Any] = {"role": role, "content": message.text}
        if message.tool_calls:
            one["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        for field in ("name", "tool_call_id"):
            if getattr(message, field) is not None:
                one[field] = getattr(message, field)
        found.append(one)
    return found


def _arguments(text: str) -> Any:
    """A call's arguments as an object, because templates write the JSON themselves."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def thinking(body: ChatBody) -> dict[str, Any]:
    """Template variables that say how much to think; empty if the request does not say."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if effort in ("none", "minimal"):
        return dict(NO_THINKING)
    return {"enable_thinking": True, "reasoning_effort": effort}


def top_logprobs(body: ChatBody) -> int | None:
    """Number of most probable tokens to list for each token; None without log-probabilities.

    Raises:
        ApiError: the request asks for top_logprobs without logprobs.
    """
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise ApiError(
            400, "top_logprobs tells nothing without logprobs: set logprobs to true",
            param="top_logprobs",
        )  # fmt: skip
    return None


def offered(body: ChatBody) -> list[Tool]:
    """The tools that the prompt offers to the model.

    Raises:
        ApiError: the tool that must be called is not among the request's tools.
    """
    choice, tools = body.tool_choice, body.tools or []
    if choice == "none":
        return []
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", param="tools")
    if isinstance(choice, NamedTool) and not _chosen(choice, tools):
        raise ApiError(
            400, f"tool_choice names '{choice.function.name}', which is not among the tools",
            param="tool_choice",
        )  # fmt: skip
    return tools


def _chosen(choice: NamedTool, tools: Sequence[Tool]) -> list[Tool]:
    return [tool for tool in tools if tool.function.name == choice.function.name]


def dialect(service: Service, tools: Sequence[Tool]) -> Dialect | None:
    """The dialect in which the model writes calls; None without tools.

    Raises:
        ApiError: the model's dialect is unknown.
    """
    if not tools:
        return None
    found = dialect_of(service.chat_template)
    if found is None:
        reason = (
            f"asks for calls in a form that is not read here (read are those of {KNOWN})"
            if has_tools(service.chat_template)
            else "has no place for them"
        )
        raise ApiError(
            400,
            f"{service.model} cannot be told of tools: its chat template {reason}. Leave tools out",
            param="tools",
            code="tools_not_supported",
        )
    return found


async def grammar(
    service: Service, body: ChatBody, tools: Sequence[Tool], known: Dialect | None
) -> LLMatcher | None:
    """The grammar that the reply must follow; None if the reply is free.

    Raises:
        ApiError: the grammar cannot be used, or the request asks for two grammars.
    """
    wanted = body.response_format
    structured = wanted is not None and wanted.type != "text"
    if known is not None and (body.tool_choice == "required" or _is_named(body)):
        if structured:
            raise ApiError(
                400, "a reply is either JSON or a call: leave response_format out",
                param="response_format",
            )  # fmt: skip
        choice = body.tool_choice
        must = _chosen(choice, tools) if isinstance(choice, NamedTool) else tools
        return await service.grammar(lambda maker: maker.lark(known.grammar(must, maker.spelled)))
    return await json_grammar(service, body) if structured else None


def _is_named(body: ChatBody) -> bool:
    return isinstance(body.tool_choice, NamedTool)


async def json_grammar(service: Service, body: ChatBody | CompletionBody) -> LLMatcher | None:
    """The grammar that response_format asks for; None for free text.

    Raises:
        ApiError: the schema is missing or cannot be used.
    """
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return await service.grammar(lambda maker: maker.json_schema({"type": "object"}))
    schema = (wanted.json_schema or {}).get("schema")
    if not isinstance(schema, dict | bool):
        raise ApiError(
            400, "response_format asks for a schema, which is to stand in json_schema.schema",
            param="response_format.json_schema.schema",
        )  # fmt: skip
    return await service.grammar(lambda maker: maker.json_schema(schema))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A chat request of any protocol whose texts are under way."""

    texts: Sequence[Running]
    prompt: Prompt
    tools: Sequence[Tool]
    dialect: Dialect | None  # in which the model writes calls; None without tools
    one_call: bool  # report only the first call of a reply

    def splitter(self, index: int) -> ReplyText:
        """Splits the reply of a text; one that follows a grammar has no thinking."""
        free = self.texts[index].request.constraint is None
        return ReplyText(
            self.prompt.text if free else None, self.dialect, self.tools, one_call=self.one_call
        )


async def ask(service: Service, body: ChatBody, size: int) -> Asked:
    """Makes the prompt of a chat request, and gives its texts to the engine.

    Args:
        size: bytes of the request as it came.
    Raises:
        ApiError: the request cannot be served.
    """
    tools = offered(body)
    known = dialect(service, tools)
    count = body.max_completion_tokens or body.max_tokens
    top = top_logprobs(body)
    must = await grammar(service, body, tools, known)

    def encode(maker: PromptMaker) -> tuple[Prompt, list[TextRequest]]:
        prompt = prompt_of(maker, body, tools, answer_at_once=must is not None)
        return prompt, service.texts(body, [prompt], count, top, must)

    prompt, requests = await service.encoding(encode, size)
    return Asked(
        texts=service.submit(requests), prompt=prompt, tools=tools, dialect=known,
        one_call=body.parallel_tool_calls is False,
    )  # fmt: skip


def prompt_of(
    maker: PromptMaker, body: ChatBody, tools: Sequence[Tool], *, answer_at_once: bool = False
) -> Prompt:
    """The prompt of a chat request; to be called in the maker's thread. See PromptMaker.chat."""
    return maker.chat(
        template_messages(body.messages),
        [tool.model_dump(exclude_none=True) for tool in tools] or None,
        thinking(body),
        answer_at_once=answer_at_once,
    )
