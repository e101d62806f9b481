"""Recognizes a model's dialect for tool calls by its chat template."""

from __future__ import annotations

import re

from specexec_cli.serve.tool_lists import MistralDialect
from specexec_cli.serve.tool_tags import GLM, GLM_IN_ONE_LINE, QWEN_CODER
from specexec_cli.serve.tools import Dialect, JsonDialect

HERMES = JsonDialect(opens="<tool_call>", closes="</tool_call>", arguments="arguments")
LLAMA = JsonDialect(opens="", closes="", arguments="parameters")
# the marks that a template must contain, all of them, for each dialect; the first match counts
_SIGNS: tuple[tuple[Dialect, tuple[str, ...]], ...] = (
    (GLM_IN_ONE_LINE, ("<tool_call>", "</arg_key><arg_value>")),
    (GLM, ("<tool_call>", r"</arg_key>(\\n|\s)*<arg_value>")),
    (QWEN_CODER, ("<tool_call>", "<function=", "<parameter=")),
    (MistralDialect(named=True), (r"\[TOOL_CALLS\]", r"\[ARGS\]")),
    (MistralDialect(named=False), (r"\[TOOL_CALLS\] ?\[",)),
    # Hermes, Qwen 2.5 and 3, and many models that follow them
    (HERMES, (r"<tool_call>(\\n|\s)*\{", r'\\?"arguments\\?"')),
    # Llama 3.1 to 3.3
    (LLAMA, (r'\{\\?"name\\?": function name, \\?"parameters\\?":',)),
)
KNOWN = "Hermes and Qwen (<tool_call> with JSON), Qwen3-Coder, GLM, Mistral and Llama 3"


def dialect_of(template: str | None) -> Dialect | None:
    """The dialect of the model with this chat template; None if it is unknown."""
    if not has_tools(template):
        return None
    found = (
        dialect for dialect, signs in _SIGNS
        if all(re.search(sign, template or "") for sign in signs)
    )  # fmt: skip
    return next(found, None)


def has_tools(template: str | None) -> bool:
    """Whether a chat template has a place for tools."""
    return template is not None and "tools" in template
