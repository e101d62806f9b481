"""The fields of requests. Unknown fields that could change the text are refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from specexec_cli.config import SamplingConfig
from specexec_cli.serve.mistakes import told
from specexec_cli.serve.reading import Window, check_prompt

MOST_CHOICES = 16  # most texts for each prompt, and most prompts of a request
MOST_TOP_LOGPROBS = 20

_T = TypeVar("_T")
Text = Annotated[str, Field(max_length=1 << 22)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=1, le=1 << 30)]
Effort = Literal["none", "minimal", "low", "medium", "high"]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
First = Annotated[_T, Field(fail_fast=True)]  # a list; checking stops at its first mistake
_Zero = Annotated[float, Field(ge=0, le=0)]


class Body(BaseModel):
    """An object in a request."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """Options for what a stream contains besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False  # hides lengths of chunks from listeners; has no effect here
    include_progress: bool = False  # our own field: report the progress of passes


class ResponseFormat(Body):
    """Free text, or JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


_Finite = Annotated[float, Field(allow_inf_nan=False)]
_sampling: Any = {
    each.name: ((_Finite if isinstance(each.default, float) else int) | None, None)
    for each in fields(SamplingConfig)
}
_Sampling = create_model("_Sampling", __base__=Body, **_sampling)


class Sampling(_Sampling):  # type: ignore[misc, valid-type]  # mypy knows no class made by a call
    """The fields of SamplingConfig; None stands for the server's default."""

    top_k: Annotated[int, Field(ge=-1, le=1 << 30)] | None = None  # -1: every token, as for 0

    def sampling(self) -> dict[str, Any]:
        """The fields that the request holds, by name."""
        names = {each.name for each in fields(SamplingConfig)}
        found: dict[str, Any] = self.model_dump(include=names, exclude_none=True)
        return found


class _Sampled(Sampling):
    """Fields of both kinds of completions; None stands for the server's default."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    max_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    # only their default values are accepted; clients send these fields explicitly
    frequency_penalty: _Zero | None = None
    presence_penalty: _Zero | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    # fields without effect on the text
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, whether sent as one string, as a list, or not at all."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class FunctionCall(Body):
    """A function that the model called in an earlier reply."""

    name: str
    arguments: str


class ToolCall(Body):
    """One call in an earlier reply."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class TextPart(Body):
    """A piece of a message; pictures and sound are refused."""

    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | First[list[TextPart]] | None = None
    name: str | None = None
    tool_calls: First[list[ToolCall]] | None = None
    tool_call_id: str | None = None
    # fields of replies, which clients send back unchanged
    reasoning_content: str | None = None
    refusal: None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        """The content's text, with its parts joined."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function to call."""

    name: str


class NamedTool(Body):
    """The choice of a tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(_Sampled):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    modalities: First[list[Literal["text"]]] | None = None


class CompletionBody(_Sampled):
    """The body of POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
        | Annotated[list[int], Field(min_length=1, fail_fast=True)]
        | Annotated[list[First[list[int]]], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


_B = TypeVar("_B", bound=BaseModel)


def checked(kind: type[_B], found: Any, window: Window) -> _B:
    """Checks a request's body, as parsed from JSON.

    Raises:
        ApiError: a field is wrong, or the prompt cannot fit; the message names the field.
    """
    check_prompt(found, window)
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise told(error) from error
